"""SGLang's own pool and attention backend over a host tier: prefill in chunks, and decode."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import small_runner
import torch
from locks_sglang.tier import capacity, pool, ranks
from locks_sglang.tier.staged_records import StagedRecords
from small_runner import HEAD_DIM, PAGE, PAGES

FLAGS = ("--sparse-decode", "locks", "--sparse-decode-budget", "32", "--sparse-decode-kv-tier")
Outputs = list[torch.Tensor]


def run(tier: str, save: bool, prepare: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Outputs:
    """Outputs of two prefills, the second with the first as its prefix, and three decode steps."""
    from locks_sglang import runtime, scheduler_hooks
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool

    args = prepare(*FLAGS, tier)
    original = MHATokenToKVPool._create_buffers_normal
    with monkeypatch.context() as patched:
        patched.setattr(ranks, "rank", lambda: 0)
        patched.setattr(ranks, "gather", lambda mine: [mine])
        patched.setattr(
            MHATokenToKVPool, "_create_buffers_normal", lambda made: pool.create_buffers(original, made)
        )
        runner = small_runner.make(args, monkeypatch)
    runner.token_to_kv_pool.k_buffer[0].zero_()
    runner.device = "cpu"
    runner.model_config.context_len = PAGES * PAGE
    runner.token_to_kv_pool_allocator.available_size = lambda: 16
    capacity.remember(capacity.Split(PAGES, 6 * 2 * PAGE * HEAD_DIM * 4))
    scheduler_hooks.init_post_memory_pool_components(None, runner)
    backend = TorchNativeAttnBackend(runner)
    scheduler_hooks.build_attention_backend(backend, model_runner=runner)
    state, layer = runtime.active(), runner.model[0]
    assert state is not None and (state.tier is not None) == (tier == "host")
    if state.tier is not None:
        staging, records = state.tier.staging, state.summaries.records
        assert staging is not None and records is not None
        state.tier._staged_records = staged = StagedRecords(records, staging, least=1)
    runner.req_to_token_pool.req_to_token[1] = torch.arange(PAGES * PAGE).roll(-PAGE)
    noise = torch.Generator().manual_seed(1)
    outputs, done = [], 0
    for new in (21, 12, 1, 1, 1):
        q, k, v = (torch.randn(new, heads * HEAD_DIM, generator=noise) for heads in (2, 1, 1))
        batch = forward(done, new, runner.req_to_token_pool.req_to_token[1])
        backend.init_forward_metadata(batch)
        given = [tensor.view(new, 1, HEAD_DIM) for tensor in (k, v)]
        if not save:
            location = KVWriteLoc(batch.out_cache_loc, None)
            runner.token_to_kv_pool.set_kv_buffer(layer, location, *given)
        attend = backend.forward_decode if new == 1 else backend.forward_extend
        outputs.append(attend(q, *given, layer, batch, save_kv_cache=save).clone())
        done += new
        ended = SimpleNamespace(can_run_graph=False)
        scheduler_hooks.model_runner_forward(ended, runner, batch)
    if state.tier is not None:
        described = state.status()
        assert described["prefills_staged"] == 2 and described["host_bytes_read"] > 0
        token = 2 * HEAD_DIM * 4
        assert described["host_bytes_written"] == done * token
        # The prefills' pages from their keys on the GPU; decode completes none.
        assert staged.pages_built == described["summaries_built"] == 33 // PAGE
        assert backend.token_to_kv_pool is runner.token_to_kv_pool
    return outputs


def forward(done: int, new: int, table: torch.Tensor) -> Any:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return SimpleNamespace(
        forward_mode=ForwardMode.DECODE if new == 1 else ForwardMode.EXTEND, batch_size=1, rids=["r"],
        req_pool_indices=torch.tensor([1]), seq_lens=torch.tensor([done + new]), encoder_lens=None,
        out_cache_loc=table[done : done + new].long(), extend_prefix_lens=torch.tensor([done]),
        extend_seq_lens=torch.tensor([new]), extend_prefix_lens_cpu=[done], extend_seq_lens_cpu=[new],
    )  # fmt: skip


@pytest.mark.parametrize("save", [True, False], ids=["the backend writes", "the model wrote"])
def test_outputs_of_a_resident_pool(
    save: bool, prepare: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, got = (run(tier, save, prepare, monkeypatch) for tier in ("gpu", "host"))
    assert [len(output) for output in got] == [21, 12, 1, 1, 1]
    for one, other in zip(expected, got, strict=True):
        assert torch.equal(one, other) and bool(one.abs().sum() > 0)
