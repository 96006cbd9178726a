"""How many requests fit, and what takes the memory."""

from __future__ import annotations

from dataclasses import dataclass

from ..buffers import Geometry, TapPlan
from ..config import LocksConfig
from ..memory import step_bytes as buffer_bytes
from ..summaries import bytes_per_token
from .machines import Machine
from .model import PlanModel

HOT_SETS = 4
"""Least size of the hot-page cache, in what one step of the batch selects: the paper's smallest at a
hot share of 90 % (Table 3: 36.3 GiB for 58 requests that select 160 MiB each)."""
HOST_SHARE = 0.9
"""Share of the host's memory that KV may take; the rest is the system's and SGLang's."""
_LOOKUP_BYTES = 4  # of a tile, in the table that says where it is
_MOST = 1 << 16


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank's GPU, and of the host for it.

    ``hot`` is the hot-page cache of the host tier: what is left of the share of the GPU's memory that
    SGLang may take for weights and caches.
    """

    weights: int
    kv: int
    summaries: int
    buffers: int
    hot: int
    host: int

    @property
    def gpu(self) -> int:
        return self.weights + self.kv + self.summaries + self.buffers + self.hot


def need(model: PlanModel, config: LocksConfig, tier: str, batch: int, context: int) -> Memory:
    """What ``batch`` requests of ``context`` tokens need at least."""
    tokens = batch * context
    if tier == "dense":
        return Memory(model.weight_bytes, tokens * model.kv_bytes, 0, 0, 0, 0)
    records = tokens * bytes_per_token(config, model.head_dim, model.kv_heads, model.layers)
    buffers = _buffers(model, config, batch, context)
    if tier == "resident":
        return Memory(model.weight_bytes, tokens * model.kv_bytes, records, buffers, 0, 0)
    tiles = -(-context // config.page_size) * batch * model.layers * model.kv_heads
    open_pages = batch * config.page_size * model.kv_bytes
    hot = HOT_SETS * batch * min(config.budget, context) * model.kv_bytes
    return Memory(
        model.weight_bytes,
        open_pages,
        records,
        buffers + tiles * _LOOKUP_BYTES,
        hot,
        tokens * model.kv_bytes,
    )


def fits(memory: Memory, machine: Machine, gpu_share: float) -> bool:
    """Whether GPU and host have room; SGLang's ``--mem-fraction-static`` is the GPU's share."""
    return memory.gpu <= gpu_share * machine.gpu_bytes and memory.host <= HOST_SHARE * machine.host_bytes


def largest_batch(
    model: PlanModel, config: LocksConfig, machine: Machine, tier: str, context: int, gpu_share: float
) -> int:
    """Most requests of ``context`` tokens at a time; 0 where not even one fits."""
    low, high = 0, 1
    while high <= _MOST and fits(need(model, config, tier, high, context), machine, gpu_share):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if fits(need(model, config, tier, middle, context), machine, gpu_share):
            low = middle
        else:
            high = middle
    return low


def _buffers(model: PlanModel, config: LocksConfig, batch: int, context: int) -> int:
    """Tables and workspaces of a decode step, as SGLang is charged for them."""
    import torch

    geometry = Geometry.of(
        tokens=context,
        page_size=config.page_size,
        width=config.largest_budget // config.page_size,
        q_heads=model.q_heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        query_dtype=torch.bfloat16,
    )
    return buffer_bytes(config, geometry, TapPlan(), batch)
