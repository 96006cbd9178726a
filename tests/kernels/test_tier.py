"""The tier ops over random sequences: what is read against a plain dictionary of pages, and the kernels of
the interpreter against torch, table by table."""

from __future__ import annotations

from dataclasses import fields

import interpreter
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from locks_kernels import Selection, attend, tier
from locks_kernels.hot_cache import NOBODY, HotCache

interpreter.require()

LAYERS, PAGES, HEADS, PAGE, DIM = 2, 9, 2, 16, 16
ROWS, WIDTH, GROUP = 3, 4, 2
Tile = tuple[int, int, int]  # layer, page, head


def new_cache(capacity: int, window: int = 4, open_rows: int = ROWS) -> HotCache:
    return HotCache.allocate(
        layers=LAYERS, pages=PAGES, kv_heads=HEADS, page_size=PAGE, head_dim=DIM, capacity=capacity,
        max_rows=ROWS, width=WIDTH, open_rows=open_rows, dtype=torch.float32, window=window,
    )  # fmt: skip


def content(layer: int, page: int, head: int, version: int) -> torch.Tensor:
    """Keys of a tile, ``[B, d]``, different for every tile and every time that its page is written."""
    generator = torch.Generator().manual_seed(((version * 50 + page) * 50 + layer) * 50 + head)
    return torch.randn(PAGE, DIM, generator=generator)


def new_pool() -> torch.Tensor:
    """Keys and values of every layer, page views ``[layers, 2, pages, B, heads, d]``; NaN until written."""
    return torch.full((LAYERS, 2, PAGES, PAGE, HEADS, DIM), torch.nan)


