"""Times of attend and summarize by variant: how the constants in the code were chosen.

    python benchmark/tune_attend_summarize.py attend dense summarize

Medians of CUDA-graph replays over data that is colder than L2, on GLM-4-9B-Chat-1M's geometry
(4 KV heads, 8 query heads each, head_dim 128, 40 layers).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from graph_timing import graph_us
from locks_kernels import (
    EnvelopeLayout,
    Envelopes,
    Selection,
    Summaries,
    SummaryLayout,
    attend,
    build,
    cuda_attend,
    summarize,
)
from locks_kernels.attend_buffers import AttendBuffers

H, G, D, B = 4, 8, 128, 16
# What the product uses, which `configure` replaces.
SHIPPED_CLUSTERS, SHIPPED_TILES = cuda_attend.CLUSTERS, cuda_attend.TILES_A_WARP


def median_us(calls: Sequence[Callable[[], object]], repeats: int = 15) -> float:
    """Microseconds a call, in one graph of all calls."""
    return graph_us(calls, repeats)[0]


class Batch:
    """Requests of ``context`` tokens each, in a pool that has just their pages, in random order."""

    def __init__(
        self, rows: int, context: int, dtype: torch.dtype = torch.bfloat16, heads: int = H, group: int = G
    ) -> None:
        pages = rows * context // B
        self.keys = torch.empty(pages, B, heads, D, dtype=torch.bfloat16, device="cuda").normal_().to(dtype)
        self.values = (
            torch.empty(pages, B, heads, D, dtype=torch.bfloat16, device="cuda").normal_().to(dtype)
        )
        self.queries = torch.randn(rows, heads * group, D, device="cuda").to(torch.bfloat16)
        self.table = torch.randperm(pages, device="cuda").int().view(rows, -1)
        self.lengths = torch.full((rows,), context - 3, dtype=torch.int32, device="cuda")
        self.scale = D**-0.5
        self.buffers = AttendBuffers.allocate(
            max_rows=rows, q_heads=heads * group, kv_heads=heads, head_dim=D, device="cuda"
        )
        self.out = (torch.empty_like(self.queries), torch.empty(rows, heads * group, device="cuda"))

    def lists(self, count: int, sets: int) -> list[Selection]:
        """Selections of ``count`` random pages a head, so that each call reads other ones."""
        rows, pages = self.table.shape
        found = []
        for _ in range(sets):
            picked = torch.stack(
                [
                    torch.stack([t[torch.randperm(pages, device="cuda")[:count]] for _ in range(H)])
                    for t in self.table
                ]
            )
            counts = torch.full((rows,), count, dtype=torch.int32, device="cuda")
            found.append(Selection(picked, picked, counts))
        return found

    def everything(self) -> Selection:
        """A selection that names no pages, whose counts are all that there are."""
        rows, pages = self.table.shape
        lists = torch.zeros(rows, H, 4, dtype=torch.int32, device="cuda")
        counts = torch.full((rows,), pages, dtype=torch.int32, device="cuda")
        return Selection(lists, lists, counts)

    def run(self, selection: Selection) -> None:
        """Attend with the CUDA kernel, in the variant of :func:`configure`."""
        cuda_attend.attend(*self.arguments(selection), 1.0, *self.out, self.buffers)

    def triton(self, selection: Selection) -> None:
        """Attend with Triton."""
        attend(*self.arguments(selection), out=self.out, impl="triton")

    def arguments(self, selection: Selection) -> tuple[Any, ...]:
        """What both take first, in their order."""
        return self.queries, self.keys, self.values, selection, self.table, self.lengths, self.scale


def constants(warps: int, blocks: int) -> dict[str, int]:
    """Constants of a build: warps a block, blocks a multiprocessor."""
    return {
        **{"HEAD_DIM": D, "PAGE": B, "KV_TYPE": 0, "Q_TYPE": 0, "HEAD_TILES": 1},
        **{"WARPS": warps, "BLOCKS": blocks},
    }


def configure(warps: int, blocks: int, cluster: int, tiles: int = SHIPPED_TILES) -> Any:
    """Point the op at a variant: warps a block, blocks a multiprocessor, largest cluster, tiles a warp.

    Returns what ``cuda_attend.clusters_of`` says of it.
    """
    library = build.load("attend", **constants(warps, blocks))
    cuda_attend._clusters.clear()
    cuda_attend.CLUSTERS = tuple(size for size in SHIPPED_CLUSTERS if size <= cluster)
    cuda_attend.TILES_A_WARP = tiles
    cuda_attend.library = lambda *_: library
    return cuda_attend.clusters_of(library)


BUILDS = ((8, 2), (4, 3), (4, 4))
VARIANTS = (
    *((8, 2, 16, 1), (8, 2, 16, 2), (8, 2, 8, 1), (8, 2, 8, 2)),
    *((4, 3, 16, 2), (4, 3, 16, 1), (4, 4, 16, 2)),
)
DENSE = ((8, 2, 16), (8, 2, 8), (4, 3, 16), (4, 4, 16))


def time_attend() -> None:
    """2,048 selected tokens of 512K: in a row (dependent launches overlap) and between other kernels."""
    batch = Batch(1, 524_288)
    selections = batch.lists(128, 48)
    small = torch.zeros(32, device="cuda")
    base = median_us([lambda: small.add_(1)] * 48)
    print(f"a small kernel alone {base:.2f} us")
    for variant in VARIANTS:
        clusters = configure(*variant)
        calls = [partial(batch.run, chosen) for chosen in selections]
        between = [call for run in calls for call in (run, lambda: small.add_(1))]
        chained, apart = median_us(calls), 2 * median_us(between) - base
        print(
            f"attend 2048 tokens: {variant}: {chained:.2f} us in a row, {apart:.2f} us between others; "
            f"clusters {clusters}",
            flush=True,
        )
    triton = median_us([partial(batch.triton, chosen) for chosen in selections])
    print(f"attend 2048 tokens: triton {triton:.2f} us", flush=True)


def time_dense() -> None:
    """Everything attended, at all shapes."""
    shapes = ((1, 16_384), (1, 65_536), (1, 262_144), (1, 1_048_576), (32, 32_768), (4, 262_144))
    for rows, context in shapes:
        time_dense_shape(rows, context)
        torch.cuda.empty_cache()


def time_dense_shape(rows: int, context: int) -> None:
    """Everything attended by each variant: time, and TB/s of keys and values."""
    batch = Batch(rows, context)
    moved = 2 * 2 * rows * context * H * D
    everything = batch.everything()
    line = []
    for variant in DENSE:
        configure(*variant)
        us = median_us([partial(batch.run, everything)] * (8 if moved < 1e9 else 2), 8)
        line.append(f"{variant} {us:.1f} us {moved / us * 1e-6:.2f}")
    us = median_us([partial(batch.triton, everything)] * 2, 5)
    print(f"dense {rows} x {context}:", "; ".join(line), f"; triton {us:.1f}", flush=True)


LAYERS, PAGES = 40, 65_536


def time_summarize() -> None:
    """Decode steps, a prefill chunk and a whole pool, of 40 layers."""
    keys = [bf16(PAGES, B, H, D) for _ in range(8)] * (LAYERS // 8)
    time_steps(keys, pool("r4i4"))
    for name in ("r4i4", "r8i4", "r6h", "r8h", "quest"):
        time_format(name, keys, pool(name))
        torch.cuda.empty_cache()


def time_steps(keys: list[torch.Tensor], records: Summaries | Envelopes) -> None:
    """Decode steps that complete no page, and that complete one a row."""
    for rows in (1, 32, 256):
        idle = torch.arange(rows, device="cuda") * 16 + 3
        full = torch.randperm(PAGES, device="cuda")[:rows] * 16 + 15
        for label, slots in (("nothing", idle), ("all", full)):
            us = median_us([partial(summarize, keys, slots, records)] * 8)
            print(f"summarize, {rows} rows, {label} complete: {us:.2f} us", flush=True)


def time_format(name: str, keys: list[torch.Tensor], records: Summaries | Envelopes) -> None:
    """A prefill chunk of 16K tokens and all 1M tokens, in one format."""
    chunk = torch.arange(16_384, device="cuda") + 16_384
    us = median_us([partial(summarize, keys, chunk, records)] * 2, 6)
    print(f"summarize {name}, 16K tokens x 40 layers: {us / 1000:.2f} ms", flush=True)
    slots = torch.arange(PAGES * B, device="cuda")
    us = median_us([partial(summarize, keys, slots, records)], 3)
    moved = LAYERS * (keys[0].nbytes + PAGES * H * records.layout.bytes_per_page)
    print(
        f"summarize {name}, 1M tokens x 40 layers: {us / 1000:.1f} ms, "
        f"{us * 1000 / (LAYERS * PAGES * H):.2f} ns a page, {moved / us * 1e-6:.2f} TB/s",
        flush=True,
    )
    if name == "r4i4":
        one = Summaries(records.layout, *(plane[:1] for plane in records.planes))
        us = median_us([partial(summarize, keys[:1], slots, one, impl="triton")], 2)
        print(f"summarize {name}, 1M tokens, one layer, triton: {us / 1000:.1f} ms", flush=True)


def pool(name: str) -> Summaries | Envelopes:
    """Empty summaries of all layers and pages; ``quest`` for its envelopes, else a record format."""
    lead = (LAYERS, PAGES, H)
    if name == "quest":
        return Envelopes.allocate(EnvelopeLayout(D, B), lead, "cuda")
    return Summaries.allocate(SummaryLayout.parse(name, D, B), lead, "cuda")


def bf16(*shape: int) -> torch.Tensor:
    """Normal noise on the GPU."""
    return torch.empty(*shape, dtype=torch.bfloat16, device="cuda").normal_()


if __name__ == "__main__":
    with ThreadPoolExecutor(8) as pool_of_builds:
        list(pool_of_builds.map(lambda pair: build.load("attend", **constants(*pair)), BUILDS))
    chosen = sys.argv[1:] or ["attend", "dense", "summarize"]
    for name in chosen:
        {"attend": time_attend, "dense": time_dense, "summarize": time_summarize}[name]()
