"""Hot-page cache of a KV pool that lives in host memory: the bookkeeping, readable, on CPU tensors.

A tile is what one KV head of one layer stores of a page: K and V, ``[B, d]`` each.  The cache holds
some tiles on the GPU; what it does not hold is read from the host pool in the same step, so residency
decides how fast a step is and never what it computes.

This is the specification for the kernels of a host tier, which are not built: nothing in the server
uses it.  Every operation is one pass of scatters, gathers and prefix sums whose length does not depend
on what the cache holds, so that it can run inside a CUDA graph.  A search for one victim after the
other could not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .select import Selection

COUNTERS = ("hits", "misses", "host_bytes")
"""Meaning of the entries of ``HotPages.counters``: tile reads served by the cache, by the host, and
bytes read from the host."""

NOBODY = -1


class HotPages:
    """Which tiles are in the cache, where, and their contents.

    A slot holds the tile of ``owner`` as it was at ``filled``, the stamp of the page at that time.
    ``written`` stamps pages anew, which makes all their tiles stale at once, in every layer and head:
    a page that is freed and used again never serves what it held before.

    Eviction is CLOCK.  A read of a tile marks its slot; the hand takes unmarked and stale slots, and
    passes marked ones, whose mark it takes away.  All victims of a call come from one window of
    ``look`` slots a missing tile, counted by a prefix sum.  If the window holds too few, the tiles
    that are left over are not taken in, and are read from the host.

    Args:
        layers, pages, kv_heads, page_size, head_dim: of the host pool (per tensor-parallel rank).
        capacity: tiles that the cache has room for, 0 included.
        dtype: of the pool.
        look: slots that the hand looks at for every missing tile, at least 1.

    Raises:
        ValueError: a size is out of range; the message names the legal ones.
    """

    def __init__(
        self,
        *,
        layers: int,
        pages: int,
        kv_heads: int,
        page_size: int,
        head_dim: int,
        capacity: int,
        dtype: torch.dtype = torch.bfloat16,
        look: int = 4,
    ) -> None:
        if capacity < 0 or look < 1:
            raise ValueError(f"capacity {capacity}, look {look}; legal: 0 or more, 1 or more")
        self.page_size, self.capacity, self.look = page_size, capacity, look
        self.keys = torch.zeros(capacity, page_size, head_dim, dtype=dtype)
        self.values = torch.zeros_like(self.keys)
        self.slot_of = torch.full((layers, pages, kv_heads), NOBODY, dtype=torch.int32)
        self.stamps = torch.zeros(pages, dtype=torch.int64)
        self.owner = torch.full((capacity,), NOBODY, dtype=torch.int64)
        self.filled = torch.zeros(capacity, dtype=torch.int64)
        self.marked = torch.zeros(capacity, dtype=torch.bool)
        self.counters = torch.zeros(len(COUNTERS), dtype=torch.int64)
        self.hand = 0
        self._writes = 0

    @property
    def tile_bytes(self) -> int:
        """Bytes of K and V of one tile."""
        return 2 * self.keys.shape[1] * self.keys.shape[2] * self.keys.dtype.itemsize

    def written(self, slots: torch.Tensor) -> None:
        """Pool slots, int ``[n]``, are about to be written: the cached tiles of their pages are stale now.

        To be called before the forward that writes them, with its ``out_cache_loc``.  Equal stamps
        make the scatter safe however often a page occurs.
        """
        self._writes += 1
        self.stamps[slots.long() // self.page_size] = self._writes

    def clear(self) -> None:
        """Forget every tile; counters stay."""
        self.slot_of.fill_(NOBODY)
        self.owner.fill_(NOBODY)
        self.marked.fill_(False)

    def locate(
        self,
        layer: int,
        pages: torch.Tensor,
        read: torch.Tensor,
        admit: torch.Tensor,
        host: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Look tiles of a layer up, take missing ones in, and say where each is to be read from.

        Args:
            layer: index in the pool.
            pages: int ``[rows, kv_heads, n]``, physical pages.
            read: bool, same shape, the entries that count; others are not looked at.
            admit: bool, same shape, entries that may be taken in.
            host: keys and values of the layer, page views ``[pages, B, kv_heads, d]``.

        Returns:
            int64 ``[rows, kv_heads, n]``: slot of the cache, or -1 for the host pool.
        """
        tiles = self._tiles(layer, pages)
        slots = torch.where(read, self._lookup(tiles), NOBODY)
        hits = slots != NOBODY
        # Marked before the hand moves: it visits a slot once at most, so none of these is evicted.
        self.marked[slots[hits]] = True
        missing = read & ~hits
        # Two requests with a common prefix miss the same tile; it is taken in once.  Sorted, so that which
        # tiles find a slot does not depend on the order of the rows.
        fetched = self._take_in(torch.unique(tiles[missing & admit]), host)
        slots = torch.where(missing, self._lookup(tiles), slots)
        in_place = int((read & (slots == NOBODY)).sum())
        self.counters += torch.tensor(
            [int(hits.sum()), int(missing.sum()), (fetched + in_place) * self.tile_bytes]
        )
        return slots

    def _tiles(self, layer: int, pages: torch.Tensor) -> torch.Tensor:
        """Numbers of tiles, int64: flat indices of ``slot_of``."""
        heads = torch.arange(pages.shape[1]).view(1, -1, 1)
        return (layer * self.slot_of.shape[1] + pages.long()) * self.slot_of.shape[2] + heads

    def _page_of(self, tiles: torch.Tensor) -> torch.Tensor:
        return tiles // self.slot_of.shape[2] % self.slot_of.shape[1]

    def _lookup(self, tiles: torch.Tensor) -> torch.Tensor:
        slots = self.slot_of.flatten()[tiles].long()
        if not self.capacity:
            return slots
        fresh = self.filled[slots] == self.stamps[self._page_of(tiles)]
        return torch.where(fresh, slots, NOBODY)

    def _take_in(self, tiles: torch.Tensor, host: tuple[torch.Tensor, torch.Tensor]) -> int:
        """Give slots to as many of the missing tiles as the hand finds victims for, and fill them."""
        victims = self._victims(len(tiles))
        tiles = tiles[: len(victims)]
        table = self.slot_of.view(-1)
        before = self.owner[victims]
        # A stale tile may have been taken in again elsewhere; that entry stays.
        evicted = before[(before != NOBODY) & (table[before] == victims)]
        table[evicted] = NOBODY
        table[tiles] = victims.int()
        self.owner[victims] = tiles
        self.filled[victims] = self.stamps[self._page_of(tiles)]
        page, head = self._page_of(tiles), tiles % self.slot_of.shape[2]
        self.keys[victims] = host[0][page, :, head]
        self.values[victims] = host[1][page, :, head]
        return len(tiles)

    def _victims(self, wanted: int) -> torch.Tensor:
        """At most ``wanted`` slots from the window at the hand, which moves on: int64 ``[found]``."""
        window = min(self.capacity, self.look * wanted)
        if not window:
            return torch.empty(0, dtype=torch.int64)
        seen = (self.hand + torch.arange(window)) % self.capacity
        owner = self.owner[seen]
        stale = (owner == NOBODY) | (self.filled[seen] != self.stamps[self._page_of(owner)])
        free = stale | ~self.marked[seen]
        # The hand stops at the last victim that is needed, or at the end of the window.
        stop = min(window, int((free.cumsum(0) < wanted).sum()) + 1)
        passed = seen[:stop]
        victims = passed[free[:stop]]
        self.marked[passed] = False
        self.hand = (self.hand + len(passed)) % self.capacity
        return victims


