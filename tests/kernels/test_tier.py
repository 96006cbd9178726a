"""The hot-page cache against a plain dictionary, one tile after the other, over random sequences."""

import pytest
import torch
from cases import Cache, make_cache
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from locks_kernels import ATTEND_ALL, attend, score, select
from locks_kernels.select import Selection
from locks_kernels.tier import COUNTERS, NOBODY, HotPages, Staged, stage

LAYERS, PAGES, HEADS, PAGE, DIM = 2, 5, 2, 2, 3
Tile = tuple[int, int, int]  # layer, page, head
TILE_BYTES = 2 * PAGE * DIM * 4


def content(layer: int, page: int, head: int, version: int) -> torch.Tensor:
    """Keys of a tile, different for every tile and every time that its page is written."""
    first = 1 + 1000 * version + 100 * page + 10 * layer + head
    return torch.arange(PAGE * DIM).view(PAGE, DIM) / 16 + first


class PlainCache:
    """CLOCK as told to a person: dictionaries and a loop over slots."""

    def __init__(self, capacity: int, look: int) -> None:
        self.capacity, self.look, self.hand = capacity, look, 0
        self.where: dict[Tile, int] = {}
        self.held: dict[int, Tile] = {}
        self.marked: set[int] = set()
        self.hits = self.misses = self.host_bytes = 0

    def forget(self, pages: set[int]) -> None:
        """What was written is not in the cache any more; its slots are free."""
        for tile in [tile for tile in self.where if tile[1] in pages]:
            del self.held[self.where.pop(tile)]

    def read(self, tiles: list[Tile], admit: bool) -> dict[Tile, int]:
        missing = sorted({tile for tile in tiles if tile not in self.where})
        self.hits += sum(tile in self.where for tile in tiles)
        self.misses += sum(tile not in self.where for tile in tiles)
        self.marked |= {self.where[tile] for tile in tiles if tile in self.where}
        waiting = list(missing) if admit else []
        for _ in range(min(self.capacity, self.look * len(waiting))):
            if not waiting:
                break
            slot = self.hand
            self.hand = (self.hand + 1) % self.capacity
            if slot in self.held and slot in self.marked:
                self.marked.discard(slot)
                continue
            self.marked.discard(slot)
            if slot in self.held:
                del self.where[self.held[slot]]
            self.held[slot] = waiting.pop(0)
            self.where[self.held[slot]] = slot
            self.host_bytes += TILE_BYTES
        self.host_bytes += TILE_BYTES * sum(tile not in self.where for tile in tiles)
        return {tile: self.where.get(tile, NOBODY) for tile in tiles}


