"""Buffers of the decode step on a GPU, on tensors without storage."""

from types import SimpleNamespace

import pytest
import torch
from locks_sglang.buffers import Geometry, price
from locks_sglang.runtime import SparseDecode

GEOMETRY = Geometry(q_heads=8, kv_heads=2, head_dim=64, max_pages=20, width=8)


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> SparseDecode:
    monkeypatch.setattr(SparseDecode, "geometry", GEOMETRY)
    made = object.__new__(SparseDecode)
    made.device = torch.device("meta")
    made._graph_buffers = made._eager_buffers = made._workspace = None
    return made


def batch(rows: int) -> SimpleNamespace:
    return SimpleNamespace(req_pool_indices=torch.zeros(rows, device="meta"))


def test_an_eager_batch_leaves_the_graphs_buffers_where_they_are(state: SparseDecode) -> None:
    state.allocate_graph_buffers(4)
    captured = state._graph_buffers
    assert captured is not None
    for rows in (3, 9, 3, 17, 4):  # 9 and 17 are more than the largest graph
        tables = state._tables(batch(rows))
        in_graph = rows <= 4
        assert len(tables.seq_lens) == rows
        assert (tables.page_table._base is captured.tables.page_table) == in_graph
        assert (state._workspace is captured.workspace) == in_graph
    assert state._graph_buffers is captured


def test_eager_buffers_grow_and_are_kept(state: SparseDecode) -> None:
    state._tables(batch(9))
    first = state._eager_buffers
    state._tables(batch(16))
    assert state._eager_buffers is first
    state._tables(batch(17))
    assert state._eager_buffers is not first


def test_price_is_what_the_buffers_take(state: SparseDecode) -> None:
    state.allocate_graph_buffers(5)
    assert state._graph_buffers is not None
    assert price(GEOMETRY, 5) == state._graph_buffers.nbytes > 0
    assert price(GEOMETRY, 0) == 0
