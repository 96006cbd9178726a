"""Fixed costs of a decode step, fitted to measured ones; tools/make_results.py writes ``costs.json``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FILE = Path(__file__).parent / "costs.json"


@dataclass(frozen=True)
class Costs:
    """What a step costs besides moving bytes at the rate of the memory.

    Attributes:
        step_ms: a step, outside of its CUDA graph; 0 where the graph was not timed by itself, and the
            layers then carry all of it.
        dense_layer_us: a layer with dense attention.
        sparse_layer_us: a layer that scores, selects and attends, whatever the batch.
        sparse_root_us: what such a layer takes more, times the square root of the batch: more requests
            fill a GPU better.  (A form that grows with the batch itself predicts left-out batches worse.)
        largest_batch: of the measured steps; above it the costs are extrapolated.
        source: date and commit of the measured steps.
    """

    step_ms: float
    dense_layer_us: float
    sparse_layer_us: float
    sparse_root_us: float
    largest_batch: int
    source: str


@cache
def load() -> Costs:
    """The costs that this version was released with."""
    return Costs(**json.loads(FILE.read_text()))
