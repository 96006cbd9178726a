"""Which implementation of an op runs: decided once a process and device kind, never in hot code."""

from __future__ import annotations

import logging
from functools import cache

import torch

from . import build

IMPLEMENTATIONS = ("auto", "cuda", "triton", "torch")

_logger = logging.getLogger(__name__)


def choose(impl: str, device: torch.device, pool: torch.dtype | None = None) -> str:
    """Resolve ``impl`` for tensors on ``device`` to ``cuda``, ``triton`` or ``torch``.

    ``auto`` is torch on a CPU; on a GPU it is the CUDA extension where it can be built (or is
    cached), else Triton, and the log says once why.  An fp32 ``pool`` goes to Triton too: the CUDA
    kernels of the ops that name one multiply in 16 bits.  A named implementation is taken as is:
    ``triton`` on CPU tensors runs where Triton's interpreter is on.

    Raises:
        ValueError: ``impl`` is none of ``IMPLEMENTATIONS``.
    """
    if impl == "auto":
        if device.type == "cpu":
            return "torch"
        return "triton" if pool == torch.float32 else _best_on_gpu()
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"unknown implementation {impl!r}; legal: {', '.join(IMPLEMENTATIONS)}")
    return impl


@cache
def _best_on_gpu() -> str:
    problem = build.missing()
    if problem is None:
        return "cuda"
    _logger.warning("locks_kernels run on Triton, which is slower: %s", problem)
    return "triton"
