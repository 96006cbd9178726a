"""SGLang with the plugin loaded in this process, server arguments of a model without weights, and sources.

Importing SGLang costs about ten seconds, so all tests here share one import. No server is started.
"""

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import source_tree
import torch
from filelock import FileLock
from locks_sglang import compat, cpu_stand_ins
from plugin_process import AtLoad, resolve

pytest.importorskip("sglang", reason="the plugin tests need sglang (make env)")

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache"
NEWEST = "0.5.23"

MODEL_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 128,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
}


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """SGLang and the plugin write environment variables that must not reach another test's server."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder that is enough to parse server arguments."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(MODEL_CONFIG))
    return folder


@pytest.fixture(scope="session")
def base_flags(model: Path) -> list[str]:
    """Flags that this machine's SGLang needs, without a page size."""
    if torch.cuda.is_available():
        return ["--model-path", str(model), "--disable-cuda-graph"]
    flags = list(cpu_stand_ins.SERVER_FLAGS)
    at = flags.index("--page-size")
    return ["--model-path", str(model), *flags[:at], *flags[at + 2 :]]


@pytest.fixture(scope="session")
def at_load(base_flags: list[str]) -> AtLoad:
    """SGLang with its plugins loaded, and server arguments without sparse decode."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    assert not HookRegistry._patched, "something hooked SGLang in this process before these tests"
    load_plugins()
    from sglang.srt.server_args import prepare_server_args

    dense_args = resolve(prepare_server_args(base_flags))
    return AtLoad(frozenset(HookRegistry._patched), dense_args, dict(os.environ))


@pytest.fixture
def prepare(at_load: AtLoad, base_flags: list[str]) -> Callable[..., Any]:
    """`prepare(*flags)`: SGLang's own parser and ServerArgs on these flags."""
    from sglang.srt.server_args import prepare_server_args

    return lambda *flags: prepare_server_args([*base_flags, *flags])


@pytest.fixture(scope="session")
def installed_sources() -> Path:
    """Folder that holds the installed `sglang` package."""
    return compat.sglang_root()


@pytest.fixture(scope="session")
def newest_sources() -> Path:
    """Folder with the Python sources of the newest SGLang, from its wheel on PyPI."""
    folder = CACHE / f"sglang-{NEWEST}"
    CACHE.mkdir(exist_ok=True)
    with FileLock(CACHE / "lock"):  # one worker of pytest-xdist downloads, the others wait
        if not folder.is_dir():
            try:
                _fetch(f"sglang=={NEWEST}", folder)
            except subprocess.CalledProcessError as error:
                reason = f"sglang=={NEWEST} could not be downloaded: {error.stderr.strip()[-300:]}"
                if os.environ.get("CI") == "true":
                    pytest.fail(reason)
                pytest.skip(reason)
    return folder


@pytest.fixture
def broken(installed_sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> source_tree.Break:
    """`broken(dotted, change)`: the installed sources with the file of `dotted` changed."""
    return lambda dotted, change: source_tree.with_changed_file(
        installed_sources, tmp_path, source_tree.file_of(installed_sources, dotted), change
    )


def _fetch(requirement: str, folder: Path) -> None:
    wheels = CACHE / "wheels"
    platform = ("--only-binary=:all:", "--python-version=3.11", "--platform=manylinux_2_34_x86_64")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *platform, "-d", str(wheels)]
    subprocess.run([*command, requirement], check=True, capture_output=True, text=True)
    (wheel,) = wheels.glob(requirement.replace("==", "-") + "-*.whl")
    partial = folder.with_suffix(".partial")
    with zipfile.ZipFile(wheel) as archive:
        # SGLang looks for the CUDA sources of its just-in-time kernels when it is imported.
        wanted = (".py", ".dist-info/METADATA", ".cuh")
        names = [name for name in archive.namelist() if name.endswith(wanted)]
        archive.extractall(partial, names)
    partial.rename(folder)
    wheel.unlink()


@pytest.fixture(scope="session")
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`run_python(code, **environment)`: a fresh interpreter with the CPU stand-ins."""

    def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
        env = cpu_stand_ins.environment({**os.environ, **environment})
        return subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=240, check=False
        )

    return run
