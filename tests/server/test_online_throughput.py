"""The throughput benchmark against servers of other tests: its rows, and that it notices a wrong server."""

import json
from pathlib import Path

import pytest
import throughput
from server import Server
from serving.server import ServerFailed
from traced import BUDGET, Traced


def run(out: Path, url: str, grid: str) -> None:
    throughput.main(["--url", url, "--grid", grid, "--out", str(out), "--machine-name", "test"])


def test_dense_and_sparse(
    locks: Traced, dense_server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    urls = f"dense:torch_native={dense_server.base_url},locks:r6h={locks.server.base_url}"
    run(tmp_path, urls, "random:2x256x6,multi-turn:1x352x4")
    rows = json.loads(next(tmp_path.glob("throughput-test-*.json")).read_text())["rows"]
    assert [(row["variant"], row["workload"]) for row in rows] == [
        (variant, workload)
        for variant in ("dense:torch_native", "locks:r6h")
        for workload in ("random", "multi-turn")
    ]
    for row in rows:
        dense = row["variant"].startswith("dense")
        answers = 4 if row["workload"] == "multi-turn" else 2
        assert row["batch"] == row["concurrency"], row
        assert 0 < row["itl_ms"] <= row["itl_p99_ms"] and row["ttft_ms"] > 0, row
        assert row["tokens_per_s"] * row["duration_s"] == pytest.approx(answers * row["output"], rel=0.01)
        assert row["budget"] == (None if dense else BUDGET)
        assert ("rows_sparse" in row) is not dense
        if not dense:
            assert row["rows_sparse"] >= answers * (row["output"] - 1) and row["rows_dense"] == 0, row
        if row["workload"] == "random":
            assert row["cached_share"] == 0 and row["prompt_tokens"] == 256, row
        else:
            assert row["cached_share"] > 0.4, row
    table = capsys.readouterr().out.splitlines()[-6:]
    assert [("1.00x" in line, "dense" in line) for line in table[:4]].count((True, True)) == 2, table


def test_a_dense_server_under_a_sparse_name(dense_server: Server, tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match="the server is dense"):
        run(tmp_path, f"locks:r6h={dense_server.base_url}", "random:1x256x4")


def test_another_record_format(locks: Traced, tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match="the server runs locks:r6h"):
        run(tmp_path, f"locks:r8i4={locks.server.base_url}", "random:1x256x4")


def test_a_budget_that_covers_the_context(locks: Traced, tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match="nothing is sparse"):
        run(tmp_path, f"locks:r6h={locks.server.base_url}", "random:1x128x4")
