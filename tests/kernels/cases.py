"""Small paged KV caches for the kernel tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from locks_kernels import (
    EnvelopeLayout,
    Envelopes,
    Records,
    Selection,
    Summaries,
    SummaryLayout,
    attend,
    page_view,
    summarize,
)


@dataclass
class Cache:
    """Requests of given lengths scattered over the pages of one layer's pool.

    ``keys`` and ``values`` are page views ``[pages, B, kv_heads, d]``; page 0 belongs to nobody.
    """

    keys: torch.Tensor
    values: torch.Tensor
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    queries: torch.Tensor
    sm_scale: float

    @property
    def page_size(self) -> int:
        return self.keys.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[2]

    @property
    def group(self) -> int:
        return self.queries.shape[1] // self.kv_heads

    def row_keys(self, row: int, head: int) -> torch.Tensor:
        return self._row(self.keys, row, head)

    def row_values(self, row: int, head: int) -> torch.Tensor:
        return self._row(self.values, row, head)

    def _row(self, pool: torch.Tensor, row: int, head: int) -> torch.Tensor:
        length = int(self.seq_lens[row])
        pages = -(-length // self.page_size)
        return pool[self.page_table[row, :pages].long(), :, head].flatten(0, 1)[:length]

    def records(self, name: str) -> Records | None:
        """Records of every page for a format name, ``quest`` or ``oracle``."""
        if name == "oracle":
            return None
        pool = empty_records(name, self.keys)
        page_size = self.page_size
        slots = torch.arange(self.keys.shape[0]) * page_size + page_size - 1
        summarize([self.keys], slots, pool)
        return pool.layer(0)

    def attend(
        self, selection: Selection, v_scale: float = 1.0, impl: str = "auto"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and LSE of every request over its selected pages."""
        pools = self.queries, self.keys, self.values
        rows = self.page_table, self.seq_lens
        return attend(*pools, selection, *rows, self.sm_scale, v_scale, impl=impl)


def empty_records(name: str, keys: torch.Tensor, layers: int = 1) -> Records:
    pages, page_size, heads, head_dim = keys.shape
    lead = (layers, pages, heads)
    if name == "quest":
        return Envelopes.allocate(EnvelopeLayout(head_dim, page_size), lead)
    return Summaries.allocate(SummaryLayout.parse(name, head_dim, page_size), lead)


def make_cache(
    lengths: list[int],
    group: int = 3,
    kv_heads: int = 2,
    head_dim: int = 64,
    page_size: int = 16,
    order: str = "nhd",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Cache:
    """Keys with a strong direction in every page, so that pages differ as they do in models."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    counts = [-(-length // page_size) for length in lengths]
    pages = sum(counts) + 1
    centre = noise(pages, 1, kv_heads, head_dim)
    spread = noise(pages, page_size, kv_heads, 1) * noise(pages, 1, kv_heads, head_dim)
    keys = centre + 1.5 * spread + 0.3 * noise(pages, page_size, kv_heads, head_dim)
    values = noise(pages, page_size, kv_heads, head_dim)

    order_of_pages = torch.randperm(pages - 1, generator=generator) + 1
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    start = 0
    for row, count in enumerate(counts):
        table[row, :count] = order_of_pages[start : start + count]
        start += count

    return Cache(
        pool_view(keys.to(dtype), order),
        pool_view(values.to(dtype), order),
        table,
        torch.tensor(lengths),
        noise(len(lengths), kv_heads * group, head_dim).to(dtype),
        head_dim**-0.5,
    )


def pool_view(pages: torch.Tensor, order: str) -> torch.Tensor:
    """The same ``[pages, B, kv_heads, d]`` as a view of a pool of the given order."""
    if order == "hnd":
        return page_view(pages.permute(0, 2, 1, 3).contiguous(), pages.shape[1], "hnd")
    return page_view(pages.flatten(0, 1).contiguous(), pages.shape[1], "nhd")