class Sequences(RuleBasedStateMachine):
    """Pages are allocated and written, selected by batches, freed and used again."""

    @initialize(capacity=st.sampled_from([0, 1, 2, 3, 5, 8, 40]), look=st.integers(1, 4))
    def start(self, capacity: int, look: int) -> None:
        self.cache = HotPages(
            layers=LAYERS, pages=PAGES, kv_heads=HEADS, page_size=PAGE, head_dim=DIM,
            capacity=capacity, look=look, dtype=torch.float32,
        )  # fmt: skip
        self.plain = PlainCache(capacity, look)
        self.host = [torch.full((2, PAGES, PAGE, HEADS, DIM), torch.nan) for _ in range(LAYERS)]
        self.versions: dict[int, int] = {}  # of the pages in use
        self.time = 0

    @rule(pages=st.sets(st.integers(0, PAGES - 1), min_size=1, max_size=3), whole=st.booleans())
    def write(self, pages: set[int], whole: bool) -> None:
        """Allocate pages, or write those in use again; by all their slots or by the last one."""
        self.time += 1
        slots = [page * PAGE + slot for page in sorted(pages) for slot in range(PAGE) if whole or slot]
        self.cache.written(torch.tensor(slots))
        self.plain.forget(pages)
        for page in pages:
            self.versions[page] = self.time
            for layer, head in ((layer, head) for layer in range(LAYERS) for head in range(HEADS)):
                tile = content(layer, page, head, self.time)
                self.host[layer][0, page, :, head] = tile
                self.host[layer][1, page, :, head] = -tile

    @precondition(lambda self: self.versions)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        """A freed page keeps its bytes until it is written again; nobody may select it."""
        del self.versions[data.draw(st.sampled_from(sorted(self.versions)))]

    @precondition(lambda self: self.versions)
    @rule(data=st.data(), layer=st.integers(0, LAYERS - 1), admit=st.booleans(), rows=st.integers(1, 3))
    def step(self, data: st.DataObject, layer: int, admit: bool, rows: int) -> None:
        """One layer of a decode step: every row and head selects pages of its own."""
        width = data.draw(st.integers(1, 3))
        page = st.sampled_from(sorted(self.versions))
        flat = data.draw(st.lists(page, min_size=rows * HEADS * width, max_size=rows * HEADS * width))
        some = data.draw(st.lists(st.booleans(), min_size=len(flat), max_size=len(flat)))
        pages = torch.tensor(flat).view(rows, HEADS, width)
        read = torch.tensor(some).view_as(pages)
        host = (self.host[layer][0], self.host[layer][1])
        slots = self.cache.locate(layer, pages, read, torch.full_like(read, admit), host)

        wanted = {
            (row, head, entry): (layer, int(pages[row, head, entry]), head)
            for row, head, entry in read.nonzero().tolist()
        }
        expected = self.plain.read(list(wanted.values()), admit)
        for place, tile in wanted.items():
            slot = int(slots[place])
            assert slot == expected[tile]
            if slot != NOBODY:
                version = self.versions[tile[1]]
                assert torch.equal(self.cache.keys[slot], content(*tile, version))
                assert torch.equal(self.cache.values[slot], -content(*tile, version))
        assert (slots[~read] == NOBODY).all()

    @rule()
    def flush(self) -> None:
        self.cache.clear()
        self.plain.forget(set(range(PAGES)))
        self.plain.marked.clear()

    @invariant()
    def counts_and_table(self) -> None:
        plain = self.plain
        assert self.cache.counters.tolist() == [plain.hits, plain.misses, plain.host_bytes]
        assert self.cache.hand == plain.hand
        table = self.cache.slot_of.flatten()
        listed = (table != NOBODY).nonzero().flatten()
        # What the table names belongs to the tile: no slot has two tiles.
        assert torch.equal(self.cache.owner[table[listed].long()], listed)


Sequences.TestCase.settings = settings(max_examples=80, stateful_step_count=20, deadline=None)
test_sequences = Sequences.TestCase


def hot_pages(cache: Cache, capacity: int, **more: int) -> HotPages:
    pages, page_size, heads, head_dim = cache.keys.shape
    return HotPages(
        layers=1, pages=pages, kv_heads=heads, page_size=page_size, head_dim=head_dim,
        capacity=capacity, dtype=cache.keys.dtype, **more,
    )  # fmt: skip


def chosen(cache: Cache, seed: int, budget: int, width: int) -> tuple[torch.Tensor, Selection]:
    """Queries of a step, and the pages that they select; the first row attends everything."""
    queries = torch.randn(cache.queries.shape, generator=torch.Generator().manual_seed(seed))
    budgets = torch.full((len(cache.seq_lens),), budget, dtype=torch.int32)
    budgets[0] = ATTEND_ALL
    scores = score(queries, cache.keys, None, cache.page_table, cache.seq_lens, cache.sm_scale)
    selection = select(
        scores,
        cache.page_table,
        cache.seq_lens,
        budgets,
        kv_heads=cache.kv_heads,
        page_size=cache.page_size,
        width=width,
    )
    return queries, selection


