"""Decode steps from a host pool: the bits of a resident one, whatever lies on the GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from locks_sglang.config import LocksConfig
from rig import HEAD_DIM, PAGE
from writing_rig import WritingRig

CONFIG = LocksConfig(selector="locks", summary="r4h", budget=4 * PAGE, page_size=PAGE)


@pytest.mark.parametrize("tiles", [0, 7, 150, 10_000])
def test_any_hot_size_gives_the_bits_of_a_resident_pool(tiles: int) -> None:
    lengths = [14 * PAGE + 3, 5, 9 * PAGE - 2]
    resident = WritingRig(CONFIG, lengths)
    host = WritingRig(CONFIG, lengths, tiles)
    assert host.state.tier is not None
    assert host.state.tier.cache.capacity == min(tiles, host.state.tier.cache.slot_of.numel())
    noise = torch.Generator().manual_seed(5)
    for step in range(22):
        lengths = [length + 1 for length in lengths]
        queries = resident.queries(3)
        new = torch.randn(resident.layers, 2, 3, resident.kv_heads, HEAD_DIM, generator=noise)
        expected, got = (rig.decode(lengths, queries, new) for rig in (resident, host))
        assert torch.equal(expected, got)
        if step in (5, 6, 14):
            keys = torch.randn(resident.layers, 100, resident.kv_heads, HEAD_DIM, generator=noise)
            for rig in (resident, host):
                rig.prefill(2, 100, keys)
            lengths[2] = 100
    status = host.state.status()
    assert status["kv_tier"] == "host" and status["host_bytes_read"] > 0
    assert (status["hot_share"] > 0) == (tiles > 0) and "kv_tier" not in resident.state.status()
    # 22 steps of 3 rows, and three prefills of 100 tokens.
    token = 2 * 4 * resident.layers * resident.kv_heads * HEAD_DIM
    assert status["host_bytes_written"] == (22 * 3 + 300) * token


def test_sizes_that_are_refused() -> None:
    for wrong, said in (
        ({"kv_tier": "disk"}, "legal: gpu, host"),
        ({"kv_tier": "host", "dense_below": 99}, "dense-below is 99; legal with .* host: 0"),
        ({"hot_gib": -1.0}, "legal: 0 or more"),
        ({"host_gib": 0.0}, "host-gib is 0.0; legal: more than 0"),
        (
            {"kv_tier": "host", "attend": "flashinfer"},
            "legal with --sparse-decode-kv-tier host: auto, native",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            replace(CONFIG, **wrong).validate()
