"""One decode step's attention from a KV pool in host memory: time and link bytes by hot share and cache.

    python benchmark/tier_step.py --out benchmark/results

GLM-4-9B-Chat-1M's layer, some layers instead of forty, in one CUDA graph a step. There is no model: page
lists drift as told. In every step each (row, KV head) replaces a share of its pages (5, 10 and 20 %, for
hot shares of about 95, 90 and 80 %) by pages drawn from its whole context, so a page may come back; the
share that the cache really served is measured. A graph with a resolve that copies nothing, one in which it
copies and one with attend run through the same steps, and the differences are the parts: "resolve" (with
write_open and a share of begin_step), "fill", "attend". "resident" is attend on a pool on the GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import results_file
import torch
from locks_kernels import Selection, attend, page_view, tier
from locks_kernels.attend_buffers import AttendBuffers
from locks_kernels.hot_cache import HotCache
from locks_kernels.workspace import Workspace
from locks_sglang.tier import host_memory
from locks_sglang.tier.topology import node_of_gpu

KV_HEADS, GROUP, HEAD_DIM, PAGE = 4, 8, 128, 16
WIDTH = 128  # pages of a budget of 2,048 tokens
REPLACED = (0.05, 0.1, 0.2)
SIZES = (0, 2, 4, 8)
"""Tiles of the cache, in what a step reads."""
WARM_UP = 12
PARTS = ("resolve", "fill", "attend")


@dataclass(frozen=True)
class Case:
    layers: int
    batch: int
    context: int
    steps: int

    @property
    def row_pages(self) -> int:
        return self.context // PAGE

    @property
    def pages(self) -> int:
        return self.batch * self.row_pages + 1

    @property
    def tiles_a_step(self) -> int:
        return self.layers * self.batch * KV_HEADS * (WIDTH - 1)


def drifting_lists(
    case: Case, replaced: float, table: torch.Tensor, generator: torch.Generator
) -> Iterator[torch.Tensor]:
    """Page lists of one step after the other, int32 ``[layers, batch, KV_HEADS, WIDTH]``, open page last.

    Args:
        case: sizes.
        replaced: share of a list's complete pages that the next step replaces.
        table: int32 ``[batch, row_pages]``, physical pages.
        generator: of the draws.
    """
    shape = (case.layers, case.batch, KV_HEADS)
    complete = case.row_pages - 1
    rank = torch.rand(*shape, complete, generator=generator)
    chosen = torch.zeros(rank.shape, dtype=torch.bool).scatter_(-1, rank.topk(WIDTH - 1).indices, True)
    swaps = round(replaced * (WIDTH - 1))
    tables = table.view(1, case.batch, 1, -1).expand(*shape, -1)
    last = tables[..., complete:]
    while True:
        logical = chosen.nonzero()[:, -1].view(*shape, WIDTH - 1)
        yield torch.cat([tables.gather(-1, logical), last], -1).int()
        rank = torch.rand(rank.shape, generator=generator)
        leave = (rank + 2.0 * chosen).topk(swaps).indices
        enter = (rank - 2.0 * chosen).topk(swaps).indices
        chosen.scatter_(-1, leave, False).scatter_(-1, enter, True)


class Inputs:
    """Host pool, resident pool of one layer, tables and queries."""

    def __init__(self, case: Case) -> None:
        self.case = case
        shape = (case.layers, 2, case.pages * PAGE, KV_HEADS, HEAD_DIM)
        elements = torch.Size(shape).numel()
        started = time.monotonic()
        facts = torch.cuda.get_device_properties(0)
        bus = f"{facts.pci_domain_id:08x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
        self.memory = host_memory.HostMemory(
            2 * elements, node=node_of_gpu(bus), registration=host_memory.with_cuda()
        )
        self.seconds = time.monotonic() - started
        self.host = (
            host_memory.on_gpu(self.memory.tensor()[: 2 * elements]).view(torch.bfloat16).view(shape)
        )
        # Through the GPU, a layer at a time: a CPU would take minutes for the random numbers.
        for layer in range(case.layers):
            self.host[layer] = torch.randn(shape[1:], device="cuda")
        self.keys, self.values = (
            [page_view(self.host[layer, which], PAGE) for layer in range(case.layers)] for which in (0, 1)
        )
        self.generator = torch.Generator().manual_seed(7)
        order = 1 + torch.randperm(case.pages - 1, generator=self.generator)
        self.table_cpu = order.view(case.batch, case.row_pages).int()
        self.table = self.table_cpu.cuda()
        self.lengths = torch.full((case.batch,), case.context - 5, dtype=torch.int32, device="cuda")
        self.requests = torch.arange(case.batch, dtype=torch.int32, device="cuda")
        self.queries = torch.randn(case.batch, KV_HEADS * GROUP, HEAD_DIM, device="cuda").bfloat16()
        self.new = torch.randn(case.batch, KV_HEADS, HEAD_DIM, device="cuda").bfloat16()
        lists = torch.zeros(case.layers, case.batch, KV_HEADS, WIDTH, dtype=torch.int32, device="cuda")
        self.lists = lists
        counts = torch.full((case.batch,), WIDTH, dtype=torch.int32, device="cuda")
        self.selections = [Selection(pages, pages, counts) for pages in lists]
        self.sources = torch.zeros_like(lists[0])
        self.out = (
            torch.empty_like(self.queries),
            torch.empty(self.queries.shape[:2], dtype=torch.float32, device="cuda"),
        )
        self.workspace = Workspace.allocate(
            max_rows=case.batch, q_heads=KV_HEADS * GROUP, kv_heads=KV_HEADS, max_pages=case.row_pages,
            width=WIDTH, head_dim=HEAD_DIM, device="cuda", total_pages=8,
        )  # fmt: skip
        assert isinstance(self.workspace.attend, AttendBuffers)

    def cache(self, size: int) -> HotCache:
        case = self.case
        return HotCache.allocate(
            layers=case.layers, pages=case.pages, kv_heads=KV_HEADS, page_size=PAGE, head_dim=HEAD_DIM,
            capacity=size * case.tiles_a_step, max_rows=case.batch, width=WIDTH, open_rows=case.batch,
            device="cuda",
        )  # fmt: skip

    def step(self, cache: HotCache, parts: tuple[str, ...]) -> None:
        tables = (self.table, self.lengths, self.requests)
        tier.begin_step(cache, self.keys, self.values, *tables)
        for layer, selection in enumerate(self.selections):
            keys, values = self.keys[layer], self.values[layer]
            tier.write_open(cache, layer, self.new, self.new, self.lengths, self.requests)
            pool = (keys, values) if "fill" in parts else None
            sources = tier.resolve(cache, layer, selection, pool, self.requests, out=self.sources)
            if "attend" in parts:
                attend(
                    self.queries, keys, values, sources, self.table, self.lengths, HEAD_DIM**-0.5,
                    hot=(cache.keys, cache.values), workspace=self.workspace, out=self.out,
                )  # fmt: skip

    def resident(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        for selection in self.selections:
            attend(
                self.queries, keys, values, selection, self.table, self.lengths, HEAD_DIM**-0.5,
                workspace=self.workspace, out=self.out,
            )  # fmt: skip


def capture(call: Any) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, inputs: Inputs, steps: list[torch.Tensor]) -> list[float]:
    """Microseconds a layer of each step, with its page lists."""
    times = []
    for lists in steps:
        inputs.lists.copy_(lists)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / inputs.case.layers)
    return times


def spread(times: list[float]) -> dict[str, float]:
    return {
        "us": round(statistics.median(times), 2),
        "us_min": round(min(times), 2),
        "us_max": round(max(times), 2),
    }


def measure(inputs: Inputs, replaced: float, size: int, steps: list[torch.Tensor]) -> dict[str, Any]:
    """A row: time a layer, its parts, and what the cache served, after the warm-up."""
    found: dict[str, Any] = {"replaced": replaced, "cache_steps": size}
    before = 0.0
    for number, part in enumerate(PARTS):
        cache = inputs.cache(size)
        inputs.lists.copy_(steps[0])
        graph = capture(lambda cache=cache, number=number: inputs.step(cache, PARTS[: number + 1]))
        replay_us(graph, inputs, steps[:WARM_UP])
        counters = cache.counters.clone()
        times = spread(replay_us(graph, inputs, steps[WARM_UP:]))
        found[f"{part}_us"] = round(times["us"] - before, 2)
        before = times["us"]
        counted = cache.counted(since=counters)
        reads, link = counted["hits"] + counted["misses"], counted["fills"] + counted["host_reads"]
    link_bytes = link * cache.tile_bytes / (len(steps) - WARM_UP)
    found |= times
    found["hot_share"] = round(counted["hits"] / reads, 4)
    found["link_bytes_per_step"] = round(link_bytes)
    found["link_gb_s"] = round(link_bytes / (times["us"] * inputs.case.layers) / 1e3, 1)
    filled = counted["fills"] * cache.tile_bytes / (len(steps) - WARM_UP) / inputs.case.layers
    found["fill_gb_s"] = round(filled / found["fill_us"] / 1e3, 1) if filled else None
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=65_536)
    parser.add_argument("--steps", type=int, default=40, help="steps timed after the warm-up")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="cache, in tiles of a step")
    parser.add_argument("--commit", help="commit to name in the results")
    parser.add_argument("--machine", default="h200", help="short machine name in the file's name")
    parser.add_argument("--out", type=Path, help="folder to write the results file to")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("tier_step needs an NVIDIA GPU")
    case = Case(arguments.layers, arguments.batch, arguments.context, arguments.steps)
    inputs = Inputs(case)
    gib = inputs.memory.nbytes / 2**30
    print(f"host memory: {gib:.1f} GiB in {inputs.seconds:.1f} s", flush=True)
    shape = {"layers": case.layers, "batch": case.batch, "context": case.context, "budget": WIDTH * PAGE}
    rows = []
    steps_of = {}
    for replaced in REPLACED:
        lists = drifting_lists(case, replaced, inputs.table_cpu, inputs.generator)
        steps_of[replaced] = [next(lists).cuda() for _ in range(WARM_UP + case.steps)]
    pool = [page_view(inputs.host[0, which].float().bfloat16(), PAGE) for which in (0, 1)]
    graph = capture(lambda: inputs.resident(*pool))
    times = replay_us(graph, inputs, steps_of[REPLACED[0]])[WARM_UP:]
    rows.append({**shape, "impl": "resident", **spread(times)})
    print(f"resident: {rows[0]['us']:.1f} us a layer", flush=True)
    for size, replaced in product(arguments.sizes, REPLACED if arguments.sizes != [0] else REPLACED[:1]):
        found = measure(inputs, replaced, size, steps_of[replaced])
        rows.append({**shape, "impl": "host tier", **found})
        parts = ", ".join(f"{part} {found[f'{part}_us']:.1f}" for part in PARTS)
        print(
            f"cache {size} steps, {100 * replaced:.0f} % replaced: {found['us']:.1f} us a layer ({parts}), "
            f"hot {100 * found['hot_share']:.1f} %, {found['link_gb_s']} GB/s, "
            f"in fill {found['fill_gb_s']}",
            flush=True,
        )
    if arguments.out:
        path = results_file.write(
            "tier_step", rows, machine_name=arguments.machine, out=arguments.out,
            made_from=arguments.commit, copy_tb_s=results_file.copy_rate_tb_s(2),
        )  # fmt: skip
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
