"""Pages that are no ordinary keys through the CUDA kernels: what `test_degenerate.py` says of the CPU's."""

import pytest
import torch
from cases import empty_records, make_cache
from gpu_cases import cuda, records_to_gpu, to_gpu
from locks_kernels import score, score_select, select, summarize
from test_degenerate import BAD, CASES, inf_key, nan_key

pytestmark = [pytest.mark.gpu, cuda]

FORMATS = ["r4i4", "r8i4", "r6h", "r8h", "quest"]
WIDTH = 6
TILE = 8  # pages that the score kernel computes together, and again where one of them overflows


def outlier_key(page):
    """The whole key, so that logits reach 1e4 and more."""
    page[3] = 1e4


def on_gpu(lengths, name, spoiled=()):
    """A cache on the GPU with records by the CUDA kernel; ``spoiled``: (row, logical page, how)."""
    cache = make_cache(lengths, group=8, head_dim=128, dtype=torch.bfloat16)
    for row, page, spoil in spoiled:
        spoil(cache.keys[int(cache.page_table[row, page])])
    device = to_gpu(cache)
    records = records_to_gpu(empty_records(name, cache.keys))
    slots = torch.arange(device.keys.shape[0] * 16, device="cuda")
    summarize([device.keys], slots, records, impl="cuda")
    return device, records.layer(0)


def inputs(cache, records):
    return cache.queries, cache.keys, records, cache.page_table, cache.seq_lens


def chosen(page_scores, cache, impl):
    budgets = torch.full((len(cache.seq_lens),), WIDTH, dtype=torch.int32, device=cache.keys.device)
    arguments = {"kv_heads": 2, "page_size": 16, "width": WIDTH, "impl": impl}
    return select(page_scores, cache.page_table, cache.seq_lens, budgets, **arguments).logical


@pytest.mark.parametrize("spoil", [*CASES, outlier_key])
@pytest.mark.parametrize("name", FORMATS)
def test_one_bad_page_changes_no_other(name, spoil):
    """No other page's score, no other request's list; the request's own is that of finite scores."""
    lengths = [12 * 16 - 3, 3000, 40]
    clean, dirty = (on_gpu(lengths, name, bad) for bad in ((), [(0, BAD, spoil)]))
    before, after = (score(*inputs(*at), at[0].sm_scale, impl="cuda") for at in (clean, dirty))
    assert torch.isfinite(after.scores[0, :, :12]).all() and torch.isfinite(after.lse).all()
    assert torch.equal(after.scores[1:], before.scores[1:])
    beside = [page for page in range(TILE) if page != BAD]
    assert torch.equal(after.scores[0, :, TILE:12], before.scores[0, :, TILE:12])
    torch.testing.assert_close(after.scores[0, :, beside], before.scores[0, :, beside], atol=1e-4, rtol=0)

    lists = chosen(after, dirty[0], "cuda")
    assert torch.equal(lists[1:], chosen(before, clean[0], "cuda")[1:])
    assert torch.equal(lists, chosen(after, dirty[0], "torch"))


@pytest.mark.parametrize("spoil", [nan_key, inf_key])
@pytest.mark.parametrize("name", ["r4i4", "r6h", "quest", "oracle"])
def test_a_broken_request_leaves_the_batch_alone(name, spoil):
    """A NaN in one request's current page may ruin that request, as it does in dense attention."""
    results = []
    for bad in ((), [(1, 2, spoil), (1, 11, spoil)]):
        cache, records = on_gpu([150, 180, 333], "r4i4" if name == "oracle" else name, bad)
        budgets = torch.tensor([4, 4, 4], dtype=torch.int32, device="cuda")
        selection = score_select(
            *inputs(cache, None if name == "oracle" else records),
            budgets,
            cache.sm_scale,
            width=WIDTH,
            impl="cuda",
        )
        assert selection.counts.tolist() == [4, 4, 4]
        # Whatever was scored, the lists are legal: ascending, in range, sink and current page in.
        logical = selection.logical[1, :, :4]
        assert (logical.diff(dim=-1) > 0).all()
        assert (logical[:, 0] == 0).all() and (logical[:, -1] == 11).all()
        output, lse = cache.attend(selection, impl="cuda")
        others = [0, 2]
        results.append((selection.logical[others, :, :4], output[others], lse[others]))
    for clean, dirty in zip(*results, strict=True):
        assert torch.isfinite(clean.float()).all()
        assert torch.equal(clean, dirty)
