"""Whether Triton kernels can run on the CPU in this process, and what the tests of them share."""

from __future__ import annotations

import pytest
import triton
import triton.language as tl


def require() -> None:
    """Skip, with the reason, unless Triton was imported with its interpreter on."""
    if not triton.knobs.runtime.interpret or isinstance(tl.cdiv, triton.JITFunction):
        pytest.skip("Triton's interpreter is off: run with TRITON_INTERPRET=1", allow_module_level=True)
