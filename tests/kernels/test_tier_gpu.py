"""The tier's kernels on a GPU, with a host pool in pinned memory: the bits of one resident pool."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from gpu_cases import gpu
from locks_kernels import (
    Selection,
    Summaries,
    SummaryLayout,
    attend,
    build,
    page_view,
    score,
    summarize,
    tier,
)
from locks_kernels.hot_cache import COUNTERS, HotCache

pytestmark = [pytest.mark.gpu, gpu]
LAYERS, PAGES, HEADS, PAGE, DIM, GROUP = 3, 900, 4, 16, 128, 8
ROWS, WIDTH = 3, 130


class Decode:
    """Rows that read drifting page lists of their own and of a common prefix."""

    def __init__(self, capacity: int) -> None:
        self.generator = torch.Generator().manual_seed(capacity)
        shape = (LAYERS, 2, PAGES * PAGE, HEADS, DIM)
        self.host = torch.randn(shape, generator=self.generator).bfloat16().pin_memory()
        # The GPU addresses pinned memory as it is (unified addressing); no copy is made.
        self.mapped = as_device(self.host)
        self.resident = self.host.cuda()
        self.cache = HotCache.allocate(
            layers=LAYERS, pages=PAGES, kv_heads=HEADS, page_size=PAGE, head_dim=DIM, capacity=capacity,
            max_rows=ROWS, width=WIDTH, open_rows=ROWS, device="cuda",
        )  # fmt: skip
        self.lengths = torch.tensor([5005, 4000, 17], device="cuda")
        table = 1 + torch.randperm(PAGES - 1, generator=self.generator)[: ROWS * 320].view(-1)
        table = table.repeat(2)[: ROWS * 320].view(ROWS, 320)
        table[1, :200] = table[0, :200]
        self.table = table.int().cuda()
        self.requests = torch.tensor([2, 0, 1], device="cuda")

    def views(self, pool: torch.Tensor, which: int) -> list[torch.Tensor]:
        return [page_view(pool[layer, which], PAGE) for layer in range(LAYERS)]

    def select(self, step: int) -> Selection:
        present = -(-self.lengths.cpu() // PAGE)
        counts = present.clamp(max=WIDTH).int()
        lists = torch.zeros(ROWS, HEADS, WIDTH, dtype=torch.int32)
        for row, count in enumerate(counts.tolist()):
            complete = int(present[row]) - 1
            window = torch.arange(complete)[min(7 * step, complete - count + 1) :][: count + 40]
            for head in range(HEADS):
                order = torch.randperm(len(window), generator=self.generator)[: count - 1]
                logical = [*window[order].sort().values.tolist(), int(present[row]) - 1]
                lists[row, head, : len(logical)] = self.table[row].cpu()[logical]
        return Selection(lists.cuda(), lists.cuda(), counts.cuda())


def as_device(host: torch.Tensor) -> torch.Tensor:
    """A CUDA tensor over pinned memory."""

    class Mapped:
        def __init__(self) -> None:
            self.__cuda_array_interface__ = {
                "shape": (host.nbytes,), "typestr": "|u1", "data": (host.data_ptr(), False), "version": 3,
            }  # fmt: skip

    mapped = torch.as_tensor(Mapped(), device="cuda").view(host.dtype).view(host.shape)
    assert mapped.data_ptr() == host.data_ptr()
    return mapped


@pytest.mark.parametrize("capacity", [0, 50, 1000, 6000])
@pytest.mark.parametrize("impl", ["cuda", "triton"])
def test_bits_of_a_resident_pool(capacity: int, impl: str) -> None:
    """In a CUDA graph as outside of it, while the lists drift, pages are written and the cache evicts."""
    if impl == "cuda" and build.missing() is not None:
        pytest.skip(f"no CUDA compiler: {build.missing()}")
    decode = Decode(capacity)
    cache = decode.cache
    keys, values = (decode.views(decode.mapped, which) for which in (0, 1))
    queries = torch.randn(ROWS, HEADS * GROUP, DIM, device="cuda").bfloat16()
    selection = decode.select(0)
    new = torch.randn(2, ROWS, HEADS, DIM, device="cuda").bfloat16()
    outputs = [torch.empty_like(queries) for _ in range(LAYERS)]

    def step() -> None:
        tier.begin_step(cache, keys, values, decode.table, decode.lengths, decode.requests)
        for layer in range(LAYERS):
            tier.write_open(cache, layer, *new, decode.lengths, decode.requests)
            sources = tier.resolve(cache, layer, selection, (keys[layer], values[layer]), decode.requests)
            outputs[layer].copy_(
                attend(
                    queries, keys[layer], values[layer], sources, decode.table, decode.lengths, 0.1,
                    hot=(cache.keys, cache.values), impl=impl,
                )[0]
            )  # fmt: skip

    write(decode, new)
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for number in range(1, 7):
        decode.lengths += 1
        fresh = decode.select(number)
        selection.pages.copy_(fresh.pages)
        selection.counts.copy_(fresh.counts)
        # A page that is read is written by another forward.
        rewrite(decode, int(fresh.pages[0, 0, 3]), number)
        write(decode, new)
        graph.replay()
        for layer in range(LAYERS):
            pools = (decode.views(decode.resident, which)[layer] for which in (0, 1))
            expected, _ = attend(queries, *pools, selection, decode.table, decode.lengths, 0.1, impl=impl)
            assert torch.equal(outputs[layer], expected)
    counted = dict(zip(COUNTERS, cache.counters.tolist(), strict=True))
    assert (counted["hits"] > 0) == (capacity > 0) and counted["misses"] > 0
    assert counted["fills"] + counted["host_reads"] <= counted["misses"]


def write(decode: Decode, new: torch.Tensor) -> None:
    """The current tokens to both pools, as the server writes them."""
    before = decode.lengths - 1
    slots = decode.table.gather(1, (before // PAGE).unsqueeze(1)).squeeze(1).long() * PAGE + before % PAGE
    for pool in (decode.mapped, decode.resident):
        for layer in range(LAYERS):
            pool[layer, 0, slots], pool[layer, 1, slots] = new[0], new[1]


def rewrite(decode: Decode, page: int, seed: int) -> None:
    slots = torch.arange(page * PAGE, (page + 1) * PAGE, device="cuda")
    fresh = torch.full((), float(seed)).bfloat16().cuda()
    for pool in (decode.mapped, decode.resident):
        pool[:, :, slots] = fresh
    tier.invalidate(decode.cache, slots)


@pytest.mark.parametrize("capacity", [1000, 20_000])
def test_tables_equal_those_of_torch(capacity: int) -> None:
    """Which tiles are held, and the counters; slots may differ, since blocks race for their numbers.

    Where a step misses more tiles than it can take in, they race for the slots as well: of the smaller
    cache the number of tiles is compared, and the counters roughly.
    """
    decode = Decode(capacity)
    enough = capacity > LAYERS * PAGES * HEADS
    cpu = {field.name: getattr(decode.cache, field.name) for field in fields(HotCache)}
    twin = HotCache(**{name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in cpu.items()})
    for number in range(5):
        selection = decode.select(number)
        there = Selection(*(x.cpu() for x in (selection.pages, selection.logical, selection.counts)))
        tables = (decode.table, decode.lengths, decode.requests)
        on_gpu = [decode.views(decode.mapped, which) for which in (0, 1)]
        on_cpu = [decode.views(decode.host, which) for which in (0, 1)]
        tier.begin_step(decode.cache, *on_gpu, *tables)
        tier.begin_step(twin, *on_cpu, *(table.cpu() for table in tables))
        for layer in range(LAYERS):
            tier.resolve(decode.cache, layer, selection, None, decode.requests)
            tier.resolve(twin, layer, there, None, decode.requests.cpu())
        held = [set(cache.owner.tolist()) for cache in (decode.cache, twin)]
        assert len(held[0]) == len(held[1])
        assert held[0] == held[1] or not enough
    found, expected = decode.cache.counters.cpu().float(), twin.counters.float()
    assert torch.allclose(found, expected, rtol=0 if enough else 0.1), (found, expected)


@pytest.mark.parametrize("impl", ["cuda", "triton"])
def test_open_pages_are_scored_where_they_are(impl: str) -> None:
    if impl == "cuda" and build.missing() is not None:
        pytest.skip(f"no CUDA compiler: {build.missing()}")
    decode = Decode(0)
    keys, values = (decode.views(decode.mapped, which) for which in (0, 1))
    layout = SummaryLayout.parse("r6h", DIM, PAGE)
    records = Summaries.allocate(layout, (1, PAGES, HEADS), "cuda")
    resident = decode.views(decode.resident, 0)[2]
    summarize([resident], torch.arange(PAGES * PAGE, device="cuda"), records)
    decode.lengths.copy_(torch.tensor([5005, 4003, 27]))
    tables = (decode.table, decode.lengths)
    tier.begin_step(decode.cache, keys, values, *tables, decode.requests)
    queries = torch.randn(ROWS, HEADS * GROUP, DIM, device="cuda").bfloat16()
    expected = score(queries, resident, records.layer(0), *tables, 0.1, impl=impl)
    got = score(
        queries, decode.cache.open_keys(2), records.layer(0), *tables, 0.1,
        open_pages=decode.requests.int(), impl=impl,
    )  # fmt: skip
    assert torch.equal(got.scores, expected.scores) and torch.equal(got.lse, expected.lse)
