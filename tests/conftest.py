"""Lets every test import the shared modules of this folder and, without a GPU too, SGLang itself."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from locks_sglang import cpu_stand_ins

if not torch.cuda.is_available():
    cpu_stand_ins.activate()
