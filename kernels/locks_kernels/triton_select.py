"""Triton implementation of ``select``: page scores -> the pages every KV head attends.

A radix search on the bits of the shares (which are not negative, so their bits order as
integers): four passes find the share of the last page that is chosen, one more writes the
lists in ascending order.  Ties at that share go to the lower page index.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


def select(
    scores: torch.Tensor,
    lse: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    budgets: torch.Tensor,
    kv_heads: int,
    page_size: int,
    shares: torch.Tensor,
    pages: torch.Tensor,
    logical: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Fill ``pages`` and ``logical [rows, kv_heads, width]`` and ``counts [rows]`` (int32).

    ``shares`` is scratch, fp32 ``[rows, kv_heads, max_pages]``.  See
    :func:`locks_kernels.select.select` for the other arguments.
    """
    rows, q_heads, max_pages = scores.shape
    _select_kernel[(kv_heads, rows)](
        scores,
        lse,
        page_table,
        page_table.stride(0),
        seq_lens,
        budgets,
        shares,
        pages,
        logical,
        counts,
        max_pages,
        pages.shape[-1],
        kv_heads,
        GROUP=q_heads // kv_heads,
        B=page_size,
        BLOCK=BLOCK,
        num_warps=8,
    )


@triton.jit
def _select_kernel(
    scores,
    lse,
    page_table,
    table_row,
    seq_lens,
    budgets,
    shares,
    pages,
    logical,
    counts,
    max_pages,
    width,
    kv_heads,
    GROUP: tl.constexpr,
    B: tl.constexpr,
    BLOCK: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    present = (tl.load(seq_lens + row).to(tl.int32) + B - 1) // B
    count = tl.minimum(present, tl.load(budgets + row).to(tl.int32))
    if head == 0:
        tl.store(counts + row, count)
    list_at = (row * kv_heads + head) * width
    offsets = tl.arange(0, BLOCK)
    if count <= width:
        share_at = shares + (row * kv_heads + head) * max_pages
        wanted = tl.maximum(count - 2, 0)  # the sink and the current page are in anyway
        everything = present <= count
        threshold = tl.zeros([], tl.int32)
        if not everything:
            _write_shares(
                scores, lse, share_at, (row * kv_heads + head) * GROUP, present, max_pages, GROUP, BLOCK
            )
            tl.debug_barrier()
            for digit in tl.static_range(4):
                threshold, wanted = _next_digit(share_at, present, threshold, wanted, 24 - 8 * digit, BLOCK)
            if count <= 2:
                threshold = tl.full([], 0x7FFFFFFF, tl.int32)  # above any share: the ends alone
        # Now threshold is the smallest chosen share and `wanted` how many that equal it are in.
        written = tl.zeros([], tl.int32)
        equal_seen = tl.zeros([], tl.int32)
        for start in range(0, present, BLOCK):
            page = start + offsets
            inner = (page > 0) & (page < present - 1)
            ends = (page < present) & ((page == 0) | (page == present - 1))
            bits = tl.load(share_at + page, mask=inner & (not everything), other=0.0).to(
                tl.int32, bitcast=True
            )
            equal = inner & (bits == threshold)
            rank = equal_seen + tl.cumsum(equal.to(tl.int32), 0)
            chosen = ends | (inner & (everything | (bits > threshold))) | (equal & (rank <= wanted))
            slot = written + tl.cumsum(chosen.to(tl.int32), 0) - 1
            physical = tl.load(page_table + row * table_row + page, mask=chosen, other=0)
            tl.store(logical + list_at + slot, page, mask=chosen)
            tl.store(pages + list_at + slot, physical, mask=chosen)
            written += tl.sum(chosen.to(tl.int32), 0)
            equal_seen += tl.sum(equal.to(tl.int32), 0)
        for start in range(0, width, BLOCK):
            slot = start + offsets
            unused = (slot >= count) & (slot < width)
            tl.store(logical + list_at + slot, 0, mask=unused)
            tl.store(pages + list_at + slot, 0, mask=unused)


@triton.jit
def _write_shares(
    scores, lse, share_at, first_head, present, max_pages, GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    """Share-average combine: mean over the group of exp(score - LSE), for one KV head."""
    for start in range(0, present, BLOCK):
        page = start + tl.arange(0, BLOCK)
        mask = page < present
        total = tl.zeros([BLOCK], tl.float32)
        for member in tl.static_range(GROUP):
            s = tl.load(scores + (first_head + member) * max_pages + page, mask=mask, other=float("-inf"))
            total += tl.exp(s - tl.load(lse + first_head + member))
        share = total / GROUP
        # A NaN (from a broken query) would have no place in the order; it counts as no share.
        tl.store(share_at + page, tl.where(share >= 0, share, 0.0), mask=mask)


@triton.jit
def _next_digit(share_at, present, prefix, wanted, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """One radix pass: extend ``prefix`` by the 8 bits at SHIFT of the wanted-th largest share."""
    offsets = tl.arange(0, BLOCK)
    bins = tl.arange(0, 256)
    histogram = tl.zeros([256], tl.int32)
    for start in range(0, present, BLOCK):
        page = start + offsets
        inner = (page > 0) & (page < present - 1)
        bits = tl.load(share_at + page, mask=inner, other=0.0).to(tl.int32, bitcast=True)
        if SHIFT < 24:
            inner = inner & ((bits >> (SHIFT + 8)) == (prefix >> (SHIFT + 8)))
        digit = (bits >> SHIFT) & 255
        histogram += tl.histogram(tl.where(inner, digit, 0), 256)
        # Pages that do not take part were counted in bin 0.
        histogram -= tl.where(bins == 0, BLOCK - tl.sum(inner.to(tl.int32), 0), 0)
    above = tl.sum(histogram, 0) - tl.cumsum(histogram, 0)  # shares in higher bins
    reached = (above < wanted) & (above + histogram >= wanted)
    digit = tl.max(tl.where(reached, bins, 0), 0)
    return prefix | (digit << SHIFT), wanted - tl.sum(tl.where(bins == digit, above, 0), 0)
