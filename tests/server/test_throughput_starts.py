"""The throughput benchmark as a user runs it: it starts servers, one after another, and stops them."""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from result_rows import served_gains
from server import ON_GPU

ROOT = Path(__file__).parents[2]
DENSE = "dense:fa3" if ON_GPU else "dense:torch_native"
TOKENS = 2048


def test_one_command_measures_dense_and_sparse(demo_model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "benchmark/throughput.py", "--model-path", str(demo_model)]
    command += ["--variants", f"{DENSE},locks:r6h", "--grid", "random:2x256x8", "--budget", "64"]
    command += ["--max-total-tokens", str(TOKENS), "--sparse-decode-dense-below", "0"]
    output = run_to_the_end([*command, "--out", str(tmp_path), "--machine-name", "test"], tmp_path / "said")
    assert f"[1/2] {DENSE}\n" in output and "[2/2] locks:r6h\n" in output

    (written,) = tmp_path.glob("throughput-test-*.json")
    rows = json.loads(written.read_text())["rows"]
    assert [(row["variant"], row["budget"]) for row in rows] == [(DENSE, None), ("locks:r6h", 64)]
    for row in rows:
        assert row["kv_tokens"] == TOKENS and row["batch"] == 2, row
        assert row["prompt_tokens"] == 256 and row["cached_share"] == 0, row
        assert 0 < row["itl_ms"] <= row["itl_p99_ms"] and row["ttft_ms"] > 0, row
        assert row["tokens_per_s"] * row["duration_s"] == pytest.approx(2 * 8, rel=0.01)
    dense, sparse = rows
    assert "rows_sparse" not in dense
    assert sparse["rows_sparse"] >= 2 * 7 and sparse["rows_dense"] == 0

    gains = served_gains(sparse, rows)
    assert gains
    lines = [line.split() for line in output.splitlines() if line.startswith("        random ")]
    assert [line[6:8] for line in lines] == [DENSE.split(":"), ["locks", "r6h"]], output
    assert [line[-2:] for line in lines] == [["1.00x", "1.00x"], [f"{gain:.2f}x" for gain in gains]]
    drawn = written.with_suffix(".svg").read_text()
    assert DENSE in drawn and "locks:r6h" in drawn and "random, 2 x 256 + 8" in drawn


def run_to_the_end(command: list[str], said: Path) -> str:
    """Output of a benchmark that must end well, had one server at a time, two in all, and left none."""
    seen: set[psutil.Process] = set()
    servers: set[psutil.Process] = set()
    with said.open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    try:
        begun = time.monotonic()
        while process.poll() is None:
            assert time.monotonic() - begun < 800, said.read_text()
            seen |= set(psutil.Process(process.pid).children(recursive=True))
            up = {child for child in psutil.Process(process.pid).children() if leads_a_session(child)}
            servers |= up
            assert len(up) <= 1, up
            time.sleep(0.25)
    finally:
        process.terminate()  # it stops its server
        process.wait(timeout=30)
        _, left = psutil.wait_procs(seen | servers, timeout=5)
        left = [child for child in left if is_up(child)]
        for child in left:
            child.kill()
    assert process.returncode == 0, said.read_text()
    assert len(servers) == 2 and len(seen) > len(servers)
    assert not left
    return said.read_text()


def is_up(child: psutil.Process) -> bool:
    """Whether it runs still; one that has ended may wait to be seen off by the system."""
    with suppress(psutil.NoSuchProcess):
        return child.status() != psutil.STATUS_ZOMBIE
    return False


def leads_a_session(child: psutil.Process) -> bool:
    """Whether it is a server, each of which has a session of its own."""
    with suppress(ProcessLookupError):
        return os.getsid(child.pid) == child.pid
    return False
