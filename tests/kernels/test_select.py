"""select: which pages, in which order, under which budget."""

import independent
import numpy as np
import pytest
import torch
from cases import make_cache
from hypothesis import given, settings
from hypothesis import strategies as st
from locks_kernels import ATTEND_ALL, PageScores, score, select


def choose(scores, lengths, budgets, kv_heads, page_size=16, width=8):
    """select on given scores ``[rows, q_heads, pages]`` and a page table that maps j to 100 * row + j."""
    scores = torch.as_tensor(scores, dtype=torch.float32).clone()
    for row, length in enumerate(lengths):
        scores[row, :, -(-length // page_size) :] = float("-inf")
    rows, _, pages = scores.shape
    table = torch.arange(pages, dtype=torch.int32) + 100 * torch.arange(rows, dtype=torch.int32)[:, None]
    return select(
        PageScores(scores, scores.logsumexp(-1)),
        table,
        torch.tensor(lengths),
        torch.tensor(budgets, dtype=torch.int32),
        kv_heads=kv_heads,
        page_size=page_size,
        width=width,
    )


def pages_of(selection, row, head):
    return selection.logical[row, head, : int(selection.counts[row])].tolist()


def test_ties_go_to_the_lower_page():
    selection = choose(torch.zeros(1, 2, 20), [320], [6], kv_heads=1)
    assert pages_of(selection, 0, 0) == [0, 1, 2, 3, 4, 19]
    scores = torch.zeros(1, 1, 20)
    scores[0, 0, [7, 9, 12, 15]] = 1.0  # three of the four fit
    selection = choose(scores, [320], [5], kv_heads=1)
    assert pages_of(selection, 0, 0) == [0, 7, 9, 12, 19]


def test_sink_and_current_page_always():
    scores = torch.zeros(1, 1, 20)
    scores[..., 0] = scores[..., 19] = -50.0
    selection = choose(scores, [305], [2], kv_heads=1)
    assert pages_of(selection, 0, 0) == [0, 19]
    selection = choose(scores, [305], [3], kv_heads=1)
    assert pages_of(selection, 0, 0) == [0, 1, 19]


def test_physical_pages_and_padding():
    scores = torch.zeros(2, 1, 20)
    scores[:, 0, 5] = 3.0
    selection = choose(scores, [320, 30], [3, 3], kv_heads=1)
    assert selection.pages[1, 0].tolist() == [100, 101, 0, 0, 0, 0, 0, 0]
    assert selection.logical[0, 0].tolist() == [0, 5, 19, 0, 0, 0, 0, 0]
    assert selection.pages[0, 0].tolist() == [0, 5, 19, 0, 0, 0, 0, 0]
    assert selection.pages.dtype == selection.logical.dtype == selection.counts.dtype == torch.int32


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 63, 64, 65])
def test_at_most_k_pages_attends_all(length):
    pages = -(-length // 16)
    selection = choose(torch.randn(1, 3, 5), [length], [4], kv_heads=1)
    if pages <= 4:
        assert pages_of(selection, 0, 0) == list(range(pages))
    else:
        assert len(pages_of(selection, 0, 0)) == 4


def test_budgets_are_per_row():
    selection = choose(
        torch.zeros(4, 1, 20), [320, 320, 320, 17], [2, 5, ATTEND_ALL, ATTEND_ALL], kv_heads=1
    )
    assert selection.counts.tolist() == [2, 5, 20, 2]
    assert pages_of(selection, 1, 0) == [0, 1, 2, 3, 19]
    assert pages_of(selection, 3, 0) == [0, 1]


def test_heads_choose_for_themselves():
    scores = torch.zeros(1, 4, 20)
    scores[0, :2, 5] = 9.0
    scores[0, 2:, 11] = 9.0
    selection = choose(scores, [320], [3], kv_heads=2)
    assert pages_of(selection, 0, 0) == [0, 5, 19]
    assert pages_of(selection, 0, 1) == [0, 11, 19]


def test_share_average_is_not_a_sum_of_logits_nor_a_maximum():
    """A head with large logits everywhere has no more say than any other: shares, not masses."""
    scores = torch.zeros(1, 3, 12)
    scores[0, 0] = 40.0  # loud and indifferent
    scores[0, 0, 3] = 40.5
    scores[0, 1:, 8] = 4.0  # two quiet heads that agree
    selection = choose(scores, [192], [3], kv_heads=1)
    assert pages_of(selection, 0, 0) == [0, 8, 11]


@pytest.mark.parametrize("budget", [1, 0, -1])
def test_refuses_less_than_two_pages(budget):
    with pytest.raises(ValueError, match="at least 2"):
        choose(torch.zeros(1, 1, 20), [320], [budget], kv_heads=1)


def test_refuses_more_than_the_lists_hold():
    with pytest.raises(ValueError, match=r"at most 8.*ATTEND_ALL"):
        choose(torch.zeros(1, 1, 20), [320], [9], kv_heads=1)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_is_the_papers_set(data):
    group = data.draw(st.sampled_from([1, 3, 5, 8, 16]))
    heads = data.draw(st.integers(1, 3))
    page_size = data.draw(st.sampled_from([16, 32, 64]))
    lengths = data.draw(st.lists(st.integers(1, 20 * page_size), min_size=1, max_size=4))
    budgets = [data.draw(st.integers(2, 9) | st.just(ATTEND_ALL)) for _ in lengths]
    # A coarse grid makes ties common; steps of 1/4 keep distinct shares far apart in fp32.
    seed = data.draw(st.integers(0, 2**31))
    generator = np.random.default_rng(seed)
    scores = generator.integers(-8, 9, (len(lengths), heads * group, 20)) / 4

    selection = choose(scores, lengths, budgets, heads, page_size, width=9)
    for row, (length, budget) in enumerate(zip(lengths, budgets, strict=True)):
        present = -(-length // page_size)
        count = min(present, budget)
        assert int(selection.counts[row]) == count
        if count > 9:
            continue
        for head in range(heads):
            share = independent.group_share(scores[row, head * group : (head + 1) * group, :present])
            got = pages_of(selection, row, head)
            assert got == sorted(set(got))
            assert {0, present - 1} <= set(got)
            want = independent.chosen_pages(share, count)
            # Equal sets, or sets of equal share: fp32 and float64 may order true ties of G > 1 differently.
            assert got == want or share[got].sum() == pytest.approx(share[want].sum(), rel=1e-6)
            if group == 1:
                assert got == want
            expected = [100 * row + page for page in got]
            assert selection.pages[row, head, :count].tolist() == expected


@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("name", ["oracle", "r8i4", "r4i4", "r2i4", "r8h", "r6h", "r4h"])
def test_a_page_for_one_query_head_is_found(name, group):
    """One key of one page answers one head of the group; the other heads have no preference."""
    page = 23
    for wanted in range(group):
        generator = torch.Generator().manual_seed(wanted)
        directions = torch.linalg.qr(torch.randn(64, 64, generator=generator))[0]
        cache = make_cache([64 * 16 - 5], group, kv_heads=2, head_dim=64, seed=wanted)
        cache.queries[0] = directions[: 2 * group] * 8
        seen = directions[: 2 * group]
        cache.keys -= 0.9 * (cache.keys @ seen.T) @ seen
        cache.keys[cache.page_table[0, page].long(), 9, 1] += directions[group + wanted] * 12
        result = score(
            cache.queries, cache.keys, cache.records(name), cache.page_table, cache.seq_lens, cache.sm_scale
        )
        budgets = torch.tensor([4], dtype=torch.int32)
        selection = select(
            result, cache.page_table, cache.seq_lens, budgets, kv_heads=2, page_size=16, width=4
        )
        assert page in pages_of(selection, 0, 1)
