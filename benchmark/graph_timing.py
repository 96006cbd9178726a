"""Time of GPU ops in a CUDA graph, as they run in a decode step."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

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


@contextmanager
def replay_times() -> Iterator[Callable[[], list[float]]]:
    """GPU milliseconds of every ``CUDAGraph.replay`` inside the block, by calling what it yields.

    What a step takes beyond this is the host's: planning, sampling, waiting.
    """
    original = torch.cuda.CUDAGraph.replay
    pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def replay(graph: torch.cuda.CUDAGraph) -> None:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        original(graph)
        end.record()
        pairs.append((start, end))

    def read() -> list[float]:
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairs]

    torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign]
    try:
        yield read
    finally:
        torch.cuda.CUDAGraph.replay = original  # type: ignore[method-assign]


class OtherStreams:
    """Keeps further CUDA streams of the process in use, so that all variants are measured in one state.

    Once a process has worked on a second stream, the kernels of its graphs may follow each other 0.2 to
    0.5 us later, which is 4 % of a decode step of 600 kernels; some eager work makes the gaps short again
    (docs/kernels.md). Left to chance, one variant has short gaps and the next one has not. This makes them
    long for all.
    """

    def __init__(self, count: int = 2) -> None:
        self._streams = [torch.cuda.Stream() for _ in range(count if torch.cuda.is_available() else 0)]
        self._words = [torch.zeros(1, device="cuda") for _ in self._streams]

    def touch(self) -> None:
        """Launch a small kernel on each of them."""
        for stream, word in zip(self._streams, self._words, strict=True):
            with torch.cuda.stream(stream):
                word.add_(1)


def gpu_clock_mhz() -> int | None:
    """What the multiprocessors run at now; None where NVML (the package nvidia-ml-py) cannot tell."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
        return int(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))
    except Exception:
        return None
