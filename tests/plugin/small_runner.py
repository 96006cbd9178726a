"""What sparse decode reads of a model runner, with SGLang's own pools and one attention layer, on a CPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

PAGE, PAGES, HEAD_DIM = 16, 4, 64


def make(server_args: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A runner of one rank whose pools exist and whose attention backends do not, as in a scheduler."""
    from locks_sglang import runtime, scheduler_hooks
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool

    monkeypatch.setattr(runtime, "_active", None)
    monkeypatch.setattr(scheduler_hooks, "_attention_ranks", lambda: 1)
    monkeypatch.setattr(scheduler_hooks, "_attention_rank", lambda: 0)
    monkeypatch.setattr(scheduler_hooks, "_largest_graph", lambda server_args: 0)
    memory = {"device": "cpu", "enable_memory_saver": False}
    pool = MHATokenToKVPool(
        PAGES * PAGE, PAGE, torch.float32, head_num=1, head_dim=HEAD_DIM, layer_num=1, **memory
    )
    pool.k_buffer[0].normal_()
    return SimpleNamespace(
        server_args=server_args,
        model_config=SimpleNamespace(num_attention_heads=2, dtype=torch.float32),
        model=torch.nn.Sequential(RadixAttention(2, HEAD_DIM, HEAD_DIM**-0.5, 1, layer_id=0)),
        is_draft_worker=False,
        page_size=PAGE,
        token_to_kv_pool=pool,
        token_to_kv_pool_allocator=type("PagedTokenToKVPoolAllocator", (), {})(),
        req_to_token_pool=ReqToTokenPool(size=2, max_context_len=PAGES * PAGE, **memory),
        capture_tail_hooks=[],
        sparse_decode=None,
    )


def built_by_a_graph(runner: Any) -> int:
    """Summaries that the tail of a captured decode step builds where one page is completed."""
    from locks_sglang import runtime

    state = runtime.active()
    assert state is not None
    before = state.counters.totals()["summaries_built"]
    batch = SimpleNamespace(out_cache_loc=torch.tensor([2 * PAGE - 1, 2 * PAGE, 0]))
    for hook in runner.capture_tail_hooks:
        hook(None, None, batch, 3)
    return state.counters.totals()["summaries_built"] - before
