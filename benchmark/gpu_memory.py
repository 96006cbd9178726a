"""Make a GPU as small as another one, and see what is in use of it."""

from __future__ import annotations

import torch


def ballast(gib: float | None) -> torch.Tensor:
    """What is to be held so that no more than ``gib`` of the GPU is free; empty where there is no limit."""
    free = torch.cuda.mem_get_info()[0] if gib is not None and torch.cuda.is_available() else 0
    taken = max(0, free - int((gib or 0.0) * 2**30))
    return torch.empty(taken, dtype=torch.uint8, device="cuda" if taken else "cpu")


def in_use_gib(held: torch.Tensor | None = None) -> float | None:
    """Memory that all processes use of the GPU, without ballast that is held; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return round((total - free - (0 if held is None else held.nbytes)) / 2**30, 2)
