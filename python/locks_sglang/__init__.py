"""LOCKS sparse decode for SGLang (arXiv 2607.24555)."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("locks-sglang")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+unknown"

__all__ = ["__version__"]
