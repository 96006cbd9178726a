"""A KV pool whose buffers lie in host memory: where they are, and what all ranks refuse together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from locks_sglang.config import LocksConfig, LocksError
from locks_sglang.tier import host_memory, limits, pool, ranks

SHAPE = (48, 3, 64)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "rank", lambda: 0)
    monkeypatch.setattr(ranks, "gather", lambda mine: [mine])


def bare() -> Any:
    return SimpleNamespace(
        layer_num=5, store_dtype=torch.float32, device="cpu", size=32, page_size=16, head_num=3,
        head_dim=64, v_head_dim=64,
    )  # fmt: skip


def test_every_layer_has_its_part() -> None:
    made = bare()
    memory = pool.hold(made, [SHAPE, SHAPE])
    buffers = [*made.k_buffer, *made.v_buffer]
    assert len(buffers) == 10 and all(tuple(buffer.shape) == SHAPE for buffer in buffers)
    assert not any(buffer.any() for buffer in buffers)
    for number, buffer in enumerate(buffers):
        assert (
            buffer.is_contiguous() and memory.address <= buffer.data_ptr() < memory.address + memory.nbytes
        )
        buffer.fill_(number + 1)
    assert [float(buffer.mean()) for buffer in buffers] == list(range(1, 11))
    assert made.v_buffer[0].data_ptr() - made.k_buffer[0].data_ptr() == buffers[0].nbytes


@pytest.mark.parametrize(("tier", "original"), [("gpu", True), ("host", False)])
def test_the_hook(monkeypatch: pytest.MonkeyPatch, tier: str, original: bool) -> None:
    monkeypatch.setattr(pool, "inherited_config", lambda: LocksConfig(selector="locks", kv_tier=tier))
    monkeypatch.setattr(pool, "_held", held := [])
    made, called = bare(), []
    pool.create_buffers(called.append, made)
    assert (called == [made]) == original and len(held) == (not original)
    assert hasattr(made, "k_buffer") != original
    if not original:
        assert pool.is_held(made)
        made.v_buffer[2] = torch.zeros(SHAPE)
        assert not pool.is_held(made)


@pytest.mark.parametrize("step", ["check", "allocate"])
def test_another_rank_that_fails_fails_this_one(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """What this rank had is given back."""
    gathered: list[Any] = []

    def gather(mine: Any) -> list[Any]:
        gathered.append(mine)
        # The node, the requests, the check, the allocation.
        fails = len(gathered) == (3 if step == "check" else 4)
        return [mine, "rank 1 has no memory"] if fails else [mine]

    monkeypatch.setattr(ranks, "gather", gather)
    closed: list[Any] = []
    monkeypatch.setattr(host_memory.HostMemory, "close", closed.append)
    made = bare()
    with pytest.raises(LocksError, match="rank 1 has no memory"):
        pool.hold(made, [SHAPE, SHAPE])
    assert len(closed) == (step == "allocate") and not hasattr(made, "k_buffer")


def test_this_rank_tells_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(ranks, "gather", lambda mine: told.append(mine) or [mine])

    def refuse(*_: Any) -> None:
        raise LocksError("host memory of 9.0 GiB is more")

    monkeypatch.setattr(limits, "check", refuse)
    with pytest.raises(LocksError, match=r"9\.0 GiB"):
        pool.hold(bare(), [SHAPE, SHAPE])
    assert told[-1] == "host memory of 9.0 GiB is more"
