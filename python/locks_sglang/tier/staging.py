"""PrefillStaging: keys and values of a prefill forward in GPU memory, a layer ahead of its attention.

An attention kernel reads every key of a request for each block of its queries, so reading them from host
memory would take the link many times over.  Here a layer's prefix is copied once, into one of two buffers,
while the layer before it computes; the forward's own tokens are written to that buffer and to the host.
A request's pages lie in a buffer one after another, so its page table there is a row of numbers that count
up, whatever pages it has in the pool.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

logger = logging.getLogger(__name__)

TRASH = 1
"""Pages at the front of a buffer that belong to nobody."""


class PrefillStaging:
    """Two buffers for a layer each, and where the tokens of the running forward lie in them.

    Args:
        keys, values: the host pool, page views ``[pages, B, kv_heads, d]`` a layer.
        tokens: of all requests of a forward, their prefixes included.
        device: of the prefill.
    """

    def __init__(
        self,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        *,
        tokens: int,
        device: torch.device,
    ) -> None:
        self._pools = (keys, values)
        _, self.page_size, kv_heads, head_dim = keys[0].shape
        self.pages = self.pages_for(tokens, self.page_size)
        shape = (2, 2, self.pages * self.page_size, kv_heads, head_dim)
        self._buffers = torch.zeros(shape, dtype=keys[0].dtype, device=device)
        self._device = device
        # One after another on a CPU.
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ready = [self._event() for _ in range(2)]
        self._read = [self._event() for _ in range(2)]
        self.active = False
        self._holds = [-1, -1]
        self.firsts: list[int] = []
        self.lengths: list[int] = []
        self._sources = none = torch.zeros(0, dtype=torch.int64, device=device)
        self.slots = none
        """Of the forward's own tokens in the buffers, int64."""
        self.completed = (none, none)
        """Pages that the forward completes, in the buffers and in the pool: int64 ``[n]`` each."""
        self._held: list[int] = []
        self.tables: Any = None
        """SGLang's token table over the buffers, for a backend that reads it while it attends."""
        self.pages_copied = 0
        """Pages read from the host for prefixes, once for each layer."""
        self.forwards = self.forwards_unstaged = 0

    @staticmethod
    def pages_for(tokens: int, page_size: int) -> int:
        """Pages of a staging for ``tokens`` tokens."""
        return TRASH - (-tokens // page_size)

    @staticmethod
    def price(tokens: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes on the GPU of a staging for ``tokens`` tokens."""
        pages = PrefillStaging.pages_for(tokens, page_size)
        return 4 * pages * page_size * kv_heads * head_dim * dtype.itemsize

    def begin(
        self,
        token_table: torch.Tensor,
        requests: torch.Tensor,
        prefixes: Sequence[int],
        lengths: Sequence[int],
    ) -> bool:
        """Place the requests of a forward; False where the buffers are too small for it.

        Args:
            token_table: int32 ``[slots, context]``, pool slot of every token of every request.
            requests: int ``[rows]``, row of ``token_table`` of each request.
            prefixes: tokens of each request that are in the pool already.
            lengths: tokens of each request after the forward.
        """
        self.end()
        pages = [-(-length // self.page_size) for length in lengths]
        if TRASH + sum(pages) > self.pages:
            self.pass_by("its requests have more tokens than there is room for on the GPU")
            return False
        self.firsts, first = [], TRASH
        for count in pages:
            self.firsts.append(first)
            first += count
        self.lengths = list(lengths)
        self._place(token_table, requests, prefixes)
        if self._side is not None:
            # What wrote the prefix, and the numbers above, are on the forward's stream.
            self._side.wait_stream(torch.cuda.current_stream(self._device))
        self.active, self._holds = True, [-1, -1]
        self.forwards += 1
        return True

    def _place(self, token_table: torch.Tensor, requests: torch.Tensor, prefixes: Sequence[int]) -> None:
        """Pages to copy, the buffer's slots of the forward's own tokens, and the pages they complete."""
        size = self.page_size
        self._held = held = [-(-prefix // size) for prefix in prefixes]
        table = token_table[:, : max(self.lengths) : size].index_select(0, requests.long())
        self._sources = torch.cat([table[row, :count] for row, count in enumerate(held)]).long() // size
        full = [
            (prefix // size, length // size) for prefix, length in zip(prefixes, self.lengths, strict=True)
        ]
        self.completed = (
            torch.cat(
                [
                    torch.arange(first + begin, first + end, device=self._device)
                    for first, (begin, end) in zip(self.firsts, full, strict=True)
                ]
            ),
            torch.cat([table[row, begin:end] for row, (begin, end) in enumerate(full)]).long() // size,
        )
        spans = zip(self.firsts, prefixes, self.lengths, strict=True)
        self.slots = torch.cat(
            [
                torch.arange(first * size + prefix, first * size + length, device=self._device)
                for first, prefix, length in spans
            ]
        )

    def pass_by(self, why: str) -> None:
        """Count a prefill whose attention reads its prefix from the pool; the first one is told of."""
        if not self.forwards_unstaged:
            logger.warning(
                "A prefill is not staged on the GPU: %s. Its attention reads the prefix from host memory, "
                "right and slow; prefills_unstaged of /server_info counts them.",
                why,
            )
        self.forwards_unstaged += 1

    def end(self) -> None:
        """The forward that comes next reads the pool itself."""
        self.active, self.tables = False, None

    def page_table(self, rows: int, width: int) -> torch.Tensor:
        """int32 ``[rows, width]``: page in the buffers of every logical page; past a request's, any."""
        if rows != len(self.firsts):
            raise ValueError(f"a page table of {rows} rows; legal: {len(self.firsts)}, as the forward")
        firsts = torch.tensor(self.firsts, dtype=torch.int32)
        firsts = firsts.to(self._device, non_blocking=True)
        count = torch.arange(width, dtype=torch.int32, device=self._device)
        return (firsts.unsqueeze(1) + count).clamp_(max=self.pages - 1)

    def token_table(self) -> torch.Tensor:
        """int32 ``[pages, B]``, slot by slot: row ``firsts[r]`` read on beyond its end is request ``r``."""
        slots = torch.arange(self.pages * self.page_size, dtype=torch.int32, device=self._device)
        return slots.view(self.pages, self.page_size)

    def enter(self, index: int) -> None:
        """Before the attention of a layer: its prefix is there, and the next one's is on its way."""
        if self._holds[index % 2] != index:
            self._copy(index)
        if self._side is not None:
            torch.cuda.current_stream(self._device).wait_event(self._ready[index % 2])
        if index + 1 < len(self._pools[0]) and self._holds[(index + 1) % 2] != index + 1:
            self._copy(index + 1)

    def leave(self, index: int) -> None:
        """After the attention of a layer: its buffer may be used again."""
        if self._side is not None:
            self._read[index % 2].record(torch.cuda.current_stream(self._device))

    def buffers(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer between :meth:`enter` and :meth:`leave`, ``[slots, kv_heads, d]``."""
        keys, values = self._buffers[index % 2]
        return keys, values

    def store(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """K and V of the forward's own tokens, ``[tokens, kv_heads, d]`` or flat, in their order."""
        for buffer, given in zip(self.buffers(index), (keys, values), strict=True):
            buffer.index_copy_(0, self.slots, given.reshape(-1, *buffer.shape[1:]).to(buffer.dtype))

    def store_from_pool(self, index: int, slots: torch.Tensor) -> None:
        """As :meth:`store`, for a model that wrote its tokens to these pool slots by itself."""
        keys, values = (pool[index].flatten(0, 1)[slots] for pool in self._pools)
        self.store(index, keys, values)

    def _copy(self, index: int) -> None:
        self._holds[index % 2] = index
        if not len(self._sources):
            if self._side is not None:
                self._ready[index % 2].record(torch.cuda.current_stream(self._device))
            return
        self.pages_copied += len(self._sources)
        if self._side is None:
            self._gather(index)
            return
        self._side.wait_event(self._read[index % 2])
        with torch.cuda.stream(self._side):
            self._gather(index)
            self._ready[index % 2].record(self._side)

    def _gather(self, index: int) -> None:
        for buffer, pool in zip(self.buffers(index), self._pools, strict=True):
            # In words of eight bytes, since a warp asks the link for what its lanes ask for together.
            pages = pool[index].view(len(pool[index]), -1).view(torch.int64)
            staged = buffer.view(self.pages, -1).view(torch.int64)
            done = 0
            for start, count in zip(self.firsts, self._held, strict=True):
                source = self._sources[done : done + count]
                torch.index_select(pages, 0, source, out=staged[start : start + count])
                done += count

    def _event(self) -> Any:
        return torch.cuda.Event() if self._device.type == "cuda" else None
