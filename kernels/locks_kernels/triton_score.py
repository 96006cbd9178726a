"""Triton implementation of ``score``: records or keys -> page scores and their LSE."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .layout import Envelopes, Records, Summaries
from .triton_order import (
    basis_bits,
    basis_plane,
    basis_positions,
    bf16_bits,
    coefficient_bits,
    coefficient_plane,
    coefficient_positions,
    hadamard_on,
    load_codes,
)

PAGES_A_PROGRAM = 16


def score(
    queries: torch.Tensor,
    keys: torch.Tensor,
    records: Records | None,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float,
    scores: torch.Tensor,
    lse: torch.Tensor,
    open_pages: torch.Tensor | None = None,
) -> None:
    """Fill ``scores [rows, q_heads, max_pages]`` and ``lse [rows, q_heads]`` (fp32, contiguous).

    See :func:`locks_kernels.score.score` for the other arguments.
    """
    rows, q_heads, head_dim = queries.shape
    _, page_size, kv_heads, _ = keys.shape
    max_pages = page_table.shape[1]
    kind, planes = _planes(records, keys)
    rotated = isinstance(records, Summaries) and records.layout.rotated
    probe = queries
    if rotated:
        probe = queries.float() @ hadamard_on(head_dim, queries.device)
    layout = records.layout if isinstance(records, Summaries) else None
    grid = (triton.cdiv(max_pages, PAGES_A_PROGRAM), kv_heads, rows)
    _score_kernel[grid](
        queries,
        queries.stride(0),
        queries.stride(1),
        probe,
        probe.stride(0),
        probe.stride(1),
        keys,
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        *planes,
        page_table,
        page_table.stride(0),
        seq_lens if open_pages is None else open_pages,
        seq_lens,
        scores,
        sm_scale,
        max_pages,
        kv_heads,
        OPEN=open_pages is not None,
        KIND=kind,
        GROUP=q_heads // kv_heads,
        D=head_dim,
        B=page_size,
        R=layout.rank if layout else 1,
        BASIS_BITS=basis_bits(layout) if layout else 4,
        COEFFICIENT_BITS=coefficient_bits(layout) if layout else 8,
        ROTATED=rotated,
        P=PAGES_A_PROGRAM,
        BASIS_BYTES=planes[0].shape[-1],
        COEFFICIENT_BYTES=planes[1].shape[-1],
        SCALES=planes[3].shape[-1],
        num_warps=4,
    )
    _lse_kernel[(rows * q_heads,)](scores, lse, seq_lens, max_pages, q_heads, B=page_size, BLOCK=1024)


def _planes(records: Records | None, keys: torch.Tensor) -> tuple[int, tuple[torch.Tensor, ...]]:
    """Kind of record (0 summaries, 1 envelopes, 2 none) and basis, C, mu, scales, two order tables."""
    if isinstance(records, Summaries):
        layout = records.layout
        return 0, (
            basis_plane(records.basis, layout),
            coefficient_plane(records.coefficients, layout),
            records.centroid.view(torch.int8),
            records.scales,
            basis_positions(layout, keys.device),
            coefficient_positions(layout, keys.device),
        )
    if isinstance(records, Envelopes):
        return 1, (records.low, records.high, *(records.low,) * 4)
    return 2, (keys,) * 6


@triton.jit
def _score_kernel(
    queries,
    q_row,
    q_head,
    probe,
    p_row,
    p_head,
    keys,
    k_page,
    k_slot,
    k_head,
    basis,
    coefficients,
    centroid,
    scales,
    basis_order,
    coefficient_order,
    page_table,
    table_row,
    open_pages,
    seq_lens,
    scores,
    sm_scale,
    max_pages,
    kv_heads,
    OPEN: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    B: tl.constexpr,
    R: tl.constexpr,
    BASIS_BITS: tl.constexpr,
    COEFFICIENT_BITS: tl.constexpr,
    ROTATED: tl.constexpr,
    P: tl.constexpr,
    BASIS_BYTES: tl.constexpr,
    COEFFICIENT_BYTES: tl.constexpr,
    SCALES: tl.constexpr,
):
    """Scores of P logical pages of one (row, KV head); the group is padded to 16 heads."""
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    logical = tl.program_id(0) * P + tl.arange(0, P)
    length = tl.load(seq_lens + row).to(tl.int32)
    closed = (length - 1) // B
    group = tl.arange(0, 16)
    dims = tl.arange(0, D)
    in_group = group < GROUP
    result = tl.full([16, P], float("-inf"), tl.float32)

    first = tl.program_id(0) * P
    if first < closed:
        valid = logical < closed
        physical = tl.load(page_table + row * table_row + logical, mask=valid, other=0).to(tl.int64)
        q_at = probe + row * p_row + (head * GROUP + group[:, None]) * p_head + dims[None, :]
        q = tl.load(q_at, mask=in_group[:, None], other=0.0).to(tl.float32)
        if KIND == 0:
            record = physical * kv_heads + head
            closed_scores = _summary_scores(
                q, record, valid, basis, coefficients, centroid, scales, basis_order, coefficient_order,
                sm_scale, D, B, R, BASIS_BITS, COEFFICIENT_BITS, ROTATED, P,
                BASIS_BYTES, COEFFICIENT_BYTES, SCALES,
            )  # fmt: skip
        elif KIND == 1:
            record = physical * kv_heads + head
            at = record[:, None] * D + dims[None, :]
            low = tl.load(basis + at, mask=valid[:, None], other=0.0).to(tl.float32)
            high = tl.load(coefficients + at, mask=valid[:, None], other=0.0).to(tl.float32)
            upper = tl.dot(tl.maximum(q, 0.0), tl.trans(high), input_precision="ieee")
            upper += tl.dot(tl.minimum(q, 0.0), tl.trans(low), input_precision="ieee")
            closed_scores = upper * sm_scale
        else:
            closed_scores = tl.full([16, P], float("-inf"), tl.float32)
            for index in range(P):
                if first + index < closed:
                    page = tl.load(page_table + row * table_row + first + index).to(tl.int64)
                    exact = _key_scores(
                        q, keys + page * k_page + head * k_head, k_slot, B, sm_scale, D, B, False
                    )
                    here = (tl.arange(0, P) == index)[None, :]
                    closed_scores = tl.where(here, exact[:, None], closed_scores)
        result = tl.where(valid[None, :], closed_scores, result)

    if (first <= closed) & (closed < first + P):
        if OPEN:
            page = tl.load(open_pages + row).to(tl.int64)
        else:
            page = tl.load(page_table + row * table_row + closed).to(tl.int64)
        q_at = queries + row * q_row + (head * GROUP + group[:, None]) * q_head + dims[None, :]
        q = tl.load(q_at, mask=in_group[:, None], other=0.0).to(tl.float32)
        tokens = length - closed * B
        current = _key_scores(
            q, keys + page * k_page + head * k_head, k_slot, tokens, sm_scale, D, B, KIND == 1
        )
        result = tl.where((logical == closed)[None, :], current[:, None], result)

    q_heads = kv_heads * GROUP
    out_at = scores + (row * q_heads + head * GROUP + group[:, None]) * max_pages + logical[None, :]
    tl.store(out_at, result, mask=in_group[:, None] & (logical < max_pages)[None, :])


@triton.jit
def _summary_scores(
    q, record, valid, basis, coefficients, centroid, scales, basis_order, coefficient_order,
    sm_scale, D: tl.constexpr, B: tl.constexpr, R: tl.constexpr, BASIS_BITS: tl.constexpr,
    COEFFICIENT_BITS: tl.constexpr, ROTATED: tl.constexpr, P: tl.constexpr,
    BASIS_BYTES: tl.constexpr, COEFFICIENT_BYTES: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Paper Eq. 2 for ``[16 heads, P pages]``: q.mu * sm + log sum_i exp((V^T q).c_i * sm)."""
    dims = tl.arange(0, D)
    tokens = tl.arange(0, B)
    page_mask = valid[:, None]
    basis_row = record * (BASIS_BYTES if BASIS_BITS == 4 else D * R)
    # bf16 and fp16 queries and all codes are exact in tf32; a rotated query is not.
    precision: tl.constexpr = "tf32x3" if ROTATED else "tf32"

    mu = tl.load(centroid + record[:, None] * D + dims[None, :], mask=page_mask, other=0).to(tl.float32)
    mu_scale = tl.load(scales + record * SCALES, mask=valid, other=0.0).to(tl.float32)
    offset = tl.dot(q, tl.trans(mu), input_precision=precision) * (mu_scale * sm_scale)[None, :]

    first_column: tl.constexpr = 1 if ROTATED else 1 + B
    logits = tl.zeros([16, P, B], tl.float32)
    for column in tl.static_range(R):
        order = tl.load(basis_order + column * D + dims)
        codes = load_codes(basis + basis_row[:, None], order[None, :], page_mask, BASIS_BITS)
        z = tl.dot(q, tl.trans(codes), input_precision=precision)
        if BASIS_BITS != 16:
            scale = tl.load(scales + record * SCALES + first_column + column, mask=valid, other=0.0)
            z = z * scale.to(tl.float32)[None, :]
        c_order = tl.load(coefficient_order + column * B + tokens)
        c_row = coefficients + record[:, None] * COEFFICIENT_BYTES
        c = load_codes(c_row, c_order[None, :], page_mask, COEFFICIENT_BITS)
        logits += z[:, :, None] * c[None, :, :]
    if not ROTATED:
        row_scale = tl.load(
            scales + record[:, None] * SCALES + 1 + tokens[None, :], mask=page_mask, other=0.0
        )
        logits = logits * row_scale.to(tl.float32)[None, :, :]
    logits = logits * sm_scale
    peak = tl.max(logits, 2)
    return offset + peak + tl.log(tl.sum(tl.exp(logits - peak[:, :, None]), 2))


