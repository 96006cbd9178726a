"""CUDA implementation of ``select``: csrc/select.cu."""

from __future__ import annotations

from typing import Any

import torch

from . import build
from .cuda_score import MAX_GROUP, check_tables
from .workspace import TILE_PAGES


def select(
    scores: torch.Tensor,
    lse: torch.Tensor | None,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    budgets: torch.Tensor,
    q_heads: int,
    page_size: int,
    pages: torch.Tensor,
    logical: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Fill ``pages`` and ``logical [rows, kv_heads, width]`` and ``counts [rows]`` (int32).

    Scores are dense, ``[rows, q_heads, max_pages]`` with ``lse [rows, q_heads]``, or of one dimension,
    packed as ``cuda_score.score_packed`` leaves them; without ``lse`` it is computed here.  See
    :func:`locks_kernels.select.select` for the rest.
    """
    rows, kv_heads, width = pages.shape
    check_tables(rows, page_table, seq_lens, budgets)
    if q_heads // kv_heads > MAX_GROUP:
        raise ValueError(f"{q_heads // kv_heads} query heads a KV head; legal: 1 to {MAX_GROUP}")
    if rows == 0:
        return
    if scores.stride(-1) != 1:
        raise ValueError("the scores of a head must be contiguous")
    packed = scores.dim() == 1
    strides = (0, 0) if packed else (scores.stride(0), scores.stride(1))
    library(q_heads // kv_heads).select(
        scores.data_ptr(),
        *strides,
        0 if lse is None else lse.data_ptr(),
        scores.numel() // (q_heads * TILE_PAGES) if packed else 0,
        page_table.data_ptr(),
        page_table.stride(0),
        seq_lens.data_ptr(),
        seq_lens.dtype == torch.int64,
        budgets.data_ptr(),
        pages.data_ptr(),
        logical.data_ptr(),
        counts.data_ptr(),
        rows,
        kv_heads,
        page_size,
        width,
        page_table.shape[1],
        torch.cuda.current_stream(scores.device).cuda_stream,
    )


def library(group: int) -> Any:
    """The library for a number of query heads a KV head; compiles at its first call."""
    return build.load("select", GROUP=group)
