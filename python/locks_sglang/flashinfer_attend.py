"""Attention over the selected pages by FlashInfer's paged decode (``--sparse-decode-attend flashinfer``).

FlashInfer takes one list of pages a request, so every (request, KV head) becomes a request of its
own with one KV head.  In SGLang's pool, token before head, the tokens of a page and head lie
``kv_heads * head_dim`` elements apart; a strided view in which a "page" begins at every
(token, head) shows them as pages of one head without a copy.  Page ``p`` of head ``h`` is entry
``p * page_size * kv_heads + h`` of that view.

A plan is made once a batch size, for rows with full lists.  Rows with fewer pages are told by the
index pointers alone, which are written on the device before each step: FlashInfer's kernel bounds
its chunks by them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from locks_kernels import Selection, StepTables

from .buffers import Geometry
from .config import LocksError

_QUERY_TILE = 16
_MOST_CTAS = 1024
"""More chunks than FlashInfer cuts a batch into where it cuts at all (two a multiprocessor)."""
_PLAN_BYTES = 1 << 20

Wrapper = Any
"""FlashInfer's ``BatchDecodeWithPagedKVCacheWrapper``, or what a test puts in its place."""


def available() -> bool:
    """Whether FlashInfer can be imported here."""
    return importlib.util.find_spec("flashinfer") is not None


def head_pages(pool: torch.Tensor) -> torch.Tensor:
    """Page view ``[pages, B, kv_heads, d]`` -> ``[(pages * B - B + 1) * kv_heads, B, 1, d]``, no copy.

    Entry ``t * kv_heads + h`` holds the B tokens from token ``t`` on of KV head ``h``; entries overlap.

    Raises:
        LocksError: the pool is not in token-before-head order, or too large for int32 indices.
    """
    pages, page_size, kv_heads, head_dim = pool.shape
    tokens = pages * page_size
    if not pool.is_contiguous():
        raise LocksError("--sparse-decode-attend flashinfer needs a KV pool with token before head (NHD)")
    if tokens * kv_heads >= 2**31:
        raise LocksError(
            f"--sparse-decode-attend flashinfer numbers {tokens} tokens x {kv_heads} KV heads in 32 bits; "
            "legal: native, or a smaller --max-total-tokens"
        )
    row = kv_heads * head_dim
    shape = ((tokens - page_size + 1) * kv_heads, page_size, 1, head_dim)
    return pool.as_strided(shape, (head_dim, row, head_dim, 1), pool.storage_offset())


def bucket(rows: int) -> int:
    """Batch size whose plan serves ``rows`` requests: the next power of two."""
    return 1 << (rows - 1).bit_length()


def float_workspace_bytes(geometry: Geometry, rows: int) -> int:
    """Room for the unmerged chunks of ``rows`` requests, as FlashInfer's planner computes it."""
    group = geometry.q_heads // geometry.kv_heads
    tiles = max(_MOST_CTAS, 2 * bucket(rows) * geometry.kv_heads)
    return group * tiles * _QUERY_TILE * (geometry.head_dim + 1) * 4


