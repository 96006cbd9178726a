"""Device tables of the base addresses of per-layer tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_tables: dict[tuple[int, ...], torch.Tensor] = {}


def pointer_table(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """int64 ``[len(tensors)]`` on their device: the address of each tensor's first element.

    Built at the first call with these tensors and kept, because a kernel that runs in every
    decode step must not upload it again (and a CUDA graph capture could not).
    """
    addresses = tuple(tensor.data_ptr() for tensor in tensors)
    table = _tables.get(addresses)
    if table is None:
        table = torch.tensor(addresses, dtype=torch.int64, device=tensors[0].device)
        _tables[addresses] = table
    return table
