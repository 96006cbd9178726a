"""Pages that are no ordinary keys: what they yield, and that no other page notices."""

import pytest
import torch
from cases import empty_records, make_cache
from locks_kernels import score, select, summarize
from locks_kernels.reference import reconstruct

FORMATS = ["r8i4", "r4i4", "r2i4", "r8h", "r6h", "r4h", "r8i8", "r8bf16", "r16i4", "r16h", "quest"]
BAD = 5


def equal_keys(page):
    page[:] = page[0].clone()


def zero_keys(page):
    page[:] = 0.0


def outlier(page):
    page[3, :, 7] = 1e4


def nan_key(page):
    page[3] = float("nan")


def inf_key(page):
    page[3, :, 7] = float("inf")
    page[4, :, 8] = float("-inf")


def two_keys(page):
    page[8:] = page[0].clone()
    page[:8] = page[1].clone()


def tiny_keys(page):
    page *= 1e-30


CASES = [equal_keys, zero_keys, outlier, nan_key, inf_key, two_keys, tiny_keys]


def spoiled(spoil, head_dim=64, page_size=16, dtype=torch.float32):
    """A cache and the same one with one of its pages spoiled."""
    clean = make_cache([12 * page_size - 3], head_dim=head_dim, page_size=page_size, dtype=dtype)
    dirty = make_cache([12 * page_size - 3], head_dim=head_dim, page_size=page_size, dtype=dtype)
    spoil(dirty.keys[int(dirty.page_table[0, BAD])])
    return clean, dirty


@pytest.mark.parametrize("spoil", CASES)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("head_dim", "page_size"), [(64, 16), (128, 32), (256, 64)])
def test_one_bad_page_changes_no_other(name, spoil, head_dim, page_size):
    clean, dirty = spoiled(spoil, head_dim, page_size)
    results = []
    for cache in (clean, dirty):
        records = cache.records(name)
        for plane in records.planes:
            assert torch.isfinite(plane.float()).all()
        results.append(
            score(
                cache.queries, cache.keys, records, cache.page_table, cache.seq_lens, cache.sm_scale
            ).scores
        )
    others = torch.arange(12) != BAD
    assert torch.equal(results[0][..., others], results[1][..., others])
    assert torch.isfinite(results[1]).all()


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "quest"])
def test_equal_keys_are_their_centroid(name):
    _, dirty = spoiled(equal_keys)
    page = int(dirty.page_table[0, BAD])
    keys = dirty.keys[page].transpose(0, 1)
    rebuilt = reconstruct(dirty.records(name))[page]
    # int8 centroid, so half a step of the largest element; rotated formats hold it in other coordinates
    step = keys.abs().amax(-1, keepdim=True) / 127
    assert ((rebuilt - keys).abs() < 2 * step).all()
    assert torch.allclose(rebuilt, rebuilt[:, :1].expand_as(rebuilt), atol=float(step.max()))


@pytest.mark.parametrize("name", FORMATS)
def test_zero_keys_score_the_page_size(name):
    _, dirty = spoiled(zero_keys)
    records = dirty.records(name)
    scores = score(
        dirty.queries, dirty.keys, records, dirty.page_table, dirty.seq_lens, dirty.sm_scale
    ).scores[0, :, BAD]
    expected = 0.0 if name == "quest" else torch.log(torch.tensor(16.0))
    assert torch.allclose(scores, torch.as_tensor(expected).expand_as(scores), atol=1e-6)


@pytest.mark.parametrize("name", ["r8i4", "r4i4", "r8h", "r4h", "quest"])
def test_an_outlier_is_found_by_the_query_that_wants_it(name):
    _, dirty = spoiled(outlier)
    dirty.queries.zero_()
    dirty.queries[..., 7] = 1.0
    scores = score(
        dirty.queries, dirty.keys, dirty.records(name), dirty.page_table, dirty.seq_lens, dirty.sm_scale
    ).scores
    assert (scores[0].argmax(-1) == BAD).all()
    assert torch.allclose(scores[0, :, BAD], torch.tensor(1e4 * dirty.sm_scale), rtol=0.1)


@pytest.mark.parametrize("name", ["r4i4", "r4h", "quest"])
def test_non_finite_elements_count_as_zero(name):
    _, broken = spoiled(inf_key)
    _, zeroed = spoiled(inf_key)
    page = zeroed.keys[int(zeroed.page_table[0, BAD])]
    page[~torch.isfinite(page)] = 0.0
    for got, want in zip(broken.records(name).planes, zeroed.records(name).planes, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("spoil", [nan_key, inf_key])
def test_a_broken_request_leaves_the_batch_alone(spoil):
    """A NaN in one request's keys may ruin that request, as it does in dense attention, and no other."""
    outputs = []
    for broken in (False, True):
        cache = make_cache([150, 180, 33])
        if broken:
            spoil(cache.keys[int(cache.page_table[1, 2])])
            spoil(cache.keys[int(cache.page_table[1, 11])])
        for name in ("r4i4", "quest", "oracle"):
            result = score(
                cache.queries,
                cache.keys,
                cache.records(name),
                cache.page_table,
                cache.seq_lens,
                cache.sm_scale,
            )
            budgets = torch.tensor([4, 4, 4], dtype=torch.int32)
            selection = select(
                result, cache.page_table, cache.seq_lens, budgets, kv_heads=2, page_size=16, width=4
            )
            # whatever was scored, the lists are legal: ascending, in range, sink and current page in
            logical = selection.logical[1].long()
            assert (
                (logical.diff(dim=-1) > 0).all()
                and (logical[:, 0] == 0).all()
                and (logical[:, -1] == 11).all()
            )
            output, lse = cache.attend(selection)
            outputs.append((output[[0, 2]], lse[[0, 2]]))
    for clean, dirty in zip(outputs[:3], outputs[3:], strict=True):
        assert torch.equal(clean[0], dirty[0]) and torch.equal(clean[1], dirty[1])


@pytest.mark.parametrize("name", ["r4i4", "r4h", "r8bf16", "quest"])
def test_extremes_of_half_precision(name):
    """The largest fp16 keys, in every element, neither overflow nor break a record."""
    cache = make_cache([64], dtype=torch.float16)
    cache.keys[:] = torch.where(cache.keys > 0, 65504.0, -65504.0).half()
    records = empty_records(name, cache.keys)
    summarize([cache.keys], torch.arange(cache.keys.shape[0] * 16), records)
    for plane in records.planes:
        assert torch.isfinite(plane.float()).all()
    scores = score(
        cache.queries, cache.keys, records.layer(0), cache.page_table, cache.seq_lens, cache.sm_scale
    ).scores
    assert torch.isfinite(scores).all()
