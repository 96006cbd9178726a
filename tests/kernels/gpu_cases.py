"""What the GPU tests share: the skip, and caches and records moved to the device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import Cache, make_cache
from locks_kernels import Envelopes, Records, Summaries, build

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
cuda = pytest.mark.skipif(
    not torch.cuda.is_available() or build.missing() is not None,
    reason=f"needs an NVIDIA GPU and a CUDA compiler ({build.missing() or 'compiler found'})",
)


def to_gpu(cache: Cache) -> Cache:
    """The same cache on the GPU; keys and values keep their strides."""

    def move(view: torch.Tensor) -> torch.Tensor:
        moved = torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device="cuda")
        return moved.copy_(view)

    return replace(
        cache,
        keys=move(cache.keys),
        values=move(cache.values),
        page_table=cache.page_table.cuda(),
        seq_lens=cache.seq_lens.cuda(),
        queries=cache.queries.cuda(),
    )


def records_to_gpu(records: Records | None) -> Records | None:
    if isinstance(records, Summaries):
        return Summaries(records.layout, *(plane.cuda() for plane in records.planes))
    if isinstance(records, Envelopes):
        return Envelopes(records.layout, records.low.cuda(), records.high.cuda())
    return None


def make_pair(
    lengths: list[int], name: str, **options
) -> tuple[Cache, Records | None, Cache, Records | None]:
    """A cache in bf16 (unless told) with its records, on the CPU and on the GPU."""
    options.setdefault("dtype", torch.bfloat16)
    cache = make_cache(lengths, **options)
    records = cache.records(name)
    return cache, records, to_gpu(cache), records_to_gpu(records)
