"""The other selectors go through the same path, so they keep the same promises.

In CI a server of Quest's stands for both: the oracle has no records that could go stale, and
tests/plugin/test_selector_steps.py has the decode steps of both.
"""

import random
from collections.abc import Callable

import pytest
from greedy import assert_same_tokens
from traced import BUDGET, PAGE, SMALL_POOL, Traced, assert_all_rows, assert_same, assert_selects

NEW = 8


@pytest.fixture(scope="module", params=["quest", pytest.param("oracle", marks=pytest.mark.slow)])
def selector(request: pytest.FixtureRequest) -> str:
    """All tests of one selector come before the other's server starts."""
    return request.param


@pytest.fixture
def other(selector: str, traced_server: Callable[..., Traced]) -> Traced:
    return traced_server(*SMALL_POOL, "--sparse-decode", selector, "--sparse-decode-budget", str(BUDGET))


def test_budget_that_covers_the_context(other: Traced, dense_tokens: Callable, words: list[int]) -> None:
    for length in (1, 16, 33, BUDGET - NEW + 1):
        run = other.run(words[:length], NEW)
        assert all(pages is None for pages in run.rows.values())
        assert_same_tokens(run.greedy, dense_tokens(words[:length], NEW))


def test_reused_pages(other: Traced, words: list[int]) -> None:
    prompt, noise = words[:480], random.Random(3).choices(range(1000, 40000), k=880)
    cold = other.run(prompt, NEW)
    assert_all_rows(cold, layers=30)
    assert_selects(cold, BUDGET // PAGE)
    hit = other.run(prompt, NEW)
    assert hit.cached_tokens == 480 - PAGE
    assert_same(hit, cold)
    other.run(noise, 1)
    again = other.run(prompt, NEW)
    assert again.cached_tokens == 0
    assert_same(again, cold)
