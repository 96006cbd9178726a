"""The throughput part of docs/results.md: its gains, and the figure that comes with a result."""

import json
from pathlib import Path

import make_results
import pytest

ROW = {"workload": "random", "context": 2048, "output": 32, "itl_p99_ms": 90.0, "ttft_ms": 1500.0}
ROW |= {"cached_share": 0.0, "kv_tokens": 16384}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """Rows of a run on a CPU: two numbers of clients, dense and sparse."""
    rows = [
        {
            **ROW,
            "variant": variant,
            "budget": budget,
            "concurrency": clients,
            "batch": clients,
            "itl_ms": step * clients,
            "tokens_per_s": 1000 / step,
        }
        for clients in (1, 2)
        for variant, budget, step in (("dense:torch_native", None, 50.0), ("locks:r6h", 512, 20.0))
    ]
    write(tmp_path, rows)
    monkeypatch.setattr(make_results, "RESULTS", tmp_path)
    return rows


def write(folder: Path, rows: list[dict]) -> None:
    machine = {"gpu": None, "cpu": "x86_64"}
    result = {"machine": machine, "date": "2026-11-30", "commit": "c", "command": "python x", "rows": rows}
    (folder / "throughput-cpu-2026-11-30.json").write_text(json.dumps(result))


def test_gains_and_figure(results: list[dict]) -> None:
    page = make_results.throughput("cpu")
    assert page.count("2.50x") == 4  # tokens/s and time between tokens, of either number of clients
    assert page.endswith("](figures/throughput_cpu.svg)")
    assert make_results.throughput("h200") == "Not run yet."


def test_without_random_prompts_there_is_no_figure(results: list[dict], tmp_path: Path) -> None:
    write(tmp_path, [{**row, "workload": "multi-turn"} for row in results])
    assert "figures/" not in make_results.throughput("cpu")


def test_figure_is_drawn(results: list[dict], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs pip install '.[bench]'")
    import plots

    plots.throughput(results, tmp_path / "figure.svg")
    drawn = (tmp_path / "figure.svg").read_text()
    assert "</svg>" in drawn and "locks" in drawn and "2,048" in drawn
