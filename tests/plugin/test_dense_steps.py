"""Steps that run dense: which they are, that the backend then attends, and the graphs they replay."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from locks_sglang import dense_steps, runtime, scheduler_hooks
from locks_sglang.backend import make_sparse_class
from locks_sglang.config import LocksConfig, LocksError
from locks_sglang.dense_steps import DenseSteps
from rig import HEAD_DIM, Rig

CONFIG = LocksConfig(selector="locks", budget=64)


def forward(lengths: list[int] | None, decode: bool = True) -> Any:
    """What is read of a forward batch."""
    mode = SimpleNamespace(is_decode=lambda: decode)
    cpu = None if lengths is None else torch.tensor(lengths)
    return SimpleNamespace(forward_mode=mode, seq_lens_cpu=cpu, batch_size=len(lengths or ()))


def test_tokens_left_out_of_all_requests_count() -> None:
    """Of each what is beyond the budget and ROW_TOKENS: many requests of little more leave nothing out."""
    steps = DenseSteps(below=1000, budget=2000)
    assert steps.begin(forward([3536 + 999])) and steps.now
    assert not steps.begin(forward([3536 + 1000])) and not steps.now
    assert not steps.begin(forward([3536 + 500, 3536 + 500]))
    assert steps.begin(forward([3536 + 500, 3536 + 499]))
    assert steps.begin(forward([3536 + 999, 10, 3536]))
    assert steps.begin(forward([3536] * 256))
    assert not steps.begin(forward([10], decode=False))
    assert not steps.begin(forward(None))
    assert not DenseSteps(below=0).begin(forward([1]))


def test_graphs_are_captured_as_told() -> None:
    steps = DenseSteps(below=1000)
    with steps.capture(dense=False):
        assert not steps.begin(forward([1]))
    with steps.capture(dense=True):
        assert steps.begin(forward([5000]))
        assert (steps.label(None), steps.label("lora")) == ("dense", "lora-dense")
    assert not steps.begin(forward([5000]))
    assert (steps.label(None), steps.label("lora")) == (None, "lora")


@pytest.mark.parametrize(
    ("changes", "on_gpu", "expected"),
    [
        ({}, True, 24_576),
        ({}, False, 0),
        ({"selector": "quest"}, True, 0),
        ({"selector": "oracle"}, True, 0),
        ({"trace_file": "trace.jsonl"}, True, 0),
        ({"dense_below": 0}, True, 0),
        ({"dense_below": 4096}, False, 4096),
        ({"dense_below": 4096, "selector": "quest"}, True, 4096),
    ],
    ids=str,
)
def test_default(changes: dict[str, Any], on_gpu: bool, expected: int) -> None:
    config = replace(CONFIG, **changes)
    assert dense_steps.below(config, kv_heads=4, head_dim=128, item_bytes=2, on_gpu=on_gpu) == expected


def test_options() -> None:
    replace(CONFIG, dense_below=0, trace_file="trace.jsonl").validate()
    with pytest.raises(LocksError, match="--sparse-decode-dense-below is -1; legal: 0 or more"):
        replace(CONFIG, dense_below=-1).validate()
    with pytest.raises(LocksError, match="--sparse-decode-dense-below is 9; legal with --sparse-decode-tr"):
        replace(CONFIG, dense_below=9, trace_file="trace.jsonl").validate()


class Dense:
    """Stands for a backend of SGLang; says what was asked of it."""

    def __init__(self) -> None:
        self.planned = 0
        self.attended: list[int] = []

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.planned += 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        self.planned += 1

    def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, **_: Any) -> Any:
        self.attended.append(layer.layer_id)
        return torch.full_like(q, 7)


@pytest.mark.parametrize("out_of_graph", [False, True])
def test_the_backend_attends_in_a_dense_step(out_of_graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_steps, "ROW_TOKENS", 0)
    rig = Rig(replace(CONFIG, audit_interval=1), [300, 250])
    rig.state.dense_steps.below = 600 - 2 * CONFIG.budget
    backend = Dense()
    backend.__class__ = make_sparse_class(Dense)
    backend.locks = rig.state  # type: ignore[attr-defined]
    begin = backend.init_forward_metadata_out_graph if out_of_graph else backend.init_forward_metadata
    queries = rig.queries(2)

    def step(lengths: list[int]) -> torch.Tensor:
        batch = forward(lengths)
        batch.req_pool_indices = torch.arange(1, len(lengths) + 1)
        batch.seq_lens, batch.rids, batch.out_cache_loc = torch.tensor(lengths), None, None
        begin(batch)
        layer = SimpleNamespace(**vars(rig.layer(0)), tp_q_head_num=rig.q_heads, head_dim=HEAD_DIM)
        out = backend.forward_decode(queries[0].flatten(1), None, None, layer, batch)
        rig.state.finish_step(batch)
        return out

    sparse = step([300, 300])
    assert backend.planned == 0 and not backend.attended and not (sparse == 7).any()
    assert rig.state.counters.totals()["rows_sparse"] == 2 and rig.state.audits_launched == 1
    # A dense step needs none of our tables, nor leaves any that a later call could mistake for its own.
    with monkeypatch.context() as patch:
        patch.setattr(runtime, "snapshot", None)
        assert (step([300, 299]) == 7).all()
    assert backend.planned == 1 and backend.attended == [0] and not rig.state.in_step
    assert rig.state.counters.totals()["rows_sparse"] == 2
    assert rig.state.audits_launched == 1, "nothing was selected, so there is nothing to audit"
    assert torch.equal(step([300, 300]), sparse)


@pytest.mark.parametrize("in_graph", [False, True])
def test_a_dense_step_builds_only_what_it_completes(
    in_graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After it, from the lengths on the host; in a CUDA graph, too, whose tail builds nothing then."""
    rig = Rig(CONFIG, [300, 250, 64])
    monkeypatch.setattr(runtime, "_active", rig.state)
    runner = SimpleNamespace(is_draft_worker=False)
    built: list[torch.Tensor] = []
    monkeypatch.setattr(rig.state.summaries, "build", built.append)
    before = rig.state.counters.totals()

    def step(lengths: list[int], below: int) -> torch.Tensor:
        rig.state.dense_steps.below = below
        batch = rig.batch(lengths)
        batch.seq_lens_cpu = batch.seq_lens.clone()
        batch.out_cache_loc = rig.token_table[range(1, len(lengths) + 1), batch.seq_lens - 1].long()
        rig.state.dense_steps.begin(batch)
        rig.state.begin_step(batch)
        if in_graph:
            scheduler_hooks._build_in_graph(runner, None, batch, len(lengths))
        ended = SimpleNamespace(can_run_graph=in_graph)
        scheduler_hooks.model_runner_forward(ended, runner, batch)
        return batch.out_cache_loc

    step([300, 250, 63], below=1000)
    assert not built
    completing = step([304, 250, 64], below=1000)
    assert len(built) == 1 and built[0] is completing
    after = rig.state.counters.totals()
    assert {name: after[name] - before[name] for name in before} == {
        "rows_sparse": 0,
        "rows_dense": 6,
        "pages_attended": 2 * (19 + 16 + 4),
        "pages_available": 2 * (19 + 16 + 4),
        "summaries_built": 2,
    }
    sparse = step([300, 250, 63], below=0)
    assert len(built) == 2 and built[1] is sparse, "a sparse step asks the device"


