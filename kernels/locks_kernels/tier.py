"""Decode from a KV pool in host memory, with the tiles that are read often on the GPU.

The host pool holds everything, always.  What lies on the GPU beside it are copies: the hot tiles, and the
page that each request is writing.  So residency decides how fast a step is and never what it computes.

    begin_step            once a decode step: clock, open pages, generations
    a layer:
      write_open          the new token's K and V (they go to the host pool too)
      resolve             page lists -> sources: where each tile is read from; misses get slots, and are
                          copied there from the host pool
      attend(hot=...)     over both pools
    invalidate            after every forward that is not a decode step: its pages were written

Nothing here allocates (but results without ``out``), waits for the device, or has a shape that depends on
what the cache holds, so all of it can be captured in a CUDA graph.  Which slot a tile gets may differ from
run to run on a GPU; what is read never does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType

import torch

from . import dispatch, torch_tier
from .hot_cache import HotCache
from .select import Selection


def begin_step(
    cache: HotCache,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    requests: torch.Tensor,
    *,
    impl: str = "auto",
) -> None:
    """Begin a decode step, before any of its writes.

    The clock moves on.  Where a request's open page is not on the GPU (its first step, or another
    wrote the page since), its tiles of all layers are copied there.  The pages that the step will write
    get a new generation, so do not :func:`invalidate` them.

    Args:
        cache: the cache.
        keys, values: the host pool, page views ``[pages, B, kv_heads, d]`` a layer, of equal strides.
        page_table: int32 ``[rows, max_pages]``, physical page of every logical page.
        seq_lens: int ``[rows]``, tokens of each request, the current one included.
        requests: int ``[rows]``, request slot of each row, below ``open_rows`` (where that is not 0).
            Rows that pad a batch may share one.
        impl: ``auto``, ``triton`` or ``torch``; there is no CUDA variant.

    Raises:
        ValueError: the pool has another geometry than the cache.
    """
    _check_pool(cache, keys[0], values[0])
    if len(keys) != cache.layers or len(values) != cache.layers:
        raise ValueError(f"a pool of {len(keys)} layers; legal: {cache.layers}, as the cache")
    _implementation(impl, seq_lens.device).begin_step(cache, keys, values, page_table, seq_lens, requests)


def invalidate(cache: HotCache, slots: torch.Tensor, *, impl: str = "auto") -> None:
    """Say that pool slots, int ``[n]``, were written: the tiles of their pages are stale, in all layers.

    To be called with the slots of every forward but decode steps, before the next step.  A page that was
    freed and is used again is written again, so it never serves what it held before.
    """
    _implementation(impl, slots.device).invalidate(cache, slots)


def write_open(
    cache: HotCache,
    layer: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    seq_lens: torch.Tensor,
    requests: torch.Tensor,
    *,
    impl: str = "auto",
) -> None:
    """Write the current token of each request into its open page on the GPU.

    Args:
        cache: a cache with ``open_rows``.
        layer: index in the pool.
        keys, values: ``[rows, kv_heads, d]``, of any dtype; stored in the pool's.
        seq_lens, requests: as for :func:`begin_step`.
    """
    _implementation(impl, keys.device).write_open(cache, layer, keys, values, seq_lens, requests)


def resolve(
    cache: HotCache,
    layer: int,
    selection: Selection,
    pool: tuple[torch.Tensor, torch.Tensor] | None,
    requests: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    impl: str = "auto",
) -> Selection:
    """Say where the tiles of a layer's page lists are read from, and take in those that are missing.

    A tile that is read is kept for this step and the next.  Missing ones get the slots of those that were
    not read for longest among ``LOOK`` looked at for each; where there are too few, the rest is read from
    the host pool.  The tile of two requests with a common prefix is taken in once.

    The last page of a row is its open page, which is never in the cache.  Rows that attend everything
    without a list (``counts`` above the width) are read from the host pool; they take nothing in.

    Args:
        cache: the cache.
        layer: index in the pool.
        selection: what ``select`` returned.
        pool: keys and values of the layer in the host pool, page views ``[pages, B, kv_heads, d]``; None:
            nothing is copied, to find out what a cache would hold.
        requests: as for :func:`begin_step`; None: open pages are read from the host pool.
        out: int32, of the shape of ``selection.pages``, for the sources.
        impl: ``auto``, ``triton`` or ``torch``.

    Returns:
        The selection with sources for pages: a page of the host pool, or ``~slot`` (negative) of
        ``cache.keys`` and ``cache.values``.

    Raises:
        ValueError: the lists are larger than the cache was made for, or the pool has another geometry.
    """
    if pool is not None:
        _check_pool(cache, *pool)
    pages = selection.pages
    if pages.numel() > len(cache.missing) or pages.shape[1] != cache.kv_heads:
        raise ValueError(
            f"lists {list(pages.shape)}; legal: {cache.kv_heads} KV heads and at most "
            f"{len(cache.missing)} entries"
        )
    if not pages.is_contiguous() or (out is not None and not out.is_contiguous()):
        raise ValueError("page lists and out must be contiguous")
    if requests is not None and not cache.open_rows:
        raise ValueError("requests are given, but the cache was made with open_rows=0; legal: None")
    if out is None:
        out = torch.zeros_like(pages, dtype=torch.int32)
    chosen = _implementation(impl, pages.device)
    chosen.resolve(cache, layer, selection.pages, selection.counts, requests, pool, out)
    return replace(selection, pages=out)


def _implementation(impl: str, device: torch.device) -> ModuleType:
    if dispatch.choose(impl, device) == "torch":
        return torch_tier
    from . import triton_tier

    return triton_tier


def _check_pool(cache: HotCache, keys: torch.Tensor, values: torch.Tensor) -> None:
    shape = (cache.pages, cache.page_size, cache.kv_heads, cache.head_dim)
    for name, pool in (("keys", keys), ("values", values)):
        if tuple(pool.shape) != shape or pool.dtype != cache.keys.dtype or pool.stride(-1) != 1:
            raise ValueError(
                f"{name} of the host pool {list(pool.shape)} {pool.dtype}; legal: {list(shape)} "
                f"{cache.keys.dtype} with a contiguous last dimension"
            )
