"""Models whose layers differ: which ones decode sparse, what the others do, and what the log says of it."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from locks_sglang import scheduler_hooks
from locks_sglang.backend import make_sparse_class
from locks_sglang.config import LocksConfig, LocksError
from locks_sglang.tier import capacity
from plugin_process import AtLoad
from rig import HEAD_DIM, SCALE, Rig

CONFIG = LocksConfig(selector="locks", budget=64)


class Attention(torch.nn.Module):
    """What models wrap around SGLang's layer; ``terms`` are attributes that some of them have."""

    def __init__(self, layer_id: int, features: dict[str, Any], terms: dict[str, Any]) -> None:
        from sglang.srt.layers.radix_attention import RadixAttention

        super().__init__()
        arguments = {"num_heads": 6, "head_dim": HEAD_DIM, "scaling": SCALE, "num_kv_heads": 2}
        self.attn = RadixAttention(**(arguments | features), layer_id=layer_id)
        for name, value in terms.items():
            setattr(self, name, value)


def model(*layers: tuple[dict[str, Any], dict[str, Any]]) -> torch.nn.Module:
    return torch.nn.ModuleList(Attention(index, *layer) for index, layer in enumerate(layers))


SINKS = torch.nn.Parameter(torch.zeros(6))
MIXED = (
    ({}, {}),
    ({"sliding_window_size": 4096}, {}),
    ({"logit_cap": 30.0}, {}),
    ({"is_cross_attention": True}, {}),
    ({}, {"sinks": SINKS}),
    ({}, {"attention_sink_bias": SINKS}),
    ({}, {"sinks": None, "attention_sink_bias": None}),
)
REASONS = {
    1: "sliding window of 4096 tokens",
    2: "logit cap 30.0",
    3: "cross attention",
    4: "attention sinks",
    5: "attention sinks",
}


def test_each_layer_is_judged_by_itself(at_load: AtLoad, caplog: pytest.LogCaptureFixture) -> None:
    state = Rig(CONFIG, [100], layers=len(MIXED)).state
    scheduler_hooks._sort_layers(state, model(*MIXED))
    assert state.sparse_layers == [0, 6]
    assert state.dense_layers == REASONS
    assert state.describe()["dense_layers"] == {str(layer): why for layer, why in REASONS.items()}
    with caplog.at_level(logging.INFO):
        state.log_start(3 * 2**30, 4096)
    text = caplog.text
    assert (
        "beside 3.000 GiB of KV for 4096 tokens, 0.000 GiB for decode steps; 2 layers sparse, 5 dense"
        in text
    )
    assert "; ".join(f"layer {layer}: {why}" for layer, why in REASONS.items()) in text


def test_a_model_without_a_sparse_layer_is_refused(at_load: AtLoad) -> None:
    state = Rig(CONFIG, [100], layers=2).state
    with pytest.raises(
        LocksError, match=r"no attention layer .*\{0: 'logit cap 50.0', 1: 'attention sinks'\}"
    ):
        scheduler_hooks._sort_layers(state, model(({"logit_cap": 50.0}, {}), ({}, {"sinks": SINKS})))


class Base:
    """An attention backend that answers every layer with its id."""

    token_to_kv_pool = SimpleNamespace(set_kv_buffer=lambda *args: None)

    def __init__(self) -> None:
        self.planned = 0

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.planned += 1

    def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        return f"dense layer {layer.layer_id}", kwargs


@pytest.mark.parametrize("dense", [{}, {1: "attention sinks"}], ids=str)
def test_dense_layers_go_to_the_users_backend(at_load: AtLoad, dense: dict[int, str]) -> None:
    """With everything that the model passes; the backend plans its own step where it has layers to run."""
    rig = Rig(CONFIG, [300], layers=3, dense=dense)
    backend = make_sparse_class(Base)()
    backend.locks = rig.state
    batch = rig.batch([300])
    queries = rig.queries(1)
    backend.init_forward_metadata(batch)
    assert backend.planned == bool(dense)
    for index in range(3):
        layer = SimpleNamespace(layer_id=index, scaling=SCALE, tp_q_head_num=6, head_dim=HEAD_DIM)
        flat = queries[index].flatten(1)
        if index in dense:
            found, passed = backend.forward_decode(flat, None, None, layer, batch, sinks=SINKS)
            assert found == "dense layer 1"
            assert passed == {"save_kv_cache": True, "sinks": SINKS}
        else:
            found = backend.forward_decode(flat, None, None, layer, batch)
            assert torch.equal(found, rig.state.decode(queries[index], layer).flatten(1))
    rig.state.finish_step(batch)


