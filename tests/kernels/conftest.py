"""Lets the kernel tests import the shared modules of ``tests/``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
