"""The Triton score kernels under the interpreter equal the reference on the same records."""

import interpreter
import pytest
import torch
from cases import make_cache
from locks_kernels import score

interpreter.require()

CASES = [
    # format, page, head_dim, group, dtype, order
    ("r4i4", 16, 64, 3, torch.float32, "nhd"),
    ("r8i4", 16, 128, 8, torch.float16, "hnd"),
    ("r6h", 16, 64, 1, torch.float32, "hnd"),
    ("r16h", 32, 64, 2, torch.float32, "nhd"),
    ("r1i8", 64, 64, 2, torch.float32, "nhd"),
    ("r2bf16", 16, 64, 5, torch.float16, "nhd"),
    ("r8i4", 16, 256, 16, torch.float32, "nhd"),
    ("quest", 16, 64, 3, torch.float32, "hnd"),
    ("quest", 32, 64, 2, torch.float16, "nhd"),
    ("oracle", 16, 64, 3, torch.float32, "nhd"),
]


@pytest.mark.parametrize(("name", "page", "head_dim", "group", "dtype", "order"), CASES)
def test_scores_and_lse(name, page, head_dim, group, dtype, order):
    cache = make_cache(
        [1, page, page + 1, 18 * page + 3],
        group=group, head_dim=head_dim, page_size=page, dtype=dtype, order=order,
    )  # fmt: skip
    arguments = (
        cache.queries, cache.keys, cache.records(name), cache.page_table, cache.seq_lens, cache.sm_scale
    )  # fmt: skip
    reference = score(*arguments, impl="torch")
    ours = score(*arguments, impl="triton")
    present = torch.isfinite(reference.scores)
    assert torch.allclose(ours.scores[present], reference.scores[present], atol=2e-5, rtol=1e-5)
    assert torch.allclose(ours.lse, reference.lse, atol=2e-5, rtol=1e-5)
