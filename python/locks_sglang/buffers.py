"""Buffers of the decode step on a GPU: allocated once, priced before the KV pool is sized."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from locks_kernels import StepTables
from locks_kernels.workspace import Workspace

from .taps import LayerTap

EAGER_ROWS = 32
"""Rows that the kernels take at a time where there are no CUDA graphs to say how many they must."""


@dataclass(frozen=True)
class Geometry:
    """Shape of a rank's decode attention: heads per rank, longest request and list in pages."""

    q_heads: int
    kv_heads: int
    head_dim: int
    max_pages: int
    width: int
    query_dtype: torch.dtype

    @classmethod
    def of(
        cls, *, tokens: int, page_size: int, width: int, q_heads: int, kv_heads: int, head_dim: int,
        query_dtype: torch.dtype,
    ) -> Geometry:  # fmt: skip
        """Geometry for requests of at most ``tokens`` tokens; scores are written in pairs of pages."""
        pages = -(-tokens // page_size)
        return cls(q_heads, kv_heads, head_dim, pages + pages % 2, width, query_dtype)

    def workspace(self, rows: int, device: torch.device | str) -> Workspace:
        """Scratch of the kernels for ``rows`` requests at a time."""
        return Workspace.allocate(
            max_rows=rows,
            q_heads=self.q_heads,
            kv_heads=self.kv_heads,
            max_pages=self.max_pages,
            width=self.width,
            head_dim=self.head_dim,
            device=device,
        )


@dataclass(frozen=True)
class TapPlan:
    """Layers whose selection is looked at after the forward, by their index in the pool.

    Attributes:
        audited: layers whose queries are kept too.
        traced: layers whose selection alone is kept.
    """

    audited: tuple[int, ...] = ()
    traced: tuple[int, ...] = ()

    def allocate(self, geometry: Geometry, rows: int, device: torch.device | str) -> dict[int, LayerTap]:
        return {
            layer: LayerTap.allocate(
                rows,
                geometry.kv_heads,
                geometry.width,
                (geometry.q_heads, geometry.head_dim) if layer in self.audited else None,
                geometry.query_dtype,
                device,
            )
            for layer in sorted({*self.audited, *self.traced})
        }


@dataclass(frozen=True)
class StepBuffers:
    """Tables and taps for batches of at most ``max_rows`` requests."""

    tables: StepTables
    taps: dict[int, LayerTap]

    @classmethod
    def allocate(
        cls, geometry: Geometry, plan: TapPlan, max_rows: int, device: torch.device | str
    ) -> StepBuffers:
        tables = StepTables.allocate(max_rows, geometry.max_pages, device)
        return cls(tables, plan.allocate(geometry, max_rows, device))

    @property
    def max_rows(self) -> int:
        return len(self.tables.seq_lens)

    @property
    def nbytes(self) -> int:
        return self.tables.nbytes + sum(tap.nbytes for tap in self.taps.values())
