"""snapshot in Triton: one launch a decode step."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .select import ATTEND_ALL
from .snapshot import StepTables

BLOCK_PAGES = 1024


@triton.jit
def _snapshot_kernel(
    token_table,
    token_stride,
    slots,
    seq_lens,
    policy,
    page_table,
    page_stride,
    out_seq_lens,
    out_budgets,
    counters,
    max_pages,
    min_len,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    ALL: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    length = tl.load(seq_lens + row).to(tl.int32)
    pages = tl.minimum((length + PAGE - 1) // PAGE, max_pages)
    first = tl.program_id(1) * BLOCK
    if first < pages:
        page = first + tl.arange(0, BLOCK)
        inside = page < pages
        token = tl.load(token_table + slot * token_stride + page.to(tl.int64) * PAGE, mask=inside, other=0)
        tl.store(page_table + row.to(tl.int64) * page_stride + page, token // PAGE, mask=inside)
    if first == 0:
        budget = tl.load(policy + slot)
        budget = tl.where(length < min_len, ALL, budget)
        tl.store(out_seq_lens + row, length)
        tl.store(out_budgets + row, budget)
        if slot != 0:
            attended = tl.minimum(pages, budget)
            sparse = (attended < pages).to(tl.int64)
            tl.atomic_add(counters, sparse)
            tl.atomic_add(counters + 1, 1 - sparse)
            tl.atomic_add(counters + 2, attended.to(tl.int64))
            tl.atomic_add(counters + 3, pages.to(tl.int64))


def snapshot(
    token_table: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    policy: torch.Tensor,
    out: StepTables,
    counters: torch.Tensor,
    *,
    page_size: int,
    min_len: int,
) -> None:
    """As :func:`locks_kernels.snapshot.snapshot`."""
    max_pages = out.page_table.shape[1]
    grid = (len(slots), triton.cdiv(max_pages, BLOCK_PAGES))
    _snapshot_kernel[grid](
        token_table,
        token_table.stride(0),
        slots,
        seq_lens,
        policy,
        out.page_table,
        out.page_table.stride(0),
        out.seq_lens,
        out.budgets,
        counters,
        max_pages,
        min_len,
        PAGE=page_size,
        BLOCK=BLOCK_PAGES,
        ALL=ATTEND_ALL,
    )
