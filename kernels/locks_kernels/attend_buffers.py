"""Scratch of split attention and how a batch is split, from its shape alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch

MAX_BLOCKS = 512
"""Most blocks of a launch; more only where every (row, KV head) has one of the smallest clusters."""

MAX_CLUSTER = 16
"""Most blocks that merge through each other's shared memory."""


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


def split(row_heads: int, clusters: Mapping[int, int]) -> tuple[int, int]:
    """Splits of every (row, KV head) and blocks a cluster.

    ``clusters[n]`` says how many clusters of n blocks the GPU holds at a time.  One wave of
    blocks, since a second one would wait for the first: the tokens of a (row, KV head) are
    dealt evenly to its splits, in the largest clusters of which each gets at least one.  Where not
    even the smallest suffice, each gets one of those, in several waves.
    """
    for size in sorted(clusters, reverse=True):
        each = min(clusters[size], MAX_BLOCKS // size) // row_heads
        if each:
            return each * size, size
    smallest = min(clusters)
    return smallest, smallest


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