@dataclass(frozen=True)
class Staged:
    """What the pages of a batch contain, in the arguments that ``attend`` takes."""

    keys: torch.Tensor
    values: torch.Tensor
    selection: Selection
    page_table: torch.Tensor


def stage(
    cache: HotPages,
    layer: int,
    host: tuple[torch.Tensor, torch.Tensor],
    selection: Selection,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
) -> Staged:
    """Read the selected tiles of a batch, each from the cache or from the host pool.

    ``attend`` of the result equals ``attend`` of the host pool, bit for bit, whatever the cache holds.
    A GPU kernel would read every tile where it lies; here they are copied next to each other.

    The page of the current token is open: it changes with every step, is never taken in, and is no hit
    and no miss, since on a GPU it stays there until it is complete.  Rows that attend all their pages
    read what the cache holds but take nothing in, or one long request would empty it.

    Args:
        cache: of the whole pool.
        layer: index in the pool.
        host: keys and values of the layer, page views ``[pages, B, kv_heads, d]``.
        selection, page_table, seq_lens: as for :func:`locks_kernels.attend.attend`.
    """
    rows, heads, width = selection.pages.shape
    counts = selection.counts.long()
    listed = counts <= width
    present = torch.where(listed, counts, -(-seq_lens.long() // cache.page_size))
    most = int(present.max()) if rows else 0

    pages = torch.zeros(rows, heads, most, dtype=torch.int64)
    for row, count in enumerate(present.tolist()):
        pages[row, :, :count] = selection.pages[row, :, :count] if listed[row] else page_table[row, :count]
    entry = torch.arange(most).view(1, 1, -1)
    complete = (entry < present.view(-1, 1, 1) - 1).expand_as(pages)
    slots = cache.locate(layer, pages, complete, complete & listed.view(-1, 1, 1), host)

    # Every row's tiles at its own pages of a small pool, whatever physical pages they came from.
    tables = torch.arange(rows * most, dtype=torch.int32).view(rows, most)
    lists = torch.zeros_like(selection.pages)
    used = min(width, most)
    lists[..., :used] = tables[:, None, :used]
    return Staged(
        _gather(pages, slots, cache.keys, host[0]),
        _gather(pages, slots, cache.values, host[1]),
        Selection(lists, selection.logical, selection.counts),
        tables,
    )


def _gather(
    pages: torch.Tensor, slots: torch.Tensor, hot: torch.Tensor, host: torch.Tensor
) -> torch.Tensor:
    """Tiles ``[rows, kv_heads, n]`` from where they are, as a page view ``[rows * n, B, kv_heads, d]``."""
    tiles = torch.empty(*pages.shape, *hot.shape[1:], dtype=host.dtype)
    cached = slots != NOBODY
    heads = torch.arange(pages.shape[1]).view(1, -1, 1).expand_as(pages)
    tiles[cached] = hot[slots[cached]]
    tiles[~cached] = host[pages[~cached], :, heads[~cached]]
    return tiles.permute(0, 2, 3, 1, 4).flatten(0, 1)
