"""Time of GPU ops in a CUDA graph, as they run in a decode step."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

WARM_UP = 2


def graph_us(calls: Sequence[Callable[[], object]], repeats: int = 15) -> tuple[float, float, float]:
    """Median, least and most microseconds a call, over replays of one graph of all calls."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(WARM_UP + repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / len(calls))
    times = times[WARM_UP:]
    return statistics.median(times), min(times), max(times)
