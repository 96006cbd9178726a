"""attend: softmax attention over the selected pages of the KV pool."""

from __future__ import annotations

import torch

from . import dispatch
from .attend_buffers import AttendBuffers
from .select import Selection
from .torch_path import attend_pages
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
    hot: tuple[torch.Tensor, torch.Tensor] | None = None,
    budgets: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    impl: str = "auto",
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
        hot: keys and values ``[tiles, B, d]`` of a second pool, contiguous, of the same dtype: a
            negative entry e of ``selection.pages`` is its tile ``~e``, whatever the head.  The result
            is that of the tile in the first pool, bit for bit.
        budgets: those given to a ``score_select`` with ``settled`` that was the call just before, on
            the same stream: rows that attend everything then do not wait for it.
        workspace: buffers of the GPU implementations, which allocate without it; the torch path
            needs none.
        out: output and LSE of the shapes below, contiguous, to be filled instead of new ones.
        impl: ``auto``, ``cuda``, ``triton`` or ``torch`` (see ``dispatch.choose``).

    Returns:
        output ``[rows, q_heads, d]`` in the dtype of the queries, and fp32 LSE
        ``[rows, q_heads]`` in natural-log units.

    Raises:
        ValueError: shapes or dtypes do not fit; the message names what is legal.
    """
    rows, q_heads, head_dim = queries.shape
    kv_heads = keys.shape[2]
    if q_heads % kv_heads:
        raise ValueError(f"{q_heads} query heads are no multiple of {kv_heads} KV heads")
    if out is None:
        output = torch.empty(
            *queries.shape[:2], values.shape[-1], dtype=queries.dtype, device=queries.device
        )
        lse = torch.empty(queries.shape[:2], dtype=torch.float32, device=queries.device)
    else:
        output, lse = out
    chosen = dispatch.choose(impl, queries.device, keys.dtype)
    if hot is not None:
        _check_hot(keys, values, *hot)
    arguments = (queries, keys, values, selection, page_table, seq_lens, sm_scale, v_scale, output, lse)
    if chosen == "torch":
        _attend_torch(*arguments, hot)
    elif rows:
        buffers = workspace.attend if workspace is not None else None
        if buffers is None:
            buffers = AttendBuffers.allocate(
                max_rows=rows, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, device=queries.device
            )
        if not buffers.fits(rows, q_heads, kv_heads, head_dim):
            raise ValueError(f"the workspace was not made for {rows} rows of these heads")
        if chosen == "cuda":
            from . import cuda_attend

            cuda_attend.attend(*arguments, buffers, budgets, hot)
        else:
            from . import triton_attend

            triton_attend.attend(*arguments, buffers, hot)
    return output, lse


def _check_hot(
    keys: torch.Tensor, values: torch.Tensor, hot_keys: torch.Tensor, hot_values: torch.Tensor
) -> None:
    for name, pool, hot in (("keys", keys, hot_keys), ("values", values, hot_values)):
        tile = [pool.shape[1], pool.shape[3]]
        if list(hot.shape[1:]) != tile or hot.dtype != pool.dtype or not hot.is_contiguous():
            raise ValueError(
                f"hot {name} {list(hot.shape)} {hot.dtype}; legal: [tiles, {tile[0]}, {tile[1]}] "
                f"{pool.dtype}, contiguous"
            )


def _attend_torch(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    selection: Selection,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float,
    v_scale: float,
    output: torch.Tensor,
    lse: torch.Tensor,
    hot: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    page_size, kv_heads = keys.shape[1], keys.shape[2]
    width = selection.pages.shape[-1]
    lengths, counts = seq_lens.tolist(), selection.counts.tolist()
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        if count > width:
            pages = page_table[row, :count].expand(kv_heads, count)
        else:
            pages = selection.pages[row, :, :count]
        out, row_lse = attend_pages(
            queries[row], keys, values, pages.long(), (length - 1) % page_size + 1, sm_scale, hot
        )
        output[row], lse[row] = out * v_scale, row_lse