@pytest.mark.parametrize("capacity", [0, 1, 7, 30, 400])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_residency_never_changes_results(capacity: int, dtype: torch.dtype) -> None:
    cache = make_cache([300, 165, 16, 97], dtype=dtype, order="hnd")
    hot = hot_pages(cache, capacity)
    host = (cache.keys, cache.values)
    for step in range(6):
        queries, selection = chosen(cache, step // 2, budget=5, width=6)
        assert selection.counts.tolist()[:2] == [19, 5], "one row attends all its pages, one is sparse"
        staged = stage(hot, 0, host, selection, cache.page_table, cache.seq_lens)
        direct = attend(
            queries, *host, selection, cache.page_table, cache.seq_lens, cache.sm_scale, impl="torch"
        )
        through = attend(
            queries, staged.keys, staged.values, staged.selection, staged.page_table, cache.seq_lens,
            cache.sm_scale, impl="torch",
        )  # fmt: skip
        assert torch.equal(direct[0], through[0]) and torch.equal(direct[1], through[1])
        # A page of the second row is rewritten, as after it was freed and given to another request.
        page = int(cache.page_table[1, 2])
        hot.written(torch.arange(page * 16, page * 16 + 16))
        cache.keys[page] += 1
        cache.values[page] -= 1
    counters = dict(zip(COUNTERS, hot.counters.tolist(), strict=True))
    assert (counters["hits"] > 0) == (capacity > 0)
    assert counters["host_bytes"] <= counters["misses"] * hot.tile_bytes


def test_rows_that_attend_everything_take_nothing_in() -> None:
    cache = make_cache([200])
    _, selection = chosen(cache, 0, budget=ATTEND_ALL, width=4)
    hot = hot_pages(cache, 100)
    stage(hot, 0, (cache.keys, cache.values), selection, cache.page_table, cache.seq_lens)
    assert (hot.owner == NOBODY).all()
    # 13 pages, one of them open.
    assert hot.counters.tolist() == [0, 12 * 2, 12 * 2 * hot.tile_bytes]


def test_the_open_page_is_never_taken_in() -> None:
    cache = make_cache([200, 32])
    _, selection = chosen(cache, 0, budget=4, width=4)
    hot = hot_pages(cache, 100)
    stage(hot, 0, (cache.keys, cache.values), selection, cache.page_table, cache.seq_lens)
    last = [int(cache.page_table[0, 12]), int(cache.page_table[1, 1])]
    assert (hot.slot_of[0, last] == NOBODY).all()
    assert (hot.slot_of[0, int(cache.page_table[1, 0])] != NOBODY).all()


def step_of(hot: HotPages, pages: list[int]) -> Staged:
    """One row that reads complete pages."""
    kv_heads = hot.slot_of.shape[2]
    pool = torch.arange(hot.slot_of.shape[1]).float().view(-1, 1, 1, 1)
    pool = pool.expand(-1, hot.page_size, kv_heads, hot.keys.shape[2])
    lists = torch.tensor([*pages, 0]).expand(1, kv_heads, len(pages) + 1).int()
    selection = Selection(lists, lists, torch.tensor([len(pages) + 1]))
    return stage(hot, 0, (pool, pool), selection, lists[:, 0], torch.tensor([1 + 16 * len(pages)]))


def small(capacity: int, look: int = 4, pages: int = 200) -> HotPages:
    return HotPages(
        layers=1, pages=pages, kv_heads=1, page_size=16, head_dim=4,
        capacity=capacity, dtype=torch.float32, look=look,
    )  # fmt: skip


def test_a_tile_in_use_survives_a_scan() -> None:
    """Second chance: pages that are read again stay, although twice the cache passes by."""
    hot = small(capacity=20)
    for step in range(40):
        step_of(hot, [1, 2, 100 + step])
    assert (hot.slot_of[0, [1, 2]] != NOBODY).all()
    assert hot.counters.tolist()[:2] == [2 * 39, 2 + 40]


def test_stale_slots_go_first() -> None:
    hot = small(capacity=4)
    for _ in range(2):
        step_of(hot, [1, 2, 3, 4])
    hot.written(torch.tensor([3 * 16]))
    step_of(hot, [5])
    # All four were marked; only the stale one was taken.
    assert (hot.slot_of[0, [1, 2, 4, 5]] != NOBODY).all()


def test_a_stale_copy_does_not_take_the_fresh_one_with_it() -> None:
    hot = small(capacity=2)
    step_of(hot, [1])
    hot.written(torch.tensor([16]))
    for pages in ([1], [2], [1]):
        step_of(hot, pages)
    assert hot.counters.tolist()[:2] == [1, 3]


def test_no_more_slots_are_looked_at_than_the_window() -> None:
    hot = small(capacity=64, look=2)
    for _ in range(2):
        step_of(hot, list(range(1, 65)))
    assert hot.marked.all() and hot.counters.tolist() == [64, 64, 64 * hot.tile_bytes]
    hand = hot.hand
    step_of(hot, [70, 71])
    # Four marked slots lost their marks, nothing was taken in, and both tiles were read in place.
    assert (hot.hand - hand) % 64 == 4 and int((~hot.marked).sum()) == 4
    assert hot.slot_of[0, 70] == NOBODY and hot.counters[2] == 66 * hot.tile_bytes


@pytest.mark.parametrize("wrong", [{"capacity": -1}, {"look": 0}])
def test_sizes_that_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="legal: 0 or more, 1 or more"):
        small(**{"capacity": 4, **wrong})
