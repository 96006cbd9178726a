"""attend: softmax attention over the selected pages of the KV pool."""

from __future__ import annotations

import torch

from .reference import attend_pages
from .select import Selection
from .workspace import Workspace


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    selection: Selection,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float,
    v_scale: float = 1.0,
    *,
    workspace: Workspace | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode attention of one query a request over its selected pages.

    Args:
        queries: ``[rows, q_heads, d]``.
        keys, values: page views ``[pages, B, kv_heads, d]`` of the layer's pools.
        selection: what :func:`locks_kernels.select.select` returned.
        page_table: int32 ``[rows, max_pages]``, read for rows that attend everything.
        seq_lens: int ``[rows]``; the current page holds ``(seq_len - 1) % B + 1`` tokens.
        sm_scale: softmax scale, times the K scale of a scaled fp8 pool.
        v_scale: scale of the values, for a scaled fp8 pool.
        workspace: buffers of the GPU implementations; the torch path needs none.

    Returns:
        output ``[rows, q_heads, d]`` in the dtype of the queries, and fp32 LSE
        ``[rows, q_heads]`` in natural-log units.
    """
    page_size, kv_heads = keys.shape[1], keys.shape[2]
    width = selection.pages.shape[-1]
    output = torch.empty(*queries.shape[:2], values.shape[-1], dtype=queries.dtype, device=queries.device)
    lse = torch.empty(queries.shape[:2], dtype=torch.float32, device=queries.device)
    lengths, counts = seq_lens.tolist(), selection.counts.tolist()
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        if count > width:
            pages = page_table[row, :count].expand(kv_heads, count)
        else:
            pages = selection.pages[row, :, :count]
        out, row_lse = attend_pages(
            queries[row], keys, values, pages.long(), (length - 1) % page_size + 1, sm_scale
        )
        output[row], lse[row] = out * v_scale, row_lse
    return output, lse