@pytest.mark.parametrize("below", [0, 100])
def test_graphs_of_both_kinds(monkeypatch: pytest.MonkeyPatch, below: int) -> None:
    """Each captured under a name of its own, which a step then asks for by its lengths."""
    monkeypatch.setattr(dense_steps, "ROW_TOKENS", 0)
    rig = Rig(CONFIG, [300])
    rig.state.dense_steps.below = below
    monkeypatch.setattr(runtime, "_active", rig.state)
    runner = SimpleNamespace(model_runner=SimpleNamespace(is_draft_worker=False))
    captured = []

    def original(_: Any, size: int, run: Any, stream: int | None, label: str | None, *rest: Any) -> None:
        dense = rig.state.dense_steps.begin(forward([size]))
        captured.append((size, stream, label, dense, *rest))

    scheduler_hooks.capture_one_shape(original, runner, 8, print, None, "lora", "more")
    both = [(8, None, "lora", False, "more"), (8, None, "lora-dense", True, "more")]
    assert captured == both[: 2 if below else 1]
    assert scheduler_hooks.capture_one_shape(lambda *_: 1, runner, 8, print) == 1
    for beyond, label in ((99, "dense" if below else None), (101, None)):
        rig.state.dense_steps.begin(forward([CONFIG.budget + beyond]))
        assert scheduler_hooks.resolve_graph_variant(None, runner, None) == label


def test_draft_models_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(CONFIG, [300])
    rig.state.dense_steps.below = 100
    rig.state.dense_steps.begin(forward([9]))
    monkeypatch.setattr(runtime, "_active", rig.state)
    runner = SimpleNamespace(model_runner=SimpleNamespace(is_draft_worker=True))
    calls: list[Any] = []
    scheduler_hooks.capture_one_shape(lambda *given: calls.append(given), runner, 8, print)
    assert len(calls) == 1
    assert scheduler_hooks.resolve_graph_variant("draft", runner, None) == "draft"
