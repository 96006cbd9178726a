"""Scratch and output buffers of the GPU ops, sized once so that no step allocates."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from .attend_buffers import AttendBuffers

TILE_PAGES = 8
"""Pages that one warp of the score kernel takes at a time; scores are padded to it."""


@dataclass(frozen=True)
class Workspace:
    """Buffers for batches of at most ``max_rows`` requests of at most ``max_pages`` pages.

    One workspace serves all layers, since every op has finished with it when the next
    layer's begins; streams that run at the same time need one each.

    Attributes:
        scores: fp32 ``[q_heads * total_pages]``, page scores of the rows that are scored, packed.
        pages, logical: int32 ``[max_rows, kv_heads, width]``, the selection.
        counts: int32 ``[max_rows]``.
        attend: scratch of split attention.
    """

    max_rows: int
    q_heads: int
    kv_heads: int
    max_pages: int
    total_pages: int
    width: int
    head_dim: int
    scores: torch.Tensor
    pages: torch.Tensor
    logical: torch.Tensor
    counts: torch.Tensor
    attend: AttendBuffers

    @classmethod
    def allocate(
        cls,
        *,
        max_rows: int,
        q_heads: int,
        kv_heads: int,
        max_pages: int,
        width: int,
        head_dim: int,
        device: torch.device | str,
        total_pages: int | None = None,
    ) -> Workspace:
        """Allocate for the maxima of a deployment.

        Args:
            max_rows: largest batch.
            q_heads, kv_heads, head_dim: as the layers have them (per tensor-parallel rank).
            max_pages: pages of the longest request, the current page included.
            width: entries of a page list (the largest budget in pages).
            total_pages: most pages of all scored rows of a batch together; default
                ``max_rows * max_pages``, which always suffices.  Rows that no longer fit
                attend all their pages: right, but not faster.

        Raises:
            ValueError: a maximum is not positive, or q_heads is no multiple of kv_heads.
        """
        sizes = {"max_rows": max_rows, "kv_heads": kv_heads, "max_pages": max_pages, "width": width}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if q_heads < 1 or q_heads % kv_heads:
            raise ValueError(f"{q_heads} query heads are no multiple of {kv_heads} KV heads")
        tiles = -(-max_pages // TILE_PAGES)
        total = max_rows * tiles * TILE_PAGES
        if total_pages is not None:
            total = min(total, -(-total_pages // TILE_PAGES) * TILE_PAGES)

        def buffer(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        return cls(
            max_rows=max_rows,
            q_heads=q_heads,
            kv_heads=kv_heads,
            max_pages=max_pages,
            total_pages=total,
            width=width,
            head_dim=head_dim,
            scores=buffer(q_heads * total, dtype=torch.float32),
            pages=buffer(max_rows, kv_heads, width),
            logical=buffer(max_rows, kv_heads, width),
            counts=buffer(max_rows),
            attend=AttendBuffers.allocate(
                max_rows=max_rows, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, device=device
            ),
        )

    def check(self, rows: int, q_heads: int, kv_heads: int, max_pages: int, width: int) -> None:
        """Raise ValueError unless a batch of this shape fits."""
        for name, size, limit in (
            ("rows", rows, self.max_rows),
            ("pages a request", max_pages, self.max_pages),
        ):
            if size > limit:
                raise ValueError(f"{size} {name} do not fit a workspace made for at most {limit}")
        if (q_heads, kv_heads, width) != (self.q_heads, self.kv_heads, self.width):
            raise ValueError(
                f"the workspace was made for {self.q_heads} query heads, {self.kv_heads} KV heads and "
                f"lists of {self.width} pages, got {q_heads}, {kv_heads} and {width}"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, to be charged where the server budgets its memory."""
        values = (getattr(self, field.name) for field in fields(self))
        return sum(value.nbytes for value in values if isinstance(value, torch.Tensor | AttendBuffers))
