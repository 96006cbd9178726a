"""summarize: which pages are rebuilt, and that their records stand for their keys."""

import independent
import numpy as np
import pytest
import torch
from cases import empty_records, make_cache, pool_view
from hypothesis import given, settings
from hypothesis import strategies as st
from locks_kernels import Summaries, SummaryLayout, page_view, summarize
from locks_kernels.reference import principal_basis, reconstruct

FORMATS = ["r8i4", "r4i4", "r2i4", "r8h", "r6h", "r4h", "r8i8", "r8bf16", "quest"]


def random_pool(pages=9, heads=2, head_dim=64, page_size=16, layers=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (layers, pages * page_size, heads, head_dim)
    return [page_view(pool, page_size) for pool in torch.randn(shape, generator=generator)]


def marked(records, mark=99):
    """Records full of a mark, to see which ones are written."""
    for plane in records.planes:
        plane.fill_(mark)
    return records


def written_pages(records, layer=0, mark=99):
    changed = [(plane[layer].float() != mark).flatten(1).any(1) for plane in records.planes]
    return torch.stack(changed).any(0).nonzero().flatten().tolist()


@pytest.mark.parametrize("name", FORMATS)
def test_only_pages_whose_last_slot_is_written(name):
    (keys,) = random_pool()
    records = marked(empty_records(name, keys))
    page_3, part_of_4, end_of_6 = range(48, 64), range(64, 79), [111]
    summarize([keys], torch.tensor([*page_3, *part_of_4, *end_of_6]), records)
    assert written_pages(records) == [3, 6]


def test_padded_rows_write_nothing():
    (keys,) = random_pool()
    records = marked(empty_records("r4i4", keys))
    summarize([keys], torch.zeros(32, dtype=torch.long), records)
    summarize([keys], torch.empty(0, dtype=torch.long), records)
    assert written_pages(records) == []


def test_a_page_finished_later_is_built_from_all_its_keys():
    (keys,) = random_pool()
    records, whole = empty_records("r4i4", keys), empty_records("r4i4", keys)
    summarize([keys], torch.arange(16, 32), whole)
    final = keys[1].clone()
    keys[1, 10:] = 0.0
    summarize([keys], torch.arange(16, 26), records)
    assert all((plane == 0).all() for plane in records.planes)
    for token in range(10, 16):  # decode: one slot a step
        keys[1, token] = final[token]
        summarize([keys], torch.tensor([16 + token]), records)
    for got, want in zip(records.planes, whole.planes, strict=True):
        assert torch.equal(got, want)


def test_a_page_used_again_gets_the_new_keys():
    (keys,) = random_pool()
    records = empty_records("r4i4", keys)
    summarize([keys], torch.tensor([31]), records)
    before = records.basis.clone()
    keys[1] = keys[2]
    summarize([keys], torch.tensor([31, 47]), records)
    assert not torch.equal(before[0, 1], records.basis[0, 1])
    for plane in records.planes:
        assert torch.equal(plane[0, 1], plane[0, 2])


@settings(max_examples=25, deadline=None)
@given(st.permutations(range(16, 80)), st.lists(st.integers(1, 30), min_size=1, max_size=12))
def test_any_order_of_writes_gives_the_same_records(slots, sizes):
    """Whatever chunks the slots of pages 1 to 4 arrive in, the last word is the complete page's."""
    (keys,) = random_pool(pages=5)
    records, whole = empty_records("r4h", keys), empty_records("r4h", keys)
    summarize([keys], torch.arange(16, 80), whole)
    # A scheduler fills a page in order, so the last slot of a page comes after its others.
    slots = sorted(slots, key=lambda slot: slot % 16 == 15)
    start = 0
    for size in [*sizes, len(slots)]:
        summarize([keys], torch.tensor(slots[start : start + size]), records)
        start += size
    for got, want in zip(records.planes, whole.planes, strict=True):
        assert torch.equal(got, want)


def test_layers_are_distinct():
    keys = random_pool(layers=3)
    records = empty_records("r4i4", keys[0], layers=3)
    summarize(keys, torch.tensor([31]), records)
    for layer in range(3):
        alone = empty_records("r4i4", keys[layer])
        summarize([keys[layer]], torch.tensor([31]), alone)
        for got, want in zip(records.planes, alone.planes, strict=True):
            assert torch.equal(got[layer], want[0])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_pool_order_and_dtype(name, dtype):
    """NHD and HND pools give the same records, and so does the same key in a wider dtype."""
    pages = random_pool()[0].to(dtype)
    slots = torch.arange(pages.shape[0]) * 16 + 15
    results = []
    for keys in (pool_view(pages, "nhd"), pool_view(pages, "hnd"), pages.float()):
        records = empty_records(name, keys)
        summarize([keys], slots, records)
        results.append(records)
    for planes in zip(*(records.planes for records in results), strict=True):
        assert torch.equal(planes[0], planes[1]) and torch.equal(planes[0], planes[2])


@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_basis_is_the_truncated_svd(page_size, head_dim):
    (keys,) = random_pool(pages=4, head_dim=head_dim, page_size=page_size)
    centred = keys.transpose(1, 2) - keys.transpose(1, 2).mean(-2, keepdim=True)
    basis = principal_basis(centred, 8)
    error = (centred - centred @ basis @ basis.transpose(-1, -2)).norm(dim=(-1, -2))
    discarded = torch.linalg.svdvals(centred.double())[..., 8:].norm(dim=-1)
    assert (error <= discarded * 1.001).all()
    identity = torch.eye(8).expand(4, 2, 8, 8)
    assert torch.allclose(basis.transpose(-1, -2) @ basis, identity, atol=1e-4)


@pytest.mark.parametrize("name", ["r8i8", "r8bf16", "r4bf16"])
def test_fine_codes_lose_nothing_of_the_svd(name):
    cache = make_cache([1024], head_dim=128)
    keys = cache.keys.transpose(1, 2)
    error = (reconstruct(cache.records(name)) - keys).norm(dim=(-1, -2))
    centred = keys - keys.mean(-2, keepdim=True)
    rank = SummaryLayout.parse(name, 128).rank
    best = torch.linalg.svdvals(centred)[..., rank:].norm(dim=-1)
    assert (error / best).mean() < 1.02


@pytest.mark.parametrize("name", sorted(independent.FORMATS))
def test_records_are_the_papers(name):
    """The keys that a record stands for, against float64 from the equations alone."""
    cache = make_cache([320], head_dim=128, kv_heads=1)
    got = reconstruct(cache.records(name))[1:, 0].double().numpy()
    distances = []
    for page, keys in zip(got, cache.keys[1:, :, 0].numpy(), strict=True):
        record = independent.record(keys, name)
        want = record.mu + record.coefficients @ record.basis.T
        distances.append(np.linalg.norm(page - want) / np.linalg.norm(want - keys))
    # Codes at a rounding boundary may fall the other way between two SVDs, so not every page is equal.
    assert np.median(distances) < 0.02
    assert max(distances) < 0.25


def test_more_rank_and_finer_codes_reconstruct_better():
    cache = make_cache([2048], head_dim=128)
    keys = cache.keys.transpose(1, 2)
    errors = [
        float((reconstruct(cache.records(name)) - keys).norm())
        for name in ("r8bf16", "r8i8", "r8i4", "r4i4", "r2i4", "r1i4")
    ]
    assert errors[0] == pytest.approx(errors[1], rel=0.01)
    assert errors[1:] == sorted(errors[1:])


def test_quest_records_are_the_bounds():
    (keys,) = random_pool()
    records = empty_records("quest", keys)
    summarize([keys], torch.tensor([47]), records)
    assert torch.equal(records.low[0, 2], keys[2].amin(0).bfloat16())
    assert torch.equal(records.high[0, 2], keys[2].amax(0).bfloat16())


def test_refuses_keys_of_another_shape():
    records = Summaries.allocate(SummaryLayout.parse("r4i4", 64, 16), (1, 4, 2))
    slots = torch.tensor([15])
    with pytest.raises(ValueError, match=r"\[pages, 16, kv_heads, 64\] for format r4i4"):
        summarize([torch.zeros(4, 32, 2, 64)], slots, records)
    with pytest.raises(ValueError, match=r"\[pages, 16, kv_heads, 64\] for format r4i4"):
        summarize([torch.zeros(4, 16, 2, 128)], slots, records)
    with pytest.raises(ValueError, match="2 layers of keys, 1 of records"):
        summarize([torch.zeros(4, 16, 2, 64)] * 2, slots, records)
