"""An fp8 (e4m3) KV pool: what is stored, times the scales of a checkpoint that brings some."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from locks_sglang import scheduler_hooks
from locks_sglang.backend import _write_kv
from locks_sglang.config import LocksConfig, LocksError
from locks_sglang.flashinfer_attend import FlashInferAttention
from plugin_process import AtLoad
from rig import HEAD_DIM, PAGE, Rig
from test_flashinfer_attend import PagedDecode

FP8 = torch.float8_e4m3fn
CONFIG = LocksConfig(selector="locks", budget=64, max_budget=64, audit_interval=1, audit_layers=2)
LENGTHS = [300, 47, 211]  # the second attends everything
SCALES = [None, (0.25, 3.0)]


def make_rig(scales: tuple[float, float] | None, **changes: Any) -> Rig:
    return Rig(CONFIG, LENGTHS, layers=2, pool_dtype=FP8, scales=scales, **changes)


@pytest.mark.parametrize("scales", SCALES, ids=str)
@pytest.mark.parametrize("attend", ["native", "flashinfer"])
def test_decode_over_stored_keys_and_values(
    scales: tuple[float, float] | None, attend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention of the selected pages in float64, and the mass that an audit says they hold."""
    rig = make_rig(scales)
    if attend == "flashinfer":
        made = FlashInferAttention(rig.state.geometry, len(LENGTHS), PAGE, FP8, "cpu", PagedDecode)
        rig.state._flashinfer = made
    observed: list[tuple[int, float]] = []
    monkeypatch.setattr(rig.state.counters, "observe_mass", lambda *row: observed.append(row))
    queries = rig.queries(len(LENGTHS))
    outputs = rig.step(LENGTHS, queries)
    masses = {}
    for layer in range(2):
        for row, length in enumerate(LENGTHS):
            pages = rig.chosen(layer, row)
            assert len(pages[0]) == min(4, -(-length // PAGE))
            expected, masses[layer, row] = rig.attention(layer, row, length, queries[layer][row], pages)
            torch.testing.assert_close(outputs[layer][row].double(), expected, atol=1e-5, rtol=1e-5)
    assert [layer for layer, _ in observed] == [0, 0]
    assert [mass for _, mass in observed] == pytest.approx([masses[0, 0], masses[0, 2]], abs=1e-5)


def test_scaled_keys_select_as_the_keys_themselves_would() -> None:
    """Keys stored at a quarter (a power of two, so exactly) with scale 4, and the same stored whole."""
    whole, quarter = make_rig(None), make_rig((4.0, 1.0))
    for keys in quarter.keys:
        keys.copy_((keys.float() / 4).to(FP8))
    for keys, stored in zip(whole.keys, quarter.keys, strict=True):
        keys.copy_((stored.float() * 4).to(FP8))  # nothing is lost again
    for rig in (whole, quarter):
        rig.state.finish_forward(torch.arange(len(rig.keys[0])))
    queries = whole.queries(len(LENGTHS))
    for rig in (whole, quarter):
        rig.step(LENGTHS, queries)
    for layer in range(2):
        for row in range(len(LENGTHS)):
            assert whole.chosen(layer, row) == quarter.chosen(layer, row)


def attention_layer(k_scale: float, v_scale: float) -> Any:
    from sglang.srt.layers.radix_attention import RadixAttention

    layer = RadixAttention(2, HEAD_DIM, HEAD_DIM**-0.5, 2, layer_id=0)
    layer.k_scale, layer.v_scale = torch.tensor(k_scale), torch.tensor(v_scale)
    layer.k_scale_float, layer.v_scale_float = k_scale, v_scale
    return layer


@pytest.mark.parametrize("dtype", [FP8, torch.float32], ids=str)
def test_what_is_written_is_what_is_read(at_load: AtLoad, dtype: torch.dtype) -> None:
    """SGLang's own pool divides by the scales, and only an fp8 one does; the state says what undoes it."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    pool = MHATokenToKVPool(
        4 * PAGE, PAGE, dtype, head_num=2, head_dim=HEAD_DIM, layer_num=1, device="cpu",
        enable_memory_saver=False,
    )  # fmt: skip
    rig = Rig(CONFIG, [40], layers=1, pool_dtype=dtype)
    layer = attention_layer(0.5, 2.0)
    slots = torch.tensor([17, 33])
    keys, values = rig.noise(2, 2, HEAD_DIM), rig.noise(2, 2, HEAD_DIM)
    batch = SimpleNamespace(out_cache_loc=slots)
    _write_kv(SimpleNamespace(token_to_kv_pool=pool), layer, batch, keys.clone(), values.clone())
    scales = rig.state.summaries.scales_of(layer)
    assert scales == ((0.5, 2.0) if dtype == FP8 else (1.0, 1.0))
    for stored, scale, given in zip(pool.get_kv_buffer(0), scales, (keys, values), strict=True):
        # e4m3 keeps three bits after the point.
        torch.testing.assert_close(stored[slots].float() * scale, given, rtol=2**-4, atol=2**-9)


def test_scales_that_the_cpu_backend_ignores_are_refused(at_load: AtLoad) -> None:
    rig = make_rig(None)
    scheduler_hooks._check_scales(rig.state, torch.nn.Sequential(attention_layer(1.0, 1.0)))
    model = torch.nn.Sequential(attention_layer(0.5, 1.0))
    with pytest.raises(LocksError, match=r"layer 0 .* scales \(0\.5, 1\.0\).*legal .* bfloat16"):
        scheduler_hooks._check_scales(rig.state, model)
    plain = Rig(CONFIG, LENGTHS, layers=1)  # where the pool is not fp8, nothing is scaled
    scheduler_hooks._check_scales(plain.state, model)
