"""score on a GPU against the fp32 reference on the same records."""

import pytest
import torch
from cases import make_cache
from gpu_cases import cuda, make_pair, random_records, records_to_gpu, to_gpu
from locks_kernels import PageScores, Summaries, SummaryLayout, build, score
from locks_kernels.cuda_score import library
from locks_kernels.reference import score_open_page
from locks_kernels.torch_path import score_pages

pytestmark = [pytest.mark.gpu, cuda]

ODD_LENGTHS = [1, 15, 16, 17, 33, 100, 511, 512, 513, 1500]

# Format, head_dim, page, query heads a KV head, query dtype.
GEOMETRIES = [
    ("r4i4", 128, 16, 8, torch.bfloat16),
    ("r4i4", 64, 16, 3, torch.bfloat16),
    ("r8i4", 128, 16, 16, torch.bfloat16),
    ("r8i4", 64, 16, 5, torch.float16),
    ("r2i4", 128, 16, 4, torch.bfloat16),
    ("r1i4", 64, 16, 1, torch.bfloat16),
    ("r6i4", 128, 16, 8, torch.bfloat16),
    ("r16i4", 64, 16, 9, torch.bfloat16),
    ("r4h", 128, 16, 8, torch.bfloat16),
    ("r6h", 64, 16, 3, torch.bfloat16),
    ("r8h", 128, 16, 4, torch.float16),
    ("r6h", 128, 16, 12, torch.bfloat16),
    ("r1h", 64, 16, 1, torch.bfloat16),
    ("r16h", 128, 32, 2, torch.bfloat16),
    ("r4i8", 128, 16, 7, torch.bfloat16),
    ("r8i8", 64, 64, 16, torch.bfloat16),
    ("r8i4", 128, 64, 8, torch.bfloat16),
    ("r8i4", 256, 32, 8, torch.bfloat16),
    ("r16i8", 256, 64, 16, torch.float16),
    ("oracle", 128, 16, 8, torch.bfloat16),
    ("oracle", 64, 32, 3, torch.float16),
    ("quest", 128, 16, 8, torch.bfloat16),
    ("quest", 64, 64, 3, torch.float16),
    ("quest", 256, 16, 16, torch.bfloat16),
    ("oracle", 256, 16, 1, torch.bfloat16),
]


def compare(got, want, worst=2e-2, average=2e-3):
    """Largest and mean absolute difference where there are pages; -inf in the same places."""
    scores, expected = got.scores, want.scores.to(got.scores.device)
    present = expected > -torch.inf
    assert torch.equal(scores > -torch.inf, present)
    difference = (scores - expected)[present].abs()
    assert difference.max() <= worst
    assert difference.mean() <= average
    torch.testing.assert_close(got.lse, want.lse.to(got.lse.device), atol=worst, rtol=0)


def run(cache, records, impl):
    return score(
        cache.queries, cache.keys, records, cache.page_table, cache.seq_lens, cache.sm_scale, impl=impl
    )


@pytest.mark.parametrize(("name", "head_dim", "page", "group", "dtype"), GEOMETRIES)
def test_geometry(name, head_dim, page, group, dtype):
    lengths = [length * page // 16 for length in ODD_LENGTHS]
    lengths[0] = 1
    cache, records, device, device_records = make_pair(
        lengths, name, head_dim=head_dim, page_size=page, group=group, kv_heads=3, dtype=dtype
    )
    compare(run(device, device_records, "cuda"), run(cache, records, "torch"))


@pytest.mark.parametrize("group", range(1, 17))
def test_every_group(group):
    """Formats whose libraries other tests load, for up to 8 heads and for more."""
    name = "r4i4" if group <= 8 else "r8i4"
    cache, records, device, device_records = make_pair(
        [1, 17, 300, 1000], name, head_dim=128, kv_heads=3, group=group
    )
    compare(run(device, device_records, "cuda"), run(cache, records, "torch"))


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 5])
@pytest.mark.parametrize("group", [9, 12, 16])
def test_two_warps_a_kv_head(group, kv_heads):
    cache, records, device, device_records = make_pair(
        [700, 3, 90, 1600], "r8i4", head_dim=128, kv_heads=kv_heads, group=group
    )
    compare(run(device, device_records, "cuda"), run(cache, records, "torch"))


