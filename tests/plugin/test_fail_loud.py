"""If sparse decode was asked for and something is missing, the server ends and says why.

SGLang logs what a plugin raises and goes on, so each link of the chain is broken here in turn.
"""

import json
import pickle
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import source_tree
from locks_sglang import activation, compat, parent_hooks, plugin
from locks_sglang.config import LocksConfig, LocksError
from locks_sglang.hooks import HOOKS, Hook
from plugin_process import AtLoad

SCHEDULER = "sglang.srt.managers.scheduler"


@pytest.fixture
def registry(at_load: AtLoad, monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's hook registry with nothing registered."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    return HookRegistry


@pytest.fixture
def scheduler_child(at_load: AtLoad, prepare: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """This process looks like a scheduler process of a sparse server."""
    prepare("--sparse-decode", "locks")
    monkeypatch.setitem(sys.modules, SCHEDULER, ModuleType(SCHEDULER))
    monkeypatch.setattr(plugin, "register_hooks", lambda hooks: None)
    monkeypatch.setattr(plugin, "_accept_engine_arguments", lambda: None)


def hook(target: str, handler: str = "locks_sglang.parent_hooks:add_cli_args") -> Hook:
    return Hook(target, "after", handler, "every", "method", ("self",), "test")


def test_hook_that_sglang_cannot_apply(registry: Any) -> None:
    target = "sglang.srt.server_args.ServerArgs.no_such_method"
    with pytest.raises(RuntimeError, match=r"could not hook .*no_such_method"):
        activation.register_hooks((hook(target),))


def test_registry_that_applies_nothing(registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "apply_hooks", lambda: None)
    target = "sglang.srt.server_args.ServerArgs.add_cli_args"
    with pytest.raises(RuntimeError, match=r"could not hook .*add_cli_args"):
        activation.register_hooks((hook(target),))


def test_hooks_are_registered_once(registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "apply_hooks", lambda: registry._patched.update(registry._hooks))
    target = "sglang.srt.server_args.ServerArgs.add_cli_args"
    for _ in range(2):
        activation.register_hooks((hook(target),))
    assert len(registry._hooks[target]) == 1


def test_every_handler_exists(at_load: AtLoad) -> None:
    from pkgutil import resolve_name

    assert all(callable(resolve_name(hook.handler)) for hook in HOOKS)


def test_scheduler_with_a_broken_contract(
    scheduler_child: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, installed_sources: Path
) -> None:
    target = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
    root = source_tree.with_changed_file(
        installed_sources,
        tmp_path,
        source_tree.file_of(installed_sources, target),
        lambda source: source.replace("    def forward(\n", "    def forward_of_old(\n"),
    )
    monkeypatch.setattr(compat, "sglang_root", lambda: root)
    with pytest.raises(
        SystemExit, match=r"could not start.*contracts.*:\n  \S*ModelRunner.forward: not found\nT"
    ):
        plugin.register()


def test_scheduler_on_an_untested_version(scheduler_child: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "sglang_version", lambda: "0.9.9")
    with pytest.raises(SystemExit, match=r"0\.9\.9 was not tested"):
        plugin.register()


def test_parent_with_a_broken_contract(
    at_load: AtLoad, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sglang").mkdir()
    monkeypatch.setattr(compat, "sglang_root", lambda: tmp_path)
    # SGLang logs it and has no flags, so that --sparse-decode is an unrecognized argument.
    with pytest.raises(LocksError, match="add_cli_args: not found"):
        plugin.register()


def test_parent_on_an_untested_version(
    prepare: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "sglang_version", lambda: "0.9.9")
    prepare()
    with pytest.raises(SystemExit, match=r"error: SGLang 0\.9\.9 was not tested"):
        prepare("--sparse-decode", "locks")
    prepare("--sparse-decode", "locks", "--sparse-decode-allow-untested")


CHILD = f"""
import json, pickle, sys, types
with open(sys.argv[1], "rb") as file:
    args = pickle.load(file)
assert "locks_sglang" not in sys.modules
from locks_sglang.activation import config_of, inherited_config
print("CONFIGS", json.dumps([config_of(args).to_dict(), inherited_config().to_dict()]), flush=True)
# The scheduler's own imports take long and do not matter here; SGLang looks for nothing else.
sys.modules["{SCHEDULER}"] = types.ModuleType("{SCHEDULER}")
sys.modules["locks_sglang.scheduler_hooks"] = None
from sglang.srt.plugins import load_plugins
load_plugins()
print("SERVED DENSE")
"""


@pytest.fixture
def child(
    prepare: Callable[..., Any], tmp_path: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> subprocess.CompletedProcess[str]:
    """A process that gets server arguments as a scheduler does, and whose part of the plugin is missing."""
    pickled = tmp_path / "args.pickle"
    pickled.write_bytes(pickle.dumps(prepare("--sparse-decode", "oracle", "--sparse-decode-budget", "64")))
    return run_python(f"import sys; sys.argv.append({str(pickled)!r})\n{CHILD}")


def test_child_process_gets_the_values_and_ends_without_its_hooks(
    child: subprocess.CompletedProcess[str],
) -> None:
    (line,) = [line for line in child.stdout.splitlines() if line.startswith("CONFIGS ")]
    expected = LocksConfig(selector="oracle", budget=64).to_dict()
    assert json.loads(line.removeprefix("CONFIGS ")) == [expected, expected]
    assert child.returncode == 1, child.stderr
    assert "SERVED DENSE" not in child.stdout
    assert "sparse decode could not start" in child.stderr
    assert "scheduler_hooks" in child.stderr


@pytest.fixture
def killed(at_load: AtLoad, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Calls of SGLang's kill_process_tree: whether each would have ended the parent too."""
    import sglang.srt.utils

    calls: list[bool] = []
    monkeypatch.setattr(
        sglang.srt.utils, "kill_process_tree", lambda pid, include_parent: calls.append(include_parent)
    )
    return calls


def launched(infos: list[dict[str, Any]]) -> tuple[Any, ...]:
    from sglang.srt.entrypoints.engine import SchedulerInitResult

    return (None, None, SimpleNamespace(), SchedulerInitResult(infos), None)


@pytest.mark.parametrize(
    ("infos", "who"),
    [
        ([{"status": "ready"}], "ranks 0 run without it"),
        ([{"locks": {}}, {}, {"locks": {}}, {}], "ranks 1, 3 run without it"),
        ([], "no scheduler reported"),
    ],
)
def test_handshake_ends_a_server_that_would_be_dense(
    prepare: Callable[..., Any], killed: list[bool], infos: list[dict[str, Any]], who: str
) -> None:
    args = prepare("--sparse-decode", "locks")
    with pytest.raises(SystemExit, match=rf"--sparse-decode locks was asked for.*{who}"):
        parent_hooks.launch_subprocesses(launched(infos), object, args)
    assert killed == [False]


def test_handshake_passes(prepare: Callable[..., Any], killed: list[bool]) -> None:
    sparse = prepare("--sparse-decode", "locks")
    parent_hooks.launch_subprocesses(launched([{"locks": {}}, {"locks": {}}]), object, sparse)
    parent_hooks.launch_subprocesses(launched([{}]), object, prepare())
    assert killed == []


def test_handshake_is_hooked(prepare: Callable[..., Any]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    prepare("--sparse-decode", "locks")
    assert {hook.target for hook in HOOKS if hook.process == "parent"} <= HookRegistry._patched


def test_scheduler_without_state_does_not_report(at_load: AtLoad, monkeypatch: pytest.MonkeyPatch) -> None:
    from locks_sglang import runtime, scheduler_hooks

    monkeypatch.setattr(runtime, "_active", None)
    with pytest.raises(LocksError, match="has no state"):
        scheduler_hooks.get_init_info({}, None)
    with pytest.raises(LocksError, match="cannot start"):
        scheduler_hooks.build_attention_backend(None, model_runner=SimpleNamespace(is_draft_worker=False))


def test_scheduler_that_lost_the_configuration(
    prepare: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from locks_sglang import scheduler_hooks

    args = prepare("--sparse-decode", "locks")
    monkeypatch.delenv("LOCKS_SGLANG_CONFIG")
    runner = SimpleNamespace(is_draft_worker=False, server_args=args)
    with pytest.raises(LocksError, match="did not get the sparse-decode options"):
        scheduler_hooks.init_post_memory_pool_components(None, runner)
