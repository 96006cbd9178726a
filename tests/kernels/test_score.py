"""score: page scores of every selector against float64."""

import independent
import numpy as np
import pytest
import torch
from cases import make_cache
from locks_kernels import score
from locks_kernels.cuda_score import score_packed
from locks_kernels.reference import reconstruct

ODD_LENGTHS = [1, 15, 16, 17, 31, 32, 33, 100]


def expected(cache, row, q_head, name, records):
    """Scores of one query head, exact arithmetic on the keys that the records stand for."""
    head = q_head // cache.group
    keys = cache.row_keys(row, head).float().numpy()
    query = cache.queries[row, q_head].float().numpy()
    page = cache.page_size
    scores = []
    for number, start in enumerate(range(0, len(keys), page)):
        tokens = keys[start : start + page]
        if name == "quest":
            scores.append(independent.envelope_bound(query, tokens, cache.sm_scale))
            continue
        if name != "oracle" and start + page < len(keys):
            physical = int(cache.page_table[row, number])
            tokens = reconstruct(records)[physical, head].numpy()
        scores.append(independent.page_mass(query, tokens, cache.sm_scale))
    return np.array(scores)


def check(cache, name, tolerance=2e-4):
    records = cache.records(name)
    result = score(cache.queries, cache.keys, records, cache.page_table, cache.seq_lens, cache.sm_scale)
    assert result.scores.shape == (*cache.queries.shape[:2], cache.page_table.shape[1])
    assert result.scores.dtype == result.lse.dtype == torch.float32
    for row in range(len(cache.seq_lens)):
        for q_head in range(cache.queries.shape[1]):
            want = expected(cache, row, q_head, name, records)
            got = result.scores[row, q_head].double().numpy()
            np.testing.assert_allclose(got[: len(want)], want, atol=tolerance, rtol=1e-5)
            assert (got[len(want) :] == -np.inf).all()
            assert float(result.lse[row, q_head]) == pytest.approx(
                independent.log_sum_exp(want), abs=tolerance
            )


@pytest.mark.parametrize(
    "name", ["r8i4", "r4i4", "r2i4", "r8h", "r6h", "r4h", "r8i8", "r8bf16", "r1h", "r16i4"]
)
def test_summaries(name):
    check(make_cache(ODD_LENGTHS), name)


@pytest.mark.parametrize("name", ["quest", "oracle"])
def test_other_selectors(name):
    check(make_cache(ODD_LENGTHS), name)


@pytest.mark.parametrize("name", ["r4i4", "r4h", "quest", "oracle"])
@pytest.mark.parametrize("group", [1, 3, 5, 8, 16])
def test_groups(name, group):
    check(make_cache([33, 64], group=group), name)


@pytest.mark.parametrize("name", ["r4i4", "r4h", "quest"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("order", ["nhd", "hnd"])
def test_geometry(name, head_dim, page_size, order):
    check(make_cache([page_size + 1, 3 * page_size], 2, 2, head_dim, page_size, order), name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_pools(dtype):
    for name in ("r4i4", "quest", "oracle"):
        check(make_cache([17, 50], dtype=dtype), name)


def test_exact_where_the_rank_is_enough():
    """Theorem 1(i): no error where a page's centred keys have rank at most r."""
    cache = make_cache([160], head_dim=128)
    generator = torch.Generator().manual_seed(5)
    within = torch.randn(11, 16, 2, 4, generator=generator)
    directions = torch.randn(11, 2, 4, 128, generator=generator)
    spread = torch.einsum("pbhr,phrd->pbhd", within, directions)
    cache.keys.copy_(spread + torch.randn(11, 1, 2, 128, generator=generator))
    arguments = (cache.page_table, cache.seq_lens, cache.sm_scale)
    exact = score(cache.queries, cache.keys, None, *arguments).scores
    fine = score(cache.queries, cache.keys, cache.records("r4bf16"), *arguments).scores
    coarse = score(cache.queries, cache.keys, cache.records("r1bf16"), *arguments).scores
    assert (fine - exact).abs().max() < 0.06  # bf16 basis, int8 coefficients
    assert (coarse - exact).abs().mean() > 0.2


def test_quest_bounds_the_largest_logit():
    cache = make_cache([400])
    result = score(
        cache.queries, cache.keys, cache.records("quest"), cache.page_table, cache.seq_lens, cache.sm_scale
    )
    for q_head in range(cache.queries.shape[1]):
        keys = cache.row_keys(0, q_head // cache.group)
        logits = keys @ cache.queries[0, q_head] * cache.sm_scale
        best = logits.unflatten(0, (25, 16)).amax(1)
        # the bounds are stored in bf16, so they can lie within its rounding of the key
        assert (result.scores[0, q_head] >= best - 0.02 * best.abs() - 0.1).all()


def test_scores_do_not_depend_on_other_rows():
    cache = make_cache([100, 33, 257])
    records = cache.records("r4i4")
    together = score(cache.queries, cache.keys, records, cache.page_table, cache.seq_lens, cache.sm_scale)
    for row in range(3):
        pick = slice(row, row + 1)
        alone = score(
            cache.queries[pick],
            cache.keys,
            records,
            cache.page_table[pick],
            cache.seq_lens[pick],
            cache.sm_scale,
        )
        assert torch.equal(alone.scores[0], together.scores[row])


def test_refusals():
    cache = make_cache([40], group=3)
    table = (cache.page_table, cache.seq_lens, cache.sm_scale)
    with pytest.raises(ValueError, match="5 query heads are no multiple of 2 KV heads"):
        score(cache.queries[:, :5], cache.keys, None, *table)
    with pytest.raises(ValueError, match="head_dim 32, keys 64"):
        score(cache.queries[..., :32], cache.keys, None, *table)
    other = make_cache([40], page_size=32).records("r4i4")
    with pytest.raises(ValueError, match="page size 32 and head_dim 64, keys have 16 and 64"):
        score(cache.queries, cache.keys, other, *table)


def test_what_the_cuda_kernels_do_not_take_is_refused_before_anything_is_compiled():
    cache = make_cache([40], group=17, kv_heads=1, dtype=torch.bfloat16)
    budgets = torch.ones(1, dtype=torch.int32)
    buffers = torch.zeros(17 * 8), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="1 to 16"):
        score_packed(
            cache.queries,
            cache.keys,
            cache.records("r4i4"),
            cache.page_table,
            cache.seq_lens,
            budgets,
            cache.sm_scale,
            *buffers,
        )