@dataclass(frozen=True)
class _Buffers:
    """Static inputs of the kernels: indptr, indices, last page lengths, and where indices go.

    The last entry of ``indices`` takes what no row wants.
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor
    entries: torch.Tensor
    places: torch.Tensor
    queries: torch.Tensor
    workspace: torch.Tensor

    @classmethod
    def allocate(cls, geometry: Geometry, max_rows: int, device: torch.device | str) -> _Buffers:
        rows = bucket(max_rows)
        heads = rows * geometry.kv_heads
        lists = (rows, geometry.kv_heads, geometry.width)

        def table(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        return cls(
            indptr=table(heads + 1),
            indices=table(heads * geometry.width + 1),
            last_page_len=table(heads),
            entries=table(*lists),
            places=table(*lists, dtype=torch.int64),
            queries=table(rows, geometry.q_heads, geometry.head_dim, dtype=geometry.query_dtype),
            # FlashInfer wants it zeroed before its first use.
            workspace=table(float_workspace_bytes(geometry, rows), dtype=torch.uint8),
        )

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in vars(self).values())


def price(geometry: Geometry, max_rows: int) -> int:
    """Bytes on the device for batches of at most ``max_rows`` requests, without allocating them."""
    plans = bucket(max_rows).bit_length()
    return _Buffers.allocate(geometry, max_rows, "meta").nbytes + plans * _PLAN_BYTES


class FlashInferAttention:
    """Attends the pages of a selection; every row's count must be at most the width of its list.

    Args:
        geometry: shape of the attention.
        max_rows: largest batch of a call.
        page_size: tokens a page.
        pool_dtype: dtype of keys and values.
        device: device of the pool.
        make_wrapper: called with (workspace, indptr, indices, last page lengths).
    """

    def __init__(
        self,
        geometry: Geometry,
        max_rows: int,
        page_size: int,
        pool_dtype: torch.dtype,
        device: torch.device | str,
        make_wrapper: Callable[..., Wrapper] | None = None,
    ) -> None:
        self._geometry = geometry
        self._page_size = page_size
        self._pool_dtype = pool_dtype
        self._buffers = _Buffers.allocate(geometry, max_rows, device)
        self._make_wrapper = make_wrapper or _flashinfer_wrapper
        self._wrappers: dict[int, Wrapper] = {}
        self._heads = torch.arange(geometry.kv_heads, dtype=torch.int32, device=device).view(1, -1, 1)
        self._list = torch.arange(geometry.width, device=device)

    def prepare(self, step: StepTables) -> None:
        """Write the index pointers of a step and plan its batch size at first use; not in a graph."""
        rows, kv_heads = len(step.seq_lens), self._geometry.kv_heads
        size = bucket(rows)
        if size not in self._wrappers:
            self._wrappers[size] = self._plan(size)
        buffers, page_size = self._buffers, self._page_size
        present = (step.seq_lens + page_size - 1) // page_size
        counts = torch.minimum(present, step.budgets).repeat_interleave(kv_heads)
        last = (step.seq_lens - 1) % page_size + 1
        heads = rows * kv_heads
        buffers.last_page_len[:heads] = last.repeat_interleave(kv_heads)
        ends = counts.cumsum(0)
        buffers.indptr[1 : heads + 1] = ends
        buffers.indptr[heads + 1 : size * kv_heads + 1] = ends[-1]
        starts = (ends - counts).view(rows, kv_heads, 1)
        inside = self._list < counts.view(rows, kv_heads, 1)
        nowhere = len(buffers.indices) - 1
        buffers.places[:rows] = torch.where(inside, starts + self._list, nowhere)

    def attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        selection: Selection,
        sm_scale: float,
        v_scale: float = 1.0,
    ) -> torch.Tensor:
        """Attention of ``queries [rows, q_heads, d]`` over the selection of one layer; same shape.

        ``keys`` and ``values`` are page views, the scales those of ``locks_kernels.attend``;
        :meth:`prepare` has run for these rows.  Can be captured in a CUDA graph.
        """
        rows, q_heads, head_dim = queries.shape
        kv_heads, size = self._geometry.kv_heads, bucket(rows)
        buffers = self._buffers
        entries, places = buffers.entries[:rows], buffers.places[:rows]
        stride = self._page_size * kv_heads
        torch.add(self._heads, selection.pages, alpha=stride, out=entries)
        buffers.indices.scatter_(0, places.view(-1), entries.view(-1))
        if size != rows:
            buffers.queries[:rows].copy_(queries)
            queries = buffers.queries[:size]
        output = self._wrappers[size].run(
            queries.reshape(size * kv_heads, q_heads // kv_heads, head_dim),
            (head_pages(keys), head_pages(values)),
            # The plan's own scale is 1.
            q_scale=sm_scale,
            v_scale=None if v_scale == 1.0 else v_scale,
        )
        return output.view(size, q_heads, head_dim)[:rows]

    def _plan(self, size: int) -> Wrapper:
        geometry, buffers = self._geometry, self._buffers
        heads, width = size * geometry.kv_heads, geometry.width
        indptr = buffers.indptr[: heads + 1]
        last_page_len = buffers.last_page_len[:heads]
        wrapper = self._make_wrapper(buffers.workspace, indptr, buffers.indices, last_page_len)
        wrapper.plan(
            torch.arange(heads + 1, dtype=torch.int32) * width,
            torch.zeros(heads * width, dtype=torch.int32),
            torch.full((heads,), self._page_size, dtype=torch.int32),
            num_qo_heads=geometry.q_heads // geometry.kv_heads,
            num_kv_heads=1,
            head_dim=geometry.head_dim,
            page_size=self._page_size,
            q_data_type=geometry.query_dtype,
            kv_data_type=self._pool_dtype,
            sm_scale=1.0,
        )
        return wrapper


def _flashinfer_wrapper(
    workspace: torch.Tensor, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor
) -> Wrapper:
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        workspace,
        "NHD",
        use_cuda_graph=True,
        # The kernel of the other path does not bound its chunks by the index pointers.
        use_tensor_cores=True,
        paged_kv_indptr_buffer=indptr,
        paged_kv_indices_buffer=indices,
        paged_kv_last_page_len_buffer=last_page_len,
        backend="fa2",
    )
    # Each plan keeps its own integers, which the graphs read; 8 MiB is what a wrapper takes by itself.
    wrapper.reset_workspace_buffer(
        workspace, torch.empty(_PLAN_BYTES, dtype=torch.uint8, device=workspace.device)
    )
    return wrapper
