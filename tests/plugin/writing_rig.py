"""A rig whose decode steps write, on a pool that may be a host tier's."""

from __future__ import annotations

from typing import Any

import torch
from locks_sglang.config import LocksConfig
from locks_sglang.tier.decode import HostTier
from rig import HEAD_DIM, PAGE, Rig


class WritingRig(Rig):
    """A rig whose decode steps write the K and V of their tokens, as the backend does.

    Its pool is a host tier's with ``tiles`` hot ones, where they are given.
    """

    def __init__(
        self, config: LocksConfig, lengths: list[int], tiles: int | None = None, **options: Any
    ) -> None:
        super().__init__(config, lengths, **options)
        if tiles is not None:
            self.use_host_tier(tiles)

    def use_host_tier(self, tiles: int) -> None:
        """Decode as from a pool in host memory, with ``tiles`` hot ones."""
        self.state.tier = HostTier(
            self.state.summaries,
            hot_bytes=tiles * 2 * PAGE * HEAD_DIM * self.dtype.itemsize,
            width=self.state.geometry.width,
            requests=len(self.token_table),
            device=self.state.device,
        )

    def decode(self, lengths: list[int], queries: list[torch.Tensor], new: torch.Tensor) -> torch.Tensor:
        """Outputs of all layers; ``new`` is ``[layers, 2, rows, kv_heads, d]``."""
        self.state.begin_step(self.batch(lengths))
        rows = range(1, len(lengths) + 1)
        slots = torch.stack([self.token_table[row, n - 1] for row, n in zip(rows, lengths, strict=True)])
        outputs = []
        for index in range(self.layers):
            self.keys[index][slots.long()], self.values[index][slots.long()] = new[index]
            self.state.write(self.layer(index), *new[index])
            outputs.append(self.state.decode(queries[index], self.layer(index)))
        self.state.finish_forward(slots.long())
        return torch.stack(outputs)

    def prefill(self, row: int, length: int, keys: torch.Tensor) -> None:
        """Another request got the pages of a row: its tokens are written anew, in all layers."""
        slots = self.token_table[row + 1, :length].long()
        for index in range(self.layers):
            self.keys[index][slots], self.values[index][slots] = keys[index], -keys[index]
        self.state.finish_forward(slots)
        self.state.wrote(slots)
