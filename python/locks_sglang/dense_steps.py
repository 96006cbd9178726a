"""Decode steps that run dense, because so little KV is faster read than searched.

Scoring and selecting cost some 10 us a layer however short the requests are, about what dense
attention needs for 48 MiB of keys and values, and a little more for every further request.  A step that
would leave out less than that runs SGLang's own decode attention: the same server, a second CUDA graph
for each batch size.  (SGLang has such pairs for DeepSeek's sparse attention, too.)  Summaries are built
in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .config import LocksConfig

# Keys and values of one layer that a step has to leave out. Measured on an H200 with 2 KiB a token and
# layer (docs/results.md).
AUTO_KV_BYTES = 48 << 20
# What a request has to leave out before it counts, since it costs something to score and list.
ROW_TOKENS = 1536
LABEL = "dense"


def left_out(lengths: torch.Tensor, budget: int) -> int:
    """Tokens that a step of requests with ``lengths`` leaves out, without those that pay for its rows."""
    return int((lengths - (budget + ROW_TOKENS)).clamp_(min=0).sum())


class DenseSteps:
    """Decides for every decode step, and tells the two kinds of CUDA graph apart.

    Args:
        below: a step runs dense where it would leave out fewer tokens than this (``left_out``); 0 is never.
        budget: tokens that a request attends, unless it asks for another budget, which is not looked at.

    Attributes:
        now: whether the step that began last runs dense.
    """

    def __init__(self, below: int = 0, budget: int = 0) -> None:
        self.below = below
        self.budget = budget
        self.now = False
        self._capturing: bool | None = None

    def begin(self, forward_batch: Any) -> bool:
        """Decide for the step of ``forward_batch``; a forward that is not a decode step is not dense."""
        self.now = forward_batch.forward_mode.is_decode() and self._is_short(forward_batch)
        return self.now

    def _is_short(self, forward_batch: Any) -> bool:
        if self._capturing is not None:
            return self._capturing
        if not self.below or forward_batch.seq_lens_cpu is None:
            return False
        return left_out(forward_batch.seq_lens_cpu, self.budget) < self.below

    @contextmanager
    def capture(self, dense: bool) -> Iterator[None]:
        """Within it all steps are of one kind, whatever their lengths."""
        self._capturing = self.now = dense
        try:
            yield
        finally:
            self._capturing = None

    def label(self, other: str | None) -> str | None:
        """Name of the graph variant of this step, for SGLang's graph key; ``other`` is SGLang's own."""
        return "-".join(filter(None, (other, LABEL))) if self.now else other


def below(config: LocksConfig, kv_heads: int, head_dim: int, item_bytes: int, on_gpu: bool) -> int:
    """Tokens of :class:`DenseSteps` for a KV pool of this shape.

    Where the user does not say: never on a CPU, where it was not measured, nor where a trace is to show
    what is selected, nor for selectors that are there to be compared with, nor from host memory, which
    dense attention would read through a link.
    """
    if config.dense_below is not None:
        return config.dense_below
    if not on_gpu or config.trace_file or config.selector != "locks" or config.kv_tier == "host":
        return 0
    return AUTO_KV_BYTES // (2 * kv_heads * head_dim * item_bytes)
