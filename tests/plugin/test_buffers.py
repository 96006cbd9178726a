"""Buffers of the decode step on a GPU: which ones a step uses, and what is charged for them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from locks_sglang import flashinfer_attend, memory
from locks_sglang.buffers import EAGER_ROWS, Geometry, StepBuffers, TapPlan
from locks_sglang.config import LocksConfig
from locks_sglang.runtime import SparseDecode
from rig import Rig

GEOMETRY = Geometry(q_heads=8, kv_heads=2, head_dim=64, max_pages=20, width=8, query_dtype=torch.bfloat16)
CONFIG = LocksConfig(selector="locks", budget=128, max_budget=128)


def make_state(config: LocksConfig, graph_rows: int) -> SparseDecode:
    """The state of a model of 10 layers whose tensors have no storage."""
    pool = SimpleNamespace(
        start_layer=0,
        layer_num=10,
        _get_key_buffer=lambda layer: torch.empty(320, 2, 64, dtype=torch.bfloat16, device="meta"),
        _get_value_buffer=lambda layer: torch.empty(320, 2, 64, dtype=torch.bfloat16, device="meta"),
    )
    slots = SimpleNamespace(req_to_token=torch.empty(4, 320, dtype=torch.int32, device="meta"))
    state = SparseDecode(config, pool, slots, 8, torch.bfloat16, graph_rows)
    state.set_layers(list(range(10)), {})
    return state


@pytest.fixture
def state() -> SparseDecode:
    return make_state(CONFIG, 4)


def batch(rows: int) -> Any:
    return SimpleNamespace(req_pool_indices=torch.zeros(rows, device="meta"))


def test_geometry() -> None:
    """Room for every page, in pairs."""
    arguments = {"width": 8, "q_heads": 8, "kv_heads": 2, "head_dim": 64, "query_dtype": torch.bfloat16}
    assert Geometry.of(tokens=320, page_size=16, **arguments) == GEOMETRY
    assert Geometry.of(tokens=321, page_size=16, **arguments).max_pages == 22
    assert Geometry.of(tokens=305, page_size=16, **arguments).max_pages == 20


def test_an_eager_batch_leaves_the_graphs_buffers_where_they_are(state: SparseDecode) -> None:
    state.allocate_graph_buffers(4)
    captured, scratch = state._graph_buffers, state._workspace
    assert captured is not None and scratch is not None
    for rows in (3, 9, 3, 17, 4):  # 9 and 17 are more than the largest graph
        buffers = state._buffers_for(batch(rows))
        assert buffers.max_rows >= rows
        assert (buffers is captured) == (rows <= 4)
    assert state._graph_buffers is captured
    assert state._workspace is scratch


def test_eager_buffers_grow_and_are_kept(state: SparseDecode) -> None:
    first = state._buffers_for(batch(9))
    assert state._buffers_for(batch(16)) is first
    assert state._buffers_for(batch(17)) is not first


def test_without_graphs_the_scratch_has_a_fixed_size(state: SparseDecode) -> None:
    state._buffers_for(batch(1))
    scratch = state._workspace
    assert scratch is not None and scratch.max_rows == EAGER_ROWS
    state._buffers_for(batch(1000))
    assert state._workspace is scratch


@pytest.mark.parametrize("rows", [2, 3, 7])
def test_a_batch_above_the_scratch_is_taken_in_parts(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same outputs, same selections as in one piece."""
    lengths = [50 + 37 * row for row in range(rows)]
    config = replace(CONFIG, audit_interval=1, audit_layers=10)
    whole, parts = Rig(config, lengths), Rig(config, lengths)
    queries = whole.queries(rows)
    expected = whole.step(lengths, queries)
    monkeypatch.setattr(SparseDecode, "_rows_at_a_time", 2)
    found = parts.step(lengths, queries)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)
    for layer, tap in whole.state._taps.items():
        other = parts.state._taps[layer]
        assert torch.equal(tap.logical, other.logical) and torch.equal(tap.counts, other.counts)
        assert torch.equal(tap.queries, other.queries)


@pytest.mark.parametrize("graph_rows", [0, 5])
@pytest.mark.parametrize(
    "option",
    [{}, {"audit_interval": 8}, {"audit_interval": 8, "trace_file": ""}, {"attend": "flashinfer"}],
    ids=str,
)
def test_charged_is_what_is_allocated(
    graph_rows: int, option: dict[str, Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tensor that a state makes for its decode steps, against what was charged."""
    if "trace_file" in option:
        option = option | {"trace_file": str(tmp_path / "trace")}
    config = replace(CONFIG, **option)
    # FlashInfer's own wrappers cannot be made here; each keeps the bytes of its plan.
    sizes = [1, 2, 4, 8] if graph_rows else [1, 2, 4, 8, 16, 32]
    state = make_state(config, graph_rows)
    if graph_rows:
        state.allocate_graph_buffers(graph_rows)
        buffers = state._graph_buffers
    else:
        buffers = state._buffers_for(batch(EAGER_ROWS))
    assert buffers is not None and state._workspace is not None
    allocated = buffers.nbytes + state._workspace.nbytes
    if state._audit is not None:
        allocated += memory.audit.scratch_bytes(state.geometry)
    if state._flashinfer is not None:
        allocated += state._flashinfer._buffers.nbytes + len(sizes) * flashinfer_attend._PLAN_BYTES
    assert state.describe()["step_bytes"] == allocated
    assert (
        memory.step_bytes(config, state.geometry, memory.largest_plan(config, 10), graph_rows) == allocated
    )
    bare = StepBuffers.allocate(GEOMETRY, TapPlan(), graph_rows or EAGER_ROWS, "meta").nbytes
    bare += GEOMETRY.workspace(graph_rows or EAGER_ROWS, "meta").nbytes
    assert (allocated > bare) == bool(option)
