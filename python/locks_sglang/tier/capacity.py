"""How many pages a host tier has, and how large its hot cache is, from the memory of host and GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from locks_kernels.hot_cache import HotCache, tile_bytes

from ..config import LocksConfig, LocksError
from . import limits, ranks
from .host_memory import HostMemory, with_cuda
from .limits import RESERVE, Request, gib
from .staging import PrefillStaging
from .topology import ROOT, host_nodes, node_of_gpu, nodes

STEPS_HELD = 4
"""Hot cache that is taken where none is asked for, in what a step of the largest graph reads.  More
holds pages longer than their selection drifts away from them."""
STAGED_BESIDE = 16384
"""Tokens of other requests that a prefill on the GPU has room for beside the longest context."""
ANY_LOCK = 1 << 62
TRIED = 1 << 30
"""Largest limit of locked memory that is tried by registering more."""


@dataclass(frozen=True)
class TierShape:
    """What a rank's pool and its decode steps look like.

    Attributes:
        layers, kv_heads, head_dim, page_size, dtype: of the pool.
        width: entries of the longest page list.
        usual_width: entries of a page list of the server's budget.
        step_rows: rows of the largest CUDA graph.
        request_slots: rows of SGLang's token table.
        staged_tokens: tokens that a prefill forward may have in GPU memory.
    """

    layers: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    width: int
    usual_width: int
    step_rows: int
    request_slots: int
    staged_tokens: int

    @property
    def tile_bytes(self) -> int:
        """K and V of one page of one layer and KV head."""
        return tile_bytes(self.page_size, self.head_dim, self.dtype)

    @property
    def page_bytes(self) -> int:
        """K and V of one page, all layers and heads of this rank."""
        return self.layers * self.kv_heads * self.tile_bytes

    @property
    def most_hot(self) -> int:
        """Bytes of the hot cache where none is asked for and the GPU has room."""
        tiles = self.step_rows * self.usual_width * self.layers * self.kv_heads
        return STEPS_HELD * tiles * self.tile_bytes

    @property
    def staged_pages(self) -> int:
        """Pages that prefill has room for on the GPU."""
        return PrefillStaging.pages_for(self.staged_tokens, self.page_size)

    def gpu_bytes(self, pages: int, hot_bytes: int) -> int:
        """GPU memory of the tier beside records: tables, hot and open tiles, staging."""
        cache = HotCache.allocate(
            layers=self.layers, pages=pages, kv_heads=self.kv_heads, page_size=self.page_size,
            head_dim=self.head_dim, capacity=hot_bytes // self.tile_bytes, max_rows=self.request_slots,
            width=self.width, open_rows=self.request_slots, dtype=self.dtype, device="meta",
        )  # fmt: skip
        # The sources of a layer's lists are as long as what it misses.
        return (
            cache.nbytes
            + cache.missing.nbytes
            + PrefillStaging.price(
                self.staged_tokens, self.page_size, self.kv_heads, self.head_dim, self.dtype
            )
        )


@dataclass(frozen=True)
class Split:
    """Pages of the pool in host memory, and bytes of the hot cache on the GPU."""

    pages: int
    hot_bytes: int


def split(
    shape: TierShape, *, host_bytes: int, gpu_bytes: int, record_bytes: int, hot_bytes: int | None
) -> Split:
    """Divide the GPU's memory between the hot cache and what every page of the host pool needs there.

    Args:
        shape: of the rank.
        host_bytes: for the pool.
        gpu_bytes: free for the tier, after weights, buffers of the decode steps and SGLang's slack.
        record_bytes: of the summaries of a page, all layers and heads.
        hot_bytes: asked for; None: what the pages of the host leave, at most ``shape.most_hot``, and half
            of the GPU's memory where they would leave less.

    Raises:
        LocksError: not even one request's page would fit.
    """
    fixed = shape.gpu_bytes(0, 0)
    # Those of a layer's staged pages.
    staged_records = shape.staged_pages * record_bytes // shape.layers
    # Beside its records, a page has an entry for each tile and its generation.
    page_on_gpu = record_bytes + shape.gpu_bytes(1, 0) - fixed
    tile_in_hot = shape.gpu_bytes(0, shape.tile_bytes) - fixed
    left = gpu_bytes - fixed - staged_records

    def charged(nbytes: int) -> int:
        return nbytes // shape.tile_bytes * tile_in_hot

    most = shape.most_hot if hot_bytes is None else hot_bytes
    least = min(most, max(left, 0) // 2) if hot_bytes is None else hot_bytes
    pages = min(host_bytes // shape.page_bytes, (left - charged(least)) // page_on_gpu)
    if pages < 2:
        raise LocksError(
            f"the host tier needs {gib(fixed + staged_records)} on the GPU for {shape.request_slots} "
            f"request slots and prefill, and {gib(charged(least))} for hot tiles, of {gib(gpu_bytes)} that "
            "are free; and "
            f"host memory for two pages of {gib(shape.page_bytes)}, of {gib(host_bytes)}; legal: a smaller "
            "--max-running-requests or --sparse-decode-hot-gib, a larger --mem-fraction-static or "
            "--sparse-decode-host-gib"
        )
    if hot_bytes is None:
        room = (left - pages * page_on_gpu) // tile_in_hot * shape.tile_bytes
        return Split(pages, min(most, room))
    return Split(pages, hot_bytes)


def host_bytes(config: LocksConfig, device: torch.device, root: Path = ROOT) -> int:
    """Host memory of a rank's pool: as asked for, else an equal share of what is free less a reserve.

    Every rank must call it; all get the same.

    Raises:
        LocksError: nothing is free.
    """
    if config.host_gib is not None:
        return int(config.host_gib * 2**30)

    def share() -> int:
        requests = ranks.gather(Request(ranks.rank(), node_of(device, root), 0))
        return room(requests, root, lockable(device, root))

    found = min(ranks.gather(share()))
    if found <= 0:
        raise LocksError(
            f"no host memory is free for a KV pool beside a reserve of {gib(RESERVE)}; legal: end what "
            "uses memory, or --sparse-decode-host-gib"
        )
    return found


def room(requests: Sequence[Request], root: Path, memlock: int) -> int:
    """The largest size that all requests can have at once."""
    found = limits.find(requests, root, memlock, RESERVE)
    return min(limit.nbytes // len(limit.requests) for limit in found)


def node_of(device: torch.device, root: Path = ROOT) -> int:
    """NUMA node of the host memory for a device: of a CPU, the first that has CPUs."""
    if device.type == "cpu":
        return host_nodes(nodes(root))[0]
    facts = torch.cuda.get_device_properties(device)
    bus = f"{facts.pci_domain_id:08x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
    return node_of_gpu(bus, root)


def lockable(device: torch.device, root: Path = ROOT) -> int:
    """Bytes that this process may lock, as far as registering memory with a GPU counts as locking.

    Drivers differ from what locks memory elsewhere, so a small limit is tried: memory a little larger
    is registered and given back.  Nothing is locked without a GPU.
    """
    limit = limits.memlock_limit()
    if device.type == "cpu" or limit is None:
        return ANY_LOCK
    if limit > TRIED:
        return limit
    try:
        HostMemory(limit + 1, node=node_of(device, root), registration=with_cuda(), root=root).close()
    except LocksError:
        return limit
    return ANY_LOCK


_split: Split | None = None


def remember(found: Split) -> None:
    """Keep what this process's pool was sized for, until its state is made."""
    global _split
    _split = found


def remembered() -> Split | None:
    return _split
