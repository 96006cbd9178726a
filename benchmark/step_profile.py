"""Where the time of a decode step goes: its kernels in order, the gaps between them, what the host does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

STEPS = 3
# In the names of kernels that come once a layer. (Not "flash": FlashInfer's norms come twice.)
ATTENTION = ("attend_kernel", "flashattn", "flash_fwd", "batchprefill", "batchdecode")
MARK = "decode_step"
NAME = 100  # characters of a kernel's name that are kept
# Calls of the CUDA runtime in which the host waits for the GPU.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


def profile(step: Callable[[], object]) -> dict[str, Any]:
    """Profile ``step``, one decode step.

    Returns:
        ``gpu_busy_ms`` and ``gpu_span_ms`` (first kernel's start to last one's end) of a step, medians;
        ``host_ms``, what the host needs to issue it (under the profiler); ``launches`` of kernels;
        ``host_waits``, calls in which the host waited, by name, of all ``profiled_steps``;
        ``kernels``, the most expensive first, microseconds a step; ``layer``, the kernels of one layer
        in order, each with its microseconds and the gap before it.
    """
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    spans, busy, host, counts = [], [], [], []
    total: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    waits: Counter[str] = Counter()
    layer: list[dict[str, Any]] = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=activities) as recorded:
            with torch.profiler.record_function(MARK):
                step()
            torch.cuda.synchronize()
        events = recorded.events()
        kernels = _kernels(events)
        end = next(event.time_range.end for event in events if event.name == MARK and _on_cpu(event))
        waits.update(event.name for event in events if event.name in WAITS and event.time_range.end <= end)
        host.append(end - min(event.time_range.start for event in events if _on_cpu(event)))
        spans.append(kernels[-1].time_range.end - kernels[0].time_range.start)
        busy.append(sum(_microseconds(kernel) for kernel in kernels))
        counts.append(len(kernels))
        for kernel in kernels:
            total[kernel.name[:NAME]] += _microseconds(kernel) / STEPS
            launches[kernel.name[:NAME]] += 1
        layer = _one_layer(kernels)
    return {
        "gpu_busy_ms": round(sorted(busy)[STEPS // 2] / 1e3, 4),
        "gpu_span_ms": round(sorted(spans)[STEPS // 2] / 1e3, 4),
        "host_ms": round(sorted(host)[STEPS // 2] / 1e3, 4),
        "launches": counts[-1],
        "profiled_steps": STEPS,
        "host_waits": dict(waits),
        "kernels": [
            {"kernel": name, "launches_per_step": launches[name] / STEPS, "us_per_step": round(us, 2)}
            for name, us in total.most_common(30)
        ],
        "layer": layer,
    }


def _kernels(events: Any) -> list[Any]:
    """What ran on the GPU, in order, without the ranges that the host named (SGLang names whole steps).

    A range appears there, too, as long as all that was launched in it, under its name on the host.
    """
    named = {event.name for event in events if _on_cpu(event)}
    found = [event for event in events if not _on_cpu(event) and event.name not in named]
    return sorted(found, key=lambda event: event.time_range.start)


def _on_cpu(event: Any) -> bool:
    return event.device_type == torch.autograd.DeviceType.CPU


def _microseconds(kernel: Any) -> float:
    return kernel.time_range.end - kernel.time_range.start


def _one_layer(kernels: list[Any]) -> list[dict[str, Any]]:
    """Kernels from behind one attention to the next one, in the middle of the step."""
    names = [kernel.name for kernel in kernels]
    middle = len(names) // 2
    anchor = next(
        (name for name in names[middle:] if any(word in name.lower() for word in ATTENTION)), None
    )
    if anchor is None:
        return []
    places = [place for place, name in enumerate(names) if name == anchor and place >= middle][:2]
    if len(places) < 2:
        return []
    return [
        {
            "kernel": kernels[place].name[:NAME],
            "us": round(_microseconds(kernels[place]), 2),
            "gap_us": round(kernels[place].time_range.start - kernels[place - 1].time_range.end, 2),
        }
        for place in range(places[0] + 1, places[1] + 1)
    ]
