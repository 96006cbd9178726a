"""What SGLang needs on a machine without a GPU: stand-in modules, environment and flags, in one place.

The stand-ins (see README.md beside this file) are importable only where this folder is on ``PYTHONPATH``,
which `environment` arranges for a server's process tree. Nothing here is used where there is a GPU.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

FOLDER = Path(__file__).resolve().parent

# float32: bf16 linear layers are about 8x slower on a CPU. torch_native is the attention backend that needs
# no compiled kernel. The pool is sized by hand: SGLang would otherwise claim most of the machine's memory.
SERVER_FLAGS: tuple[str, ...] = (
    "--device", "cpu",
    "--attention-backend", "torch_native",
    "--dtype", "float32",
    "--page-size", "16",
    "--chunked-prefill-size", "512",
    "--max-total-tokens", "16384",
    "--enable-cache-report",
)  # fmt: skip

_SETTINGS = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # A page size above 1 launches a Triton kernel in SGLang's allocator; the interpreter runs it here.
    "TRITON_INTERPRET": "1",
    "HF_HUB_OFFLINE": "1",
}


def environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment for an SGLang server (and the processes that it spawns) on a CPU.

    `base` (default: this process's environment) wins over every default, except that the stand-ins always
    come first on ``PYTHONPATH``.
    """
    env = {**_SETTINGS, "OMP_NUM_THREADS": "1", **(os.environ if base is None else base)}
    rest = env.get("PYTHONPATH", "").split(os.pathsep)
    env["PYTHONPATH"] = os.pathsep.join([str(FOLDER), *(x for x in rest if x and x != str(FOLDER))])
    return env


def activate() -> None:
    """Make the stand-ins importable in this process; call it before transformers or SGLang is imported."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