@pytest.mark.parametrize("kv_heads", [1, 2, 5, 8, 32])
def test_any_number_of_kv_heads(kv_heads):
    cache, records, device, device_records = make_pair([700, 3, 90], "r4i4", kv_heads=kv_heads, group=2)
    compare(run(device, device_records, "cuda"), run(cache, records, "torch"))


@pytest.mark.parametrize("rows", [1, 3, 17, 256])
def test_rows(rows):
    lengths = [1 + 37 * row % 600 for row in range(rows)]
    cache, records, device, device_records = make_pair(lengths, "r8i4", group=4)
    compare(run(device, device_records, "cuda"), run(cache, records, "torch"))


def test_long_context():
    cache, records, device, device_records = make_pair([70_003, 33_000], "r4i4", group=8, head_dim=128)
    compare(run(device, device_records, "cuda"), run(cache, records, "torch"))


@pytest.mark.parametrize(
    ("millions", "heads", "group"), [(4, 4, 8), (1, 2, 16), (1, 1, 12), (1, 3, 9)], ids=str
)
def test_millions_of_tokens(millions, heads, group):
    """Pages in random order, many to a block, so that every stage of a ring is used more than once.

    The torch implementation takes some of them at a time.
    """
    pages, scale = millions * 2**20 // 16, 128**-0.5
    records = random_records(SummaryLayout.parse("r4i4", 128), (pages, heads))
    generator = torch.Generator("cuda").manual_seed(1)
    noise = {"generator": generator, "device": "cuda"}
    queries = torch.randn(1, heads * group, 128, **noise).bfloat16()
    current = torch.randn(1, 16, heads, 128, **noise).bfloat16()
    table = torch.randperm(pages, **noise).int().unsqueeze(0)
    lengths = torch.tensor([16 * pages - 5], device="cuda")
    keys = current.expand(pages, -1, -1, -1)
    got = score(queries, keys, records, table, lengths, scale, impl="cuda")
    parts = [score_pages(queries[0], records, part.long(), scale) for part in table[0, :-1].split(2**15)]
    parts.append(score_open_page(queries[0], current[0, :11], scale, "locks"))
    want = torch.cat(parts, -1).unsqueeze(0)
    compare(got, PageScores(want, want.logsumexp(-1)))


@pytest.mark.parametrize("name", ["r4i4", "r8h", "r16i4"])
def test_logits_whose_exponential_overflows(name):
    """Logits of several hundred: their exp is no float, so sums need a shift."""
    cache, records, device, device_records = make_pair([500, 40], name, group=8, head_dim=128)
    cache.queries *= 100
    device.queries *= 100
    got, want = run(device, device_records, "cuda"), run(cache, records, "torch")
    assert want.scores[want.scores > -torch.inf].max() > 200
    # The fp16 product rounds relative to the logits.
    compare(got, want, worst=2.0, average=0.2)


def test_hnd_pool_strided_queries_and_wide_lengths():
    cache, records, device, device_records = make_pair([77, 300], "r4i4", order="hnd", group=4)
    want = run(cache, records, "torch")
    rows, heads, head_dim = device.queries.shape
    packed = torch.randn(rows, heads + 4, head_dim, device="cuda").to(torch.bfloat16)
    packed[:, :heads] = device.queries
    device.queries = packed[:, :heads]
    for dtype in (torch.int32, torch.int64):
        device.seq_lens = device.seq_lens.to(dtype)
        compare(run(device, device_records, "cuda"), want)


def test_fp8_keys():
    cache = make_cache([77, 300], group=4, dtype=torch.bfloat16)
    cache.keys = cache.keys.to(torch.float8_e4m3fn).to(torch.bfloat16)
    records = cache.records("r4i4")
    want = run(cache, records, "torch")
    device = to_gpu(cache)
    device.keys = device.keys.to(torch.float8_e4m3fn)
    compare(run(device, records_to_gpu(records), "cuda"), want)


def test_same_bits_every_time():
    _, _, device, records = make_pair([3000, 16, 900], "r4i4", group=8, head_dim=128)
    first = run(device, records, "cuda")
    for _ in range(5):
        again = run(device, records, "cuda")
        assert torch.equal(first.scores, again.scores)
        assert torch.equal(first.lse, again.lse)


