"""Eager calls of the ops, once they have been called: no allocation, and the host never waits."""

import pytest
import torch
from cases import empty_records
from gpu_cases import cuda, make_pair, records_to_gpu, steady
from locks_kernels import attend, score, score_select, select, summarize
from locks_kernels.workspace import Workspace

pytestmark = [pytest.mark.gpu, cuda]

WIDTH = 12
OPS = ("summarize", "score", "select", "score_select", "attend")


@pytest.fixture(scope="module")
def calls():
    """A call of each op without arguments; all it needs is there."""
    _, _, cache, records = make_pair([3000, 70, 17], "r4i4", group=8, head_dim=128)
    tables = (cache.page_table, cache.seq_lens)
    budgets = torch.full((3,), WIDTH, dtype=torch.int32, device="cuda")
    workspace = Workspace.allocate(
        max_rows=3,
        q_heads=16,
        kv_heads=2,
        max_pages=cache.page_table.shape[1],
        width=WIDTH,
        head_dim=128,
        device="cuda",
    )
    pool = records_to_gpu(empty_records("r4i4", cache.keys))
    slots = torch.arange(15, 16 * cache.keys.shape[0], 16, device="cuda")
    scored = (cache.queries, cache.keys, records, *tables)
    sizes = {"kv_heads": 2, "page_size": 16, "width": WIDTH, "impl": "cuda"}
    scores = score(*scored, cache.sm_scale, impl="cuda")
    selection = select(scores, *tables, budgets, **sizes)
    attended = (cache.queries, cache.keys, cache.values, selection, *tables, cache.sm_scale)
    out = attend(*attended, workspace=workspace, impl="cuda")
    return {
        "summarize": lambda: summarize([cache.keys], slots, pool, impl="cuda"),
        "score": lambda: score(*scored, cache.sm_scale, out=scores, impl="cuda"),
        "select": lambda: select(scores, *tables, budgets, out=selection, **sizes),
        "score_select": lambda: score_select(
            *scored, budgets, cache.sm_scale, width=WIDTH, workspace=workspace, impl="cuda"
        ),
        "attend": lambda: attend(*attended, workspace=workspace, out=out, impl="cuda"),
    }


@pytest.mark.parametrize("op", OPS)
def test_eager_calls_are_steady(calls, op):
    calls[op]()
    with steady():
        for _ in range(3):
            calls[op]()


def test_what_is_not_steady_is_noticed():
    with pytest.raises(AssertionError, match="1 allocations"), steady():
        torch.empty(1, device="cuda")
    there = torch.zeros(1, device="cuda")
    with pytest.raises(RuntimeError, match="synchronizing"), steady():
        there.item()
