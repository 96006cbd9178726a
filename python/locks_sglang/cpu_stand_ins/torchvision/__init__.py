"""Stand-in that lets the CUDA build of torchvision import beside a CPU build of torch.

torchvision registers fake kernels for two of its C++ operators while it imports. Its C++ library does not
load without CUDA, so torch does not know the operators and the import fails. Declaring their schemas first
is all it needs. The installed torchvision is then loaded in this module's place: nothing of it is replaced.
"""

import importlib.util
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def _find_installed() -> ModuleSpec:
    here = Path(__file__).resolve().parent.parent
    elsewhere = [entry for entry in sys.path if Path(entry or ".").resolve() != here]
    spec = PathFinder.find_spec("torchvision", elsewhere)
    if spec is None or spec.loader is None or spec.origin is None:
        raise ModuleNotFoundError(
            "torchvision is not installed; only its CPU stand-in is", name="torchvision"
        )
    return spec


def _extension_loads(package: Path) -> bool:
    """Whether torchvision's own C++ library works here; it then declares the operators itself."""
    for library in package.glob("_C*.so"):
        try:
            torch.ops.load_library(str(library))
            return True
        except OSError:
            continue
    return False


_spec = _find_installed()
_library = None
if not _extension_loads(Path(_spec.origin or "").parent):
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for _schema in _SCHEMAS:
        _library.define(_schema)

_installed = importlib.util.module_from_spec(_spec)
# torch forgets the operators when the library object dies.
_installed._cpu_stand_in_library = _library  # type: ignore[attr-defined]
# The import system hands out whatever sys.modules holds once this file has run.
sys.modules[__name__] = _installed
assert _spec.loader is not None
_spec.loader.exec_module(_installed)
