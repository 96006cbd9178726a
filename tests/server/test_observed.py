"""What an operator sees: log lines, /server_info, Prometheus; and that the numbers are right."""

import re

import pytest
from locks_sglang.telemetry import METRICS
from server import ON_GPU, Server
from traced import BUDGET, PAGE, Traced

# Bytes of a record r6h, a page and KV head: basis, coefficients, centroid, and the scales of each
# (d = 64, r = 6). The demo model has 30 layers and 3 KV heads.
RECORD = 64 * 6 // 2 + 16 * 6 // 2 + 64 + 2 * (1 + 6)
BYTES_PER_TOKEN = -(-RECORD * 3 * 30 // 16)
KV_BYTES = 2 if ON_GPU else 4  # bf16, float32


def sample_name(metric: str) -> str:
    return {"counter": f"{metric}_total", "histogram": f"{metric}_count"}.get(METRICS[metric][0], metric)


def test_start_up_line(locks: Traced) -> None:
    found = re.search(
        r"Sparse decode on: selector locks, record format r6h, budget 128 tokens, page 16; summaries "
        r"(\d+) bytes a token, ([\d.]+) GiB beside ([\d.]+) GiB of KV for 1280 tokens, [\d.]+ GiB for "
        r"decode steps; 30 layers sparse, 0 dense\n",
        locks.server.log,
    )
    assert found
    assert int(found[1]) == BYTES_PER_TOKEN
    tokens = 1280 + PAGE  # SGLang keeps a page that nobody owns
    assert float(found[2]) == pytest.approx(RECORD / PAGE * 90 * tokens / 2**30, abs=6e-4)
    assert float(found[3]) == pytest.approx(2 * KV_BYTES * 64 * 90 * tokens / 2**30, abs=6e-4)


def test_server_info(locks: Traced) -> None:
    info = locks.server.locks_info()
    expected = {
        "selector": "locks",
        "attend": "native",
        "format": "r6h",
        "budget": BUDGET,
        "max_budget": 4 * BUDGET,
        "min_len": 0,
        "dense_below": 0,
        "page_size": PAGE,
        "bytes_per_token": BYTES_PER_TOKEN,
        "sparse_layers": 30,
        "dense_layers": {},
    }
    assert {name: info[name] for name in expected} == expected
    pages = 1280 // PAGE + 1
    assert info["summary_bytes"] == pages * 90 * RECORD


def test_counters_count_every_row(locks: Traced, words: list[int]) -> None:
    """Against what the requests' lengths imply: 641 prompt tokens, then a row each from 642 tokens on."""
    prompt, new = words[:641], 9
    before = locks.server.locks_info()
    running = locks.start(prompt, new)
    running.result()
    after = locks.server.locks_info()
    grown = {name: after[name] - before[name] for name in before if isinstance(before[name], int)}
    lengths = locks.lengths_of(running.rid)
    # SGLang may run one step more than it needs; its row is decoded like the others.
    assert lengths in (list(range(642, 650)), list(range(642, 651)))
    assert (grown["rows_sparse"], grown["rows_dense"]) == (len(lengths), 0)
    assert grown["pages_attended"] == BUDGET // PAGE * len(lengths)
    assert grown["pages_available"] == sum(-(-length // PAGE) for length in lengths) == 41 * len(lengths)
    assert grown["summaries_built"] == 640 // PAGE

    before = after
    running = locks.start(words[:641], new, {"mode": "dense"})
    assert running.result().cached_tokens == 640
    after = locks.server.locks_info()
    rows = len(locks.lengths_of(running.rid))
    assert (after["rows_sparse"], after["rows_dense"]) == (
        before["rows_sparse"],
        before["rows_dense"] + rows,
    )
    assert after["pages_attended"] - before["pages_attended"] == 41 * rows
    assert after["summaries_built"] == before["summaries_built"]
    assert after["pages_attended"] <= after["pages_available"]


def test_decode_log_line(locks: Traced, words: list[int]) -> None:
    seen = len(locks.server.log)
    run = locks.run(words[:640], 9)
    expected = (len(run.tokens) - 1) // 2  # one every two steps
    lines = locks.server.find_in_log(
        r"Sparse decode, #sparse-row: (\d+), #dense-row: (\d+), pages attended: (\d+) of (\d+) "
        r"\(([\d.]+) %\), #summary: (\d+), retained mass: ([\d.]+)\n",
        seen,
        expected,
    )
    assert len(lines) >= expected
    assert sum(int(line[5]) for line in lines) >= 640 // PAGE - 1
    for sparse, dense, attended, available, share, _, mass in lines[1:]:
        assert int(dense) == 0
        assert int(attended) == BUDGET // PAGE * int(sparse)
        assert int(available) == 41 * int(sparse)
        assert float(share) == pytest.approx(100 * 8 / 41, abs=0.06)
        assert 0 < float(mass) <= 1


def test_prometheus(locks: Traced, words: list[int]) -> None:
    locks.server.locks_info()  # publishes what was counted so far
    before = locks.server.metrics()
    assert METRICS.keys() == {
        re.sub("_(total|count|sum|bucket)$", "", name) for name in before if name.startswith("locks:")
    }
    locks.run(words[:640], 9)
    locks.run(words[:100], 3)
    info = locks.server.locks_info()
    after = locks.server.metrics()
    for metric, (kind, _) in METRICS.items():
        name = sample_name(metric)
        assert (after[name] > before[name]) == (kind != "gauge"), metric
    assert after["locks:summary_bytes"] == info["summary_bytes"]
    for counter in ("rows_sparse", "rows_dense", "pages_attended", "pages_available", "summaries_built"):
        assert after[f"locks:{counter}_total"] == info[counter]
    assert after["locks:retained_mass_count"] == info["audited_rows"]
    mean = after["locks:retained_mass_sum"] / after["locks:retained_mass_count"]
    assert mean == pytest.approx(info["retained_mass"])
    assert 0.5 < mean <= 1


def test_server_without_the_flag_says_nothing(dense_server: Server) -> None:
    assert "locks" not in dense_server.server_info()["internal_states"][0]
    assert not [name for name in dense_server.metrics() if name.startswith("locks:")]
    assert "Sparse decode" not in dense_server.log
