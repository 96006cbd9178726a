"""What the GPU tests share: the skip, caches and records on the device, what a steady step may not do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from cases import Cache, make_cache
from locks_kernels import Envelopes, Records, Summaries, SummaryLayout, build

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


def random_records(layout: SummaryLayout, lead: tuple[int, ...], seed: int = 0) -> Summaries:
    """Records of no keys, for contexts whose keys would take too long: logits of a few units."""
    generator = torch.Generator("cuda").manual_seed(seed)
    records = Summaries.allocate(layout, lead, "cuda")
    for plane in (records.basis, records.coefficients, records.centroid):
        plane.random_(0, 256, generator=generator)
    scales = torch.rand(records.scales.shape, generator=generator, device="cuda")
    records.scales.copy_(scales.mul_(0.03))
    return records


@contextmanager
def steady() -> Iterator[None]:
    """Within it, torch may neither allocate GPU memory nor make the host wait for the GPU."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    assert allocated == 0, f"{allocated} allocations"
