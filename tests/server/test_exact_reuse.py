"""The prefix cache: a request selects the same pages whoever wrote them, and whoever had them before."""

import random

import pytest
from traced import BUDGET, PAGE, Traced, assert_all_rows, assert_same, assert_selects

LENGTH, NEW = 480, 8


@pytest.fixture
def text(words: list[int]) -> list[int]:
    return words[160 : 160 + LENGTH]


def noise(seed: int, length: int = 480) -> list[int]:
    """Tokens that share nothing with the text."""
    return random.Random(seed).choices(range(1000, 40000), k=length)


def test_same_prompt_twice(locks: Traced, text: list[int]) -> None:
    cold = locks.alone(text, NEW)
    assert_all_rows(cold, layers=30)
    assert_selects(cold, BUDGET // PAGE)
    locks.server.flush_cache()
    first, second = (locks.run(text, NEW) for _ in range(2))
    assert first.cached_tokens == 0
    assert second.cached_tokens == LENGTH - PAGE  # the last token's page is always computed
    assert_same(first, cold)
    assert_same(second, cold)


@pytest.mark.parametrize("shared", [240, 247])
def test_shared_prefix(locks: Traced, words: list[int], text: list[int], shared: int) -> None:
    """A prefix of whole pages, and one that ends in the middle of a page."""
    prompt = text[:shared] + words[940:1140]
    cold = locks.alone(prompt, NEW)
    locks.server.flush_cache()
    locks.run(text, 2)
    run = locks.run(prompt, NEW)
    assert run.cached_tokens == shared // PAGE * PAGE
    assert_same(run, cold)


def test_evicted_pages_get_new_summaries(locks: Traced, text: list[int]) -> None:
    """The pool holds 1,280 tokens, so the same physical pages pass from request to request."""
    cold = locks.alone(text, NEW)
    other = locks.alone(noise(6), NEW)
    locks.server.flush_cache()
    locks.run(text, 1)
    locks.run(noise(2), 1)
    reused = locks.run(noise(6), NEW)
    again = locks.run(text, NEW)
    assert (reused.cached_tokens, again.cached_tokens) == (0, 0), "nothing was evicted"
    assert_same(reused, other)
    assert_same(again, cold)


def test_flush_cache(locks: Traced, words: list[int], text: list[int]) -> None:
    cold = locks.alone(text, NEW)
    locks.run(words[200:500], 2)  # the next request's pages are elsewhere
    locks.run(text, 2)
    locks.server.flush_cache()
    run = locks.run(text, NEW)
    assert run.cached_tokens == 0
    assert_same(run, cold)
