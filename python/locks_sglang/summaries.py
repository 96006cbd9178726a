"""SummaryPool: the records beside SGLang's KV pool, keyed by physical page.

Because a record belongs to a physical page and is rebuilt by the forward that completes the
page, radix prefix sharing, eviction and reuse need no bookkeeping here: a page enters a live
request's scorable range only after that forward.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from locks_kernels import (
    EnvelopeLayout,
    Envelopes,
    Records,
    Summaries,
    SummaryLayout,
    page_view,
    summarize,
)

from .config import LocksConfig

FP8 = torch.float8_e4m3fn
"""The one quantised type of a KV pool that is read here; its scales are the layers'."""


def layout_of(config: LocksConfig, head_dim: int) -> SummaryLayout | EnvelopeLayout | None:
    """Record format of the selector; None where it needs no records."""
    if config.selector == "oracle":
        return None
    if config.selector == "quest":
        return EnvelopeLayout(head_dim, config.page_size)
    return SummaryLayout.parse(config.summary, head_dim, config.page_size)


def bytes_per_page(config: LocksConfig, head_dim: int, kv_heads: int, layers: int) -> int:
    """Bytes of the records of a page, all layers and heads."""
    layout = layout_of(config, head_dim)
    return layout.bytes_per_page * kv_heads * layers if layout is not None else 0


def bytes_per_token(config: LocksConfig, head_dim: int, kv_heads: int, layers: int) -> int:
    """Bytes that the records add to a token of the KV pool, rounded up."""
    return math.ceil(bytes_per_page(config, head_dim, kv_heads, layers) / config.page_size)


class SummaryPool:
    """Keys, values and records of every layer, by physical page.

    Args:
        config: the configuration.
        pool: SGLang's MHA pool, buffers ``[slots, kv_heads, head_dim]`` a layer.
    """

    def __init__(self, config: LocksConfig, pool: Any) -> None:
        self._first_layer = pool.start_layer
        layers = range(pool.start_layer, pool.start_layer + pool.layer_num)
        page_size = config.page_size
        self.page_size = page_size
        self.keys = [page_view(pool._get_key_buffer(layer), page_size) for layer in layers]
        self.values = [page_view(pool._get_value_buffer(layer), page_size) for layer in layers]
        pages, _, self.kv_heads, self.head_dim = self.keys[0].shape
        self.layout = layout_of(config, self.head_dim)
        lead = (len(layers), pages, self.kv_heads)
        device = self.keys[0].device
        self.records: Records | None = None
        if isinstance(self.layout, SummaryLayout):
            self.records = Summaries.allocate(self.layout, lead, device)
        elif isinstance(self.layout, EnvelopeLayout):
            self.records = Envelopes.allocate(self.layout, lead, device)

    def scales_of(self, layer: Any) -> tuple[float, float]:
        """What the stored keys and the stored values of an SGLang layer are to be multiplied by.

        SGLang divides by the scales of the checkpoint when it writes to an fp8 pool, and only then.
        Records are made of the stored keys; a scale common to all keys goes into the softmax scale.
        """
        if self.keys[0].dtype != FP8:
            return 1.0, 1.0
        k_scale, v_scale = layer.k_scale_float, layer.v_scale_float
        return 1.0 if k_scale is None else k_scale, 1.0 if v_scale is None else v_scale

    @property
    def nbytes(self) -> int:
        return self.records.nbytes if self.records is not None else 0

    def index(self, layer_id: int) -> int:
        """Position of a model layer in this rank's pool."""
        return layer_id - self._first_layer

    def layer_id(self, index: int) -> int:
        """Model layer of a position in this rank's pool."""
        return index + self._first_layer

    def records_of(self, index: int) -> Records | None:
        return self.records.layer(index) if self.records is not None else None

    def build(self, slots: torch.Tensor) -> None:
        """Rebuild the records of the pages that the writes to ``slots`` completed."""
        if self.records is not None:
            summarize(self.keys, slots, self.records)
