"""Taps: what a layer selected, kept where it can be read after the forward.

A replayed CUDA graph runs no Python.  So the layer copies its selection into buffers of a fixed
address, inside the graph, and audits and traces read them once the replay has been launched.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from locks_kernels import Selection


@dataclass
class LayerTap:
    """Selection of one layer in the step that ran last.

    Attributes:
        logical: int32 ``[rows, kv_heads, width]``, as in :class:`locks_kernels.Selection`.
        counts: int32 ``[rows]``.
        queries: ``[rows, q_heads, head_dim]`` after RoPE, None where only the selection is kept.
        sm_scale: softmax scale of the layer, times its K scale where the pool is fp8.
    """

    logical: torch.Tensor
    counts: torch.Tensor
    queries: torch.Tensor | None
    sm_scale: float = 0.0

    @classmethod
    def allocate(
        cls,
        rows: int,
        kv_heads: int,
        width: int,
        query_shape: tuple[int, int] | None,
        query_dtype: torch.dtype,
        device: torch.device | str,
    ) -> LayerTap:
        """Buffers for ``rows`` requests; ``query_shape`` is ``(q_heads, head_dim)``."""
        queries = None
        if query_shape is not None:
            queries = torch.zeros(rows, *query_shape, dtype=query_dtype, device=device)
        return cls(
            torch.zeros(rows, kv_heads, width, dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
            queries,
        )

    def record(
        self, queries: torch.Tensor, selection: Selection, sm_scale: float, first_row: int = 0
    ) -> None:
        """Copy what rows ``first_row`` and on selected; can be captured in a CUDA graph."""
        rows = slice(first_row, first_row + len(queries))
        self.logical[rows].copy_(selection.logical)
        self.counts[rows].copy_(selection.counts)
        if self.queries is not None:
            self.queries[rows].copy_(queries)
        self.sm_scale = sm_scale

    def selection(self, rows: slice) -> Selection:
        """Selection of some rows, without physical pages: ``pages`` holds the logical ones."""
        return Selection(self.logical[rows], self.logical[rows], self.counts[rows])

    @property
    def nbytes(self) -> int:
        queries = 0 if self.queries is None else self.queries.nbytes
        return self.logical.nbytes + self.counts.nbytes + queries
