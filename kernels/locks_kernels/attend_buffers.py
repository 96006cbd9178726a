"""Scratch of split attention and how a batch is split, from its shape alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

MAX_BLOCKS = 512
"""Most blocks of a launch whose rows are split; larger batches are not split at all."""

MAX_CLUSTER = 8
"""Most blocks that merge through each other's shared memory (what every Hopper GPU allows)."""


@dataclass(frozen=True)
class AttendBuffers:
    """Unmerged results of split attention, for batches of at most ``max_rows`` requests.

    Attributes:
        output: fp32 ``[parts, group, head_dim]``, one part a block at most.
        sums: fp32 ``[parts, group, 2]``, maximum and sum of a part's weights.
        arrivals: int32, finished parts of every (row, KV head); zero between launches.
    """

    output: torch.Tensor
    sums: torch.Tensor
    arrivals: torch.Tensor

    @classmethod
    def allocate(
        cls, *, max_rows: int, q_heads: int, kv_heads: int, head_dim: int, device: torch.device | str
    ) -> AttendBuffers:
        parts = max(MAX_BLOCKS, max_rows * kv_heads)
        group = q_heads // kv_heads

        def buffer(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        return cls(
            buffer(parts, group, head_dim),
            buffer(parts, group, 2),
            buffer(max_rows * kv_heads * MAX_CLUSTER, dtype=torch.int32),
        )

    def fits(self, rows: int, q_heads: int, kv_heads: int, head_dim: int) -> bool:
        group = q_heads // kv_heads
        return self.output.shape[1:] == (group, head_dim) and (
            rows * kv_heads * MAX_CLUSTER <= self.arrivals.shape[0]
        )

    @property
    def nbytes(self) -> int:
        return self.output.nbytes + self.sums.nbytes + self.arrivals.nbytes


def split(row_heads: int, blocks: int) -> tuple[int, int]:
    """Splits of every (row, KV head) and blocks a cluster, for a GPU that holds ``blocks`` at a time.

    One wave of blocks: the tokens of a (row, KV head) are dealt evenly to its splits.  Splits
    past one cluster come in whole clusters.
    """
    each = max(1, min(blocks, MAX_BLOCKS) // row_heads)
    if each >= MAX_CLUSTER:
        return each // MAX_CLUSTER * MAX_CLUSTER, MAX_CLUSTER
    cluster = 1 << (each.bit_length() - 1)
    return cluster, cluster


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
