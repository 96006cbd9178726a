"""How the memory of host and GPU is divided between pages and the hot cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_machine import GIB, grace
from hypothesis import given, settings
from hypothesis import strategies as st
from locks_sglang.config import LocksConfig, LocksError
from locks_sglang.tier import capacity, limits, ranks
from locks_sglang.tier.capacity import Split, TierShape, split
from locks_sglang.tier.host_memory import Registration
from locks_sglang.tier.limits import Request
from locks_sglang.tier.topology import host_nodes, nodes

# GLM-4-9B-Chat-1M with its 80 KiB a token, r4i4 records.
GLM = TierShape(
    layers=40, kv_heads=4, head_dim=128, page_size=16, dtype=torch.bfloat16, width=512, usual_width=128,
    step_rows=32, request_slots=65, staged_tokens=300_000,
)  # fmt: skip
RECORD = 490 * 160


def charged(found: Split, record: int = RECORD) -> int:
    """With the records of all pages, and of a layer's staged ones."""
    staged = (1 + GLM.staged_tokens // 16) * record // 40
    return GLM.gpu_bytes(found.pages, found.hot_bytes) + found.pages * record + staged


def test_a_host_that_is_the_limit_leaves_the_gpu_to_the_hot_cache() -> None:
    found = split(GLM, host_bytes=200 * GIB, gpu_bytes=70 * GIB, record_bytes=RECORD, hot_bytes=None)
    assert found.pages == 200 * GIB // (16 * 80 * 1024)
    # Four steps of 32 rows of 128 pages of 160 tiles of 8 KiB.
    assert found.hot_bytes == 4 * 32 * 128 * 160 * 8192 == GLM.most_hot
    assert charged(found) <= 70 * GIB
    small = split(GLM, host_bytes=200 * GIB, gpu_bytes=32 * GIB, record_bytes=RECORD, hot_bytes=None)
    assert small.pages == found.pages and small.hot_bytes < GLM.most_hot
    assert 32 * GIB - 2**21 < charged(small) <= 32 * GIB


def test_a_gpu_that_is_the_limit_is_halved() -> None:
    found = split(GLM, host_bytes=4000 * GIB, gpu_bytes=20 * GIB, record_bytes=RECORD, hot_bytes=None)
    assert found.pages < 4000 * GIB // GLM.page_bytes
    fixed = GLM.gpu_bytes(0, 0)
    assert 0.48 * (20 * GIB - fixed) < found.hot_bytes < 0.52 * (20 * GIB - fixed)


def test_what_is_asked_for_is_kept() -> None:
    for hot in (0, 3 * GIB):
        found = split(GLM, host_bytes=50 * GIB, gpu_bytes=40 * GIB, record_bytes=RECORD, hot_bytes=hot)
        assert found == Split(50 * GIB // GLM.page_bytes, hot)


@settings(deadline=None, max_examples=60)
@given(
    host=st.integers(1, 2000 * GIB),
    gpu=st.integers(1, 140 * GIB),
    record=st.integers(0, 200_000),
    hot=st.none() | st.integers(0, 100 * GIB),
)
def test_never_more_than_there_is(host: int, gpu: int, record: int, hot: int | None) -> None:
    try:
        found = split(GLM, host_bytes=host, gpu_bytes=gpu, record_bytes=record, hot_bytes=hot)
    except LocksError:
        return
    assert found.pages >= 2 and found.pages * GLM.page_bytes <= host
    assert charged(found, record) <= gpu


@pytest.mark.parametrize(
    ("shape", "host", "gpu", "hot"),
    [
        (GLM, 2 * GIB, 30 * GIB, 29 * GIB),
        (GLM, GLM.page_bytes, 30 * GIB, None),
        (replace(GLM, request_slots=4097), 2 * GIB, 5 * GIB, None),
    ],
    ids=["hot cache", "host", "request slots"],
)
def test_too_little_is_refused_with_numbers(shape: TierShape, host: int, gpu: int, hot: int | None) -> None:
    with pytest.raises(LocksError, match=r"GiB on the GPU for \d+ request slots .*--max-running-requests"):
        split(shape, host_bytes=host, gpu_bytes=gpu, record_bytes=RECORD, hot_bytes=hot)


def test_ranks_share_what_is_free(tmp_path: Path) -> None:
    grace(tmp_path)  # 420 and 320 GiB free on the nodes, 900 in all; 4 are kept
    both = [Request(0, 0, 0), Request(1, 1, 0)]
    assert capacity.room(both, tmp_path, capacity.ANY_LOCK) == 316 * GIB
    assert capacity.room([Request(0, 0, 0), Request(1, 0, 0)], tmp_path, capacity.ANY_LOCK) == 208 * GIB
    assert capacity.room(both, tmp_path, 5 * GIB) == 5 * GIB


@pytest.mark.parametrize(("limit", "counts"), [(8 << 20, False), (8 << 20, True), (2 << 30, True)])
def test_a_small_limit_of_locked_memory_is_tried(
    monkeypatch: pytest.MonkeyPatch, limit: int, counts: bool
) -> None:
    tried: list[int] = []

    def register(address: int, nbytes: int) -> str | None:
        tried.append(nbytes)
        return "not permitted (1)" if counts else None

    fake = Registration(register, lambda address: None)
    monkeypatch.setattr(capacity, "with_cuda", lambda: fake)
    monkeypatch.setattr(capacity, "node_of", lambda device, root: host_nodes(nodes())[0])
    monkeypatch.setattr(limits, "memlock_limit", lambda: limit)
    assert capacity.lockable(torch.device("cuda")) == (limit if counts else capacity.ANY_LOCK)
    assert tried == ([10 << 20] if limit < capacity.TRIED else [])
    assert capacity.lockable(torch.device("cpu")) == capacity.ANY_LOCK


def test_all_ranks_take_the_least(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grace(tmp_path)
    monkeypatch.setattr(ranks, "rank", lambda: 0)
    monkeypatch.setattr(
        ranks, "gather", lambda mine: [mine, 7 * GIB if isinstance(mine, int) else Request(1, 1, 0)]
    )
    config = LocksConfig(selector="locks", kv_tier="host")
    cpu = torch.device("cpu")
    assert capacity.host_bytes(config, cpu, tmp_path) == 7 * GIB
    assert capacity.host_bytes(replace(config, host_gib=1.5), cpu, tmp_path) == 3 * GIB // 2
    monkeypatch.setattr(ranks, "gather", lambda mine: [mine, 0] if isinstance(mine, int) else [mine])
    with pytest.raises(LocksError, match="no host memory is free"):
        capacity.host_bytes(config, cpu, tmp_path)
