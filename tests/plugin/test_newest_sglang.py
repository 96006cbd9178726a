"""Flags, refusals and resolution on the newest tested SGLang, whose server arguments are built differently.

Its sources run in a process of their own beside this environment's other packages; no server starts.
"""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from locks_sglang.config import LocksConfig
from locks_sglang.hooks import HOOKS, hooks_for
from locks_sglang.refusals import REFUSALS

NEW_FLAGS = {
    "enable_unified_cache_external_linker": ["--enable-unified-cache-external-linker"],
    "enable_nvidia_megakernel": ["--enable-nvidia-megakernel"],
    "enable_amd_monokernel": ["--enable-amd-monokernel"],
    "enable_kv_cache_sharding": ["--enable-kv-cache-sharding"],
    "attn_dp_size": ["--attn-dp-size", "2"],
    "dp_size": ["--dp-size", "2"],
}

PROBE = """
import json, os, pickle, sys
base, yaml, refused = json.loads(sys.argv[1])
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
load_plugins()
found = {"patched": sorted(HookRegistry._patched)}
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import prepare_server_args
from locks_sglang.activation import config_of, inherited_config
from locks_sglang.refusals import resolved

def error_of(call, *arguments):
    try:
        call(*arguments)
    except (SystemExit, ValueError) as error:
        return str(error)

dense = prepare_server_args(base)
found["dense"] = [config_of(dense).to_dict(), dense.page_size]
sparse = prepare_server_args([*base, "--config", yaml])
found["sparse"] = [config_of(pickle.loads(pickle.dumps(sparse))).to_dict(), sparse.page_size]
found["inherited"] = inherited_config().to_dict()
found["patched by sparse"] = sorted(HookRegistry._patched)
found["refused"] = {key: error_of(prepare_server_args, [*base, "--config", yaml, *flags])
                    for key, flags in refused.items()}
beams = SamplingParams(max_new_tokens=1, beam_width=4)
budget = SamplingParams(custom_params={"locks": {"budget": 7}})
found["requests"] = [error_of(params.verify, 128) for params in (SamplingParams(), beams, budget)]
unresolved = prepare_server_args([*base, "--config", yaml])
found["graphs"] = [resolved(unresolved).cuda_graph_config is None]
unresolved.resolve_once()
unresolved.check_server_args()
found["graphs"].append(resolved(unresolved).cuda_graph_config.decode.backend)
unresolved._resolved_overrides = [*unresolved._resolved_overrides, ("test", {"enable_lmcache": True})]
found["lmcache"] = [unresolved.enable_lmcache, error_of(unresolved.check_server_args)]
print("FOUND", json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(
    newest_sources: Path,
    base_flags: list[str],
    tmp_path_factory: pytest.TempPathFactory,
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> dict[str, Any]:
    yaml = tmp_path_factory.mktemp("newest") / "server.yaml"
    yaml.write_text("sparse-decode: locks\nsparse-decode-budget: 512\n")
    arguments = json.dumps([base_flags, str(yaml), NEW_FLAGS])
    path = os.pathsep.join([str(newest_sources), os.environ.get("PYTHONPATH", "")])
    ran = run_python(f"import sys; sys.argv.append({arguments!r})\n{PROBE}", PYTHONPATH=path)
    lines = [line for line in ran.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, ran.stderr[-3000:]
    return json.loads(lines[0].removeprefix("FOUND "))


def test_off_changes_nothing(found: dict[str, Any]) -> None:
    assert found["patched"] == sorted(hook.target for hook in hooks_for("every"))
    config, page_size = found["dense"]
    assert config == LocksConfig().to_dict()
    assert page_size in (None, 1)


def test_values_arrive(found: dict[str, Any]) -> None:
    expected = LocksConfig(selector="locks", budget=512).to_dict()
    assert found["sparse"] == [expected, 16]
    assert found["inherited"] == expected
    parent = {hook.target for hook in HOOKS if hook.process != "scheduler"}
    assert set(found["patched by sparse"]) == parent


def test_new_options_are_refused(found: dict[str, Any]) -> None:
    rows = {row.field: row for row in REFUSALS}
    assert {row.field for row in REFUSALS if row.since == "0.5.23"} <= set(NEW_FLAGS)
    for field, message in found["refused"].items():
        assert message is not None, f"{field} was not refused"
        assert rows[field].option in message and rows[field].reason in message


def test_requests_are_refused(found: dict[str, Any]) -> None:
    plain, beams, budget = found["requests"]
    assert plain is None
    assert "beam_width is 4" in beams
    assert "custom_params.locks.budget is 7" in budget


def test_what_sglang_resolves_later_is_checked_at_launch(found: dict[str, Any]) -> None:
    assert found["graphs"] == [True, "disabled"]
    given, message = found["lmcache"]
    assert not given
    assert "--enable-lmcache (True) does not work with --sparse-decode" in message
