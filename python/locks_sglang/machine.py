"""What this machine has: GPUs, CUDA compiler, NUMA nodes, lockable memory.

Everything is read from where the system says it, without touching a GPU, and every reader can be
given another source, so that a machine can be described that is not there.
"""

from __future__ import annotations

import platform
import re
import resource
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from locks_kernels import build

from .tier import topology

HOPPER = 9
"""Major compute capability that the CUDA kernels were written for and run on."""

_PACKAGES = {"torch": "torch", "triton": "triton", "flashinfer": "flashinfer-python"}
_GPU_FIELDS = ("name", "driver_version", "compute_cap", "memory.total")
_TIMEOUT_S = 60

Run = Callable[[list[str]], str]


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver describes it: ``capability`` is (major, minor), memory in MiB."""

    name: str
    driver: str
    capability: tuple[int, int]
    memory_mib: int


@dataclass(frozen=True)
class Machine:
    """The facts that ``python -m locks_sglang check`` shows.

    Attributes:
        processor: architecture as ``uname -m`` names it.
        python: version of this interpreter.
        packages: package -> version, None where it is not installed.
        gpus: GPUs that the driver lists.
        torch_sees_gpu: whether this torch can use one.
        nvcc, nvcc_version: path and release of the CUDA compiler, None where there is none.
        kernels_missing: why CUDA kernels cannot be built here, None where they can.
        numa: NUMA nodes with memory, by number; empty where the system does not say.
        memlock: bytes that a process may lock, None for no limit.
    """

    processor: str
    python: str
    packages: dict[str, str | None]
    gpus: tuple[Gpu, ...]
    torch_sees_gpu: bool
    nvcc: str | None
    nvcc_version: str | None
    kernels_missing: str | None
    numa: tuple[topology.Node, ...]
    memlock: int | None


def look() -> Machine:
    """Describe the machine that this process runs on."""
    import torch

    nvcc = build.find_nvcc()
    return Machine(
        processor=platform.machine(),
        python=platform.python_version(),
        packages={shown: _version(name) for shown, name in _PACKAGES.items()},
        gpus=find_gpus(),
        torch_sees_gpu=torch.cuda.is_available(),
        nvcc=nvcc,
        nvcc_version=compiler_release(nvcc) if nvcc else None,
        kernels_missing=build.missing(),
        numa=numa_nodes(),
        memlock=memlock_limit(),
    )


def run(command: list[str]) -> str:
    """Output of a command; empty where it is not there, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def find_gpus(ask: Run = run) -> tuple[Gpu, ...]:
    """GPUs that ``nvidia-smi`` lists; none where it is not there or the driver does not answer."""
    answer = ask(["nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader,nounits"])
    gpus = []
    for line in answer.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        capability = re.fullmatch(r"(\d+)\.(\d+)", cells[2]) if len(cells) == len(_GPU_FIELDS) else None
        if capability:
            # Unified-memory machines answer "[N/A]" for the memory.
            memory = int(cells[3]) if cells[3].isdigit() else 0
            gpus.append(Gpu(cells[0], cells[1], (int(capability[1]), int(capability[2])), memory))
    return tuple(gpus)


def compiler_release(nvcc: str, ask: Run = run) -> str | None:
    """Release of a CUDA compiler such as ``13.0``."""
    match = re.search(r"release (\d+\.\d+)", ask([nvcc, "--version"]))
    return match[1] if match else None


def numa_nodes(root: Path = topology.ROOT) -> tuple[topology.Node, ...]:
    """NUMA nodes with memory, by number, as the system lists them."""
    return tuple(node for node in topology.listed(root).values() if node.total)


def memlock_limit() -> int | None:
    """Bytes that this process may lock in memory (the soft limit), None for no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
