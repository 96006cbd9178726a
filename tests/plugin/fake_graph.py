"""What a CUDA graph does, on a CPU: record the device's work once, run it again on the same memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


class FakeGraph(TorchDispatchMode):
    """Records the tensor operations of a ``with`` block; :meth:`replay` runs them without its Python."""

    def __init__(self) -> None:
        super().__init__()
        self._recorded: list[tuple[Any, tuple, dict, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._recorded.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for func, args, kwargs, result in self._recorded:
            again = func(*args, **kwargs)
            # A graph's own tensors lie where they lay at capture.
            if isinstance(result, torch.Tensor) and result.data_ptr() != again.data_ptr():
                tree_map_only(torch.Tensor, result.copy_, again)
