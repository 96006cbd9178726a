"""A budget that covers the context changes nothing: SGLang's own tokens, up to the last page that fits."""

from collections.abc import Callable

import pytest
from greedy import assert_same_tokens
from traced import BUDGET, PAGE, Run, Traced, assert_all_rows

NEW = 8
# Where in the text a prompt of so many tokens begins: there the best token is better by 0.3 and more for at
# least as long as a comparison needs (float32), so that bf16 does not turn it.
STARTS = {
    **{1: 44, 15: 160, 16: 24, 17: 88, 31: 8, 32: 8, 33: 344, 127: 40, 128: 600, 129: 120},
    **{120: 450, 121: 120, 122: 120, 504: 400, 505: 440, 506: 240},
}


def take(words: list[int], length: int) -> list[int]:
    return words[STARTS[length] :][:length]


def attends_everything(run: Run) -> bool:
    return all(pages is None for pages in run.rows.values())


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33])
def test_short_prompts(locks: Traced, dense_tokens: Callable, words: list[int], length: int) -> None:
    before = locks.server.locks_info()
    prompt = take(words, length)
    run = locks.run(prompt, NEW)
    after = locks.server.locks_info()
    assert_same_tokens(run.greedy, dense_tokens(prompt, NEW))
    assert_all_rows(run, layers=30)
    assert attends_everything(run)
    assert after["rows_sparse"] == before["rows_sparse"]
    assert after["rows_dense"] >= before["rows_dense"] + NEW - 1


@pytest.mark.parametrize("budget", [BUDGET, 4 * BUDGET])
@pytest.mark.parametrize("last", [-1, 0])
def test_the_last_step_just_fits(
    locks: Traced, dense_tokens: Callable, words: list[int], budget: int, last: int
) -> None:
    """The last decode step has budget - 1, then budget tokens present."""
    prompt = take(words, budget + last - (NEW - 1))
    run = locks.run(prompt, NEW, {"budget": budget})
    assert max(length for length, _ in run.rows) == budget + last
    assert attends_everything(run)
    assert_same_tokens(run.greedy, dense_tokens(prompt, NEW))


@pytest.mark.parametrize("budget", [BUDGET, 4 * BUDGET])
def test_one_token_more_is_sparse(
    locks: Traced, dense_tokens: Callable, words: list[int], budget: int
) -> None:
    prompt = take(words, budget + 1 - (NEW - 1))
    before = locks.server.locks_info()["rows_sparse"]
    run = locks.run(prompt, NEW, {"budget": budget})
    assert locks.server.locks_info()["rows_sparse"] > before
    last = run.rows_after(budget)
    assert {length for length, _ in last} == {budget + 1}
    assert all(len(chosen) == budget // PAGE for heads in last.values() for chosen in heads or [[]])
    assert all(pages is None for row, pages in run.rows.items() if row not in last)
    # The step at budget + 1 tokens yields the last token; those before must be the dense ones.
    assert_same_tokens(run.greedy.until(NEW - 1), dense_tokens(prompt, NEW).until(NEW - 1))


def test_prompts_of_about_the_budget(locks: Traced, dense_tokens: Callable, words: list[int]) -> None:
    """b - 1, b and b + 1 prompt tokens: prefill stays dense, the first step after it may not."""
    for length in (BUDGET - 1, BUDGET, BUDGET + 1):
        prompt = take(words, length)
        run = locks.run(prompt, 2)
        (heads,) = {str(pages) for (_, layer), pages in run.rows.items() if layer == 0}
        assert (heads == "None") == (length + 1 <= BUDGET)
        expected = dense_tokens(prompt, 2)
        last = 2 if length + 1 <= BUDGET else 1
        assert_same_tokens(run.greedy.until(last), expected.until(last))
