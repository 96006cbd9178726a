"""The tier ops in single situations: eviction, sharing, sizes, attention over two pools, refusals."""

from __future__ import annotations

import interpreter
import pytest
import torch
from cases import Cache, make_cache
from locks_kernels import Selection, attend, score, score_select, tier
from locks_kernels.hot_cache import CALLS, CLOCK, COPIES, COUNTERS, NOBODY, WRAP, HotCache

interpreter.require()

IMPLS = ["torch", "triton"]
DIM, PAGE = 16, 16


def new_cache(
    capacity: int, *, pages: int = 200, kv_heads: int = 1, rows: int = 1, width: int = 80, window: int = 4
) -> HotCache:
    return HotCache.allocate(
        layers=1, pages=pages, kv_heads=kv_heads, page_size=PAGE, head_dim=DIM, capacity=capacity,
        max_rows=rows, width=width, dtype=torch.float32, window=window,
    )  # fmt: skip


def new_pool(cache: HotCache) -> torch.Tensor:
    """Page view of random numbers."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(cache.pages, PAGE, cache.kv_heads, DIM, generator=generator)


class Reader:
    """Steps of one layer, every row and head with the same complete pages before an open one, page 0."""

    def __init__(self, cache: HotCache, impl: str = "torch") -> None:
        self.cache, self.impl = cache, impl
        self.pool = new_pool(cache)

    def read(self, *rows: list[int], step: bool = True) -> list[list[int]]:
        """Sources of the first head of each row, checked against the pool; of a new step unless told."""
        if step:
            self.cache.state[CLOCK] += 1
        width = max(len(pages) for pages in rows) + 1
        lists = torch.zeros(len(rows), self.cache.kv_heads, width, dtype=torch.int32)
        for row, pages in enumerate(rows):
            lists[row, :, : len(pages)] = torch.tensor(pages)
        counts = torch.tensor([len(pages) + 1 for pages in rows], dtype=torch.int32)
        pool = self.pool, -self.pool
        found = tier.resolve(self.cache, 0, Selection(lists, lists, counts), pool, impl=self.impl)
        for row, pages in enumerate(rows):
            for head in range(self.cache.kv_heads):
                self.check(pages, found.pages[row, head].tolist(), head)
        return [found.pages[row, 0, : len(pages)].tolist() for row, pages in enumerate(rows)]

    def check(self, pages: list[int], sources: list[int], head: int) -> None:
        assert sources[len(pages)] == 0, "the open page is read from the host pool"
        for page, source in zip(pages, sources, strict=False):
            if source >= 0:
                assert source == page
            else:
                assert torch.equal(self.cache.keys[~source], self.pool[page, :, head])
                assert torch.equal(self.cache.values[~source], -self.pool[page, :, head])

    def held(self, *pages: int) -> list[bool]:
        slots = self.cache.slot_of[0, list(pages), 0]
        return (slots >= 0).tolist()

    def counted(self) -> dict[str, int]:
        return dict(zip(COUNTERS, self.cache.counters.tolist(), strict=True))


@pytest.mark.parametrize("impl", IMPLS)
def test_two_requests_with_a_prefix_share_its_tiles(impl: str) -> None:
    reader = Reader(new_cache(12, rows=3, kv_heads=2), impl)
    first, second, third = reader.read([5, 7], [7, 5, 9], [9])
    assert first == second[1::-1] and third == second[2:] and max(*first, *second) < 0
    # Three tiles for each of two heads, read by six entries a head.
    assert reader.counted() == {"hits": 0, "misses": 12, "fills": 6, "host_reads": 0}
    reader.read([7], [5], [9, 7])
    assert reader.counted() == {"hits": 8, "misses": 12, "fills": 6, "host_reads": 0}


@pytest.mark.parametrize("impl", IMPLS)
def test_without_a_cache_everything_is_read_from_the_host(impl: str) -> None:
    reader = Reader(new_cache(0), impl)
    for _ in range(2):
        assert reader.read([3, 4, 5]) == [[3, 4, 5]]
    assert reader.counted() == {"hits": 0, "misses": 6, "fills": 0, "host_reads": 6}
    assert not reader.cache.state[COPIES]


def test_a_tile_in_use_survives_a_scan() -> None:
    """Pages that every step reads stay, although four times the cache passes by."""
    reader = Reader(new_cache(20))
    for step in range(80):
        reader.read([1, 2, 100 + step])
    assert reader.held(1, 2) == [True, True]
    assert reader.counted() == {"hits": 2 * 79, "misses": 2 + 80, "fills": 82, "host_reads": 0}


def test_of_a_window_the_oldest_goes() -> None:
    reader = Reader(new_cache(4))
    for page in (1, 2, 3, 4):
        reader.read([page])
    reader.read([1])
    reader.read([2])
    reader.read([5])
    assert reader.held(1, 2, 3, 4, 5) == [True, True, False, True, True]


def test_stale_slots_go_first() -> None:
    reader = Reader(new_cache(4))
    for page in (1, 2, 3, 4):
        reader.read([page])
    tier.invalidate(reader.cache, torch.tensor([4 * PAGE]))
    reader.read([5])
    assert reader.held(1, 2, 3, 5) == [True, True, True, True]


@pytest.mark.parametrize("impl", IMPLS)
def test_a_page_that_was_written_again_is_read_anew(impl: str) -> None:
    reader = Reader(new_cache(8), impl)
    for token in (0, PAGE - 1):
        reader.read([1, 2])
        reader.pool[2] += 1
        tier.invalidate(reader.cache, torch.tensor([2 * PAGE + token, 2 * PAGE + token]), impl=impl)
        # reader.read compares with the pool.
        assert max(*reader.read([2, 1])[0]) < 0
    assert reader.counted() == {"hits": 4, "misses": 4, "fills": 4, "host_reads": 0}


@pytest.mark.parametrize("impl", IMPLS)
def test_a_stale_copy_does_not_take_the_fresh_one_with_it(impl: str) -> None:
    """A page is written, and filled again from another window; then its old slot is given away."""
    reader = Reader(new_cache(8), impl)
    reader.read([1])
    tier.invalidate(reader.cache, torch.tensor([PAGE]))
    reader.read([1])
    assert reader.cache.slot_of[0, 1, 0] == 4
    reader.read([2])
    assert reader.held(1, 2) == [True, True] and reader.cache.slot_of[0, 2, 0] == 0


@pytest.mark.parametrize("impl", IMPLS)
def test_what_the_last_step_read_is_never_evicted(impl: str) -> None:
    """Steps that read twice what the cache holds: half is found; evicting the oldest would leave none."""
    reader = Reader(new_cache(20), impl)
    pages = list(range(1, 41))
    for _ in range(3):
        reader.read(pages[:20])
        reader.read(pages[20:], step=False)
    assert reader.counted() == {"hits": 2 * 20, "misses": 40 + 2 * 20, "fills": 20, "host_reads": 60}


def test_ages_over_the_wrap_of_the_clock() -> None:
    reader = Reader(new_cache(4))
    reader.cache.state[CLOCK] = WRAP - 3
    for page in (1, 2, 3):  # the last of them at WRAP
        reader.read([page])
    # begin_step would have set the clock to 0, then 1.
    for clock, page in enumerate((4, 5)):
        reader.cache.state[CLOCK] = clock
        reader.read([page], step=False)
    assert reader.held(1, 2, 3, 4, 5) == [False, True, True, True, True]


@pytest.mark.parametrize("calls", [0, 2**30 - 1, WRAP])
def test_claims_of_any_call(calls: int) -> None:
    """What is not taken in is claimed in every call anew."""
    reader = Reader(new_cache(3), "triton")
    reader.cache.state[CALLS] = calls
    for _ in range(4):
        reader.read([1, 2, 3, 4, 5])
    assert reader.counted() == {"hits": 9, "misses": 11, "fills": 3, "host_reads": 8}
    assert NOBODY not in reader.cache.owner


@pytest.mark.parametrize(("capacity", "window"), [(300, 128), (70, 32), (1000, 64), (1, 128)])
def test_kernels_equal_torch_on_long_lists(capacity: int, window: int) -> None:
    """Lists of more than one program, caches that are no multiple of a window, drifting reads."""
    caches = [new_cache(capacity, pages=400, kv_heads=2, rows=3, width=150, window=window) for _ in IMPLS]
    readers = [Reader(cache, impl) for cache, impl in zip(caches, IMPLS, strict=True)]
    generator = torch.Generator().manual_seed(capacity)
    for step in range(4):
        shift = 15 * step
        rows = [
            (torch.randperm(200, generator=generator)[:count] + shift + 1).tolist()
            for count in (149, 1, 90)
        ]
        assert readers[0].read(*rows) == readers[1].read(*rows)
    for name in ("owner", "filled", "used", "state", "counters", "keys", "values"):
        assert torch.equal(*(getattr(cache, name) for cache in caches)), name
    assert capacity < 300 or readers[0].counted()["hits"] > 0


@pytest.mark.parametrize("impl", IMPLS)
def test_open_pages_are_loaded_when_another_wrote_them(impl: str) -> None:
    """And only then: while the same request goes on writing, the host pool is not read."""
    cache = HotCache.allocate(
        layers=3, pages=5, kv_heads=2, page_size=PAGE, head_dim=DIM, capacity=0, max_rows=2, width=4,
        open_rows=2, dtype=torch.float32,
    )  # fmt: skip
    pool = [new_pool(cache) + layer for layer in range(3)]
    table = torch.tensor([[4, 3], [2, 0]], dtype=torch.int32)
    requests = torch.tensor([1, 0])

    def begin(*lengths: int) -> torch.Tensor:
        """Keys that the request slots have: ``[request, layer, head, B, d]``."""
        tier.begin_step(cache, pool, pool, table, torch.tensor(lengths), requests, impl=impl)
        return cache.keys.view(2, 3, 2, PAGE, DIM)

    def of(page: int) -> torch.Tensor:
        return torch.stack(pool)[:, page].transpose(1, 2)

    held = begin(PAGE + 5, 9)
    assert torch.equal(held[1], of(3)) and torch.equal(held[0], of(2))
    before = [of(3), of(2)]
    for layer in range(3):
        pool[layer] += 1
    held = begin(PAGE + 6, 10)
    assert torch.equal(held[1], before[0]) and torch.equal(held[0], before[1])
    # Slot 0 ended; a prefill wrote its page for a request that got the same slot.
    tier.invalidate(cache, torch.tensor([2 * PAGE]), impl=impl)
    held = begin(PAGE + 7, 11)
    assert torch.equal(held[1], before[0]) and torch.equal(held[0], of(2))
    new = torch.full((2, 2, DIM), 7.0)
    tier.write_open(cache, 1, new, -new, torch.tensor([PAGE + 7, 11]), requests, impl=impl)
    assert (
        (held[1, 1, :, 6] == 7).all()
        and (held[0, 1, :, 10] == 7).all()
        and int((held == 7).sum()) == 4 * DIM
    )
    assert (cache.values.view_as(held)[0, 1, :, 10] == -7).all()
    # A new page: nothing to load.
    before = held[0].clone()
    table[1, 1] = 1
    assert torch.equal(begin(PAGE + 8, PAGE + 1)[0], before)


@pytest.mark.parametrize("impl", IMPLS)
def test_open_pages_are_scored_where_they_are(impl: str) -> None:
    """Scores and selections of one pool, with keys read from the open pages alone."""
    cache = make_cache([300, 17, 64, 97], kv_heads=2)
    hot = HotCache.allocate(
        layers=2, pages=len(cache.keys), kv_heads=2, page_size=16, head_dim=64, capacity=3, max_rows=4,
        width=4, open_rows=6, dtype=torch.float32,
    )  # fmt: skip
    requests = torch.tensor([4, 0, 5, 1], dtype=torch.int32)
    noise = torch.randn_like(cache.keys)
    keys, values = [noise, cache.keys], [noise, cache.values]
    tier.begin_step(hot, keys, values, cache.page_table, cache.seq_lens, requests, impl=impl)
    # Row 1 is at the first token of its page, which no step before could have loaded.
    last = cache.page_table.gather(1, ((cache.seq_lens - 1) // 16).unsqueeze(1)).squeeze(1).long()
    new = [pool[last, (cache.seq_lens - 1) % 16] for pool in (cache.keys, cache.values)]
    tier.write_open(hot, 1, *new, cache.seq_lens, requests, impl=impl)

    records, tables = cache.records("r4h"), (cache.page_table, cache.seq_lens)
    expected = score(cache.queries, cache.keys, records, *tables, cache.sm_scale, impl=impl)
    got = score(
        cache.queries, hot.open_keys(1), records, *tables, cache.sm_scale, open_pages=requests, impl=impl
    )
    assert torch.equal(got.scores, expected.scores) and torch.equal(got.lse, expected.lse)
    budgets = torch.tensor([3, 4, 4, 2], dtype=torch.int32)
    rest = (records, *tables, budgets, cache.sm_scale)
    chosen = score_select(cache.queries, cache.keys, *rest, width=4, impl=impl)
    also = score_select(cache.queries, hot.open_keys(1), *rest, width=4, open_pages=requests, impl=impl)
    assert torch.equal(chosen.pages, also.pages) and torch.equal(chosen.counts, also.counts)
    other = score(
        cache.queries, hot.open_keys(0), records, *tables, cache.sm_scale, open_pages=requests, impl=impl
    )
    assert not torch.equal(other.scores, expected.scores)
    for wrong in (requests.long(), requests[:3]):
        with pytest.raises(ValueError, match=r"open_pages .*legal: \[4\] torch.int32"):
            score_select(cache.queries, hot.open_keys(1), *rest, width=4, open_pages=wrong, impl=impl)
    with pytest.raises(ValueError, match=r"with NoneType; legal: .* with Summaries"):
        score(cache.queries, cache.keys, None, *tables, 1.0, open_pages=requests, impl=impl)


def split_pool(cache: Cache, selection: Selection, share: float) -> tuple[Selection, list[torch.Tensor]]:
    """Move a share of the listed tiles to a second pool, and ruin them in the first."""
    generator = torch.Generator().manual_seed(3)
    moved = torch.rand(selection.pages.shape, generator=generator) < share
    sources = selection.pages.clone()
    pools = [cache.keys.clone(), cache.values.clone()]
    hot = [torch.full((moved.numel() + 1, *pool.shape[1::2]), torch.nan).to(pool.dtype) for pool in pools]
    order = torch.randperm(moved.numel(), generator=generator).tolist()
    places = [place for place in moved.nonzero().tolist() if place[2] < selection.counts[place[0]]]
    for (row, head, entry), slot in zip(places, order, strict=False):
        page = int(selection.pages[row, head, entry])
        for pool, tiles, whole in zip(pools, hot, (cache.keys, cache.values), strict=True):
            tiles[slot] = whole[page, :, head]
            pool[page, :, head] = torch.nan
        sources[row, head, entry] = ~slot
    return Selection(sources, selection.logical, selection.counts), [*pools, *hot]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("page", "head_dim", "group", "dtype", "order"),
    [
        (16, 64, 3, torch.float32, "nhd"),
        (32, 128, 1, torch.float16, "hnd"),
        (16, 128, 9, torch.bfloat16, "nhd"),
    ],
)
def test_attention_over_two_pools(
    page: int, head_dim: int, group: int, dtype: torch.dtype, order: str, impl: str
) -> None:
    """The bits of one pool, whatever lies in the second; a tile that is in both places is read in one."""
    cache = make_cache(
        [5 * page + 3, 7, 9 * page, 4 * page + 1],
        group=group, head_dim=head_dim, page_size=page, dtype=dtype, order=order,
    )  # fmt: skip
    counts = torch.tensor([4, 1, 3, 5], dtype=torch.int32)  # the last row attends everything
    lists = torch.zeros(4, 2, 4, dtype=torch.int32)
    for row, count in enumerate(counts[:3].tolist()):
        pages = -(-int(cache.seq_lens[row]) // page)
        for head in range(2):
            chosen = [*range(head, head + count - 1), pages - 1]
            lists[row, head, :count] = cache.page_table[row, chosen]
    selection = Selection(lists, lists, counts)
    rest = (cache.page_table, cache.seq_lens, cache.sm_scale)
    expected = attend(cache.queries, cache.keys, cache.values, selection, *rest, impl=impl)
    for share in (0.0, 0.5, 1.0):
        sources, (keys, values, *hot) = split_pool(cache, selection, share)
        got = attend(cache.queries, keys, values, sources, *rest, hot=(hot[0], hot[1]), impl=impl)
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
    assert share == 1.0 and not torch.isnan(expected[0]).any()


@pytest.mark.parametrize(
    "wrong",
    [
        {"capacity": -1},
        {"open_rows": -1},
        {"window": 6},
        {"window": 2},
        {"window": 512},
        {"layers": 1 << 25},
    ],
)
def test_sizes_that_are_refused(wrong: dict[str, int]) -> None:
    sizes = {
        "layers": 1, "pages": 64, "kv_heads": 2, "page_size": 16, "head_dim": 64, "capacity": 4,
        "max_rows": 2, "width": 8, **wrong,
    }  # fmt: skip
    with pytest.raises(ValueError, match="legal: "):
        HotCache.allocate(**sizes, device="meta")


def test_calls_that_are_refused() -> None:
    cache = new_cache(4, kv_heads=2, width=3)
    pool = new_pool(cache)
    lists = torch.zeros(1, 2, 4, dtype=torch.int32)
    ones = torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="2 KV heads and at most 6 entries"):
        tier.resolve(cache, 0, Selection(lists, lists, ones), None)
    short = Selection(lists[..., :3].contiguous(), lists, ones)
    with pytest.raises(ValueError, match="open_rows=0; legal: None"):
        tier.resolve(cache, 0, short, None, ones)
    with pytest.raises(ValueError, match="must be contiguous"):
        tier.resolve(cache, 0, Selection(lists[..., :3], lists, ones), None)
    with pytest.raises(ValueError, match=r"legal: \[200, 16, 2, 16\] torch.float32"):
        tier.resolve(cache, 0, short, (pool[:5], pool[:5]))
    with pytest.raises(ValueError, match="a pool of 2 layers; legal: 1"):
        tier.begin_step(cache, [pool, pool], [pool, pool], lists[:, 0], ones, ones)
    with pytest.raises(ValueError, match=r"hot keys .*legal: \[tiles, 16, 16\] torch.float32"):
        attend(
            torch.zeros(1, 2, DIM), pool, pool, short, lists[:, 0], ones, 1.0, hot=(pool, pool)
        )  # fmt: skip


def test_bytes_are_known_beforehand() -> None:
    sizes = {"layers": 2, "pages": 9, "kv_heads": 3, "page_size": 16, "head_dim": 64}
    for open_rows in (0, 5):
        made = [
            HotCache.allocate(**sizes, capacity=11, max_rows=2, width=4, open_rows=open_rows, device=device)
            for device in ("cpu", "meta")
        ]
        assert made[0].nbytes == made[1].nbytes
        assert made[0].tile_bytes == 2 * 16 * 64 * 2
        assert made[0].keys.nbytes + made[0].values.nbytes == (11 + open_rows * 6) * made[0].tile_bytes
