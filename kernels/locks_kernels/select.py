"""select: page scores -> the pages that each KV head attends (paper sections 2 and 4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import dispatch
from .reference import group_shares, select_pages
from .score import PageScores

ATTEND_ALL = 2**31 - 1
"""Budget that makes a row attend all its pages, whatever the width of the lists."""


@dataclass
class Selection:
    """Pages to attend.

    Attributes:
        pages: int32 ``[rows, kv_heads, width]``, physical pages in ascending logical order,
            so the page of the current token is entry ``counts - 1``; past it 0, or what was
            there before in buffers that a caller passed.
        logical: int32, same shape, the logical indices of those pages.
        counts: int32 ``[rows]``, pages attended, equal for all heads of a row.  A count
            above ``width`` means that the row attends every page of its page table and its
            lists are not filled.
    """

    pages: torch.Tensor
    logical: torch.Tensor
    counts: torch.Tensor


def select(
    page_scores: PageScores,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    budgets: torch.Tensor,
    *,
    kv_heads: int,
    page_size: int,
    width: int,
    out: Selection | None = None,
    impl: str = "auto",
) -> Selection:
    """Choose the pages of every (request, KV head).

    The score of page j for a KV head is the share-average over its G query heads,
    ``mean_g exp(s_g(j) - LSE_g)``.  The sink page and the page of the current token are
    always in; the other slots go to the highest scores, ties to the lower page index.

    Args:
        page_scores: what :func:`locks_kernels.score.score` returned.
        page_table: int32 ``[rows, max_pages]``.
        seq_lens: int ``[rows]``, tokens of each request, the current one included.
        budgets: int32 ``[rows]``, pages that a row may attend: at least 2 and at most
            ``width``, or ``ATTEND_ALL``.
        kv_heads: KV heads; must divide the query heads.
        page_size: tokens a page.
        width: entries a list has room for.
        out: results of an earlier call with the same shapes, filled again, so that a GPU need
            not allocate.
        impl: ``auto``, ``cuda``, ``triton`` or ``torch`` (see ``dispatch.choose``).

    Returns:
        :class:`Selection`; a row with no more pages than its budget attends all of them.

    Raises:
        ValueError: a budget below two pages, or above ``width`` and not ``ATTEND_ALL`` (on the
            CPU; on a GPU the caller has to see to it, since a look would wait for the device).
    """
    if out is None:
        out = empty_selection(page_table, kv_heads, width)
    chosen = dispatch.choose(impl, page_table.device)
    lists = (out.pages, out.logical, out.counts)
    scores, lse = page_scores.scores, page_scores.lse
    if chosen == "cuda":
        from . import cuda_select

        cuda_select.select(scores, lse, page_table, seq_lens, budgets, scores.shape[1], page_size, *lists)
        return out
    if chosen == "triton":
        from . import triton_select

        shares = scores.new_empty(len(seq_lens), kv_heads, scores.shape[2])
        triton_select.select(
            scores.contiguous(), lse, page_table, seq_lens, budgets, kv_heads, page_size, shares, *lists
        )
        return out
    return _select_torch(page_scores, page_table, seq_lens, budgets, page_size, out)


def empty_selection(page_table: torch.Tensor, kv_heads: int, width: int) -> Selection:
    """A zeroed selection for the rows of a page table."""
    rows = page_table.shape[0]
    pages = torch.zeros(rows, kv_heads, width, dtype=torch.int32, device=page_table.device)
    counts = torch.zeros(rows, dtype=torch.int32, device=page_table.device)
    return Selection(pages, torch.zeros_like(pages), counts)


def _select_torch(
    page_scores: PageScores,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    budgets: torch.Tensor,
    page_size: int,
    out: Selection,
) -> Selection:
    pages, logical, counts = out.pages, out.logical, out.counts
    kv_heads, width = pages.shape[1:]
    lengths, limits = seq_lens.tolist(), budgets.tolist()
    for row, (length, budget) in enumerate(zip(lengths, limits, strict=True)):
        present = -(-length // page_size)
        count = min(present, budget)
        if width < budget < ATTEND_ALL:
            raise ValueError(
                f"a budget of {budget} pages; legal: at least 2, at most {width}, or ATTEND_ALL"
            )
        counts[row] = count
        if count > width:
            continue
        shares = group_shares(page_scores.scores[row, :, :present], page_scores.lse[row], kv_heads)
        chosen = select_pages(shares, count)
        logical[row, :, :count] = chosen
        pages[row, :, :count] = page_table[row][chosen]
    return out