class Sequences(RuleBasedStateMachine):
    """Requests grow, share pages, read pages, end; their pages are used again."""

    impls: tuple[str, ...] = ("torch",)

    @initialize(capacity=st.sampled_from([0, 1, 3, 5, 11, 40]), window=st.sampled_from([4, 8]))
    def start(self, capacity: int, window: int) -> None:
        self.caches = {impl: new_cache(capacity, window) for impl in self.impls}
        self.pool = new_pool()
        self.truth: dict[Tile, tuple[torch.Tensor, torch.Tensor]] = {}
        self.versions = 0
        self.complete: list[int] = []
        self.free = list(range(1, PAGES))
        # Request slot -> its pages, of which the last is open, and tokens in that one.
        self.requests: dict[int, tuple[list[int], int]] = {}

    def put(self, page: int, tokens: slice) -> None:
        """Write tokens of a page in all layers, to the host pool and to the truth."""
        self.versions += 1
        for layer, head in ((layer, head) for layer in range(LAYERS) for head in range(HEADS)):
            fresh = content(layer, page, head, self.versions)
            keys, values = self.truth.get((layer, page, head), (fresh.clone(), -fresh))
            keys[tokens], values[tokens] = fresh[tokens], -fresh[tokens]
            self.truth[layer, page, head] = keys, values
            self.pool[layer, 0, page, tokens, head] = fresh[tokens]
            self.pool[layer, 1, page, tokens, head] = -fresh[tokens]

    @precondition(lambda self: self.free and len(self.requests) < ROWS)
    @rule(shared=st.integers(0, 2), fresh=st.integers(1, 2), tokens=st.integers(1, PAGE - 1))
    def prefill(self, shared: int, fresh: int, tokens: int) -> None:
        """A request begins: a prefix that others share, pages of its own, the last of them not full."""
        own = [self.free.pop(0) for _ in range(min(fresh, len(self.free)))]
        prefix = self.complete[:shared]
        for page in own:
            self.put(page, slice(0, tokens if page == own[-1] else PAGE))
        slots = torch.tensor([page * PAGE + token for page in own for token in range(tokens)])
        for impl, cache in self.caches.items():
            tier.invalidate(cache, slots, impl=impl)
        self.complete += own[:-1]
        request = min(set(range(ROWS)) - set(self.requests))
        self.requests[request] = (prefix + own, tokens)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """A request ends; pages that nobody has any more are free and keep their bytes until written."""
        self.end_of(data.draw(st.sampled_from(sorted(self.requests))))

    def end_of(self, request: int) -> None:
        pages, _ = self.requests.pop(request)
        others = {page for kept, _ in self.requests.values() for page in kept}
        gone = [page for page in pages if page not in others]
        self.complete = [page for page in self.complete if page not in gone]
        # The last freed is the first used again.
        self.free = gone + self.free

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), times=st.integers(1, 2))
    def step(self, data: st.DataObject, times: int) -> None:
        """Decode steps in which every request takes part that has room for its token."""
        for _ in range(times):
            for request, (pages, tokens) in list(self.requests.items()):
                if tokens < PAGE:
                    self.requests[request] = (pages, tokens + 1)
                elif self.free:
                    self.complete.append(pages[-1])
                    self.requests[request] = ([*pages, self.free.pop(0)], 1)
                else:
                    self.end_of(request)
            if self.requests:
                self.one_step(data)

    def one_step(self, data: st.DataObject) -> None:
        order = data.draw(st.permutations(sorted(self.requests)))
        rows = [self.requests[request] for request in order]
        requests = torch.tensor(order)
        lengths = torch.tensor([(len(pages) - 1) * PAGE + tokens for pages, tokens in rows])
        table = torch.zeros(len(rows), PAGES, dtype=torch.int32)
        for row, (pages, _) in enumerate(rows):
            table[row, : len(pages)] = torch.tensor(pages)
        keys, values = ([self.pool[layer, which] for layer in range(LAYERS)] for which in (0, 1))
        for impl, cache in self.caches.items():
            tier.begin_step(cache, keys, values, table, lengths, requests, impl=impl)
        for pages, tokens in rows:
            self.put(pages[-1], slice(tokens - 1, tokens))
        selection = self.select(data, rows)
        for layer in range(LAYERS):
            self.one_layer(layer, selection, rows, table, lengths, requests)

    def select(self, data: st.DataObject, rows: list[tuple[list[int], int]]) -> Selection:
        """Every head of a row selects pages of its own; long rows may attend everything."""
        lists = torch.full((len(rows), HEADS, WIDTH), 99, dtype=torch.int32)
        counts = torch.zeros(len(rows), dtype=torch.int32)
        for row, (pages, _) in enumerate(rows):
            if len(pages) > WIDTH and data.draw(st.booleans()):
                counts[row] = len(pages)
                continue
            counts[row] = count = min(len(pages), data.draw(st.integers(1, WIDTH)))
            for head in range(HEADS):
                chosen = data.draw(st.permutations(pages[:-1]))[: count - 1]
                lists[row, head, :count] = torch.tensor([*chosen, pages[-1]])
        return Selection(lists, torch.zeros_like(lists), counts)

    def one_layer(
        self, layer: int, selection: Selection, rows: list[tuple[list[int], int]],
        table: torch.Tensor, lengths: torch.Tensor, requests: torch.Tensor,
    ) -> None:  # fmt: skip
        keys, values = self.pool[layer]
        new = [
            torch.stack([pool[pages[-1], tokens - 1] for pages, tokens in rows]) for pool in (keys, values)
        ]
        queries = torch.randn(len(rows), HEADS * GROUP, DIM, generator=torch.Generator().manual_seed(layer))
        plain = (queries, keys, values, selection, table, lengths, 0.3)
        for impl, cache in self.caches.items():
            tier.write_open(cache, layer, *new, lengths, requests, impl=impl)
            resolved = tier.resolve(cache, layer, selection, (keys, values), requests, impl=impl)
            self.check_sources(cache, layer, selection, resolved.pages, rows, requests)
            through = (queries, keys, values, resolved, table, lengths, 0.3)
            got = attend(*through, hot=(cache.keys, cache.values))
            expected = attend(*plain)
            assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
        self.check_attention(layer, selection, rows, queries, got[0])

    def check_sources(
        self, cache: HotCache, layer: int, selection: Selection, sources: torch.Tensor,
        rows: list[tuple[list[int], int]], requests: torch.Tensor,
    ) -> None:  # fmt: skip
        for row, (pages, tokens) in enumerate(rows):
            count = int(selection.counts[row])
            for head in range(HEADS) if count <= WIDTH else ():
                for entry in range(count):
                    page, source = int(selection.pages[row, head, entry]), int(sources[row, head, entry])
                    if entry == count - 1:
                        place = (int(requests[row]) * LAYERS + layer) * HEADS + head
                        assert source == ~(cache.capacity + place), (
                            "the open page is where its request has it"
                        )
                    elif source >= 0:
                        assert source == page
                        continue
                    else:
                        assert ~source < cache.capacity
                    present = tokens if page == pages[-1] else PAGE
                    keys, values = self.truth[layer, page, head]
                    assert torch.equal(cache.keys[~source, :present], keys[:present])
                    assert torch.equal(cache.values[~source, :present], values[:present])

    def check_attention(
        self, layer: int, selection: Selection, rows: list[tuple[list[int], int]],
        queries: torch.Tensor, got: torch.Tensor,
    ) -> None:  # fmt: skip
        """Softmax attention straight from the dictionary of pages."""
        for row, (pages, tokens) in enumerate(rows):
            count = int(selection.counts[row])
            for head in range(HEADS):
                chosen = selection.pages[row, head, :count].tolist() if count <= WIDTH else pages
                tiles = [self.truth[layer, page, head] for page in chosen]
                length = (len(chosen) - 1) * PAGE + tokens
                keys, values = (torch.cat(pair)[:length] for pair in zip(*tiles, strict=True))
                mine = slice(head * GROUP, (head + 1) * GROUP)
                expected = torch.softmax(queries[row, mine] @ keys.T * 0.3, -1) @ values
                assert torch.allclose(got[row, mine], expected, atol=1e-5)

    @invariant()
    def tables_are_equal_and_sound(self) -> None:
        if not hasattr(self, "caches"):
            return
        mine, other = self.caches["torch"], self.caches[self.impls[-1]]
        # Claims of the kernels are negative too.
        assert torch.equal(mine.slot_of, other.slot_of.clamp(min=NOBODY))
        for field in fields(HotCache):
            if field.name not in ("slot_of", "window", "missing", "targets"):
                # Bits: what an open page holds past its last token may be NaN.
                pair = (getattr(cache, field.name).view(torch.int32) for cache in (mine, other))
                assert torch.equal(*pair), field.name
        mapped = (mine.slot_of >= 0).flatten().nonzero().flatten()
        assert torch.equal(mine.owner[mine.slot_of.flatten()[mapped].long()].long(), mapped)


class SequencesInKernels(Sequences):
    """The same with the kernels beside it; their tables are equal since the interpreter has one order."""

    impls = ("torch", "triton")


# Without shrinking, which takes minutes under the interpreter.
PHASES = [Phase.reuse, Phase.generate]
Sequences.TestCase.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, phases=PHASES
)
SequencesInKernels.TestCase.settings = settings(
    max_examples=10, stateful_step_count=12, deadline=None, phases=PHASES
)
test_sequences = Sequences.TestCase
test_sequences_in_kernels = SequencesInKernels.TestCase
