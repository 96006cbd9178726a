"""snapshot: what all layers of a decode step share, copied out of the server's tables."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import dispatch
from .select import ATTEND_ALL

COUNTERS = ("rows_sparse", "rows_dense", "pages_attended", "pages_available")
"""Meaning of the entries of the counter tensor."""


@dataclass(frozen=True)
class StepTables:
    """Page table, lengths and budgets of a batch.

    Attributes:
        page_table: int32 ``[rows, max_pages]``, physical page of every logical page; entries past
            a row's pages are undefined.
        seq_lens: int32 ``[rows]``, tokens of each request, the current one included.
        budgets: int32 ``[rows]``, pages that each row may attend, or ``ATTEND_ALL``.
    """

    page_table: torch.Tensor
    seq_lens: torch.Tensor
    budgets: torch.Tensor

    @classmethod
    def allocate(cls, rows: int, max_pages: int, device: torch.device | str) -> StepTables:
        """Tables for at most ``rows`` requests of at most ``max_pages`` pages."""

        def table(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        return cls(table(rows, max_pages), table(rows), table(rows))

    def rows(self, count: int) -> StepTables:
        """Views of the first ``count`` rows."""
        return StepTables(self.page_table[:count], self.seq_lens[:count], self.budgets[:count])

    @property
    def nbytes(self) -> int:
        return self.page_table.nbytes + self.seq_lens.nbytes + self.budgets.nbytes


def snapshot(
    token_table: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    policy: torch.Tensor,
    out: StepTables,
    counters: torch.Tensor,
    *,
    page_size: int,
    min_len: int = 0,
    impl: str = "auto",
) -> None:
    """Fill ``out`` for a decode batch, and count its rows and pages.

    A copy and not a view, since the server may overwrite its token table while the step that
    was planned from it still runs.

    Args:
        token_table: int32 ``[slots, context]``, pool slot of every token of every request
            (SGLang's ``req_to_token``).  A page's tokens are consecutive pool slots.
        slots: int ``[rows]``, row of ``token_table`` of each request; 0 is a padding row, which
            is not counted.
        seq_lens: int ``[rows]``.
        policy: int32 ``[slots]``, budget in pages of each request slot, or ``ATTEND_ALL``.
        out: tables with exactly ``rows`` rows.
        counters: int64 ``[4]``, added to as named by ``COUNTERS``.
        page_size: tokens a page.
        min_len: requests with fewer tokens attend all their pages.
        impl: ``auto``, ``triton`` or ``torch``; there is no CUDA variant, since the launch is
            what this op costs.

    Raises:
        ValueError: ``out`` has another number of rows than ``slots``.
    """
    if len(out.seq_lens) != len(slots):
        raise ValueError(f"tables for {len(out.seq_lens)} rows, batch of {len(slots)}")
    if dispatch.choose(impl, slots.device) == "torch":
        _snapshot_torch(token_table, slots, seq_lens, policy, out, counters, page_size, min_len)
        return
    from . import triton_snapshot

    triton_snapshot.snapshot(
        token_table, slots, seq_lens, policy, out, counters, page_size=page_size, min_len=min_len
    )


def _snapshot_torch(
    token_table: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    policy: torch.Tensor,
    out: StepTables,
    counters: torch.Tensor,
    page_size: int,
    min_len: int,
) -> None:
    tokens = out.page_table.shape[1] * page_size
    first = token_table[slots, :tokens:page_size]
    out.page_table[:, : first.shape[1]] = first // page_size
    out.seq_lens.copy_(seq_lens)
    short = out.seq_lens < min_len
    out.budgets.copy_(torch.where(short, ATTEND_ALL, policy[slots]))

    real = slots != 0
    available = ((out.seq_lens + page_size - 1) // page_size * real).long()
    attended = torch.minimum(available, out.budgets.long())
    sparse = (attended < available).sum()
    counters += torch.stack([sparse, real.sum() - sparse, attended.sum(), available.sum()])
