"""The throughput part of docs/results.md: its gains, and the figure that comes with a result."""

import json
from contextlib import nullcontext
from pathlib import Path

import make_results
import pytest
import throughput
from result_rows import served_gains
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


def test_gains_are_over_the_faster_dense_backend_in_each_respect() -> None:
    """One backend may give more tokens a second, another the shorter time between them."""
    sparse = {**ROW, "concurrency": 1, "budget": 512, "itl_ms": 4.0, "tokens_per_s": 30.0}
    both = ((8.0, 20.0), (6.0, 10.0))
    dense = [{**sparse, "budget": None, "itl_ms": ms, "tokens_per_s": rate} for ms, rate in both]
    elsewhere = {**dense[0], "tp": 2, "itl_ms": 1.0, "tokens_per_s": 99.0}
    assert served_gains(sparse, [sparse, *dense, elsewhere]) == (1.5, 1.5)
    assert served_gains(sparse, [sparse, elsewhere]) is None


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
        (15000, 10, 500, True),  # both together are short
        (15000, 500, 10, False),
        (27000, 255, 255, True),  # alone short, together long
        (27000, 200, 200, False),
    ],
)
def test_what_a_server_must_have_decoded(context: int, sparse: int, dense: int, good: bool) -> None:
    """Two requests, 510 decode rows, on a server whose steps run dense below 24,576 tokens left out."""
    variant, case = Variant.parse("locks:r4i4", "fa3"), Case("random", 2, context, 256, 2)
    locks = {"dense_below": 24576, "budget": 2048}
    with nullcontext() if good else pytest.raises(ServerFailed, match=f"{sparse} sparse and {dense} dense"):
        throughput.check_rows(variant, case, sparse, dense, completed=2, locks=locks)


def run(rows: list[dict], folder: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> int:
    """Exit status of the benchmark whose server of ``locks:r6h`` would have given ``rows``."""
    monkeypatch.setattr(throughput, "server_of", lambda *_: nullcontext((None, None)))
    monkeypatch.setattr(throughput, "measured", lambda _, variant, *__: iter(rows))
    flags = ("--variants", "locks:r6h", "--out", str(folder / "out"), "--machine-name", "cpu", *flags)
    return throughput.main([*flags, "--model-path", "m"])


def test_a_run_that_is_appended_is_compared_with_the_earlier_one(
    results: list[dict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="needs pip install '.[bench]'")
    sparse = [
        {**row, "tokens_per_s": 100.0, "dense_rows_share": 0.4 * row["concurrency"]}
        for row in results
        if row["budget"]
    ]
    other = {**results[0], "model": "n", "itl_ms": 1.0}
    write(tmp_path, [*results, other])
    earlier = tmp_path / "throughput-cpu-2026-11-30.json"
    assert run(sparse, tmp_path, monkeypatch, "--append", str(earlier)) == 0
    said = capsys.readouterr().out
    # 100 tokens/s against the dense server's 20 of the same model; the case of two clients ran dense.
    assert said.count("5.00x   2.50x") == 2 and said.count("locks r6h D ") == 1
    assert said.count("dense torch_native") == 2 and "figure: " in said
    (drawn,) = (tmp_path / "out").glob("*.svg")
    assert "dense:torch_native" in drawn.read_text()


def test_a_run_without_anything_to_compare_or_to_write_says_so(
    results: list[dict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(results[1:2], tmp_path, monkeypatch) == 0
    assert "no figure: no case ran both dense and sparse" in capsys.readouterr().out
    assert run([], tmp_path / "none", monkeypatch, "--grid", "random:1x8x2") == 1
    assert "no case of random:1x8x2 fitted" in capsys.readouterr().out
    assert not list((tmp_path / "none/out").glob("*.json"))


def test_figure_is_drawn(results: list[dict], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs pip install '.[bench]'")
    import figures

    alone = {**results[-1], "variant": "host:r6h", "context": 9999}
    figures.throughput([*results, alone], tmp_path / "figure.svg")
    drawn = (tmp_path / "figure.svg").read_text()
    assert "</svg>" in drawn and "locks" in drawn and "random, 2 x 2,048 + 32" in drawn
    assert "host:r6h" not in drawn and "9,999" not in drawn  # nothing dense to compare with
    assert "TP 2" not in drawn
    figures.throughput([{**row, "tp": 2} for row in results], tmp_path / "two.svg")
    assert "random, 2 x 2,048 + 32, TP 2" in (tmp_path / "two.svg").read_text()
    with pytest.raises(ValueError, match="no case ran both"):
        figures.throughput([alone], tmp_path / "none.svg")
