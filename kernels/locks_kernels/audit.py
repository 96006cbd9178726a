"""retained_mass: what a selection really kept, measured against every key."""

from __future__ import annotations

import torch

from .score import score
from .select import Selection


def retained_mass(
    queries: torch.Tensor,
    keys: torch.Tensor,
    selection: Selection,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float,
) -> torch.Tensor:
    """Share of the exact attention mass that falls on the selected pages (paper section 2).

    Reads all keys of the given rows, so it is for audits of a few of them.  Arguments as in
    :func:`locks_kernels.attend.attend`.

    Returns:
        fp32 ``[rows, q_heads]`` in [0, 1]; 1 for a row that attends everything.
    """
    kv_heads, width = selection.pages.shape[1:]
    group = queries.shape[1] // kv_heads
    exact = score(queries, keys, None, page_table, seq_lens, sm_scale)
    shares = (exact.scores - exact.lse.unsqueeze(-1)).exp()
    chosen = selection.logical.long().repeat_interleave(group, dim=1)
    entries = torch.arange(width, device=chosen.device)
    listed = entries < selection.counts.view(-1, 1, 1)
    # A list may have room for more pages than the page table has columns.
    chosen = chosen.clamp_max(shares.shape[-1] - 1)
    mass = (shares.gather(-1, chosen) * listed).sum(-1)
    everything = selection.counts.view(-1, 1) > width
    return torch.where(everything, torch.ones_like(mass), mass)
