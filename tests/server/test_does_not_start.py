"""A server that was asked for sparse decode and cannot do it does not start, and says why.

(tests/plugin breaks each hook inside a process; here whole servers fail.)
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from server import ServerFailed, launch_refused

# Python imports this module at start; the spawned processes of a server are told from their parent by it.
IN_CHILDREN = """
import importlib.abc
import os
import sys

if "--multiprocessing-fork" in sys.orig_argv:
{body}
"""

NOT_LOADED = """
    os.environ["SGLANG_PLUGINS"] = "another"
"""
BROKEN_IMPORT = """
    class Broken(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name == "locks_sglang.scheduler_hooks":
                raise ImportError("broken on purpose")

    sys.meta_path.insert(0, Broken())
"""
# The sources keep their contract, but at run time the function is not there.
FUNCTION_GONE = """
    class Gone(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            pool = sys.modules.get("sglang.srt.mem_cache.memory_pool")
            if name == "locks_sglang.scheduler_hooks":
                del pool.ReqToTokenPool.alloc

    sys.meta_path.insert(0, Gone())
"""


@pytest.fixture
def refused(demo_model: Path, tmp_path: Path) -> Callable[[str], ServerFailed]:
    def start(body: str) -> ServerFailed:
        (tmp_path / "sitecustomize.py").write_text(IN_CHILDREN.format(body=body))
        environment = {"PYTHONPATH": str(tmp_path)}
        return launch_refused(demo_model, "--sparse-decode", "locks", log_dir=tmp_path, env=environment)

    return start


def test_plugin_not_loaded_at_all(demo_model: Path, tmp_path: Path) -> None:
    failure = launch_refused(
        demo_model, "--sparse-decode", "locks", log_dir=tmp_path, env={"SGLANG_PLUGINS": "another"}
    )
    assert failure.returncode == 2
    assert "unrecognized arguments: --sparse-decode locks" in failure.log


def test_plugin_not_loaded_by_the_scheduler(refused: Callable[[str], ServerFailed]) -> None:
    failure = refused(NOT_LOADED)
    assert failure.returncode != 0
    message = "error: --sparse-decode locks was asked for, but the schedulers of ranks 0 run without it"
    assert message in failure.log
    assert "SGLANG_PLUGINS" in failure.log.split(message)[1].splitlines()[0]


def test_scheduler_hooks_that_cannot_be_imported(refused: Callable[[str], ServerFailed]) -> None:
    failure = refused(BROKEN_IMPORT)
    assert failure.returncode != 0
    assert "sparse decode could not start: broken on purpose" in failure.log


# It ends as the one before; tests/plugin/test_fail_loud.py loses every hook inside a process.
@pytest.mark.slow
def test_hooked_function_that_is_gone(refused: Callable[[str], ServerFailed]) -> None:
    failure = refused(FUNCTION_GONE)
    assert failure.returncode != 0
    assert "could not hook sglang.srt.mem_cache.memory_pool.ReqToTokenPool.alloc" in failure.log
