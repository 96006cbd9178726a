"""The throughput benchmark against servers of other tests: its rows, and that it notices a wrong server."""

import json
from pathlib import Path

import pytest
import throughput
from server import Server
from serving.server import ServerFailed
from traced import BUDGET, Traced


def run(out: Path, url: str, grid: str, *more: str) -> list[dict]:
    """Rows of a run with servers that are up."""
    throughput.main(["--url", url, "--grid", grid, "--out", str(out), "--machine-name", "test", *more])
    return json.loads(next(out.glob("throughput-test-*.json")).read_text())["rows"]


def test_workloads_that_share_a_prefix(locks: Traced, dense_server: Server, tmp_path: Path) -> None:
    """Two prompts one after the other with 288 tokens in common; four turns of 148 to 352 tokens.

    The cache is empty before each case and holds whole pages of what came before.
    """
    urls = f"dense:torch_native={dense_server.base_url},locks:r6h={locks.server.base_url}"
    shared = run(tmp_path / "shared", urls, "shared-prefix:1x352x4", "--requests", "2")
    turns = run(tmp_path / "turns", urls, "multi-turn:1x352x4")
    for rows, answers, cached in ((shared, 2, 288 / 704), (turns, 4, (144 + 208 + 288) / 1000)):
        assert [row["variant"] for row in rows] == ["dense:torch_native", "locks:r6h"]
        for row in rows:
            assert row["batch"] == 1 and row["cached_share"] == pytest.approx(cached, abs=0.05), row
            assert 0 < row["itl_ms"] <= row["itl_p99_ms"] and row["ttft_ms"] > 0, row
            assert row["tokens_per_s"] * row["duration_s"] == pytest.approx(answers * 4, rel=0.01)
        dense, sparse = rows
        assert dense["budget"] is None and "rows_sparse" not in dense
        assert sparse["budget"] == BUDGET
        assert sparse["rows_sparse"] >= answers * 3 and sparse["rows_dense"] == 0, sparse


def test_a_dense_server_under_a_sparse_name(dense_server: Server, tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match="the server is dense"):
        run(tmp_path, f"locks:r6h={dense_server.base_url}", "random:1x256x4")


def test_another_record_format(locks: Traced, tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match="the server runs locks:r6h"):
        run(tmp_path, f"locks:r8i4={locks.server.base_url}", "random:1x256x4")


def test_a_budget_that_covers_the_context(locks: Traced, tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match="nothing is sparse"):
        run(tmp_path, f"locks:r6h={locks.server.base_url}", "random:1x128x4")
