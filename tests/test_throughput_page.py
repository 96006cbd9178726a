"""The throughput part of docs/results.md: its gains, and the figure that comes with a result."""

import json
from contextlib import nullcontext
from pathlib import Path

import make_results
import pytest
import throughput
from serving.load import Case
from serving.server import ServerFailed
from serving.variants import Variant

ROW = {"workload": "random", "context": 2048, "output": 32, "itl_p99_ms": 90.0, "ttft_ms": 1500.0}
ROW |= {"cached_share": 0.0, "kv_tokens": 16384, "tp": 1, "model": "m", "tier": "resident", "format": "r6h"}


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


def hosted(row: dict, **changes: object) -> dict:
    found = {**row, "tier": "host", "variant": "host:r6h", "hot_share": 0.8765, "host_bytes_read": 3.2e9}
    return {**found, "host_bytes_written": 5e8, **changes}


def test_a_host_tiers_link_is_shown(results: list[dict], tmp_path: Path) -> None:
    assert "hot share" not in make_results.throughput("cpu")
    write(tmp_path, [*results, hosted(results[1])])
    page = make_results.throughput("cpu")
    assert page.splitlines()[0].endswith("| hot share | GB read / written over the link |")
    assert page.count("| 87.6% | 3.2 / 0.5 |") == 1 and page.count("| - | - |\n") == 4


def test_first_tokens_from_host_memory_beside_resident_ones(results: list[dict], tmp_path: Path) -> None:
    assert make_results.host_ttft("cpu") == make_results.host_ttft("h200") == "Not run yet."
    dense, resident = results[:2]
    others = [
        hosted(resident, ttft_ms=9000.0, format="r4i4"),  # another record format
        hosted(resident, ttft_ms=9000.0, context=4096),
        hosted(resident, ttft_ms=9000.0, workload="multi-turn"),
        hosted(resident, ttft_ms=9000.0, concurrency=2),
    ]
    write(tmp_path, [dense, resident, *others])
    assert make_results.host_ttft("cpu") == "Not run yet."
    write(tmp_path, [dense, resident, *others, hosted(resident, ttft_ms=1800.0)])
    page = make_results.host_ttft("cpu")
    assert page.splitlines()[2:4] == ["| m | 2,048 | r6h | 1.50 | 1.80 | 1.20x | 1.3x |", ""]
    assert "Command: `python x`" in page


def test_with_nothing_dense_there_is_no_figure(results: list[dict], tmp_path: Path) -> None:
    write(tmp_path, [row for row in results if row["budget"]])
    assert "figures/" not in make_results.throughput("cpu")


def test_cases_that_ran_dense_steps_are_marked(results: list[dict], tmp_path: Path) -> None:
    assert "r6h D" not in make_results.throughput("cpu")
    write(tmp_path, [{**row, "dense_rows_share": 0.4 * row["concurrency"]} for row in results])
    assert make_results.throughput("cpu").count("locks r6h D ") == 1


def test_two_gpus_are_compared_with_two(results: list[dict], tmp_path: Path) -> None:
    slower = [{**row, "tp": 2, "itl_ms": 3 * row["itl_ms"], "variant": row["variant"]} for row in results]
    write(tmp_path, [*results, *slower])
    page = make_results.throughput("cpu")
    assert page.count("locks r6h TP 2 ") == 2 and page.count("2.50x") == 8


@pytest.mark.parametrize(
    ("context", "sparse", "dense", "good"),
    [
        (60000, 500, 10, True),  # each prompt alone is too long for dense steps
        (60000, 480, 30, False),
        (60000, 0, 510, False),
        (20000, 10, 500, True),  # both together are short
        (20000, 500, 10, False),
        (40000, 255, 255, True),  # alone short, together long
        (40000, 200, 200, False),
    ],
)
def test_what_a_server_must_have_decoded(context: int, sparse: int, dense: int, good: bool) -> None:
    """Two requests, 510 decode rows, on a server whose steps of fewer than 57,344 tokens run dense."""
    variant, case = Variant.parse("locks:r4i4", "fa3"), Case("random", 2, context, 256, 2)
    with nullcontext() if good else pytest.raises(ServerFailed, match=f"{sparse} sparse and {dense} dense"):
        throughput.check_rows(variant, case, sparse, dense, completed=2, dense_below=57344)


def test_figure_is_drawn(results: list[dict], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs pip install '.[bench]'")
    import plots

    alone = {**results[-1], "variant": "host:r6h", "context": 9999}
    plots.throughput([*results, alone], tmp_path / "figure.svg")
    drawn = (tmp_path / "figure.svg").read_text()
    assert "</svg>" in drawn and "locks" in drawn and "random, 2 x 2,048 + 32" in drawn
    assert "host:r6h" not in drawn and "9,999" not in drawn  # nothing dense to compare with
