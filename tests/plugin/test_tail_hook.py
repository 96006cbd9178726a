"""The tail of a captured decode step builds each summary once: a second time would only cost."""

from collections.abc import Callable
from typing import Any

import pytest
import small_runner


def test_once_with_hooks(prepare: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from locks_sglang import scheduler_hooks

    runner = small_runner.make(prepare("--sparse-decode", "locks"), monkeypatch)
    scheduler_hooks.init_post_memory_pool_components(None, runner)
    assert small_runner.built_by_a_graph(runner) == 1
