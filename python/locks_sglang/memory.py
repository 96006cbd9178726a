"""Bytes that a decode step needs on a GPU, charged before SGLang sizes its KV pool."""

from __future__ import annotations

from . import audit, flashinfer_attend
from .buffers import EAGER_ROWS, Geometry, StepBuffers, TapPlan
from .config import LocksConfig


def largest_plan(config: LocksConfig, layers: int) -> TapPlan:
    """Taps of a model with ``layers`` layers, none of which turns out to be dense."""
    audited = range(min(config.audit_layers, layers)) if config.audit_interval else ()
    return TapPlan(tuple(audited), tuple(range(layers)) if config.trace_file else ())


def step_bytes(config: LocksConfig, geometry: Geometry, plan: TapPlan, graph_rows: int) -> int:
    """Bytes of everything that is allocated once for the decode steps.

    Args:
        config: the configuration.
        geometry: shape of the attention.
        plan: layers whose selection is kept.
        graph_rows: largest batch that gets a CUDA graph, 0 without graphs.  Eager batches that
            are larger get their page tables when they come; those are not counted.
    """
    rows = graph_rows or EAGER_ROWS
    total = StepBuffers.allocate(geometry, plan, rows, "meta").nbytes
    total += geometry.workspace(rows, "meta").nbytes
    if plan.audited:
        total += audit.scratch_bytes(geometry)
    if config.attend == "flashinfer":
        total += flashinfer_attend.price(geometry, rows)
    return total
