"""The prefill attention of the CPU path gives what SGLang's own padded one gives."""

import types

import pytest
import torch
from locks_sglang.cpu_prefill import run_extend


@pytest.fixture(scope="module")
def backend():
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    made = object.__new__(TorchNativeAttnBackend)
    return types.SimpleNamespace(padded=made._run_sdpa_forward_extend)


@pytest.mark.parametrize("new", [(1, 5), (16, 33), (50, 1)])
@pytest.mark.parametrize("window", [None, 8])
def test_equals_the_padded_one(backend, new, window):
    generator = torch.Generator().manual_seed(5)
    prefix, heads, kv_heads, d = (37, 0), 6, 2, 64
    pools = [torch.randn(400, kv_heads, d, generator=generator) for _ in range(2)]
    table = torch.stack([torch.randperm(400, generator=generator)[:128] for _ in range(4)]).int()
    rows, extend = torch.tensor([3, 1]), torch.tensor(new)
    lengths = torch.tensor(prefix) + extend
    query = torch.randn(sum(new), heads, d, generator=generator)
    outputs = []
    for run in (backend.padded, lambda *a, **k: run_extend(backend.padded, *a, **k)):
        output = torch.full_like(query, float("nan"))
        run(
            query,
            output,
            *pools,
            table,
            rows,
            lengths,
            torch.tensor(prefix),
            extend,
            None,
            scaling=0.2,
            enable_gqa=True,
            causal=True,
            is_cross_attn=False,
            sliding_window_size=window,
        )
        outputs.append(output)
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=1e-6)
