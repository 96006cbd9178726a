"""What a trace says of the pages that a selection keeps."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import plan_report
import pytest
import selection_drift


def test_kept_and_hot_share(tmp_path: Path) -> None:
    """One layer, one head: three old pages stay, one goes back and forth between two."""
    lines = [
        {"rid": "a", "seq_len": 200 + step, "layer": 0, "pages": [[0, 3, 5, 6 + step % 2, 12]]}
        for step in range(40)
    ]
    lines.append({"rid": "a", "seq_len": 400, "layer": 0, "pages": None})
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (steps,) = selection_drift.read(trace).values()
    assert len(steps) == 40
    assert selection_drift.kept(steps) == 0.75
    assert selection_drift.hot_share(steps, 0) == 0
    assert selection_drift.hot_share(steps, 2) == 1  # room for both
    # The one of the two that came first stays: what was read a step ago is not evicted.
    assert selection_drift.hot_share(steps, 1) == 0.875


def test_rows_and_their_table(tmp_path: Path) -> None:
    """A row a request, without those of too few steps; the page shows what the row says."""
    lines = [
        {"rid": rid, "seq_len": 200 + step, "layer": 0, "pages": [[0, 3, 5, 6 + step % 2, 12]]}
        for rid, steps in (("longer-than-8", 40), ("b", 2))
        for step in range(steps)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (row,) = selection_drift.rows_of(trace, (1, 2))
    assert row == {
        **{"rid": "longer-t", "steps": 40, "selected": 5, "pages": 13, "kept": 0.75},
        **{"hot_share_1": 0.875, "hot_share_2": 1.0},
    }
    page = plan_report.drift({"rows": [row]}, lambda result: "origin")
    assert "| 5 of 13 | 40 | 75.0% | 87.5% | 100.0% |" in page and page.endswith("origin")


def test_a_server_is_asked_and_its_trace_read(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[int, int]] = []

    @contextmanager
    def launched(flags: Sequence[str], log: Path) -> Iterator[SimpleNamespace]:
        flags = list(flags)
        assert flags[flags.index("--sparse-decode-budget") + 1] == "64" and flags[-2:] == ["--dtype", "x"]
        trace = Path(flags[flags.index("--sparse-decode-trace-file") + 1])

        def generate(prompts: list[list[int]], tokens: int) -> None:
            asked.append((len(prompts[0]), tokens))
            with trace.open("a") as lines:
                for step in range(tokens):
                    line = {"rid": f"r{len(asked)}", "seq_len": 200 + step, "layer": 0}
                    lines.write(json.dumps({**line, "pages": [[0, 3, 12]]}) + "\n")

        yield SimpleNamespace(generate=generate)

    monkeypatch.setattr(selection_drift, "launched", launched)
    for name in ("one", "two"):
        (tmp_path / name).write_text("some words")
    one, two = (str(tmp_path / name) for name in ("one", "two"))
    flags = ["--model-path", str(demo_model), "--prompts", one, f"{one},{two}", "--answer", "20"]
    flags += ["--budget", "64", "--sizes", "1", "--dtype", "x"]
    monkeypatch.setattr("sys.argv", ["selection_drift.py", *flags])
    selection_drift.main()
    assert asked == [(2, 20), (5, 20)]  # two texts with a line's end between them
    said = capsys.readouterr().out
    assert "r1: 20 steps, 3 of 13 pages; the next step keeps 100.0%" in said and "r2: 20 steps" in said
