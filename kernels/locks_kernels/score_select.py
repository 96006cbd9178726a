"""score and select in one call, which spends no work on rows that attend everything."""

from __future__ import annotations

import torch

from .layout import Records
from .score import score
from .select import Selection, select
from .workspace import Workspace


def score_select(
    queries: torch.Tensor,
    keys: torch.Tensor,
    records: Records | None,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    budgets: torch.Tensor,
    sm_scale: float,
    *,
    width: int,
    workspace: Workspace | None = None,
) -> Selection:
    """Choose the pages of every (request, KV head) for one decode step of one layer.

    Arguments as in :func:`locks_kernels.score.score` and :func:`locks_kernels.select.select`;
    ``workspace`` holds the buffers of the GPU implementations, the torch path needs none.
    """
    page_size, kv_heads = keys.shape[1], keys.shape[2]
    present = (seq_lens + page_size - 1) // page_size
    counts = torch.minimum(present, budgets.to(present.dtype)).to(torch.int32)
    pages = torch.zeros(len(counts), kv_heads, width, dtype=torch.int32, device=page_table.device)
    logical = torch.zeros_like(pages)

    whole = min(width, page_table.shape[1])
    slots = torch.arange(whole, dtype=torch.int32, device=page_table.device)
    filled = (slots < counts.unsqueeze(-1)) & (counts.unsqueeze(-1) <= width)
    pages[..., :whole] = (page_table[:, :whole] * filled).unsqueeze(1)
    logical[..., :whole] = (slots * filled).unsqueeze(1)

    rows = (present > counts).nonzero().flatten()
    if rows.numel():
        lengths = seq_lens[rows]
        page_scores = score(queries[rows], keys, records, page_table[rows], lengths, sm_scale)
        chosen = select(
            page_scores,
            page_table[rows],
            lengths,
            budgets[rows],
            kv_heads=kv_heads,
            page_size=page_size,
            width=width,
        )
        pages[rows], logical[rows] = chosen.pages, chosen.logical
    return Selection(pages, logical, counts)
