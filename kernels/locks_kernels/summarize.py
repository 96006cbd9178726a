"""summarize: complete pages of K -> records (paper section 4)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import dispatch
from .layout import Envelopes, Records
from .reference import envelope_pages, summarize_pages


def summarize(
    keys: Sequence[torch.Tensor], slots: torch.Tensor, records: Records, *, impl: str = "auto"
) -> None:
    """Rebuild the records of the pages that the writes to ``slots`` completed, in place.

    A page of the KV pool is complete exactly when its last slot has been written, so the
    page ``slot // B`` is summarised for every slot with ``slot % B == B - 1``; all other
    slots, slot 0 of padded rows among them, are ignored.

    Args:
        keys: one page view ``[pages, B, kv_heads, d]`` a layer (see ``page_view``).
        slots: int64 ``[n]``, pool slots just written (SGLang's ``out_cache_loc``).
        records: pool with a leading layer dimension, ``[layers, pages, kv_heads, ...]``.
        impl: ``auto``, ``cuda``, ``triton`` or ``torch`` (see ``dispatch.choose``).  The GPU
            implementations build all layers in one launch, without a host synchronisation.

    Raises:
        ValueError: a shape, dtype or layout does not fit; the message names what is legal.

    A page whose keys are all equal gets a zero basis and is represented by its centroid; a
    non-finite key element counts as 0; other pages are never affected.
    """
    _check(keys, slots, records)
    chosen = dispatch.choose(impl, slots.device, keys[0].dtype)
    if slots.shape[0] == 0:
        return
    if chosen == "cuda":
        from .cuda_summarize import summarize as summarize_cuda

        summarize_cuda(keys, slots, records)
    elif chosen == "triton":
        from .triton_summarize import summarize as summarize_triton

        summarize_triton(keys, slots, records)
    else:
        _summarize_torch(keys, slots, records)


def _summarize_torch(keys: Sequence[torch.Tensor], slots: torch.Tensor, records: Records) -> None:
    layout = records.layout
    page_size = layout.page_size
    pages = slots[slots % page_size == page_size - 1] // page_size
    if pages.numel() == 0:
        return
    build = envelope_pages if isinstance(records, Envelopes) else summarize_pages
    for index, layer_keys in enumerate(keys):
        records.layer(index).store(pages, build(layer_keys[pages], layout))  # type: ignore[arg-type]


def _check(keys: Sequence[torch.Tensor], slots: torch.Tensor, records: Records) -> None:
    layout = records.layout
    layers, pages, kv_heads = records.planes[0].shape[:3]
    if len(keys) != layers:
        raise ValueError(f"{len(keys)} layers of keys, {layers} of records")
    first = keys[0]
    for view in keys:
        if view.shape[1] != layout.page_size or view.shape[3] != layout.head_dim:
            raise ValueError(
                f"keys are [pages, {layout.page_size}, kv_heads, {layout.head_dim}] for format "
                f"{layout.name}, got {list(view.shape)}"
            )
        if view.shape[2] != kv_heads or view.shape[0] > pages:
            raise ValueError(
                f"records are for {pages} pages of {kv_heads} KV heads, keys are {list(view.shape)}"
            )
        if view.dtype != first.dtype or view.stride() != first.stride():
            raise ValueError("all layers of keys must have the same dtype and strides")
        if view.stride(3) != 1:
            raise ValueError(f"the head dimension of keys must be contiguous, got strides {view.stride()}")
    if slots.dim() != 1 or (slots.numel() and slots.dtype != torch.int64):
        raise ValueError(f"slots are int64 [n], got {slots.dtype} {list(slots.shape)}")
