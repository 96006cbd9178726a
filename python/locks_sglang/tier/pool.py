"""The KV pool of a host tier: SGLang's own pool object, whose buffers lie in host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..activation import inherited_config
from . import capacity, limits, ranks
from .host_memory import HostMemory, on_gpu, unregistered, with_cuda
from .limits import Request
from .topology import ROOT

_held: list[HostMemory] = []
"""Until the process ends: tensors of the pool are views of it."""


def create_buffers(original: Callable[[Any], None], pool: Any) -> None:
    """Around ``MHATokenToKVPool._create_buffers_normal``: buffers in host memory, if that was asked for."""
    config = inherited_config()
    if not config.enabled or config.kv_tier != "host":
        original(pool)
        return
    rows = pool.size + pool.page_size
    shapes = [(rows, pool.head_num, pool.head_dim), (rows, pool.head_num, pool.v_head_dim)]
    _held.append(hold(pool, shapes))


def is_held(pool: Any) -> bool:
    """Whether all buffers of a pool lie in host memory that was made here."""
    spans = [(memory.address, memory.address + memory.nbytes) for memory in _held]
    buffers = (*pool.k_buffer, *pool.v_buffer)
    return all(any(low <= buffer.data_ptr() < high for low, high in spans) for buffer in buffers)


def hold(pool: Any, shapes: Sequence[tuple[int, ...]], root: Path = ROOT) -> HostMemory:
    """Give a pool ``k_buffer`` and ``v_buffer``, a tensor a layer, as views of one piece of host memory.

    On a GPU they are tensors of the GPU, which reads and writes the host's memory through its link.

    Args:
        pool: with ``layer_num``, ``store_dtype`` and ``device``.
        shapes: of K and V of a layer.
        root: where ``sys`` and ``proc`` are.

    Raises:
        LocksError: on all ranks, where one of them cannot have its memory.
    """
    device = torch.device(pool.device)
    sizes = [torch.Size(shape).numel() * pool.store_dtype.itemsize for shape in shapes]
    nbytes = pool.layer_num * sum(sizes)
    node = ranks.together(lambda: capacity.node_of(device, root))
    requests = ranks.gather(Request(ranks.rank(), node, nbytes))
    ranks.together(lambda: limits.check(requests, root, capacity.lockable(device, root)))
    registration = unregistered() if device.type == "cpu" else with_cuda()
    memory = ranks.together(
        lambda: HostMemory(nbytes, node=node, registration=registration, root=root), HostMemory.close
    )
    whole = memory.tensor()
    if device.type != "cpu":
        whole = on_gpu(whole)
    views = []
    first = 0
    for size, shape in zip(sizes * pool.layer_num, list(shapes) * pool.layer_num, strict=True):
        views.append(whole[first : first + size].view(pool.store_dtype).view(shape))
        first += size
    pool.k_buffer, pool.v_buffer = views[0::2], views[1::2]
    return memory
