"""The plugin as a method of a patched SGLang; `test_patches.py` runs this file in a process of its own.

No server is started here: `tests/server/test_patched.py` does.
"""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import small_runner
from locks_sglang import activation, plugin
from locks_sglang.config import SELECTORS, LocksConfig, LocksError, argument_name, flag_name
from plugin_process import AtLoad
from test_flags import CHOSEN as FOR_HOOKS
from test_flags import as_flags

# No seam gives a pool of another kind.
CHOSEN = {**FOR_HOOKS, "kv_tier": "gpu"}
EXPECTED = LocksConfig(**CHOSEN)


@pytest.fixture
def launched(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """`launched(*flags)`: server arguments that the engine has resolved and checked."""

    def launch(*flags: str) -> Any:
        args = prepare(*flags)
        if hasattr(args, "resolve_once"):  # SGLang 0.5.23 and later
            args.resolve_once()
        args.check_server_args()
        return args

    return launch


def hooked() -> set[str]:
    from sglang.srt.plugins.hook_registry import HookRegistry

    return set(HookRegistry._patched)


def test_methods_are_registered_and_nothing_is_hooked(at_load: AtLoad) -> None:
    from locks_sglang.method import LocksMethod
    from sglang.srt.sparse_decode import SPARSE_DECODE_METHODS

    assert set(SPARSE_DECODE_METHODS) == set(SELECTORS) - {"off"}
    assert set(SPARSE_DECODE_METHODS.values()) == {LocksMethod}
    assert at_load.patched == set()


def test_off_changes_nothing(at_load: AtLoad, launched: Callable[..., Any]) -> None:
    assert at_load.dense_args.sparse_decode == "off"
    assert at_load.dense_args.sparse_decode_config is None
    assert at_load.dense_args.page_size in (None, 1)
    assert not activation.config_of(launched("--sparse-decode", "off")).enabled


def test_command_line(launched: Callable[..., Any]) -> None:
    args = launched(*as_flags(CHOSEN))
    assert args.sparse_decode == CHOSEN["selector"]
    assert args.sparse_decode_config == {k: v for k, v in CHOSEN.items() if k != "selector"}
    assert activation.config_of(args) == activation.inherited_config() == EXPECTED
    assert hooked() == set()


def test_yaml_file(launched: Callable[..., Any], tmp_path: Path) -> None:
    keys = {flag_name(name).removeprefix("--"): value for name, value in CHOSEN.items()}
    config = tmp_path / "server.yaml"
    config.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in keys.items()))
    assert activation.config_of(launched("--config", str(config))) == EXPECTED


def test_json_config(launched: Callable[..., Any]) -> None:
    flags = ("--sparse-decode", "locks", "--sparse-decode-budget", "512", "--sparse-decode-config")
    args = launched(*flags, '{"budget": 64, "min_len": 96}')
    assert activation.config_of(args) == LocksConfig(selector="locks", budget=64, min_len=96)
    with pytest.raises(LocksError, match=r"unknown keys \['magic'\]; legal: summary, budget"):
        launched(*flags, '{"magic": 1}')


def test_engine_arguments(at_load: AtLoad, base_flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import ServerArgs

    monkeypatch.setattr(Engine, "server_args_class", ServerArgs)
    plugin.register()
    ours = {argument_name(name): value for name, value in CHOSEN.items()}
    theirs = {"model_path": base_flags[1], "disable_cuda_graph": True, "device": "cpu"}
    args = Engine.server_args_class(**theirs, attention_backend="torch_native", **ours)
    assert args.sparse_decode == CHOSEN["selector"]
    assert args.sparse_decode_config == {k: v for k, v in CHOSEN.items() if k != "selector"}
    dense = Engine.server_args_class(**theirs, attention_backend="torch_native")
    assert (dense.sparse_decode, dense.sparse_decode_config) == ("off", None)
    with pytest.raises(TypeError, match="sparse_decode_nonsense"):
        Engine.server_args_class(**theirs, sparse_decode_nonsense=1)


@pytest.mark.parametrize("page_size", [None, 16, 32])
def test_page_size(launched: Callable[..., Any], page_size: int | None) -> None:
    flags = [] if page_size is None else ["--page-size", str(page_size)]
    args = launched("--sparse-decode", "locks", *flags)
    assert activation.config_of(args).page_size == (page_size or 16)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--sparse-decode-budget", "40"], "multiple of the page size"),
        (["--sparse-decode-kv-tier", "host"], "more than the seams of patches/ give"),
        (["--enable-mixed-chunk"], "neighbours"),
        (["--page-size", "8"], "--page-size 8 does not work"),
    ],
)
def test_refused(launched: Callable[..., Any], flags: list[str], message: str) -> None:
    with pytest.raises(LocksError, match=message):
        launched("--sparse-decode", "locks", *flags)


def test_requests(launched: Callable[..., Any]) -> None:
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.sparse_decode.registry import verify_sparse_decode_request

    args = launched("--sparse-decode", "locks")
    verify_sparse_decode_request(SamplingParams(custom_params={"locks": {"mode": "dense"}}), args)
    with pytest.raises(LocksError, match=r"custom_params\.locks\.budget is 7"):
        verify_sparse_decode_request(SamplingParams(custom_params={"locks": {"budget": 7}}), args)


def test_scheduler_gets_the_configuration(
    launched: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.model_executor.model_runner import ModelRunner

    args = pickle.loads(pickle.dumps(launched(*as_flags(CHOSEN))))
    monkeypatch.delenv("LOCKS_SGLANG_CONFIG")  # it does not need to be inherited
    monkeypatch.setattr(activation, "_ATTRIBUTE", "_another_attribute")
    runner = SimpleNamespace(server_args=args, model_config=None, is_draft_worker=False, sparse_decode=None)
    bags = SimpleNamespace(kernel=args)  # where SGLang 0.5.23 reads it
    monkeypatch.setattr("sglang.srt.model_executor.model_runner.get_exec", lambda: bags)
    ModelRunner.maybe_create_sparse_decode(runner)
    assert type(runner.sparse_decode).__name__ == "LocksMethod"
    assert activation.inherited_config() == activation.config_of(args) == EXPECTED
    assert hooked() == set()


def test_process_without_the_plugin_ends(
    launched: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.sparse_decode import registry

    args = launched("--sparse-decode", "locks")
    monkeypatch.setattr(registry, "SPARSE_DECODE_METHODS", {})
    runner = SimpleNamespace(server_args=args, model_config=None, is_draft_worker=False, sparse_decode=None)
    bags = SimpleNamespace(kernel=args)
    monkeypatch.setattr("sglang.srt.model_executor.model_runner.get_exec", lambda: bags)
    with pytest.raises(ValueError, match="'locks'; registered in this process: none"):
        ModelRunner.maybe_create_sparse_decode(runner)
    assert "LOCKS_SGLANG_CONFIG" in os.environ


def test_graph_builds_summaries_once(launched: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.model_executor.model_runner import ModelRunner

    args = launched("--sparse-decode", "locks")
    bags = SimpleNamespace(kernel=args)
    monkeypatch.setattr("sglang.srt.model_executor.model_runner.get_exec", lambda: bags)
    runner = small_runner.make(args, monkeypatch)
    ModelRunner.maybe_create_sparse_decode(runner)
    ModelRunner.maybe_init_sparse_decode(runner)
    assert small_runner.built_by_a_graph(runner) == 1
