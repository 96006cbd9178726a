"""HostTier: what a model runner needs beside its own state where its KV pool lies in host memory."""

from __future__ import annotations

from typing import Any

import torch
from locks_kernels import Selection, StepTables, tier
from locks_kernels.hot_cache import HotCache, tile_bytes

from ..summaries import SummaryPool
from .staged_records import StagedRecords
from .staging import PrefillStaging


class HostTier:
    """The hot tiles of a pool, which of them a step reads where, and the staging of its prefills.

    Args:
        pool: keys and values of every layer, in host memory.
        hot_bytes: for hot tiles, 0 included; the open pages of the requests come on top.
        width: entries of a page list.
        requests: request slots, also the largest batch.
        device: of the decode steps.
        staged_tokens: that a prefill forward may have on the device; 0: prefills read the host's memory.
        allocator: SGLang's, which knows how many tokens are free; None where nobody asks.
    """

    def __init__(
        self,
        pool: SummaryPool,
        *,
        hot_bytes: int,
        width: int,
        requests: int,
        device: torch.device,
        staged_tokens: int = 0,
        allocator: Any = None,
    ) -> None:
        self._keys, self._values = pool.keys, pool.values
        pages, page_size, kv_heads, head_dim = pool.keys[0].shape
        dtype = pool.keys[0].dtype
        tiles = len(pool.keys) * pages * kv_heads
        self.cache = HotCache.allocate(
            layers=len(pool.keys), pages=pages, kv_heads=kv_heads, page_size=page_size, head_dim=head_dim,
            capacity=min(hot_bytes // tile_bytes(page_size, head_dim, dtype), tiles), max_rows=requests,
            width=width, open_rows=requests, dtype=dtype, device=device,
        )  # fmt: skip
        self.staging: PrefillStaging | None = None
        if staged_tokens:
            self.staging = PrefillStaging(self._keys, self._values, tokens=staged_tokens, device=device)
        self._staged_records: StagedRecords | None = None
        if self.staging is not None and pool.records is not None:
            self._staged_records = StagedRecords(pool.records, self.staging)
        self._allocator = allocator
        self._prefilled = 0
        self._logged = (0, 0)
        # At one address each, since CUDA graphs go on using them.
        self._slots = torch.zeros(requests, dtype=torch.int32, device=device)
        self._sources = torch.zeros_like(self.cache.missing)
        self._step: StepTables | None = None

    @property
    def hot(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The second pool of ``attend``."""
        return self.cache.keys, self.cache.values

    def begin_step(self, step: StepTables, requests: torch.Tensor) -> None:
        """Before the writes of a decode step of these request slots."""
        self._step = step
        self._requests.copy_(requests)
        tier.begin_step(
            self.cache, self._keys, self._values, step.page_table, step.seq_lens, self._requests
        )

    def write(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """The current tokens' K and V of a layer, ``[rows, kv_heads * d]``, which the pool gets too."""
        lengths = self._tables.seq_lens
        shape = (len(lengths), self.cache.kv_heads, self.cache.head_dim)
        tier.write_open(
            self.cache, index, keys.reshape(shape), values.reshape(shape), lengths, self._requests
        )

    def written(self, index: int, slots: torch.Tensor) -> None:
        """As :meth:`write`, with K and V from the pool's ``slots``, int ``[rows]``."""
        keys, values = (pool[index].flatten(0, 1)[slots] for pool in (self._keys, self._values))
        self.write(index, keys, values)

    def open_keys(self, index: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and page numbers of the current pages, as ``score_select`` takes them."""
        return self.cache.open_keys(index), self._requests[rows]

    def resolve(self, index: int, selection: Selection, rows: slice) -> Selection:
        """The selection of some rows of the step, with sources for pages; missing tiles are taken in."""
        pages = selection.pages
        sources = self._sources[: pages.numel()].view(pages.shape)
        pool = self._keys[index], self._values[index]
        return tier.resolve(self.cache, index, selection, pool, self._requests[rows], out=sources)

    @property
    def _tables(self) -> StepTables:
        assert self._step is not None, "outside of a decode step"
        return self._step

    @property
    def _requests(self) -> torch.Tensor:
        """Request slots of the step's rows."""
        return self._slots[: len(self._tables.seq_lens)]

    def build_staged(self, index: int) -> None:
        """Records of a layer of a prefill, whose keys are staged."""
        if self._staged_records is not None:
            self._staged_records.build(index)

    def took_staged(self) -> bool:
        """Whether the forward that just ended has all its records that way; to be asked once."""
        return self._staged_records is not None and self._staged_records.take()

    def wrote(self, slots: torch.Tensor) -> None:
        """A forward that is no decode step wrote these pool slots."""
        tier.invalidate(self.cache, slots)
        self._prefilled += len(slots)

    def counts(self, decoded: int, pages_built: int) -> dict[str, int]:
        """Totals since the start, by the name of their metric, beside those of all servers.

        Args:
            decoded: rows of decode steps.
            pages_built: pages whose summaries were built; those of long prefills from keys on the GPU,
                the others from keys that are read from the host.
        """
        if self._staged_records is not None:
            pages_built -= self._staged_records.pages_built
        counted = self.cache.counted()
        page_bytes = len(self._keys) * self.cache.kv_heads * self.cache.tile_bytes
        tiles = (counted["fills"] + counted["host_reads"]) * self.cache.tile_bytes
        staged = self.staging.pages_copied if self.staging is not None else 0
        layers = len(self._keys)
        return {
            "hot_hits": counted["hits"],
            "hot_misses": counted["misses"],
            "host_bytes_read": tiles + staged * page_bytes // layers + pages_built * page_bytes // 2,
            "host_bytes_written": (self._prefilled + decoded) * page_bytes // self.cache.page_size,
        }

    def pages(self) -> dict[str, int]:
        """Pages of the host pool that hold something, the prefix cache's included, and that are free."""
        if self._allocator is None:
            return {}
        size = self.cache.page_size
        free = int(self._allocator.available_size()) // size
        # The first page belongs to nobody: padding is written there.
        return {"host_pages_used": self.cache.pages - 1 - free, "host_pages_free": free}

    def log_part(self) -> str:
        """For the decode log line: the share of the tiles read since the last one that were hot."""
        hits, misses = self.cache.counters[:2].tolist()
        hit, read = hits - self._logged[0], hits + misses - self._logged[1]
        self._logged = (hits, hits + misses)
        return f", hot share: {100 * hit / read:.1f} %" if read else ""

    def describe(self, decoded: int, pages_built: int) -> dict[str, Any]:
        """Plain values for ``/server_info``; arguments as for :meth:`counts`."""
        counted = self.counts(decoded, pages_built)
        reads = counted["hot_hits"] + counted["hot_misses"]
        staging = self.staging
        return {
            "kv_tier": "host",
            "host_bytes": sum(pool.nbytes for pool in (*self._keys, *self._values)),
            "hot_tiles": self.cache.capacity,
            "hot_bytes": self.cache.capacity * self.cache.tile_bytes,
            "hot_share": counted["hot_hits"] / reads if reads else None,
            **counted,
            **self.pages(),
            "prefills_staged": staging.forwards if staging is not None else 0,
            "prefills_unstaged": staging.forwards_unstaged if staging is not None else 0,
        }
