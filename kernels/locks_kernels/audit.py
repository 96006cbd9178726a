"""retained_mass: what a selection really kept, measured against every key."""

from __future__ import annotations

import torch

from .score import PageScores, score
from .select import Selection


def retained_mass(
    queries: torch.Tensor,
    keys: torch.Tensor,
    selection: Selection,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float,
    *,
    scratch: PageScores | None = None,
) -> torch.Tensor:
    """Share of the exact attention mass that falls on the selected pages (paper section 2).

    Reads all keys of the given rows, so it is for audits of a few of them.  Arguments as in
    :func:`locks_kernels.attend.attend`; ``scratch`` as ``out`` of :func:`locks_kernels.score.score`.

    Returns:
        fp32 ``[rows, q_heads]`` in [0, 1]; 1 for a row that attends everything.
    """
    kv_heads, width = selection.pages.shape[1:]
    group = queries.shape[1] // kv_heads
    exact = score(queries, keys, None, page_table, seq_lens, sm_scale, out=scratch)
    entries = torch.arange(width, device=queries.device)
    listed = entries < selection.counts.view(-1, 1, 1)
    # Entries past the count may hold anything, and a list may be wider than the page table.
    chosen = selection.logical.clamp(0, exact.scores.shape[-1] - 1).long()
    scores = exact.scores.gather(-1, chosen.repeat_interleave(group, dim=1))
    shares = torch.where(listed, (scores - exact.lse.unsqueeze(-1)).exp(), 0.0)
    everything = selection.counts.view(-1, 1) > width
    return torch.where(everything, 1.0, shares.sum(-1).clamp_max(1.0))
