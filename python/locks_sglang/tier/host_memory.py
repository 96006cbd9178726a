"""Host memory for KV: on one NUMA node, touched in parallel, registered with the GPU in chunks.

Neither torch's pinned memory, which rounds up to powers of two, nor managed memory, which moves.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch

from ..config import LocksError
from . import numa
from .limits import gib
from .topology import ROOT, host_nodes, nodes

CHUNK = 16 << 30
"""Bytes registered at a time.  Drivers since 580 fail at 512 GiB in one call, whose page table in pages
of 4 KiB outgrows what the kernel allocates in one piece."""
MISPLACED = 0.01
"""Share of the pages that may lie on another node with CPUs."""
_MOST_THREADS = 32
_HUGE_PAGE = 2 << 20
_CUDA_FLAGS = 1 | 2  # portable, mapped

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Registration:
    """How memory is made known to the GPU.

    Attributes:
        register: takes address and bytes, returns what went wrong or None.
        unregister: takes the address of a registration, returns the same.
    """

    register: Callable[[int, int], str | None]
    unregister: Callable[[int], str | None]


def with_cuda() -> Registration:
    """Registration with torch's CUDA runtime, on its current device."""
    runtime = torch.cuda.cudart()

    def said(name: str, code: int) -> str | None:
        if not int(code):
            return None
        return f"{name} failed with CUDA error {int(code)} ({runtime.cudaGetErrorString(code)})"

    return Registration(
        lambda address, nbytes: said(
            "cudaHostRegister", runtime.cudaHostRegister(address, nbytes, _CUDA_FLAGS)
        ),
        lambda address: said("cudaHostUnregister", runtime.cudaHostUnregister(address)),
    )


def unregistered() -> Registration:
    """For a process without a GPU."""
    return Registration(lambda address, nbytes: None, lambda address: None)


class HostMemory:
    """``nbytes`` of zeroed host memory that the GPU can address, until :meth:`close`.

    Without it, until the last tensor of it is gone: it is unregistered then, before it is given back.
    Check before with :func:`locks_sglang.tier.limits.check`, for all ranks together.

    Args:
        nbytes: rounded up to 2 MiB.
        node: NUMA node, one with CPUs.
        registration: of the GPU.
        chunk: most bytes of one registration, a multiple of 2 MiB.
        root: where ``sys`` and ``proc`` are.

    Raises:
        LocksError: the memory cannot be had, lies elsewhere, or cannot be registered; then nothing of it
            is left.
    """

    def __init__(
        self, nbytes: int, *, node: int, registration: Registration, chunk: int = CHUNK, root: Path = ROOT
    ) -> None:
        if nbytes < 1 or chunk < 1 or chunk % _HUGE_PAGE:
            raise LocksError(
                f"host memory of {nbytes} bytes in chunks of {chunk}; legal: at least 1, in chunks that "
                "are a multiple of 2 MiB"
            )
        self.nbytes = -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE
        self.node = node
        self._map = _map(self.nbytes, registration)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        try:
            numa.prefer(self.address, self.nbytes, node)
            touch(self.address, self.nbytes, _cpus(node, root))
            check_place(numa.placed(self.address, self.nbytes, root), node, host_nodes(nodes(root)))
            self._map.register(self.address, chunk)
        except BaseException:
            # The first error is the one to tell.
            for said in self._release():
                logger.error("Host memory that is given up again: %s", said)
            raise

    def tensor(self) -> torch.Tensor:
        """All of it, uint8 ``[nbytes]``.  Tensors and their views must be gone before :meth:`close`."""
        # Through numpy, which holds the mapping open as long as a tensor of it lives; torch does not.
        return torch.from_numpy(numpy.frombuffer(self._map, dtype=numpy.uint8))

    def close(self) -> None:
        """Unregister every chunk, whatever others answer, and give the memory back.  Safe to repeat.

        Raises:
            LocksError: chunks could not be unregistered.
            BufferError: tensors of it are still there; it is unregistered but not given back.
        """
        wrong = self._release()
        if wrong:
            raise LocksError(f"{len(wrong)} chunks of host memory: {wrong[0]}")

    def _release(self) -> list[str]:
        """What went wrong with each chunk that could not be unregistered."""
        wrong = self._map.unregister()
        self._map.close()
        return wrong


