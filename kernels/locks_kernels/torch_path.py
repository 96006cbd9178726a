"""The CPU's way through score and attend: what ``reference.py`` says, with fewer passes over memory.

Records stay in integer codes until after the first product; scales, the softmax scale and the
Hadamard turn are applied to the small side.  ``reference.py`` is the specification, and the
tests hold the two together.
"""

from __future__ import annotations

from functools import cache

import torch

from .layout import Envelopes, Records, Summaries, hadamard, unpack_basis, unpack_coefficients
from .reference import score_pages as reference_score_pages


def score_pages(
    queries: torch.Tensor, records: Records, pages: torch.Tensor, sm_scale: float
) -> torch.Tensor:
    """Scores of one request's complete pages: ``[q_heads, d]`` -> fp32 ``[q_heads, n]``.

    ``records`` are those of a layer, ``pages`` int64 ``[n]`` the physical pages in logical order.
    """
    if isinstance(records, Envelopes):
        return reference_score_pages(queries, records.gather(pages), sm_scale)
    layout = records.layout
    basis, coefficients, centroid, scales = (_by_head(plane, pages) for plane in records.planes)
    heads, count = basis.shape[:2]
    scales = scales.float()
    mu_scale, row_scale, column_scale = _split_scales(records, scales)

    grouped = queries.float().unflatten(0, (heads, -1)) * sm_scale  # [H, G, d]
    if layout.rotated:
        grouped = grouped @ _hadamard(layout.head_dim, grouped.device)
    columns = unpack_basis(layout, basis).transpose(-1, -2).reshape(heads, -1, layout.head_dim)
    projected = (grouped @ columns.transpose(1, 2)).unflatten(-1, (count, -1))  # [H, G, n, r]
    if column_scale is not None:
        projected *= column_scale.unsqueeze(1)
    by_page = projected.transpose(1, 2).flatten(0, 1)  # [H * n, G, r]
    within = by_page @ unpack_coefficients(layout, coefficients).flatten(0, 1).transpose(1, 2)
    if row_scale is not None:
        within *= row_scale.flatten(0, 1).unsqueeze(1)
    scores = within.logsumexp(-1).unflatten(0, (heads, count))  # [H, n, G]
    scores += centroid.view(torch.int8).float() @ grouped.transpose(1, 2) * mu_scale
    return scores.transpose(1, 2).flatten(0, 1)


@cache
def _hadamard(head_dim: int, device: torch.device) -> torch.Tensor:
    return hadamard(head_dim, device)


def _by_head(plane: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """``[pages, H, width]`` -> contiguous ``[H, n, width]``, so that products need no copy."""
    return plane.index_select(0, pages).transpose(0, 1).contiguous()


def _split_scales(
    records: Summaries, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Scales of mu ``[..., 1]``, of the rows of C ``[..., B]`` and of the columns ``[..., r]``."""
    layout = records.layout
    rows = 0 if layout.rotated else layout.page_size
    return (
        scales[..., :1],
        scales[..., 1 : 1 + rows] if rows else None,
        scales[..., 1 + rows :] if layout.scale_count > 1 + rows else None,
    )


def attend_pages(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: torch.Tensor,
    last_tokens: int,
    sm_scale: float,
    hot: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention over listed pages; arguments and results as in ``reference.attend_pages``.

    A negative entry is the tile ``~entry`` of ``hot``, keys and values ``[tiles, B, d]``.
    """
    heads, page_size = keys.shape[2], keys.shape[1]
    tokens = (pages.shape[1] - 1) * page_size + last_tokens
    grouped = queries.float().unflatten(0, (heads, -1)) * sm_scale
    output = grouped.new_empty(*grouped.shape[:2], values.shape[-1])
    lse = grouped.new_empty(grouped.shape[:2])
    for head in range(heads):
        picked = _pick(keys, hot and hot[0], pages[head], head)[:tokens].float()
        logits = grouped[head] @ picked.T
        torch.logsumexp(logits, -1, out=lse[head])
        shares = (logits - lse[head].unsqueeze(-1)).exp_()
        picked = _pick(values, hot and hot[1], pages[head], head)[:tokens].float()
        torch.mm(shares, picked, out=output[head])
    return output.flatten(0, 1), lse.flatten()


def _pick(pool: torch.Tensor, hot: torch.Tensor | None, pages: torch.Tensor, head: int) -> torch.Tensor:
    """Tokens of one head's tiles, ``[tokens, d]``, from the pool and, where negative, from ``hot``."""
    if hot is None:
        return pool[:, :, head].index_select(0, pages).flatten(0, 1)
    picked = pool[:, :, head].index_select(0, pages.clamp(min=0))
    picked[pages < 0] = hot[~pages[pages < 0]]
    return picked.flatten(0, 1)
