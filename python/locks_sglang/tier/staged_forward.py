"""A prefill forward of SGLang's attention backends over staged keys and values.

A backend asks its pool for a layer's buffers, and finds pages through a table that it made before the
forward.  Both are replaced for the time of a call; its kernels stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from .staging import PrefillStaging


class StagedPool:
    """A KV pool whose buffers are the staged ones of a layer; writes go there and to the pool."""

    def __init__(self, pool: Any, staging: PrefillStaging, index: int) -> None:
        self._pool, self._staging, self._index = pool, staging, index

    def set_kv_buffer(self, layer: Any, location: Any, k: Any, v: Any, *scales: Any, **more: Any) -> None:
        self._staging.store(self._index, k, v)
        self._pool.set_kv_buffer(layer, location, k, v, *scales, **more)

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._staging.buffers(self._index)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self._staging.buffers(self._index)[0]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self._staging.buffers(self._index)[1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)


def can_stage(forward_batch: Any) -> bool:
    """Whether this module knows how to redirect a prefill."""
    prefixes, new = forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu
    if prefixes is None or new is None:
        return False
    if forward_batch.batch_size != len(prefixes) or sum(new) == 0:
        return False
    # Later versions plan where FlashInfer reads before the backend is asked.
    return getattr(forward_batch, "kv_loc_plan", None) is None


@contextmanager
def planning(backend: Any, forward_batch: Any, staging: PrefillStaging) -> Iterator[None]:
    """The backend's own planning of a prefill, so that it finds the pages of the staged copy."""
    updater = getattr(backend, "indices_updater_prefill", None)
    if updater is None:
        yield
        _redirect(backend, forward_batch, staging)
        return
    # FlashInfer lists the slots of every token, from a table that counts up here.
    table, requests = updater.req_to_token, forward_batch.req_pool_indices
    firsts = torch.tensor(staging.firsts, dtype=requests.dtype)
    updater.req_to_token = staging.token_table()
    forward_batch.req_pool_indices = firsts.to(requests.device, non_blocking=True)
    try:
        yield
    finally:
        updater.req_to_token, forward_batch.req_pool_indices = table, requests


def _redirect(backend: Any, forward_batch: Any, staging: PrefillStaging) -> None:
    metadata = getattr(backend, "forward_metadata", None)
    if metadata is not None:
        metadata.page_table = staging.page_table(*metadata.page_table.shape)
        return
    # The torch backend reads SGLang's own table in every layer.
    table = torch.zeros_like(backend.req_to_token_pool.req_to_token)
    for request, first, length in zip(
        forward_batch.req_pool_indices.tolist(), staging.firsts, staging.lengths, strict=True
    ):
        start = first * staging.page_size
        table[request, :length] = torch.arange(start, start + length, dtype=table.dtype)
    staging.tables = SimpleNamespace(req_to_token=table)


@contextmanager
def attending(
    backend: Any, staging: PrefillStaging, index: int, written: torch.Tensor | None = None
) -> Iterator[None]:
    """The backend's prefill attention of a layer.

    Args:
        backend: SGLang's.
        staging: with a forward that was begun.
        index: of the layer in the pool.
        written: pool slots of the forward's own tokens, if the model has written them by itself.
    """
    pool, tables = backend.token_to_kv_pool, backend.req_to_token_pool
    staging.enter(index)
    if written is not None:
        staging.store_from_pool(index, written)
    backend.token_to_kv_pool = StagedPool(pool, staging, index)
    if staging.tables is not None:
        backend.req_to_token_pool = staging.tables
    try:
        yield
    finally:
        backend.token_to_kv_pool, backend.req_to_token_pool = pool, tables
        staging.leave(index)
