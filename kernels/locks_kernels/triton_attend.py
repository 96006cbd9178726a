"""Triton implementation of ``attend``: split-KV decode over page lists, then a merge."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .attend_buffers import AttendBuffers, multiprocessors, split
from .select import Selection

TOKENS_A_STEP = 64


def splits(rows: int, kv_heads: int, device: torch.device) -> int:
    """Splits of every row's tokens: enough programs for the GPU, from the shape alone."""
    if device.type == "cpu":
        return 3
    return split(rows * kv_heads, {1: 2 * multiprocessors(device)})[0]


def attend(
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
    buffers: AttendBuffers,
    hot: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Fill ``output [rows, q_heads, d]`` and fp32 ``lse [rows, q_heads]``, both contiguous.

    See :func:`locks_kernels.attend.attend` for the rest.
    """
    rows, q_heads, head_dim = queries.shape
    _, page_size, kv_heads, value_dim = values.shape
    parts = splits(rows, kv_heads, queries.device)
    partial_output, partial_lse = buffers.output, buffers.sums
    _split_kernel[(parts, kv_heads, rows)](
        queries,
        queries.stride(0),
        queries.stride(1),
        keys,
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        values,
        values.stride(0),
        values.stride(1),
        values.stride(2),
        *(hot or (keys, values)),
        selection.pages,
        selection.pages.shape[-1],
        selection.counts,
        page_table,
        page_table.stride(0),
        seq_lens,
        partial_output,
        partial_lse,
        sm_scale,
        rows,
        kv_heads,
        GROUP=q_heads // kv_heads,
        D=head_dim,
        DV=value_dim,
        B=page_size,
        STEP=TOKENS_A_STEP,
        HOT=hot is not None,
        num_warps=4,
    )
    _merge_kernel[(rows * q_heads,)](
        partial_output, partial_lse, output, lse, v_scale, rows * q_heads, parts, DV=value_dim, num_warps=2
    )


@triton.jit
def _split_kernel(
    queries,
    q_row,
    q_head,
    keys,
    k_page,
    k_slot,
    k_head,
    values,
    v_page,
    v_slot,
    v_head,
    hot_keys,
    hot_values,
    pages,
    width,
    counts,
    page_table,
    table_row,
    seq_lens,
    partial_output,
    partial_lse,
    sm_scale,
    rows,
    kv_heads,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    B: tl.constexpr,
    STEP: tl.constexpr,
    HOT: tl.constexpr,
):
    """One split of one (row, KV head): unmerged output and LSE of its share of the tokens."""
    split = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    count = tl.load(counts + row).to(tl.int32)
    length = tl.load(seq_lens + row).to(tl.int32)
    tokens = (count - 1) * B + (length - 1) % B + 1
    page_list = pages + (row * kv_heads + head) * width
    if count > width:
        page_list = page_table + row * table_row

    steps = (tokens + STEP - 1) // STEP
    share = (steps + tl.num_programs(0) - 1) // tl.num_programs(0)
    first = split * share
    last = tl.minimum(first + share, steps)

    group = tl.arange(0, 16)
    in_group = (group < GROUP)[:, None]
    dims = tl.arange(0, D)
    value_dims = tl.arange(0, DV)
    q_at = queries + row * q_row + (head * GROUP + group[:, None]) * q_head + dims[None, :]
    q = tl.load(q_at, mask=in_group, other=0.0)

    peak = tl.full([16], -1.0e30, tl.float32)
    total = tl.zeros([16], tl.float32)
    acc = tl.zeros([16, DV], tl.float32)
    for step in range(first, last):
        token = step * STEP + tl.arange(0, STEP)
        valid = token < tokens
        page = tl.load(page_list + token // B, mask=valid, other=0).to(tl.int64)
        slot = token % B
        k_at = keys + page * k_page + slot * k_slot + head * k_head
        if HOT:  # a negative page is a tile of the second pool
            k_at = tl.where(page < 0, hot_keys + ((-1 - page) * B + slot) * D, k_at)
        k = tl.load(k_at[:, None] + dims[None, :], mask=valid[:, None], other=0.0).to(q.dtype)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * sm_scale
        logits = tl.where(valid[None, :], logits, float("-inf"))
        higher = tl.maximum(peak, tl.max(logits, 1))
        weights = tl.exp(logits - higher[:, None])
        decay = tl.exp(peak - higher)
        v_at = values + page * v_page + slot * v_slot + head * v_head
        if HOT:
            v_at = tl.where(page < 0, hot_values + ((-1 - page) * B + slot) * DV, v_at)
        v = tl.load(v_at[:, None] + value_dims[None, :], mask=valid[:, None], other=0.0).to(q.dtype)
        acc = acc * decay[:, None] + tl.dot(weights.to(q.dtype), v, input_precision="ieee")
        total = total * decay + tl.sum(weights, 1)
        peak = higher

    q_heads = kv_heads * GROUP
    at = (split * rows + row) * q_heads + head * GROUP + group
    empty = total == 0.0
    part_lse = tl.where(empty, float("-inf"), peak + tl.log(tl.where(empty, 1.0, total)))
    tl.store(partial_lse + at, part_lse, mask=group < GROUP)
    out = acc / tl.where(empty, 1.0, total)[:, None]
    tl.store(partial_output + at[:, None] * DV + value_dims[None, :], out, mask=in_group)


@triton.jit
def _merge_kernel(partial_output, partial_lse, output, lse, v_scale, heads, parts, DV: tl.constexpr):
    """Combine the splits of one (row, query head) in their order."""
    program = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, DV)
    peak = tl.full([], -1.0e30, tl.float32)
    total = tl.zeros([], tl.float32)
    acc = tl.zeros([DV], tl.float32)
    for part in range(parts):
        at = part * heads + program
        part_lse = tl.load(partial_lse + at)
        higher = tl.maximum(peak, part_lse)
        decay = tl.exp(peak - higher)
        weight = tl.exp(part_lse - higher)
        acc = acc * decay + weight * tl.load(partial_output + at * DV + dims)
        total = total * decay + weight
        peak = higher
    tl.store(output + program * DV + dims, (acc / total * v_scale).to(output.dtype.element_ty))
    tl.store(lse + program, peak + tl.log(total))
