"""Stand-in for ``sgl_kernel``, whose wheel holds CUDA code only.

On a CPU SGLang imports some functions from it by name; a server with plain decoding calls none of them.
Each one exists here and raises when it is called, so a path that does need the package says so instead of
computing something else.
"""

from collections.abc import Callable
from typing import NoReturn

_SUFFIX = "_cpu"


def __getattr__(name: str) -> Callable[..., NoReturn]:
    # SGLang asks for other names to find out what this machine can do; those must stay missing.
    if not name.endswith(_SUFFIX):
        raise AttributeError(f"the CPU stand-in for sgl_kernel has no {name!r}")

    def missing(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} is not available: this is the CPU stand-in of locks_sglang. "
            "The option that led here needs SGLang's own kernel package."
        )

    missing.__name__ = name
    return missing