def configurator(**changes: Any) -> Any:
    model_config = SimpleNamespace(
        num_attention_heads=32,
        num_hidden_layers=40,
        head_dim=128,
        context_len=1_000_000,
        dtype=torch.bfloat16,
        get_num_kv_heads=lambda ranks: 4 // ranks,
        get_total_num_kv_heads=lambda: 4,
    )
    graphs = SimpleNamespace(decode=SimpleNamespace(backend="full", max_bs=8))
    values = {"model_config": model_config, "device": "cuda", "is_draft_worker": False}
    return SimpleNamespace(**(values | changes), server_args=SimpleNamespace(cuda_graph_config=graphs))


@pytest.fixture
def charge(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``charge(kvc, **options)``: bytes kept from a budget of 100 GiB, and bytes added to a token."""

    def both(kvc: Any, **options: Any) -> tuple[int, int]:
        config = LocksConfig(selector="locks", **options)
        monkeypatch.setattr(scheduler_hooks, "inherited_config", lambda: config)
        monkeypatch.setattr(scheduler_hooks, "_attention_ranks", lambda: 1)
        budget = 100 * 2**30
        kept = budget - scheduler_hooks.profile_available_bytes(budget, kvc, 0)
        return kept, scheduler_hooks.compute_cell_size(81920, None, kvc, 40) - 81920

    return both


def test_memory_is_charged_before_the_pool_is_sized(charge: Any) -> None:
    """GLM-4-9B-Chat-1M, from the sizes of what is allocated."""
    steps, token = charge(configurator(), summary="r4i4")
    assert token == 490 * 4 * 40 // 16
    pages = 62_502  # of 1,000,000 tokens and a few more, in pairs
    table, scores, lists = 8 * pages * 4, 32 * 8 * 62_504 * 4, 2 * 8 * 4 * 512 * 4
    assert 1 < steps / (table + scores + lists) < 1.2  # and the partial sums of split attention
    audited, _ = charge(configurator(), summary="r4i4", audit_interval=100)
    taps = 3 * 8 * (4 * 512 * 4 + 4 + 32 * 128 * 2)
    assert audited - steps == taps + 4 * 32 * (pages + 1) * 4
    traced, _ = charge(configurator(), summary="r4i4", trace_file="/tmp/trace")
    assert traced - steps == 40 * 8 * (4 * 512 * 4 + 4)
    fewer = configurator()
    fewer.server_args.cuda_graph_config.decode.max_bs = 4
    assert charge(fewer, summary="r4i4")[0] < steps
    off = configurator()
    off.server_args.cuda_graph_config.decode.backend = "disabled"
    assert charge(off, summary="r4i4")[0] > steps  # 32 rows at a time, whatever the graphs' sizes say


def test_a_host_pool_is_sized_by_host_and_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """GLM-4-9B-Chat-1M on 40 GiB of a GPU: 200 GiB of the host are its limit, 2,000 GiB are not."""
    monkeypatch.setattr(scheduler_hooks, "_attention_ranks", lambda: 1)
    config = LocksConfig(selector="locks", summary="r4i4", kv_tier="host")
    monkeypatch.setattr(scheduler_hooks, "inherited_config", lambda: config)
    asked: list[int] = []
    kvc = configurator(
        kv_cache_dtype=torch.bfloat16, resolve_max_num_reqs=lambda tokens: asked.append(tokens) or 64
    )
    assert scheduler_hooks.compute_cell_size(81920, None, kvc, 40) == 81920
    page = 16 * 81920
    for host, tokens in ((200 * 2**30, 200 * 2**30 // page * 16), (2000 * 2**30, None)):
        monkeypatch.setattr(capacity, "host_bytes", lambda config, device, host=host: host)
        given = scheduler_hooks.profile_available_bytes(40 * 2**30, kvc, 0)
        found = capacity.remembered()
        assert found is not None and given == (found.pages - 1) * page and asked[-1] == host // page * 16
        assert (found.pages * 16 == tokens) == (tokens is not None)
        assert 2**30 < found.hot_bytes < 40 * 2**30
        # Records, and an entry for each of a page's tiles, are the GPU's.
        assert found.pages * (490 + 4) * 160 + found.hot_bytes < 40 * 2**30


def test_nothing_is_charged_where_nothing_is_allocated(charge: Any) -> None:
    assert charge(configurator(is_draft_worker=True)) == (0, 0)
    assert charge(configurator(device="cpu"))[0] == 0
