"""The Triton select kernel under the interpreter returns exactly the reference's lists."""

import interpreter
import pytest
import torch
from locks_kernels import ATTEND_ALL, PageScores, select

interpreter.require()

PAGES = 1501
LENGTHS = [1, 16, 17, 200, 16 * 1500 + 3, 16 * 90, 16 * 1500, 16 * 600]
BUDGETS = [2, 3, 4, 5, 64, 2, ATTEND_ALL, 8]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("group", [1, 3])
def test_lists_equal_the_reference(group, tied):
    generator = torch.Generator().manual_seed(group)
    lengths = torch.tensor(LENGTHS)
    scores = 2 * torch.randn(len(LENGTHS), 2 * group, PAGES, generator=generator)
    if tied:  # few distinct values, so that the threshold falls among equal shares
        scores = scores.round()
    present = -(-lengths // 16)
    scores[(torch.arange(PAGES) >= present[:, None, None]).expand_as(scores)] = float("-inf")
    page_scores = PageScores(scores, scores.logsumexp(-1))
    table = torch.stack([torch.randperm(PAGES, generator=generator) for _ in LENGTHS]).int()
    budgets = torch.tensor(BUDGETS, dtype=torch.int32)
    arguments = {"kv_heads": 2, "page_size": 16, "width": 64}
    reference = select(page_scores, table, lengths, budgets, **arguments, impl="torch")
    ours = select(page_scores, table, lengths, budgets, **arguments, impl="triton")
    assert torch.equal(ours.counts, reference.counts)
    filled = reference.counts <= 64
    assert torch.equal(ours.logical[filled], reference.logical[filled])
    assert torch.equal(ours.pages[filled], reference.pages[filled])
