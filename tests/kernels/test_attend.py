"""attend: softmax attention over chosen pages against float64."""

import independent
import numpy as np
import pytest
import torch
from cases import make_cache
from hypothesis import given, settings
from hypothesis import strategies as st
from locks_kernels import ATTEND_ALL, Selection, attend, score, select

ODD_LENGTHS = [1, 15, 16, 17, 31, 32, 33, 100]


def chosen(cache, budgets, width, name="oracle"):
    result = score(
        cache.queries, cache.keys, cache.records(name), cache.page_table, cache.seq_lens, cache.sm_scale
    )
    return select(
        result,
        cache.page_table,
        cache.seq_lens,
        torch.tensor(budgets, dtype=torch.int32),
        kv_heads=cache.kv_heads,
        page_size=cache.page_size,
        width=width,
    )


def check(cache, selection, tolerance=2e-5, v_scale=1.0):
    output, lse = cache.attend(selection, v_scale)
    assert output.shape == cache.queries.shape and output.dtype == cache.queries.dtype
    assert lse.shape == cache.queries.shape[:2] and lse.dtype == torch.float32
    page = cache.page_size
    for row, length in enumerate(cache.seq_lens.tolist()):
        count = int(selection.counts[row])
        for q_head in range(cache.queries.shape[1]):
            head = q_head // cache.group
            logical = selection.logical[row, head, :count].tolist()
            if count > selection.logical.shape[-1]:
                logical = range(count)
            tokens = [t for p in logical for t in range(p * page, min((p + 1) * page, length))]
            want, want_lse = independent.attention(
                cache.queries[row, q_head].float().numpy(),
                cache.row_keys(row, head).float().numpy()[tokens],
                cache.row_values(row, head).float().numpy()[tokens],
                cache.sm_scale,
            )
            got = output[row, q_head].double().numpy()
            np.testing.assert_allclose(got, want * v_scale, atol=tolerance, rtol=tolerance)
            assert float(lse[row, q_head]) == pytest.approx(want_lse, abs=1e-4)


def test_odd_lengths():
    cache = make_cache(ODD_LENGTHS)
    check(cache, chosen(cache, [4] * len(ODD_LENGTHS), width=4))


@pytest.mark.parametrize("group", [1, 3, 5, 8, 16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_groups_and_head_dims(group, head_dim):
    cache = make_cache([49, 200], group, head_dim=head_dim)
    check(cache, chosen(cache, [3, 5], width=5))


@pytest.mark.parametrize("order", ["nhd", "hnd"])
@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_pool_orders_and_page_sizes(order, page_size):
    cache = make_cache([1, page_size, page_size + 1, 7 * page_size - 3], page_size=page_size, order=order)
    check(cache, chosen(cache, [3] * 4, width=3))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_half_precision(dtype, tolerance):
    cache = make_cache([33, 100], dtype=dtype)
    check(cache, chosen(cache, [3, 3], width=3), tolerance)


def test_value_scale():
    cache = make_cache([33, 100])
    check(cache, chosen(cache, [3, ATTEND_ALL], width=3), v_scale=0.125)


def test_fp8_pool():
    cache = make_cache([33, 100])
    selection = chosen(cache, [2, 3], width=3)
    cache.keys, cache.values = cache.keys.to(torch.float8_e4m3fn), cache.values.to(torch.float8_e4m3fn)
    check(cache, selection)


@pytest.mark.parametrize("name", ["oracle", "quest", "r4i4", "r4h"])
def test_a_budget_that_covers_is_dense(name):
    """Not merely close: the same numbers as attending everything."""
    cache = make_cache(ODD_LENGTHS)
    rows = len(ODD_LENGTHS)
    covered, covered_lse = cache.attend(chosen(cache, [7] * rows, 7, name))
    dense, dense_lse = cache.attend(chosen(cache, [ATTEND_ALL] * rows, 2, name))
    assert torch.equal(covered, dense) and torch.equal(covered_lse, dense_lse)


def test_mixed_rows():
    """Sparse, covered and attend-all rows in one batch, each as it is alone."""
    cache = make_cache([300, 300, 20, 300])
    selection = chosen(cache, [4, ATTEND_ALL, 4, 3], width=4)
    check(cache, selection)
    output, _ = cache.attend(selection)
    for row in range(4):
        pick = slice(row, row + 1)
        part = Selection(selection.pages[pick], selection.logical[pick], selection.counts[pick])
        alone, _ = attend(
            cache.queries[pick],
            cache.keys,
            cache.values,
            part,
            cache.page_table[pick],
            cache.seq_lens[pick],
            cache.sm_scale,
        )
        assert torch.allclose(alone[0], output[row], atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=5),
    st.integers(2, 12),
    st.sampled_from([1, 3, 5, 8]),
    st.integers(1, 3),
    st.integers(0, 1000),
)
def test_any_batch(lengths, budget, group, kv_heads, seed):
    cache = make_cache(lengths, group, kv_heads, seed=seed)
    check(cache, chosen(cache, [budget] * len(lengths), width=budget, name="r2i4"))
