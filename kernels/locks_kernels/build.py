"""Compile the CUDA sources in ``csrc/`` at first use and load them through tvm-ffi.

A library is one source with one set of compile-time constants (``-DNAME=value``), so a
server compiles only the geometry that it serves.  Libraries are cached on disk by the hash
of everything that decides their code; the Triton path needs none of this.

Every ``.cu`` file names the constants that the tests compile it with, one line a variant:
``// variant: HEAD_DIM=128 RANK=4``.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

CSRC = Path(__file__).parent / "csrc"
CACHE = Path.home() / ".cache" / "locks_kernels"
FLAGS = ("-O3", "-std=c++17", "-Xcompiler", "-fPIC", "-shared")
CI_ARCH = "90a"

Constants = tuple[tuple[str, int], ...]
Library = tuple[str, Constants]
"""Name of a source and the compile-time constants of one library of it."""

_VARIANT = re.compile(r"^// variant:(.*)$", re.MULTILINE)
_named: list[Library] | None = None


class BuildError(RuntimeError):
    """The CUDA path cannot be built here; the message says what is missing or wrong."""


def load(name: str, **constants: int) -> Any:
    """Load ``csrc/<name>.cu`` compiled for the current GPU with the given constants.

    The first call of a (source, constants) pair compiles, which takes 10 to 40 seconds;
    call it before a CUDA graph is captured.  Functions are attributes of the result.

    Raises:
        BuildError: no nvcc, no tvm-ffi, or the compiler failed (its output is in the message).
    """
    library = (name, tuple(sorted(constants.items())))
    if _named is not None:
        _named.append(library)
        return None
    return _load(*library)


@contextmanager
def naming() -> Iterator[list[Library]]:
    """Within it :func:`load` compiles and loads nothing, but adds to the list what it was asked for."""
    global _named
    _named = []
    try:
        yield _named
    finally:
        _named = None


def missing() -> str | None:
    """Why the CUDA sources cannot be built here, or None where they can."""
    if find_nvcc() is None:
        return "no CUDA compiler (nvcc): install the CUDA toolkit, put nvcc on PATH or set CUDA_HOME"
    try:
        import tvm_ffi  # noqa: F401
    except ImportError:
        return "the package apache-tvm-ffi is not installed (SGLang brings it)"
    return None


@cache
def find_nvcc() -> str | None:
    """Path of nvcc: on PATH, else in the CUDA toolkit that torch finds, else None."""
    found = shutil.which("nvcc")
    if found is None:
        from torch.utils.cpp_extension import CUDA_HOME

        found = shutil.which("nvcc", path=os.path.join(CUDA_HOME, "bin")) if CUDA_HOME else None
    return found


def compile_all(arch: str = CI_ARCH, names: list[str] | None = None) -> dict[str, Path]:
    """Compile every declared variant of every source, without a GPU; variant -> library.

    ``names`` restricts it to some sources.  Raises BuildError at the first failure.
    """
    sources = names or sorted(path.stem for path in CSRC.glob("*.cu"))
    return compile_libraries([(name, constants) for name in sources for constants in variants(name)], arch)


def compile_libraries(libraries: Iterable[Library], arch: str = CI_ARCH) -> dict[str, Path]:
    """Compile some libraries side by side, without a GPU; label -> file.

    Raises BuildError at the first failure.
    """
    with ThreadPoolExecutor(os.cpu_count()) as compilers:
        jobs = {
            label(library): compilers.submit(_compile, *library, arch)
            for library in dict.fromkeys(libraries)
        }
        return {name: job.result() for name, job in jobs.items()}


def label(library: Library) -> str:
    """One line that names a library: its source and its constants."""
    name, constants = library
    return " ".join([name, *(f"{key}={value}" for key, value in constants)])


def is_compiled(library: Library, arch: str = CI_ARCH) -> bool:
    """Whether the cache holds this library, as this compiler makes it, for ``arch``."""
    return missing() is None and _target(*library, arch)[1].exists()


def arch_of(capability: tuple[int, int]) -> str:
    """Name of the architecture that a GPU's code is compiled for: (9, 0) -> ``90a``."""
    major, minor = capability
    return f"{major}{minor}" + ("a" if major >= 9 else "")


def variants(name: str) -> list[Constants]:
    """Constants of the variants that ``csrc/<name>.cu`` declares; one empty set if none."""
    found = []
    for line in _VARIANT.findall((CSRC / f"{name}.cu").read_text()):
        pairs = (pair.split("=") for pair in line.split())
        found.append(tuple(sorted((key, int(value)) for key, value in pairs)))
    return found or [()]


@cache
def _load(name: str, constants: Constants) -> Any:
    problem = missing()
    if problem:
        raise BuildError(f"cannot build the CUDA kernel {name!r}: {problem}")
    import torch
    import tvm_ffi

    arch = arch_of(torch.cuda.get_device_capability())
    return tvm_ffi.load_module(_compile(name, constants, arch))


def _compile(name: str, constants: Constants, arch: str) -> Path:
    problem = missing()
    if problem:
        raise BuildError(f"cannot build the CUDA kernel {name!r}: {problem}")
    command, target = _target(name, constants, arch)
    if target.exists():
        return target
    CACHE.mkdir(parents=True, exist_ok=True)
    # Tensor-parallel ranks start together: one compiles, the others wait for its result.
    with open(target.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            partial = target.with_suffix(".partial")
            run = subprocess.run(
                [*command, "-o", str(partial), str(CSRC / f"{name}.cu")],
                capture_output=True,
                text=True,
                check=False,
            )
            if run.returncode:
                raise BuildError(f"nvcc failed on {name}.cu ({run.returncode}):\n{run.stderr[-8000:]}")
            os.replace(partial, target)
    return target


def _target(name: str, constants: Constants, arch: str) -> tuple[list[str], Path]:
    """Compiler command and cached file of a library; the compiler and tvm-ffi must be there."""
    from tvm_ffi.libinfo import find_dlpack_include_path, find_include_path, find_libtvm_ffi

    nvcc = find_nvcc()
    assert nvcc is not None
    command = [
        nvcc,
        *FLAGS,
        f"-gencode=arch=compute_{arch},code=sm_{arch}",
        *(f"-D{key}={value}" for key, value in constants),
        f"-I{find_include_path()}",
        f"-I{find_dlpack_include_path()}",
        f"-L{Path(find_libtvm_ffi()).parent}",
        "-ltvm_ffi",
    ]
    return command, CACHE / f"{name}-{_digest(name, command)}.so"


def _digest(name: str, command: list[str]) -> str:
    """Hash of the command, the compiler and the source with all headers of ``csrc``."""
    hasher = hashlib.sha256("\0".join(command).encode())
    hasher.update(_nvcc_version(command[0]).encode())
    for path in [CSRC / f"{name}.cu", *sorted(CSRC.glob("*.cuh"))]:
        hasher.update(path.name.encode() + path.read_bytes())
    return hasher.hexdigest()[:20]


@cache
def _nvcc_version(nvcc: str) -> str:
    return subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
