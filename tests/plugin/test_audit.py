"""The online audit: retained mass of live traffic, with and without graphs, and when pages are reused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_graph import FakeGraph
from locks_kernels import Selection
from locks_sglang import runtime, scheduler_hooks
from locks_sglang.audit import AUDITED_ROWS, AUDITED_ROWS_ON_HOST, _Result, spread
from locks_sglang.buffers import StepBuffers
from locks_sglang.config import LocksConfig
from locks_sglang.telemetry import Counters
from rig import HEAD_DIM, PAGE, Rig

CONFIG = LocksConfig(selector="locks", budget=64, max_budget=64, audit_interval=1)
LENGTHS = [300, 47, 211]  # the second attends everything


def observed(rig: Rig) -> list[tuple[int, float]]:
    """(layer, mass) of every audited row from here on."""
    found: list[tuple[int, float]] = []
    rig.state.counters.observe_mass = lambda *row: found.append(row)  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize(
    ("layers", "count", "expected"),
    [
        (range(30), 3, (0, 14, 29)),
        ((2, 5, 9), 3, (2, 5, 9)),
        ((2, 5), 3, (2, 5)),
        (range(40), 1, (20,)),
        (range(10), 4, (0, 3, 6, 9)),
    ],
)
def test_layers_are_spread(layers: Any, count: int, expected: tuple[int, ...]) -> None:
    assert spread(layers, count) == expected


def test_mass_is_the_exact_one() -> None:
    rig = Rig(CONFIG, LENGTHS)
    found = observed(rig)
    for turn, layer in enumerate((0, 2, 4, 0)):
        queries = rig.queries(len(LENGTHS))
        rig.step(LENGTHS, queries)
        expected = [
            rig.retained(layer, row, LENGTHS[row], queries[layer][row], rig.chosen(layer, row))
            for row in (0, 2)
        ]
        rows = found[2 * turn :]
        assert [audited for audited, _ in rows] == [layer, layer]
        assert [mass for _, mass in rows] == pytest.approx(expected, abs=1e-5)
        assert all(0.05 < mass < 0.999 for _, mass in rows)


def test_every_interval_steps_and_never_without() -> None:
    rig = Rig(LocksConfig(selector="locks", budget=64, audit_interval=3), LENGTHS)
    found = observed(rig)
    for step in range(1, 8):
        rig.step(LENGTHS, rig.queries(len(LENGTHS)))
        assert len(found) == step // 3 * 2
    off = Rig(LocksConfig(selector="locks", budget=64), LENGTHS)
    off.step(LENGTHS, off.queries(len(LENGTHS)))
    assert off.state._taps == {} and off.state._audit is None


def test_every_row_gets_its_turn() -> None:
    lengths = [100 + 17 * row for row in range(2 * AUDITED_ROWS + 1)]
    rig = Rig(LocksConfig(selector="locks", budget=64, audit_interval=1, audit_layers=1), lengths)
    found = observed(rig)
    for _ in range(3):
        rig.step(lengths, rig.queries(len(lengths)))
    assert len(found) == len(lengths)


def test_keys_that_come_over_the_link_are_those_of_one_row() -> None:
    config = LocksConfig(selector="locks", budget=64, audit_interval=1, audit_layers=1, kv_tier="host")
    lengths = [300, 250, 211]
    rig = Rig(config, lengths)
    found = observed(rig)
    for step in range(len(lengths)):
        queries = rig.queries(len(lengths))
        rig.step(lengths, queries)
        assert len(found) == (step + 1) * AUDITED_ROWS_ON_HOST
        layer, mass = found[-1]
        expected = rig.retained(layer, step, lengths[step], queries[layer][step], rig.chosen(layer, step))
        assert mass == pytest.approx(expected, abs=1e-5)  # every row in turn


def test_dense_layers_are_not_audited() -> None:
    rig = Rig(CONFIG, LENGTHS, dense={0: "sliding window", 4: "sinks"})
    found = observed(rig)
    for _ in range(6):
        rig.step(LENGTHS, rig.queries(len(LENGTHS)))
    assert {layer for layer, _ in found} == {1, 2, 3}


def test_reused_pages_do_not_reach_an_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    """With overlap scheduling the host may free a request's pages and fill its row of the token table for
    another one while the step still runs. Nothing writes to the pages before the next forward, which is
    launched after the hook on this one has returned: the audit is in the queue by then."""
    rig = Rig(CONFIG, [300])
    monkeypatch.setattr(runtime, "_active", rig.state)
    queries, batch = rig.queries(1), rig.batch([300])
    rig.state.begin_step(batch)
    rig.run_layers(queries)
    expected = rig.retained(0, 0, 300, queries[0][0], rig.chosen(0, 0))
    rig.token_table.zero_()
    scheduler_hooks.model_runner_forward(
        SimpleNamespace(can_run_graph=True), SimpleNamespace(is_draft_worker=False), batch
    )
    for keys in rig.keys:
        keys.normal_()
    status = rig.state.status()
    assert status["audited_rows"] == 1
    assert status["retained_mass"] == pytest.approx(expected, abs=1e-5)
    assert status["retained_mass_by_layer"] == {"0": status["retained_mass"]}


def test_the_log_line_has_the_mass_of_the_newest_audits() -> None:
    """A mean since the start would hide that it has changed."""
    counters = Counters("cpu")
    assert "retained mass" not in counters.log_line()
    for layer, mass in ((0, 0.9), (4, 0.8)):
        counters.observe_mass(layer, mass)
    assert counters.log_line().endswith(", retained mass: 0.8500")
    assert counters.log_line().endswith(", retained mass: 0.8500"), "no audit since"
    counters.observe_mass(0, 0.5)
    assert counters.log_line().endswith(", retained mass: 0.5000")
    assert counters.retained_mass == pytest.approx(2.2 / 3)


class Captured:
    """Decode steps of a rig through :class:`FakeGraph`, with selections that the test chooses."""

    def __init__(self, rig: Rig, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rig, self.rows = rig, rows
        state = rig.state
        buffers = StepBuffers.allocate(state.geometry, state._plan, rows + 2, "cpu")
        monkeypatch.setattr(state, "_buffers_for", lambda batch: buffers)
        width = state.geometry.width
        self.queries = [torch.zeros(rows, rig.q_heads, HEAD_DIM) for _ in range(rig.layers)]
        self.lists = [torch.zeros(rows, rig.kv_heads, width, dtype=torch.int32) for _ in self.queries]
        self.counts = torch.zeros(rows, dtype=torch.int32)
        layers = iter(range(rig.layers))
        workspace = torch.zeros_like(self.lists[0])  # as on a GPU: the next layer writes over it

        def score_select(*args: Any, **kwargs: Any) -> Selection:
            workspace.copy_(self.lists[next(layers)])
            return Selection(workspace, workspace, self.counts)

        monkeypatch.setattr(runtime, "score_select", score_select)
        monkeypatch.setattr(runtime, "attend", lambda queries, *args, **kwargs: (queries, None))
        state.begin_step(rig.batch([1] * 0, padding=rows))
        with FakeGraph() as self.graph:
            rig.run_layers(self.queries)

    def replay(self, lengths: list[int], queries: list[torch.Tensor], lists: torch.Tensor) -> None:
        """Metadata, replay and the hook on the forward. ``lists``: ``[layers, rows, heads, pages]``."""
        batch = self.rig.batch(lengths, padding=self.rows - len(lengths))
        self.rig.state.begin_step(batch)
        self.counts.fill_(1)  # padded rows attend their only page
        self.counts[: len(lengths)] = lists.shape[-1]
        for layer in range(self.rig.layers):
            self.queries[layer][: len(lengths)] = queries[layer]
            self.lists[layer][: len(lengths), :, : lists.shape[-1]] = lists[layer]
        self.graph.replay()
        self.rig.state.finish_step(batch)


def some_lists(rig: Rig, lengths: list[int], count: int) -> torch.Tensor:
    """Ascending logical pages of every layer, row and head, int32 ``[layers, rows, heads, count]``."""
    shape = (rig.layers, len(lengths), rig.kv_heads)
    lists = torch.empty(*shape, count, dtype=torch.int32)
    for row, length in enumerate(lengths):
        present = -(-length // PAGE)
        chosen = torch.rand(*shape[::2], present, generator=rig.generator).argsort(-1)[..., :count]
        lists[:, row] = chosen.sort(-1).values.int()
    return lists


def test_a_replayed_graph_is_audited(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(CONFIG, [300, 250, 211])
    found = observed(rig)
    captured = Captured(rig, 4, monkeypatch)
    assert found == []
    for layer, lengths in ((0, [300, 250, 211]), (2, [290, 240]), (4, [211, 220, 210])):
        del found[:]
        queries, lists = rig.queries(len(lengths)), some_lists(rig, lengths, 3)
        captured.replay(lengths, queries, lists)
        expected = [
            rig.retained(layer, row, length, queries[layer][row], lists[layer, row].tolist())
            for row, length in enumerate(lengths)
        ]
        assert [audited for audited, _ in found] == [layer] * len(lengths)
        assert [mass for _, mass in found] == pytest.approx(expected, abs=1e-5)


def test_a_replayed_graph_is_traced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rig = Rig(replace(CONFIG, audit_interval=0, trace_file=str(path)), [300, 250, 211])
    captured = Captured(rig, 4, monkeypatch)
    written = 0
    for lengths in ([300, 250, 211], [41, 240]):
        lists = some_lists(rig, lengths, 3)
        captured.replay(lengths, rig.queries(len(lengths)), lists)
        lines = [json.loads(line) for line in path.read_text().splitlines()][written:]
        written += len(lines)
        assert lines == [
            {
                "rid": f"r{row}",
                "seq_len": length,
                "layer": layer,
                "pages": None if length == 41 else lists[layer, row].tolist(),
            }
            for layer in range(rig.layers)
            for row, length in enumerate(lengths)
        ]


class Event:
    """An event of a device that has not got there yet."""

    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.passed = True


def test_results_that_are_not_there_yet_are_not_waited_for() -> None:
    rig = Rig(CONFIG, LENGTHS)
    found = observed(rig)
    audit = rig.state._audit
    assert audit is not None
    first, second = Event(), Event()
    audit._pending.append(_Result(0, 2, torch.tensor([0.5, -1.0, 9.0]), first))  # type: ignore[arg-type]
    audit._pending.append(_Result(2, 1, torch.tensor([0.25, 9.0]), second))  # type: ignore[arg-type]
    second.passed = True
    audit.collect()
    assert found == []
    first.passed = True
    audit.collect()
    assert found == [(0, 0.5), (2, 0.25)]
    assert len(audit._free) == 2
    audit._pending.append(_Result(4, 1, torch.tensor([0.75]), Event()))  # type: ignore[arg-type]
    rig.state.status()
    assert found[2:] == [(4, 0.75)]


def test_a_mass_that_is_not_a_number_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(CONFIG, LENGTHS)
    for keys in rig.keys:
        keys.fill_(float("nan"))
    rig.step(LENGTHS, rig.queries(len(LENGTHS)))
    assert rig.state.status()["audited_rows"] == 0
    assert "audit of layer 0: the retained mass is nan" in caplog.text


def test_ranks_do_not_share_a_trace(tmp_path: Path) -> None:
    """Each has KV heads of its own."""
    config = replace(CONFIG, trace_file=str(tmp_path / "trace.jsonl"))
    for rank in (1, 0):
        rig = Rig(config, LENGTHS, rank=rank, seed=rank)
        rig.step(LENGTHS, rig.queries(len(LENGTHS)))
    first, second = ((tmp_path / name).read_text() for name in ("trace.jsonl", "trace.jsonl.rank1"))
    assert first != second
    assert len(first.splitlines()) == len(second.splitlines()) == 5 * len(LENGTHS)
