"""Buffers of the decode step on a GPU: allocated once, priced before the KV pool is sized."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from locks_kernels import StepTables
from locks_kernels.workspace import Workspace


@dataclass(frozen=True)
class Geometry:
    """Shape of a rank's decode attention: heads per rank, longest request and list in pages."""

    q_heads: int
    kv_heads: int
    head_dim: int
    max_pages: int
    width: int


@dataclass(frozen=True)
class StepBuffers:
    """Tables and kernel workspace for batches of at most ``max_rows`` requests."""

    tables: StepTables
    workspace: Workspace

    @classmethod
    def allocate(cls, geometry: Geometry, max_rows: int, device: torch.device | str) -> StepBuffers:
        tables = StepTables.allocate(max_rows, geometry.max_pages, device)
        workspace = Workspace.allocate(
            max_rows=max_rows,
            q_heads=geometry.q_heads,
            kv_heads=geometry.kv_heads,
            max_pages=geometry.max_pages,
            width=geometry.width,
            head_dim=geometry.head_dim,
            device=device,
        )
        return cls(tables, workspace)

    @property
    def max_rows(self) -> int:
        return len(self.tables.seq_lens)

    @property
    def nbytes(self) -> int:
        return self.tables.nbytes + self.workspace.nbytes


def price(geometry: Geometry, max_rows: int) -> int:
    """Bytes that the buffers will take, without allocating them."""
    return StepBuffers.allocate(geometry, max_rows, "meta").nbytes if max_rows else 0
