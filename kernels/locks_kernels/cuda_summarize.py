"""CUDA implementation of ``summarize``: csrc/summarize.cu and csrc/envelope.cu."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import build
from .layout import Envelopes, Records, SummaryLayout
from .pointers import pointer_table

KEY_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float8_e4m3fn: 3}


def summarize(keys: Sequence[torch.Tensor], slots: torch.Tensor, records: Records) -> None:
    """See :func:`locks_kernels.summarize.summarize`, which has checked shapes and dtypes."""
    view = keys[0]
    # One vector load takes 8 elements, so rows must start at multiples of that.
    if any(stride % 8 for stride in view.stride()[:3]) or any(key.data_ptr() % 16 for key in keys):
        raise ValueError(f"strides of keys must be multiples of 8 elements, got {view.stride()}")
    if not all(plane.is_contiguous() for plane in records.planes):
        raise ValueError("records must be contiguous planes as Summaries.allocate makes them")
    library = load(records, view.dtype)
    where = (
        pointer_table(keys).data_ptr(),
        len(keys),
        slots.data_ptr(),
        slots.shape[0],
        *view.stride()[:3],
    )
    planes = [plane.data_ptr() for plane in records.planes]
    pages, kv_heads = records.planes[0].shape[1:3]
    stream = torch.cuda.current_stream(slots.device).cuda_stream
    function = library.envelope if isinstance(records, Envelopes) else library.summarize
    function(*where, *planes, pages, kv_heads, stream)


def load(records: Records, dtype: torch.dtype) -> Any:
    """The library for a record format and a key dtype; compiles at the first call."""
    if dtype not in KEY_TYPES:
        legal = ", ".join(str(name).removeprefix("torch.") for name in KEY_TYPES)
        raise ValueError(f"keys of dtype {dtype}; legal: {legal} (fp32 pools: impl='triton')")
    layout = records.layout
    constants = {"HEAD_DIM": layout.head_dim, "PAGE": layout.page_size, "KEY_TYPE": KEY_TYPES[dtype]}
    if not isinstance(layout, SummaryLayout):
        return build.load("envelope", **constants)
    bits = {"i4": 4, "h": 4, "i8": 8, "bf16": 16}[layout.suffix]
    return build.load(
        "summarize", **constants, RANK=layout.rank, BASIS_BITS=bits, ROTATED=int(layout.rotated)
    )
