"""The online audit: what the selected pages really retained, measured on live traffic.

Order makes it right without waiting.  The audit of a step is launched on the stream of the
forward, straight after it, and reads the step's own page table.  Whoever gets a freed page next
can write to it only in a later forward, which the same stream runs later.  Results travel to the
host behind an event and are picked up when the device has passed it.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from locks_kernels import StepTables, retained_mass
from locks_kernels.score import PageScores

from .buffers import Geometry
from .summaries import SummaryPool
from .taps import LayerTap

logger = logging.getLogger(__name__)

AUDITED_ROWS = 4
"""Requests that one audit looks at; reading all of their keys is what it costs."""
AUDITED_ROWS_ON_HOST = 1
"""The same where keys come over the link, some eighty times as slowly."""

_NOT_SPARSE = -1.0


def spread(layers: Sequence[int], count: int) -> tuple[int, ...]:
    """``count`` of the layers, evenly spaced, the first and the last among them."""
    if count >= len(layers):
        return tuple(layers)
    if count == 1:
        return (layers[len(layers) // 2],)
    step = (len(layers) - 1) / (count - 1)
    return tuple(layers[round(i * step)] for i in range(count))


def empty_scratch(geometry: Geometry, rows: int, device: torch.device | str) -> PageScores:
    """Room for the exact scores of an audit, so that none allocates."""
    shape = (rows, geometry.q_heads, geometry.max_pages)
    return PageScores(
        torch.zeros(shape, dtype=torch.float32, device=device),
        torch.zeros(shape[:2], dtype=torch.float32, device=device),
    )


def scratch_bytes(geometry: Geometry) -> int:
    """At most what an audit keeps."""
    scratch = empty_scratch(geometry, AUDITED_ROWS, "meta")
    return scratch.scores.nbytes + scratch.lse.nbytes


@dataclass(frozen=True)
class _Result:
    """Retained mass of one layer's rows on its way to the host, ``_NOT_SPARSE`` for dense rows."""

    layer: int
    rows: int
    host: torch.Tensor
    done: torch.cuda.Event | None


class Audit:
    """Measures the retained mass of one layer and a few rows every ``interval`` decode steps.

    Args:
        interval: decode steps from one audit to the next.
        layers: indices of the layers that are looked at, one at a time.
        summaries: the keys of every layer.
        geometry: shape of the attention.
        observe: called with (layer, mean mass over the heads) for every audited row.
        rows: requests that one audit looks at.

    Attributes:
        launched: audits so far, whether their results have arrived or not.
    """

    def __init__(
        self,
        interval: int,
        layers: Sequence[int],
        summaries: SummaryPool,
        geometry: Geometry,
        observe: Callable[[int, float], None],
        rows: int = AUDITED_ROWS,
    ) -> None:
        self._interval = interval
        self._rows = rows
        self._layers = tuple(layers)
        self._keys = summaries.keys
        self._page_size = summaries.page_size
        self._observe = observe
        self._steps = 0
        self.launched = 0
        self._pending: deque[_Result] = deque()
        self._free: list[torch.Tensor] = []
        device = self._keys[0].device
        self._on_gpu = device.type == "cuda"
        self._scratch = empty_scratch(geometry, rows, device) if self._on_gpu else None

    def after_step(self, step: StepTables, taps: dict[int, LayerTap], rows: int) -> None:
        """Audit the decode step that was launched last, if it is one's turn.

        Args:
            step: the tables that the step ran with.
            taps: what its layers left.
            rows: requests of the batch, without the rows that pad it to a graph's size.
        """
        self._steps += 1
        if self._pending:
            self.collect()
        if self._steps % self._interval == 0 and rows:
            self._measure(step, taps, rows)

    def collect(self, wait: bool = False) -> None:
        """Take over the results that have arrived; with ``wait``, all of them."""
        while self._pending:
            result = self._pending[0]
            if result.done is not None:
                if wait:
                    result.done.synchronize()
                elif not result.done.query():
                    return
            self._pending.popleft()
            for mass in result.host[: result.rows].tolist():
                if mass == _NOT_SPARSE:
                    continue
                if not math.isfinite(mass):
                    logger.error("audit of layer %d: the retained mass is %s", result.layer, mass)
                    continue
                self._observe(result.layer, mass)
            if result.done is not None:
                self._free.append(result.host)

    def warm_up(self, step: StepTables, taps: dict[int, LayerTap]) -> None:
        """Compile what an audit runs, so that none does it in the middle of traffic."""
        if self._on_gpu:
            layer, one = self._layers[0], slice(0, 1)
            lengths = torch.ones_like(step.seq_lens[one])
            table = torch.zeros_like(step.page_table[one])
            self._mass(taps[layer], layer, one, table, lengths)

    def _measure(self, step: StepTables, taps: dict[int, LayerTap], rows: int) -> None:
        turn = self.launched
        self.launched += 1
        layer = self._layers[turn % len(self._layers)]
        # Other rows each time all layers have had their turn.
        first = turn // len(self._layers) % -(-rows // self._rows) * self._rows
        window = slice(first, min(first + self._rows, rows))
        mass = self._mass(taps[layer], layer, window, step.page_table[window], step.seq_lens[window])
        count = len(mass)
        if not self._on_gpu:
            self._pending.append(_Result(layer, count, mass, None))
            self.collect()
            return
        host = self._free.pop() if self._free else torch.empty(self._rows, pin_memory=True)
        host[:count].copy_(mass, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        self._pending.append(_Result(layer, count, host, done))

    def _mass(
        self,
        tap: LayerTap,
        layer: int,
        rows: slice,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
    ) -> torch.Tensor:
        """Mean over the heads of each row's retained mass, ``_NOT_SPARSE`` for rows that read all."""
        assert tap.queries is not None
        selection = tap.selection(rows)
        scratch = None
        if self._scratch is not None:
            count = len(seq_lens)
            scratch = PageScores(self._scratch.scores[:count], self._scratch.lse[:count])
        mass = retained_mass(
            tap.queries[rows], self._keys[layer], selection, page_table, seq_lens, tap.sm_scale,
            scratch=scratch,
        )  # fmt: skip
        present = (seq_lens + self._page_size - 1) // self._page_size
        return torch.where(selection.counts < present, mass.mean(-1), _NOT_SPARSE)
