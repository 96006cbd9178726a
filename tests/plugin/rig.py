"""A model runner's sparse decode without a model: random keys, requests of given lengths, fake layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from locks_sglang.config import LocksConfig
from locks_sglang.runtime import SparseDecode

PAGE = 16
HEAD_DIM = 64
SCALE = HEAD_DIM**-0.5


class Rig:
    """Requests 1, 2, ... of ``lengths`` tokens on scattered pages of a pool of ``layers`` layers.

    ``dtype`` is that of the queries and, without ``pool_dtype``, of the pool; ``scales`` are those of an
    fp8 pool's keys and values.
    """

    def __init__(
        self,
        config: LocksConfig,
        lengths: list[int],
        *,
        layers: int = 5,
        q_heads: int = 6,
        kv_heads: int = 2,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        pool_dtype: torch.dtype | None = None,
        scales: tuple[float, float] | None = None,
        context: int | None = None,
        seed: int = 0,
        graph_rows: int = 0,
        rank: int = 0,
        dense: dict[int, str] | None = None,
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.device, self.dtype = device, dtype
        self.q_heads, self.kv_heads, self.layers = q_heads, kv_heads, layers
        context = context or max(lengths) + 4 * PAGE
        pages = len(lengths) * (-(-context // PAGE)) + 1
        shape = (pages * PAGE, kv_heads, HEAD_DIM)
        self.keys = [self.noise(*shape).to(pool_dtype or dtype) for _ in range(layers)]
        self.values = [self.noise(*shape).to(pool_dtype or dtype) for _ in range(layers)]
        self.scales = scales
        order = torch.randperm(pages - 1, generator=self.generator) + 1
        slots = (order.view(len(lengths), -1, 1) * PAGE + torch.arange(PAGE)).flatten(1)
        self.token_table = torch.zeros(len(lengths) + 1, slots.shape[1], dtype=torch.int32)
        self.token_table[1:] = slots
        self.token_table = self.token_table.to(device)
        pool = SimpleNamespace(
            start_layer=0,
            layer_num=layers,
            _get_key_buffer=self.keys.__getitem__,
            _get_value_buffer=self.values.__getitem__,
        )
        self.state = SparseDecode(
            config,
            pool,
            SimpleNamespace(req_to_token=self.token_table),
            q_heads,
            dtype,
            graph_rows,
            rank,
        )
        dense = dense or {}
        self.state.set_layers([layer for layer in range(layers) if layer not in dense], dense)
        self.state.finish_forward(torch.arange(pages * PAGE, device=device))

    def noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype).to(self.device)

    def queries(self, rows: int) -> list[torch.Tensor]:
        """Queries of every layer, sharp enough that pages differ."""
        return [3 * self.noise(rows, self.q_heads, HEAD_DIM) for _ in range(self.layers)]

    def batch(self, lengths: list[int], padding: int = 0) -> Any:
        """A decode batch of requests 1, 2, ...; ``padding`` rows as in the batch of a CUDA graph."""
        rows = len(lengths)
        slots = [*range(1, rows + 1), *[0] * padding]
        return SimpleNamespace(
            forward_mode=SimpleNamespace(is_decode=lambda: True, is_idle=lambda: False),
            req_pool_indices=torch.tensor(slots, device=self.device),
            seq_lens=torch.tensor(lengths + [1] * padding, device=self.device),
            rids=[f"r{row}" for row in range(rows)],
            batch_size=rows,
            out_cache_loc=torch.zeros(rows, dtype=torch.int64, device=self.device),
        )

    def layer(self, index: int) -> Any:
        k_scale, v_scale = self.scales or (None, None)
        return SimpleNamespace(layer_id=index, scaling=SCALE, k_scale_float=k_scale, v_scale_float=v_scale)

    def run_layers(self, queries: list[torch.Tensor]) -> list[torch.Tensor]:
        return [
            self.state.decode(queries[layer], self.layer(layer))
            for layer in range(self.layers)
            if layer not in self.state.dense_layers
        ]

    def step(self, lengths: list[int], queries: list[torch.Tensor]) -> list[torch.Tensor]:
        """A whole eager decode step, as SGLang and the hooks run it."""
        batch = self.batch(lengths)
        self.state.begin_step(batch)
        outputs = self.run_layers(queries)
        self.state.finish_step(batch)
        return outputs

    def chosen(self, layer: int, row: int) -> list[list[int]]:
        """Logical pages that each KV head of a tapped layer chose in the last step."""
        tap = self.state._taps[layer]
        return tap.logical[row, :, : tap.counts[row]].tolist()

    def attention(
        self, layer: int, row: int, length: int, query: torch.Tensor, pages: list[list[int]]
    ) -> tuple[torch.Tensor, float]:
        """Attention over the tokens of ``pages`` of each KV head, float64 ``[q_heads, d]``, and the share
        of the exact attention mass that these tokens hold, averaged over the query heads."""
        slots = self.token_table[row + 1, :length].long()
        stored = (pool[layer].double()[slots].cpu() for pool in (self.keys, self.values))
        keys, values = (part * scale for part, scale in zip(stored, self.scales or (1.0, 1.0), strict=True))
        group = self.q_heads // self.kv_heads
        outputs, masses = [], []
        for head, vector in enumerate(query.double().cpu()):
            shares = (keys[:, head // group] @ vector * SCALE).softmax(0)
            chosen = torch.isin(torch.arange(length) // PAGE, torch.tensor(pages[head // group]))
            masses.append(float(shares[chosen].sum()))
            outputs.append(shares[chosen] @ values[chosen, head // group] / shares[chosen].sum())
        return torch.stack(outputs), sum(masses) / len(masses)

    def retained(self, *row: Any) -> float:
        """The second result of :meth:`attention`."""
        return self.attention(*row)[1]
