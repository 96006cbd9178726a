"""What Triton's interpreter takes and its compiler may not: every kernel is compiled once."""

import os
import subprocess
import sys
from pathlib import Path


def test_the_triton_kernels_compile_for_hopper() -> None:
    """With the arguments that the ops pass; no GPU is needed."""
    run = subprocess.run(
        [sys.executable, Path(__file__).with_name("compile_triton.py")],
        env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    names = {line.split()[0] for line in run.stdout.splitlines()}
    assert {
        "_look_up_kernel",
        "_take_in_kernel",
        "_finish_kernel",
        "_split_kernel",
        "_summary_kernel",
        "_envelope_kernel",
        "_score_kernel",
        "_select_kernel",
    } <= names
