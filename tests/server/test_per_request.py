"""`custom_params: {"locks": ...}`: each request has its own mode and budget, whatever runs beside it."""

from collections.abc import Callable
from typing import Any

import pytest
from greedy import assert_same_tokens
from traced import BUDGET, LONG, PAGE, Traced, assert_same, assert_selects

CHAT = [{"role": "user", "content": "List ten rivers of Europe."}]
REFUSED = [
    ({"mode": "fast"}, "legal: sparse, dense"),
    ({"budget": 100}, "a multiple of the page size (16) and at least two pages"),
    ({"budget": 16}, "a multiple of the page size (16) and at least two pages"),
    ({"budget": 4 * BUDGET + 16}, "at most 512 tokens"),
    ({"budget": "large"}, "a whole number of tokens"),
    ({"size": 128}, "legal: 'mode', 'budget'"),
    ("sparse", "an object with 'mode' (sparse, dense) and 'budget'"),
]


def test_dense_beside_sparse(locks: Traced, dense_tokens: Callable, words: list[int]) -> None:
    prompt, new = words[540:851], 8
    expected, cold = dense_tokens(prompt, new), locks.alone(words[160:640], LONG)
    locks.server.flush_cache()
    sparse = locks.start(words[160:640], LONG)
    sparse.wait_for_rows(1)
    dense = locks.start(prompt, new, {"mode": "dense"})
    run = dense.result()
    assert locks.overlap(sparse, dense)
    assert run.rows
    assert all(pages is None for pages in run.rows.values())
    assert_same_tokens(run.greedy, expected)
    assert_same(sparse.result(), cold)


@pytest.mark.parametrize("budget", [32, 256])
def test_budget(locks: Traced, words: list[int], budget: int) -> None:
    """The next request is back at the server's budget, though it gets the same slot."""
    own = locks.run(words[:480], 4, {"budget": budget, "mode": "sparse"})
    assert_selects(own, budget // PAGE)
    after = locks.run(words[:480], 4)
    assert_selects(after, BUDGET // PAGE)


def test_openai_api(locks: Traced) -> None:
    """The same options in the body of a chat completion."""
    before = locks.server.locks_info()
    answer = locks.server.chat(CHAT, 4, rid="dense-chat", custom_params={"locks": {"mode": "dense"}})
    assert answer["usage"]["completion_tokens"] == 4
    assert set(map(str, locks.rows_of("dense-chat").values())) == {"None"}
    assert locks.server.locks_info()["rows_sparse"] == before["rows_sparse"]
    locks.server.chat(CHAT, 4, rid="small-chat", custom_params={"locks": {"budget": 32}})
    rows = locks.rows_of("small-chat")
    assert {len(chosen) for heads in rows.values() for chosen in heads or []} == {2}


def test_refused_with_400(locks: Traced, words: list[int]) -> None:
    new = 8 + LONG
    cold = locks.alone(words[350:540], new)
    locks.server.flush_cache()
    other = locks.start(words[350:540], new)
    other.wait_for_rows(1)
    for options, legal in REFUSED:
        for path, body in bodies(options).items():
            answer = locks.server.post(path, body)
            assert answer.status_code == 400, f"{path} with {options}: {answer.text}"
            assert legal in answer.text.replace("\\", "")
    assert not other.done(), "the other request was meant to run meanwhile"
    assert_same(other.result(), cold)


def bodies(options: Any) -> dict[str, dict[str, Any]]:
    """A request with these options in each API."""
    custom = {"custom_params": {"locks": options}}
    return {
        "/generate": {"text": "Once", "sampling_params": {"max_new_tokens": 1, **custom}},
        "/v1/completions": {"model": "demo", "prompt": "Once", "max_tokens": 1, **custom},
        "/v1/chat/completions": {"model": "demo", "messages": CHAT, "max_tokens": 1, **custom},
    }
