"""summarize: complete pages of K -> records (paper section 4)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .layout import Envelopes, Records
from .reference import envelope_pages, summarize_pages


def summarize(keys: Sequence[torch.Tensor], slots: torch.Tensor, records: Records) -> None:
    """Rebuild the records of the pages that the writes to ``slots`` completed, in place.

    A page of the KV pool is complete exactly when its last slot has been written, so the
    page ``slot // B`` is summarised for every slot with ``slot % B == B - 1``; all other
    slots, slot 0 of padded rows among them, are ignored.

    Args:
        keys: one page view ``[pages, B, kv_heads, d]`` a layer (see ``page_view``).
        slots: int64 ``[n]``, pool slots just written (SGLang's ``out_cache_loc``).
        records: pool with a leading layer dimension, ``[layers, pages, kv_heads, ...]``.

    Raises:
        ValueError: a shape does not fit the records' layout.

    A page whose keys are all equal gets a zero basis and is represented by its centroid; a
    non-finite key element counts as 0; other pages are never affected.
    """
    layout = records.layout
    page_size = layout.page_size
    for layer_keys in keys:
        if layer_keys.shape[1] != page_size or layer_keys.shape[3] != layout.head_dim:
            raise ValueError(
                f"keys are [pages, {page_size}, kv_heads, {layout.head_dim}] for format "
                f"{layout.name}, got {list(layer_keys.shape)}"
            )
    if len(keys) != records.planes[0].shape[0]:
        raise ValueError(f"{len(keys)} layers of keys, {records.planes[0].shape[0]} of records")

    pages = slots[slots % page_size == page_size - 1] // page_size
    if pages.numel() == 0:
        return
    build = envelope_pages if isinstance(records, Envelopes) else summarize_pages
    for index, layer_keys in enumerate(keys):
        records.layer(index).store(pages, build(layer_keys[pages], layout))  # type: ignore[arg-type]
