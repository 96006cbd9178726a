"""Decode steps in a CUDA graph: audits, traces and FlashInfer's attention, against float64 arithmetic."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from locks_sglang import flashinfer_attend
from locks_sglang.config import LocksConfig
from rig import HEAD_DIM, PAGE, Rig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

CONFIG = LocksConfig(selector="locks", budget=128, max_budget=256)
LENGTHS = [900, 47, 129, 2000, 17, 1, 640]
needs_flashinfer = pytest.mark.skipif(not flashinfer_attend.available(), reason="needs flashinfer")


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Captured:
    """The decode layers of a rig in one CUDA graph, as SGLang captures and replays them."""

    def __init__(self, rig: Rig, rows: int) -> None:
        self.rig, self.rows = rig, rows
        state = rig.state
        if state._graph_buffers is None:
            state.allocate_graph_buffers(8)
        self.queries = [
            torch.zeros(rows, rig.q_heads, HEAD_DIM, dtype=rig.dtype, device="cuda")
            for _ in range(rig.layers)
        ]
        # As at capture: every row one token, on the padding page.
        state.begin_step(rig.batch([], padding=rows))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                rig.run_layers(self.queries)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = rig.run_layers(self.queries)

    def replay(self, lengths: list[int], queries: list[torch.Tensor]) -> None:
        batch = self.rig.batch(lengths, padding=self.rows - len(lengths))
        with no_synchronisation():
            self.rig.state.begin_step(batch)
            for static, given in zip(self.queries, queries, strict=True):
                static[: len(lengths)].copy_(given)
            self.graph.replay()
            if self.rig.state._trace is None:
                self.rig.state.finish_step(batch)
        if self.rig.state._trace is not None:
            self.rig.state.finish_step(batch)


def make_rig(config: LocksConfig, **options: Any) -> Rig:
    return Rig(
        config, LENGTHS, device="cuda", dtype=torch.bfloat16, q_heads=16, graph_rows=8, layers=3, **options
    )


def batches() -> list[list[int]]:
    """Changing lengths and sizes: full and open pages, fewer pages than the list, shorter batches."""
    return [LENGTHS, [n + 1 for n in LENGTHS[:6]], [5, 16, 200, 1999], [900], [n + 30 for n in LENGTHS]]


@needs_flashinfer
@pytest.mark.parametrize("rows", [8, 7])
def test_flashinfer_in_a_graph(rows: int, tmp_path: Path) -> None:
    rig = make_rig(replace(CONFIG, attend="flashinfer", trace_file=str(tmp_path / "trace")))
    captured = Captured(rig, rows)
    worst = 0.0
    for lengths in batches():
        queries = rig.queries(len(lengths))
        captured.replay(lengths, queries)
        for layer in range(rig.layers):
            for row, length in enumerate(lengths):
                pages = rig.chosen(layer, row)
                expected, _ = rig.attention(layer, row, length, queries[layer][row], pages)
                error = (captured.outputs[layer][row].double().cpu() - expected).abs()
                # bf16 outputs: relative to the value where it is large.
                worst = max(worst, float((error / expected.abs().clamp_min(1)).max()))
    print(f"largest error {worst:.1e}")
    assert worst <= 1e-2


@pytest.mark.parametrize("attend", ["native", pytest.param("flashinfer", marks=needs_flashinfer)])
def test_an_fp8_pool_in_a_graph(attend: str, tmp_path: Path) -> None:
    """Stored keys and values times scales, from scores to outputs."""
    config = replace(CONFIG, attend=attend, trace_file=str(tmp_path / "trace"))
    rig = make_rig(config, pool_dtype=torch.float8_e4m3fn, scales=(0.25, 3.0))
    captured = Captured(rig, 8)
    for lengths in batches():
        queries = rig.queries(len(lengths))
        captured.replay(lengths, queries)
        for layer in range(rig.layers):
            for row, length in enumerate(lengths):
                pages = rig.chosen(layer, row)
                expected, _ = rig.attention(layer, row, length, queries[layer][row], pages)
                found = captured.outputs[layer][row].double().cpu()
                torch.testing.assert_close(found, expected, atol=3e-2, rtol=1e-2)


@needs_flashinfer
def test_flashinfer_with_several_graphs_and_eager_batches(tmp_path: Path) -> None:
    """Graphs of other sizes share the buffers, so each replay must bring its own pointers."""
    config = replace(CONFIG, attend="flashinfer", trace_file=str(tmp_path / "trace"))
    rig = make_rig(config)
    rig.state.allocate_graph_buffers(4)
    graphs = {rows: Captured(rig, rows) for rows in (4, 2, 1)}
    for lengths in (LENGTHS[:4], LENGTHS[:1], LENGTHS[:2], LENGTHS, LENGTHS[1:4]):
        queries = rig.queries(len(lengths))
        if len(lengths) > 4:  # more than the largest graph
            outputs = rig.step(lengths, queries)
        else:
            captured = next(graphs[rows] for rows in (1, 2, 4) if rows >= len(lengths))
            captured.replay(lengths, queries)
            outputs = captured.outputs
        for layer in range(rig.layers):
            for row, length in enumerate(lengths):
                expected, _ = rig.attention(layer, row, length, queries[layer][row], rig.chosen(layer, row))
                torch.testing.assert_close(
                    outputs[layer][row].double().cpu(), expected, atol=1e-2, rtol=1e-2
                )


def test_audits_of_replayed_steps_read_the_keys_of_the_step() -> None:
    """No step waits for the device, and what a later forward writes into the pages does not count."""
    rig = make_rig(replace(CONFIG, audit_interval=1))
    captured = Captured(rig, 8)
    state = rig.state
    found: list[tuple[int, float]] = []
    state.counters.observe_mass = lambda *row: found.append(row)  # type: ignore[method-assign]
    for step in range(6):
        layer, first = step % 3, step // 3 * 4
        queries = rig.queries(len(LENGTHS))
        kept = [keys.clone() for keys in rig.keys]
        captured.replay(LENGTHS, queries)
        for keys in rig.keys:
            keys.normal_()
        state.status()
        rig.keys, overwritten = kept, rig.keys
        audited = [row for row in range(first, min(first + 4, len(LENGTHS))) if LENGTHS[row] > 128]
        expected = [
            rig.retained(layer, row, LENGTHS[row], queries[layer][row], rig.chosen(layer, row))
            for row in audited
        ]
        assert [audited_layer for audited_layer, _ in found] == [layer] * len(audited)
        assert [mass for _, mass in found] == pytest.approx(expected, abs=5e-3)
        del found[:]
        for keys, original in zip(overwritten, kept, strict=True):
            keys.copy_(original)
        rig.keys = overwritten


def test_a_trace_of_replayed_steps_equals_that_of_eager_ones(tmp_path: Path) -> None:
    traces = []
    for name in ("graph", "eager"):
        rig = make_rig(replace(CONFIG, trace_file=str(tmp_path / name)))
        captured = Captured(rig, 8) if name == "graph" else None
        for lengths in batches():
            queries = rig.queries(len(lengths))
            if captured is not None:
                captured.replay(lengths, queries)
            else:
                rig.step(lengths, queries)
        traces.append([json.loads(line) for line in (tmp_path / name).read_text().splitlines()])
    replayed, eager = traces
    assert len(replayed) == 3 * sum(map(len, batches()))
    assert replayed == eager
    assert any(line["pages"] for line in replayed) and PAGE == 16
