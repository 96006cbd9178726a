"""The Triton attend kernels under the interpreter equal the CPU path."""

import interpreter
import pytest
import torch
from cases import make_cache
from locks_kernels import ATTEND_ALL, attend, score, select

interpreter.require()

CASES = [
    # group, kv_heads, page, head_dim, dtype, order
    (1, 2, 16, 64, torch.float32, "nhd"),
    (3, 2, 32, 64, torch.float16, "hnd"),
    (9, 1, 16, 128, torch.float32, "nhd"),
    (2, 2, 64, 256, torch.float32, "nhd"),
]


@pytest.mark.parametrize(("group", "kv_heads", "page", "head_dim", "dtype", "order"), CASES)
def test_output_and_lse(group, kv_heads, page, head_dim, dtype, order):
    cache = make_cache(
        [1, page, page + 1, 20 * page + 3, 12 * page],
        group=group, kv_heads=kv_heads, head_dim=head_dim, page_size=page, dtype=dtype, order=order,
    )  # fmt: skip
    budgets = torch.tensor([2, 4, 4, 5, ATTEND_ALL], dtype=torch.int32)
    scores = score(
        cache.queries, cache.keys, None, cache.page_table, cache.seq_lens, cache.sm_scale, impl="torch"
    )
    selection = select(
        scores, cache.page_table, cache.seq_lens, budgets, kv_heads=kv_heads, page_size=page, width=6
    )
    assert selection.counts[-1] > 6  # one row attends everything through its page table
    tensors = (cache.queries, cache.keys, cache.values, selection, cache.page_table, cache.seq_lens)
    arguments = (*tensors, cache.sm_scale, 0.5)
    reference, reference_lse = attend(*arguments, impl="torch")
    out, lse = attend(*arguments, impl="triton")
    tolerance = 2e-6 if dtype == torch.float32 else 1e-3
    assert torch.allclose(out.float(), reference.float(), atol=tolerance, rtol=tolerance)
    assert torch.allclose(lse, reference_lse, atol=5e-6)
