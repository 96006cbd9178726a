"""CUDA implementation of ``attend``: csrc/attend.cu."""

from __future__ import annotations

from typing import Any

import torch

from . import build
from .attend_buffers import AttendBuffers, split
from .select import Selection

QUERY_TYPES = {torch.bfloat16: 0, torch.float16: 1}
KV_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float8_e4m3fn: 3}
MAX_GROUP = 16

# None of one block: launched without clusters, the kernel ended with an illegal instruction on an H200,
# most likely at its asynchronous stores to the memory of the cluster, even to a block's own.
CLUSTERS = (2, 4, 8, 16)

TILES_A_WARP = 1
"""Tiles of 16 tokens that a warp gets at least before a (row, KV head) is split over further blocks of a
cluster; over further clusters it is for more (``Share`` in csrc/attend_warp.cuh)."""


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    selection: Selection,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float,
    v_scale: float,
    output: torch.Tensor,
    lse: torch.Tensor,
    buffers: AttendBuffers,
    budgets: torch.Tensor | None = None,
    hot: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Fill ``output [rows, q_heads, d]`` and ``lse [rows, q_heads]``; see ``locks_kernels.attend``.

    Raises:
        ValueError: a dtype, alignment or group that the kernel does not take.
    """
    check(queries, keys, values)
    rows, q_heads, _ = queries.shape
    kv_heads = keys.shape[2]
    kernel = library(queries, keys, hot is not None)
    splits, cluster = split(rows * kv_heads, clusters_of(kernel))
    kernel.attend(
        queries.data_ptr(),
        *queries.stride()[:2],
        keys.data_ptr(),
        *keys.stride()[:3],
        values.data_ptr(),
        *values.stride()[:3],
        selection.pages.data_ptr(),
        selection.pages.shape[-1],
        selection.counts.data_ptr(),
        page_table.data_ptr(),
        page_table.stride(0),
        seq_lens.data_ptr(),
        seq_lens.dtype == torch.int64,
        sm_scale,
        v_scale,
        output.data_ptr(),
        lse.data_ptr(),
        buffers.output.data_ptr(),
        buffers.sums.data_ptr(),
        buffers.arrivals.data_ptr(),
        rows,
        kv_heads,
        q_heads // kv_heads,
        splits,
        cluster,
        TILES_A_WARP,
        0 if budgets is None else budgets.data_ptr(),
        *((0, 0) if hot is None else (tiles.data_ptr() for tiles in hot)),
        torch.cuda.current_stream(queries.device).cuda_stream,
    )


def library(queries: torch.Tensor, keys: torch.Tensor, hot: bool = False) -> Any:
    """The library for these dtypes and this geometry, for two pools if ``hot``; compiled at first use."""
    return build.load(
        "attend",
        HEAD_DIM=queries.shape[2],
        PAGE=keys.shape[1],
        KV_TYPE=KV_TYPES[keys.dtype],
        Q_TYPE=QUERY_TYPES[queries.dtype],
        HEAD_TILES=1 if queries.shape[1] // keys.shape[2] <= 8 else 2,
        **({"HOT": 1} if hot else {}),
    )


def check(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Raise ValueError, naming what is legal, unless the kernel takes these tensors."""
    if queries.dtype not in QUERY_TYPES:
        raise ValueError(f"queries of dtype {queries.dtype}; legal: {_names(QUERY_TYPES)}")
    if keys.dtype not in KV_TYPES or values.dtype != keys.dtype:
        raise ValueError(
            f"pools of dtypes {keys.dtype} and {values.dtype} are not supported; legal: one of "
            f"{_names(KV_TYPES)} for both (fp32 pools: impl='triton')"
        )
    if queries.shape[1] // keys.shape[2] > MAX_GROUP:
        raise ValueError(
            f"{queries.shape[1] // keys.shape[2]} query heads a KV head; legal: 1 to {MAX_GROUP}"
        )
    if values.shape != keys.shape:
        raise ValueError(f"values {list(values.shape)} must have the shape of keys {list(keys.shape)}")
    for name, tensor in (("queries", queries), ("keys", keys), ("values", values)):
        if tensor.stride(-1) != 1 or any(stride % 8 for stride in tensor.stride()[:-1]):
            raise ValueError(
                f"{name} need a contiguous last dimension and other strides that are multiples of 8 "
                f"elements, got {tensor.stride()}"
            )


def _names(types: dict[torch.dtype, int]) -> str:
    return ", ".join(str(name).removeprefix("torch.") for name in types)


_clusters: dict[int, dict[int, int]] = {}


def clusters_of(kernel: Any) -> dict[int, int]:
    """Clusters of each of ``CLUSTERS`` that the GPU holds at a time; ``build`` keeps libraries for good."""
    found = _clusters.get(id(kernel))
    if found is None:
        found = {size: int(kernel.clusters_at_a_time(size)) for size in CLUSTERS}
        _clusters[id(kernel)] = found
    return found