@triton.jit
def _key_scores(
    q, keys, k_slot, tokens, sm_scale, D: tl.constexpr, B: tl.constexpr, ENVELOPE: tl.constexpr
):
    """Exact LSE (or Quest's bound) of the first ``tokens`` keys of one page: ``[16]``."""
    slots = tl.arange(0, B)
    dims = tl.arange(0, D)
    valid = slots < tokens
    page = tl.load(keys + slots[:, None] * k_slot + dims[None, :], mask=valid[:, None], other=0.0)
    page = page.to(tl.float32)
    if ENVELOPE:
        page = tl.where(tl.abs(page) < float("inf"), page, 0.0)
        low = tl.min(tl.where(valid[:, None], page, float("inf")), 0)
        high = tl.max(tl.where(valid[:, None], page, float("-inf")), 0)
        low = bf16_bits(low)[1]
        high = bf16_bits(high)[1]
        return tl.sum(tl.maximum(q * low[None, :], q * high[None, :]), 1) * sm_scale
    logits = tl.dot(q, tl.trans(page), input_precision="ieee") * sm_scale
    logits = tl.where(valid[None, :], logits, float("-inf"))
    peak = tl.max(logits, 1)
    return peak + tl.log(tl.sum(tl.exp(logits - peak[:, None]), 1))


@triton.jit
def _lse_kernel(scores, lse, seq_lens, max_pages, q_heads, B: tl.constexpr, BLOCK: tl.constexpr):
    """Log-sum-exp over the pages of one (row, query head), in a fixed order."""
    program = tl.program_id(0).to(tl.int64)
    pages = (tl.load(seq_lens + program // q_heads).to(tl.int32) + B - 1) // B
    offsets = tl.arange(0, BLOCK)
    peak = tl.full([BLOCK], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, pages, BLOCK):
        page = start + offsets
        s = tl.load(scores + program * max_pages + page, mask=page < pages, other=float("-inf"))
        higher = tl.maximum(peak, s)
        total = total * tl.exp(peak - higher) + tl.exp(s - higher)
        peak = higher
    top = tl.max(peak, 0)
    tl.store(lse + program, top + tl.log(tl.sum(total * tl.exp(peak - top), 0)))