def test_pages_beyond_two_to_the_31_elements():
    """Records at the end of a pool of 2.2 billion basis bytes; keys are all one page."""
    layout = SummaryLayout.parse("r4i4", 128)
    heads, pages = 4, 2_200_000
    cache, records, device, small = make_pair([321], "r4i4", head_dim=128, kv_heads=heads, group=2)
    pool = Summaries.allocate(layout, (pages, heads), "cuda")
    assert pool.basis.numel() > 2**31
    shift = pages - cache.keys.shape[0]
    for target, source in zip(pool.planes, small.planes, strict=True):
        target[shift:] = source
    last = (int(cache.seq_lens[0]) - 1) // 16
    current = device.keys[device.page_table[0, last].long()]
    device.keys = current.expand(pages, *current.shape)
    device.page_table = device.page_table + shift
    compare(run(device, pool, "cuda"), run(cache, records, "torch"))


def test_layer_views_of_a_pool():
    """Scales of a layer start at any even address, and nothing past the pool is read."""
    cache, records, device, device_records = make_pair([200, 31], "r4i4", kv_heads=1, group=8)
    pages = cache.keys.shape[0]
    pool = Summaries.allocate(records.layout, (3, pages, 1), "cuda")
    for layer in range(3):
        for target, source in zip(pool.layer(layer).planes, device_records.planes, strict=True):
            target.copy_(source)
    want = run(cache, records, "torch")
    for layer in range(3):
        compare(run(device, pool.layer(layer), "cuda"), want)


def test_refusals_name_what_is_legal():
    _, _, device, records = make_pair([40], "r4i4", group=17, kv_heads=1)
    with pytest.raises(ValueError, match="1 to 16"):
        run(device, records, "cuda")
    _, _, device, records = make_pair([40], "r8bf16")
    with pytest.raises(ValueError, match="i4, i8 and h"):
        run(device, records, "cuda")
    _, _, device, records = make_pair([40], "r4i4")
    device.queries = device.queries.float()
    with pytest.raises(ValueError, match="bfloat16, float16"):
        run(device, records, "cuda")
    device.queries = device.queries.half()
    with pytest.raises(ValueError, match="that of the queries"):
        run(device, records, "cuda")


# Of test_select_gpu.py, the slowest to compile first.
SELECT_GROUPS = (16, 13, 11, 8, 6, 5, 4, 3, 2, 1)


def prebuild() -> None:
    """Compile what these tests use, many at a time (a convenience for a fresh machine)."""
    from concurrent.futures import ThreadPoolExecutor

    def one(case, kv_heads):
        name, head_dim, page, group, dtype = case
        options = {"head_dim": head_dim, "page_size": page, "group": group, "kv_heads": kv_heads}
        cache = make_cache([1], dtype=dtype, **options)
        library(cache.queries, cache.keys, cache.records(name))
        library(cache.queries, cache.keys, None)  # which sums the scores

    bf16 = torch.bfloat16
    jobs = [(case, 3) for case in GEOMETRIES]
    jobs += [(("r4i4", 64, 16, 2, bf16), heads) for heads in (1, 2, 4)]
    jobs += [(("r4i4", 128, 16, 2, bf16), heads) for heads in (2, 4)]
    jobs += [(("r4i4", 128, 16, group, bf16), heads) for group, heads in ((16, 2), (12, 1))]
    jobs += [((name, 128, 16, 8, bf16), 2) for name in ("r8i4", "r8h", "r16i4", "oracle", "quest")]
    jobs += [(("r6h", 128, 16, 8, bf16), heads) for heads in (2, 4)]
    jobs += [(("r8i4", 64, 16, 4, bf16), 2), (("oracle", 64, 16, 4, bf16), 2)]
    jobs += [(("r8i4", 128, 16, 16, bf16), 2)]
    with ThreadPoolExecutor(16) as pool:
        selects = [pool.submit(build.load, "select", GROUP=group) for group in SELECT_GROUPS]
        done = [pool.submit(one, *job) for job in jobs] + selects
        for future in done:
            future.result()


if __name__ == "__main__":
    prebuild()
