"""The memory of a host tier on the GPU: hot tiles, the pages being written, and their tables."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

COUNTERS = ("hits", "misses", "fills", "host_reads")
"""Meaning of the entries of ``HotCache.counters``: reads of complete tiles that found theirs in the cache
and that did not, tiles copied into the cache, and reads served by the host pool itself."""

CLOCK, HAND, CALLS, MISSING, COPIES = range(5)
"""Entries of ``HotCache.state``: the decode step, where the next victims are looked for, calls of
``resolve``, tiles that the running call misses, and places in the list of those to be copied."""

NOBODY = -1
WINDOW = 128
"""Slots among which victims are ranked together."""
MOST_WINDOW = 256
"""So that an age, a place in the window and a flag fit into 31 bits."""
LOOK = 4
"""Slots that are looked at for every tile that needs one, where there are enough."""
YOUNG = 2
"""Steps for which a tile that was read is kept, whatever else is wanted.  A step reads mostly what the one
before it read; where that is more than the capacity, the oldest tile is the very one to be read next, and
evicting it would leave no hits at all."""
OLDEST = 2**22 - 1
"""Steps beyond which ages are not told apart; slots that hold nothing fresh are as old."""
WRAP = 2**31 - 1
"""Clock and calls count modulo this plus one."""


def tile_bytes(page_size: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of K and V of one tile."""
    return 2 * page_size * head_dim * dtype.itemsize


@dataclass(frozen=True)
class HotCache:
    """Tiles of a host pool that lie on the GPU.

    A tile is what one KV head of one layer stores of a page: K and V, ``[B, d]`` each.  Its number is
    ``(layer * pages + page) * kv_heads + head``.

    Attributes:
        keys, values: ``[capacity + open_rows * layers * kv_heads, B, d]``.  First the slots of the
            cache, then for every request slot the tiles of the page that it is writing (its open page).
        slot_of: int32 ``[layers, pages, kv_heads]``, slot of every tile; negative: none.
        generation: int32 ``[pages]``, changes whenever the page is written.
        owner: int32 ``[capacity]``, number of the tile in a slot, or -1.
        filled: int32 ``[capacity]``, generation of its page when it was filled.  A tile counts as
            present only while that is still the page's, so one write makes all its tiles stale.
        used: int32 ``[capacity]``, step that read it last.
        open_page, open_stamp: int32 ``[open_rows]``, page whose tiles a request slot has on the GPU,
            and its generation then.
        missing, targets: int32 ``[most]``, tiles that a layer misses and their slots, or -1.
        state: int32, see ``CLOCK``.
        counters: int64, see ``COUNTERS``.
        window: slots among which victims are ranked together, a power of two from ``LOOK`` to
            ``MOST_WINDOW``.
    """

    keys: torch.Tensor
    values: torch.Tensor
    slot_of: torch.Tensor
    generation: torch.Tensor
    owner: torch.Tensor
    filled: torch.Tensor
    used: torch.Tensor
    open_page: torch.Tensor
    open_stamp: torch.Tensor
    missing: torch.Tensor
    targets: torch.Tensor
    state: torch.Tensor
    counters: torch.Tensor
    window: int = WINDOW

    @classmethod
    def allocate(
        cls,
        *,
        layers: int,
        pages: int,
        kv_heads: int,
        page_size: int,
        head_dim: int,
        capacity: int,
        max_rows: int,
        width: int,
        open_rows: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        window: int = WINDOW,
    ) -> HotCache:
        """An empty cache.

        Args:
            layers, pages, kv_heads, page_size, head_dim, dtype: of the host pool (per rank).
            capacity: tiles that the cache has room for, 0 included.
            max_rows, width: largest batch and length of its page lists.
            open_rows: request slots that have their open page on the GPU; 0 where open pages are read
                from the host pool.

        Raises:
            ValueError: a size is out of range; the message names the legal ones.
        """
        if capacity < 0 or open_rows < 0 or not LOOK <= window <= MOST_WINDOW or window & (window - 1):
            raise ValueError(
                f"capacity {capacity}, open_rows {open_rows}, window {window}; legal: 0 or more, 0 or "
                f"more, a power of two from {LOOK} to {MOST_WINDOW}"
            )
        slots = capacity + open_rows * layers * kv_heads
        if max(layers * pages * kv_heads, slots) > WRAP:
            raise ValueError(
                f"{layers * pages * kv_heads} tiles and {slots} slots; legal: at most {WRAP} of each"
            )

        def table(*shape: int, value: int = 0, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        def storage() -> torch.Tensor:
            return torch.zeros(slots, page_size, head_dim, dtype=dtype, device=device)

        return cls(
            keys=storage(),
            values=storage(),
            slot_of=table(layers, pages, kv_heads, value=NOBODY),
            generation=table(pages),
            owner=table(capacity, value=NOBODY),
            filled=table(capacity),
            used=table(capacity),
            open_page=table(open_rows, value=NOBODY),
            open_stamp=table(open_rows),
            missing=table(max_rows * kv_heads * width),
            targets=table(max_rows * kv_heads * width),
            state=table(5),
            counters=table(len(COUNTERS), dtype=torch.int64),
            window=window,
        )

    @property
    def capacity(self) -> int:
        return len(self.owner)

    @property
    def open_rows(self) -> int:
        return len(self.open_page)

    @property
    def layers(self) -> int:
        return self.slot_of.shape[0]

    @property
    def pages(self) -> int:
        return self.slot_of.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.slot_of.shape[2]

    @property
    def page_size(self) -> int:
        return self.keys.shape[1]

    @property
    def head_dim(self) -> int:
        return self.keys.shape[2]

    def open_keys(self, layer: int) -> torch.Tensor:
        """Keys of the open pages of a layer, as a page view ``[open_rows, B, kv_heads, d]``."""
        shape = (self.open_rows, self.layers, self.kv_heads, self.page_size, self.head_dim)
        return self.keys[self.capacity :].view(shape)[:, layer].transpose(1, 2)

    @property
    def tile_bytes(self) -> int:
        """Bytes of K and V of one tile."""
        return tile_bytes(self.page_size, self.head_dim, self.keys.dtype)

    def counted(self, since: torch.Tensor | None = None) -> dict[str, int]:
        """The counters, or what they grew ``since`` a copy of them, by the names of ``COUNTERS``.

        It waits for the device.
        """
        counters = self.counters if since is None else self.counters - since
        return dict(zip(COUNTERS, counters.tolist(), strict=True))

    @property
    def windows(self) -> int:
        """Windows that do not overlap; a cache smaller than one has one."""
        return max(self.capacity // self.window, min(self.capacity, 1))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; of a cache on ``meta`` too, so that it can be priced beforehand."""
        values = (getattr(self, field.name) for field in fields(self))
        return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
