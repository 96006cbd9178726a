"""Decode steps of a host tier in a CUDA graph: the bits of a resident pool, from memory of the host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from locks_kernels import page_view
from locks_sglang.config import LocksConfig
from locks_sglang.tier import pool, ranks
from rig import HEAD_DIM, PAGE
from writing_rig import WritingRig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

CONFIG = LocksConfig(selector="locks", budget=128, max_budget=256)
LENGTHS = [900, 47, 129, 2000, 17, 1, 640]
ROWS, LAYERS, KV_HEADS = 8, 3, 2


class Graph:
    """The layers of a decode step in one CUDA graph: write, score, select, resolve, fill, attend."""

    def __init__(self, tiles: int | None) -> None:
        self.rig = rig = WritingRig(
            CONFIG, LENGTHS, None, device="cuda", dtype=torch.bfloat16, q_heads=16, graph_rows=ROWS,
            layers=LAYERS,
        )  # fmt: skip
        if tiles is not None:
            move_to_host(rig)
            rig.use_host_tier(tiles)
        state = rig.state
        state.allocate_graph_buffers(ROWS)
        self.queries = [
            torch.zeros(ROWS, 16, HEAD_DIM, dtype=rig.dtype, device="cuda") for _ in range(LAYERS)
        ]
        self.new = torch.zeros(LAYERS, 2, ROWS, KV_HEADS, HEAD_DIM, dtype=rig.dtype, device="cuda")
        self.slots = torch.zeros(ROWS, dtype=torch.int64, device="cuda")
        state.begin_step(rig.batch([], padding=ROWS))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.layers()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = self.layers()

    def layers(self) -> list[torch.Tensor]:
        rig, outputs = self.rig, []
        for index in range(LAYERS):
            rig.keys[index][self.slots], rig.values[index][self.slots] = self.new[index]
            rig.state.write(rig.layer(index), *self.new[index])
            outputs.append(rig.state.decode(self.queries[index], rig.layer(index)))
        rig.state.finish_forward(self.slots)
        return outputs

    def replay(
        self, lengths: list[int], queries: list[torch.Tensor], new: torch.Tensor
    ) -> list[torch.Tensor]:
        """Outputs of all layers."""
        rows = len(lengths)
        before = torch.tensor(lengths, device="cuda") - 1
        slots = self.rig.token_table[1 : rows + 1].gather(1, before.unsqueeze(1)).squeeze(1)
        torch.cuda.set_sync_debug_mode("error")
        try:
            # The batch's own tensors are made on the host.
            batch = self.batch(lengths)
            self.rig.state.begin_step(batch)
            self.slots.zero_()
            self.slots[:rows].copy_(slots)
            self.new[:, :, :rows].copy_(new)
            for static, given in zip(self.queries, queries, strict=True):
                static[:rows].copy_(given)
            self.graph.replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return [output[:rows].clone() for output in self.outputs]

    def batch(self, lengths: list[int]) -> Any:
        torch.cuda.set_sync_debug_mode("default")
        batch = self.rig.batch(lengths, padding=ROWS - len(lengths))
        torch.cuda.set_sync_debug_mode("error")
        return batch


def move_to_host(rig: WritingRig) -> None:
    """Another pool with the same keys and values, as SGLang's pool gets it."""
    made = SimpleNamespace(layer_num=LAYERS, store_dtype=rig.dtype, device="cuda")
    made.memory = pool.hold(made, [tuple(rig.keys[0].shape)] * 2)
    summaries = rig.state.summaries
    for theirs, ours, views in (
        (made.k_buffer, rig.keys, summaries.keys), (made.v_buffer, rig.values, summaries.values)
    ):  # fmt: skip
        for index in range(LAYERS):
            theirs[index].copy_(ours[index].float())  # by a kernel, as all that writes there
            ours[index] = theirs[index]
            views[index] = page_view(theirs[index], PAGE)


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "rank", lambda: 0)
    monkeypatch.setattr(ranks, "gather", lambda mine: [mine])


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("tiles", [0, 60, 2000])
def test_bits_of_a_resident_pool(tiles: int) -> None:
    resident, host = Graph(None), Graph(tiles)
    assert host.rig.state.tier is not None
    noise = torch.Generator().manual_seed(tiles)
    lengths = list(LENGTHS)
    for step in range(20):
        lengths = [length + 1 for length in lengths]
        rows = 4 if step in (3, 4, 9) else len(lengths)
        queries = resident.rig.queries(rows)
        new = torch.randn(LAYERS, 2, rows, KV_HEADS, HEAD_DIM, generator=noise).bfloat16().cuda()
        expected, got = (graph.replay(lengths[:rows], queries, new) for graph in (resident, host))
        for layer, (one, other) in enumerate(zip(expected, got, strict=True)):
            assert torch.equal(one, other), (step, layer, float((one - other).abs().max()))
        lengths = lengths[:rows] + [length - 1 for length in lengths[rows:]]
        if step in (5, 6, 14):
            keys = torch.randn(LAYERS, 100, KV_HEADS, HEAD_DIM, generator=noise).bfloat16().cuda()
            for graph in (resident, host):
                graph.rig.prefill(2, 100, keys)
            lengths[2] = 100
    status = host.rig.state.status()
    assert status["host_bytes_read"] > 0 and (status["hot_share"] > 0) == (tiles > 0)
    print(f"{tiles} tiles: hot share {status['hot_share']:.3f}, {status['host_bytes_read']} bytes read")