def on_gpu(host: torch.Tensor) -> torch.Tensor:
    """The registered memory of a contiguous tensor as one of the current GPU, which addresses it as it is.

    It holds the memory as any other tensor of it does.

    Raises:
        LocksError: the GPU has another address for it.
    """
    mapped = torch.as_tensor(_Shown(host), device="cuda")
    if mapped.data_ptr() != host.data_ptr():
        raise LocksError("host memory has another address on this GPU; legal: GPUs with unified addressing")
    return mapped.view(host.dtype).view(host.shape)


class _Shown:
    """What torch makes a tensor of the GPU from, and keeps as long as that lives."""

    def __init__(self, host: torch.Tensor) -> None:
        self._host = host
        self.__cuda_array_interface__ = {
            "shape": (host.nbytes,), "typestr": "|u1", "data": (host.data_ptr(), False), "version": 3,
        }  # fmt: skip


class _Mapping(mmap.mmap):
    """A mapping that unregisters itself before it goes, whoever held it last.

    Memory that is given back while it is registered stays so: the next mapping at its address cannot be
    registered (CUDA error 712).
    """

    registration: Registration
    registered: list[int]

    def register(self, address: int, chunk: int) -> None:
        starts = range(0, len(self), chunk)
        for number, start in enumerate(starts, 1):
            size = min(chunk, len(self) - start)
            said = self.registration.register(address + start, size)
            if said:
                raise LocksError(
                    f"chunk {number} of {len(starts)} of the host memory ({gib(size)}, after {gib(start)} "
                    f"of {gib(len(self))}): {said}; everything is released again; legal: less host "
                    "memory, or a higher limit of locked memory (ulimit -l)"
                )
            self.registered.append(address + start)

    def unregister(self) -> list[str]:
        """What went wrong with each chunk that could not be unregistered."""
        wrong = []
        while self.registered:
            said = self.registration.unregister(self.registered.pop())
            wrong += [said] if said else []
        return wrong

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # Not for what could not be mapped, nor where modules are being taken apart: the end of a process
        # unregisters everything.
        if hasattr(self, "registered") and not is_finalizing():
            for said in self.unregister():
                logger.error("Host memory that nothing uses any more: %s", said)


def touch(address: int, nbytes: int, cpus: frozenset[int]) -> None:
    """Write zeros everywhere, by threads on the given CPUs, so that every page lies on their node.

    With no CPUs given, on those that the process has.
    """
    workers = min(_MOST_THREADS, len(cpus) or len(os.sched_getaffinity(0)), -(-nbytes // _HUGE_PAGE))
    share = -(-nbytes // workers // _HUGE_PAGE) * _HUGE_PAGE

    def write(start: int) -> None:
        if cpus:
            os.sched_setaffinity(0, cpus)  # 0 is the calling thread
        ctypes.memset(address + start, 0, min(share, nbytes - start))

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(write, range(0, nbytes, share)))


def check_place(found: dict[int, int] | None, node: int, legal: list[int]) -> None:
    """Refuse pages on a GPU's own memory, and more than a few on another node than asked for.

    Args:
        found: bytes by node; None where the system does not say, and then nothing is refused.
        node: where they should lie.
        legal: nodes of the host.

    Raises:
        LocksError: with the bytes on each node.
    """
    if found is None:
        return
    elsewhere = sum(count for number, count in found.items() if number != node)
    on_gpu = any(number not in legal for number in found)
    if on_gpu or elsewhere > MISPLACED * sum(found.values()):
        lies = ", ".join(f"{gib(count)} on node {number}" for number, count in sorted(found.items()))
        raise LocksError(
            f"host memory asked for on NUMA node {node} lies elsewhere ({lies}; nodes of the host: "
            f"{', '.join(map(str, legal))}); legal: as much as is free on node {node}, in a process that "
            "may choose (docker run --cap-add SYS_NICE)"
        )


def _map(nbytes: int, registration: Registration) -> _Mapping:
    """A private anonymous mapping, in huge pages where the system has them, that children do not get."""
    try:
        found = _Mapping(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise LocksError(f"host memory of {gib(nbytes)} cannot be mapped: {error}; legal: less") from None
    found.registration, found.registered = registration, []
    # A child's copy of a registered page would take the page from the GPU.
    found.madvise(mmap.MADV_DONTFORK)
    # A system without them is slower to touch, and otherwise the same.
    with contextlib.suppress(OSError):
        found.madvise(mmap.MADV_HUGEPAGE)
    return found


def _cpus(node: int, root: Path) -> frozenset[int]:
    """CPUs of the node that this process may run on; none if it may run on none of them."""
    found = nodes(root).get(node)
    return found.cpus & frozenset(os.sched_getaffinity(0)) if found else frozenset()
