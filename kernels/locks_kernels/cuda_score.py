"""CUDA implementation of ``score``: csrc/score.cu and, for quest and oracle, csrc/page_scores.cu."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from . import build
from .layout import Envelopes, Records, Summaries
from .workspace import TILE_PAGES

QUERY_DTYPES = (torch.bfloat16, torch.float16)
MAX_GROUP = 16
MAX_ROWS = 1024
LARGE_RECORD = 1600
"""Bytes above which the stages of four heads leave room for too few warps."""


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
    """Fill ``scores`` and ``lse`` of all rows (fp32; rows of scores start at even addresses).

    See :func:`locks_kernels.score.score`.  Entries past a row's pages are left alone.
    """
    every_row = _no_budget(len(seq_lens), queries.device)
    tiles = len(seq_lens) * -(-page_table.shape[1] // TILE_PAGES)
    _launch(
        queries,
        keys,
        records,
        page_table,
        seq_lens,
        every_row,
        sm_scale,
        scores,
        (scores.stride(0), scores.stride(1)),
        tiles,
        open_pages=open_pages,
    )
    library(queries, keys, None).lse(
        scores.data_ptr(),
        scores.stride(0),
        scores.stride(1),
        lse.data_ptr(),
        seq_lens.data_ptr(),
        seq_lens.dtype == torch.int64,
        len(seq_lens),
        queries.shape[1],
        keys.shape[1],
        torch.cuda.current_stream(queries.device).cuda_stream,
    )


def score_packed(
    queries: torch.Tensor,
    keys: torch.Tensor,
    records: Records | None,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    budgets: torch.Tensor,
    sm_scale: float,
    scores: torch.Tensor,
    settled: bool = False,
    open_pages: torch.Tensor | None = None,
) -> None:
    """Score the rows whose budget leaves pages out, packed row after row, for ``select``.

    ``scores`` is fp32 ``[q_heads * total_pages]``, of which a row gets whole tiles of 8 pages, as long as
    they fit.  ``settled`` and ``open_pages`` as in ``score_select``.
    """
    tiles = scores.numel() // (queries.shape[1] * TILE_PAGES)
    _launch(
        queries,
        keys,
        records,
        page_table,
        seq_lens,
        budgets,
        sm_scale,
        scores,
        (0, 0),
        tiles,
        settled,
        open_pages,
    )


def _launch(
    queries: torch.Tensor,
    keys: torch.Tensor,
    records: Records | None,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    budgets: torch.Tensor,
    sm_scale: float,
    scores: torch.Tensor,
    score_strides: tuple[int, int],
    capacity: int,
    settled: bool = False,
    open_pages: torch.Tensor | None = None,
) -> None:
    check(queries, keys, records, page_table, seq_lens, budgets)
    rows, q_heads, _ = queries.shape
    kv_heads = keys.shape[2]
    if rows == 0:
        return
    # Not before the check: what is not legal is not to be compiled.
    loaded = library(queries, keys, records, open_pages is not None)
    common = (
        page_table.data_ptr(),
        page_table.stride(0),
        seq_lens.data_ptr(),
        seq_lens.dtype == torch.int64,
        budgets.data_ptr(),
        scores.data_ptr(),
        *score_strides,
        rows,
        kv_heads,
        q_heads // kv_heads,
        capacity,
        sm_scale,
    )
    stream = torch.cuda.current_stream(queries.device).cuda_stream
    vectors = (
        queries.data_ptr(),
        queries.stride(0),
        queries.stride(1),
        keys.data_ptr(),
        *keys.stride()[:3],
    )
    if isinstance(records, Summaries):
        storage = records.scales.untyped_storage()
        planes = [plane.data_ptr() for plane in records.planes]
        end = storage.data_ptr() + storage.nbytes()
        current = 0 if open_pages is None else open_pages.data_ptr()
        loaded.score(*vectors, *planes, end, *common, settled, current, stream)
    else:
        planes = [0, 0] if records is None else [plane.data_ptr() for plane in records.planes]
        loaded.page_scores(*vectors, *planes, *common, stream)


def library(
    queries: torch.Tensor, keys: torch.Tensor, records: Records | None, open_pages: bool = False
) -> Any:
    """The library for this geometry; compiles at its first call, so call it before a graph capture."""
    constants = {
        "HEAD_DIM": keys.shape[3],
        "PAGE": keys.shape[1],
        "QUERY_HALF": int(queries.dtype == torch.float16),
        "KEY_FP8": int(keys.dtype == torch.float8_e4m3fn),
    }
    if not isinstance(records, Summaries):
        return build.load("page_scores", QUEST=int(isinstance(records, Envelopes)), **constants)
    layout = records.layout
    group = queries.shape[1] // keys.shape[2]
    return build.load(
        "score",
        RANK=layout.rank,
        BASIS_BITS=8 if layout.suffix == "i8" else 4,
        ROTATED=int(layout.rotated),
        BLOCKS=_query_blocks(group),
        HEADS_TOGETHER=heads_together(records, group),
        **({"OPEN_PAGES": 1} if open_pages else {}),
        **constants,
    )


def heads_together(records: Summaries, group: int) -> int:
    """Neighbouring KV heads whose records are copied as one run, for ``group`` query heads each.

    What shared memory has room for, and at most four warps, one for each 8 query heads of a KV head.
    """
    kv_heads = records.basis.shape[-2]
    most = 4 // _query_blocks(group) if records.layout.bytes_per_page <= LARGE_RECORD else 1
    return next(heads for heads in (4, 2, 1) if heads <= most and kv_heads % heads == 0)


def _query_blocks(group: int) -> int:
    """Blocks of 8 query heads that one KV head has."""
    return -(-group // 8)


def _check_alignment(records: Summaries, group: int) -> None:
    # What the copies of the kernel start at; a pool of its own allocation always fits.
    starts = (16, 8, 16, 2 * heads_together(records, group))
    for plane, alignment in zip(records.planes, starts, strict=True):
        if plane.data_ptr() % alignment:
            raise ValueError(f"a plane of the records does not start at a multiple of {alignment} bytes")


def check(
    queries: torch.Tensor,
    keys: torch.Tensor,
    records: Records | None,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    budgets: torch.Tensor,
) -> None:
    """Raise ValueError, naming what is legal, for what the CUDA kernels do not take."""
    rows, q_heads, _ = queries.shape
    if rows > MAX_ROWS:
        raise ValueError(f"{rows} rows; legal: at most {MAX_ROWS}")
    if q_heads // keys.shape[2] > MAX_GROUP:
        raise ValueError(f"{q_heads // keys.shape[2]} query heads a KV head; legal: 1 to {MAX_GROUP}")
    if queries.dtype not in QUERY_DTYPES:
        raise ValueError(f"queries of dtype {queries.dtype}; legal on a GPU: bfloat16, float16")
    if keys.dtype not in (queries.dtype, torch.float8_e4m3fn):
        raise ValueError(f"keys of dtype {keys.dtype}; legal: that of the queries, or float8_e4m3fn")
    if isinstance(records, Summaries) and records.layout.suffix == "bf16":
        raise ValueError(
            f"format {records.layout.name} is for comparisons on the CPU; legal on a GPU: i4, i8 and h"
        )
    if records is not None and not all(plane.is_contiguous() for plane in records.planes):
        raise ValueError("records must be contiguous planes as Summaries.allocate makes them")
    if isinstance(records, Summaries):
        _check_alignment(records, q_heads // keys.shape[2])
    if any(stride % 8 for stride in queries.stride()[:2]) or queries.data_ptr() % 16:
        raise ValueError(f"strides of queries must be multiples of 8, got {queries.stride()}")
    if queries.stride(2) != 1 or keys.stride(3) != 1:
        raise ValueError("the head dimension of queries and keys must be contiguous")
    if any(stride % 2 for stride in keys.stride()[:3]) or keys.data_ptr() % 4:
        raise ValueError(f"strides of keys must be even, got {keys.stride()}")
    check_tables(rows, page_table, seq_lens, budgets)


def check_tables(
    rows: int, page_table: torch.Tensor, seq_lens: torch.Tensor, budgets: torch.Tensor
) -> None:
    """Raise ValueError unless the per-row tables have the dtypes and shapes of the contract."""
    if page_table.dtype != torch.int32 or page_table.shape[0] != rows or page_table.stride(1) != 1:
        raise ValueError(f"page_table must be int32 [{rows}, max_pages] with contiguous rows")
    if seq_lens.dtype not in (torch.int32, torch.int64) or seq_lens.shape != (rows,):
        raise ValueError(f"seq_lens must be int32 or int64 [{rows}], got {seq_lens.dtype} {seq_lens.shape}")
    if budgets.dtype != torch.int32 or budgets.shape != (rows,):
        raise ValueError(f"budgets must be int32 [{rows}], got {budgets.dtype} {budgets.shape}")
    if not (seq_lens.is_contiguous() and budgets.is_contiguous()):
        raise ValueError("seq_lens and budgets must be contiguous")


@cache
def _no_budget(rows: int, device: torch.device) -> torch.Tensor:
    """Budgets of zero pages, with which every row needs its scores."""
    return torch.zeros(rows, dtype=torch.int32, device=device)
