"""How many requests fit, and what takes the memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..buffers import Geometry, TapPlan
from ..config import LocksConfig
from ..memory import step_bytes as buffer_bytes
from ..summaries import bytes_per_page, bytes_per_token
from ..tier.capacity import STAGED_BESIDE, TierShape
from .machines import Machine
from .model import PlanModel

HOST_SHARE = 0.9
"""Share of the host's memory that KV may take; the rest is the system's and SGLang's."""
_MOST = 1 << 16


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank's GPU, and of the host for it.

    ``hot`` is the hot-page cache of the host tier, as large as a server takes it unless it is told.
    """

    weights: int
    kv: int
    summaries: int
    buffers: int
    hot: int
    host: int

    @property
    def gpu(self) -> int:
        return self.weights + self.kv + self.summaries + self.buffers + self.hot


def need(model: PlanModel, config: LocksConfig, tier: str, batch: int, context: int) -> Memory:
    """What ``batch`` requests of ``context`` tokens need at least."""
    tokens = batch * context
    if tier == "dense":
        return Memory(model.weight_bytes, tokens * model.kv_bytes, 0, 0, 0, 0)
    records = tokens * bytes_per_token(config, model.head_dim, model.kv_heads, model.layers)
    buffers = _buffers(model, config, batch, context)
    if tier == "resident":
        return Memory(model.weight_bytes, tokens * model.kv_bytes, records, buffers, 0, 0)
    shape, pages = tier_shape(model, config, batch, context), -(-context // config.page_size) * batch
    # As `tier.capacity.split` charges them: tables, open pages, staged prefill with a layer's records.
    staged = shape.staged_pages * bytes_per_page(config, model.head_dim, model.kv_heads, 1)
    beside = shape.gpu_bytes(pages, shape.most_hot) - shape.most_hot + staged
    return Memory(
        model.weight_bytes, 0, records, buffers + beside, shape.most_hot, pages * shape.page_bytes
    )


def tier_shape(model: PlanModel, config: LocksConfig, batch: int, context: int) -> TierShape:
    """The host tier of a server for ``batch`` requests, with a graph of as many rows."""
    return TierShape(
        layers=model.layers,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        page_size=config.page_size,
        dtype=torch.bfloat16,
        width=config.largest_budget // config.page_size,
        usual_width=min(config.budget, context) // config.page_size,
        step_rows=batch,
        request_slots=batch + 1,
        staged_tokens=context + STAGED_BESIDE,
    )


def fits(memory: Memory, machine: Machine, gpu_share: float) -> bool:
    """Whether GPU and host have room; SGLang's ``--mem-fraction-static`` is the GPU's share."""
    return memory.gpu <= gpu_share * machine.gpu_bytes and memory.host <= HOST_SHARE * machine.host_bytes


def largest_batch(
    model: PlanModel, config: LocksConfig, machine: Machine, tier: str, context: int, gpu_share: float
) -> int:
    """Most requests of ``context`` tokens at a time; 0 where not even one fits."""
    low, high = 0, 1
    while high <= _MOST and fits(need(model, config, tier, high, context), machine, gpu_share):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if fits(need(model, config, tier, middle, context), machine, gpu_share):
            low = middle
        else:
            high = middle
    return low


def _buffers(model: PlanModel, config: LocksConfig, batch: int, context: int) -> int:
    """Tables and workspaces of a decode step, as SGLang is charged for them."""
    geometry = Geometry.of(
        tokens=context,
        page_size=config.page_size,
        width=config.largest_budget // config.page_size,
        q_heads=model.q_heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        query_dtype=torch.bfloat16,
    )
    return buffer_bytes(config, geometry, TapPlan(), batch)
