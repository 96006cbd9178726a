"""The flags: on SGLang's command line, in YAML files, as arguments of its engine, and in its processes."""

import copy
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from locks_sglang import activation, plugin
from locks_sglang.config import LocksConfig, argument_name, flag_name, options
from locks_sglang.hooks import hooks_for
from plugin_process import AtLoad

# A legal value that is not the default, for every option.
CHOSEN = {
    "selector": "quest",
    "summary": "r4i4",
    "budget": 512,
    "max_budget": 1024,
    "min_len": 96,
    "dense_below": 0,
    "attend": "native",
    "kv_tier": "host",
    "host_gib": 2.5,
    "hot_gib": 0.25,
    "audit_interval": 7,
    "audit_layers": 5,
    "trace_file": "/tmp/pages.jsonl",
    "allow_untested": True,
}


def as_flags(values: dict[str, Any]) -> list[str]:
    flags = []
    for name, value in values.items():
        flags += [flag_name(name)] if value is True else [flag_name(name), str(value)]
    return flags


def test_every_option_has_a_chosen_value() -> None:
    assert set(CHOSEN) == {option.name for option in options()}
    assert all(value != getattr(LocksConfig(), name) for name, value in CHOSEN.items())


def test_help_lists_every_flag(prepare: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        prepare("--help")
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    for option in options():
        assert f"  {flag_name(option.name)} " in shown.replace("\n", " \n")


def test_command_line(prepare: Callable[..., Any]) -> None:
    args = prepare(*as_flags(CHOSEN))
    assert activation.config_of(args) == LocksConfig(**CHOSEN)


@pytest.mark.parametrize("after", [(), ("--sparse-decode-budget", "512")], ids=str)
def test_audits_without_a_number(prepare: Callable[..., Any], after: tuple[str, ...]) -> None:
    args = prepare("--sparse-decode", "locks", "--sparse-decode-audit-interval", *after)
    assert activation.config_of(args).audit_interval == 100
    assert activation.config_of(prepare("--sparse-decode", "locks")).audit_interval == 0


def test_yaml_file(prepare: Callable[..., Any], tmp_path: Path) -> None:
    keys = {flag_name(name).removeprefix("--"): value for name, value in CHOSEN.items()}
    config = tmp_path / "server.yaml"
    config.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in keys.items()))
    args = prepare("--config", str(config))
    assert activation.config_of(args) == LocksConfig(**CHOSEN)


def test_engine_arguments(at_load: AtLoad, base_flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import ServerArgs

    monkeypatch.setattr(Engine, "server_args_class", ServerArgs)
    plugin._accept_engine_arguments()
    ours = {argument_name(name): value for name, value in CHOSEN.items()}
    theirs: dict[str, Any] = {"model_path": base_flags[1], "disable_cuda_graph": True}
    if "cpu" in base_flags:
        theirs |= {"device": "cpu", "attention_backend": "torch_native"}
    args = Engine.server_args_class(**theirs, **ours)
    assert isinstance(args, ServerArgs)
    assert activation.config_of(args) == LocksConfig(**CHOSEN)
    assert args.page_size == 16
    dense = Engine.server_args_class(**theirs)
    assert not activation.config_of(dense).enabled
    assert dense.page_size == at_load.dense_args.page_size
    with pytest.raises(TypeError, match="sparse_decode_nonsense"):
        Engine.server_args_class(**theirs, sparse_decode_nonsense=1)


@pytest.mark.parametrize("page_size", [None, 16, 32, 64])
def test_page_size(prepare: Callable[..., Any], page_size: int | None) -> None:
    flags = [] if page_size is None else ["--page-size", str(page_size)]
    args = prepare("--sparse-decode", "locks", *flags)
    assert args.page_size == (page_size or 16)
    assert activation.config_of(args).page_size == args.page_size


def test_config_survives_copies_and_dictionaries(prepare: Callable[..., Any]) -> None:
    config = LocksConfig(**CHOSEN)
    assert LocksConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    args = prepare(*as_flags(CHOSEN))
    for other in (pickle.loads(pickle.dumps(args)), copy.deepcopy(args)):
        assert activation.config_of(other) == config
    # Processes without the plugin must be able to unpickle it.
    assert b"locks_sglang" not in pickle.dumps(args)


def test_environment_follows_the_last_server_arguments(prepare: Callable[..., Any]) -> None:
    prepare(*as_flags(CHOSEN))
    assert activation.inherited_config() == LocksConfig(**CHOSEN)
    prepare()
    assert not activation.inherited_config().enabled
    assert "LOCKS_SGLANG_CONFIG" not in os.environ


def test_off_changes_nothing(at_load: AtLoad, base_flags: list[str]) -> None:
    assert at_load.patched == {hook.target for hook in hooks_for("every")}
    assert not activation.config_of(at_load.dense_args).enabled
    assert at_load.dense_args.page_size == 1
    assert "LOCKS_SGLANG_CONFIG" not in at_load.environment


@pytest.mark.parametrize(
    "flags",
    [("--sparse-decode", "magic"), ("--sparse-decode-budget", "many"), ("--sparse-decode-min-len", "1.5")],
)
def test_values_that_argparse_refuses(
    prepare: Callable[..., Any], capsys: pytest.CaptureFixture[str], flags: tuple[str, str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        prepare(*flags)
    assert stopped.value.code == 2
    assert flags[0] in capsys.readouterr().err
