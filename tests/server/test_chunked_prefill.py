"""Prefill in odd pieces leaves the same summaries: a page may begin in one chunk and end in the next."""

from traced import BUDGET, PAGE, Traced, assert_all_rows, assert_same, assert_selects

CHUNK = 112
"""Tokens of a chunk of the server `odd`."""


def chunks_of(traced: Traced) -> int:
    return traced.server.log.count(f"#new-token: {CHUNK},")


def test_odd_chunks(odd: Traced, locks: Traced, words: list[int]) -> None:
    before = chunks_of(odd)
    run = odd.run(words[380:1027], 8)
    assert chunks_of(odd) - before == 647 // CHUNK
    assert_all_rows(run, layers=30)
    assert_selects(run, BUDGET // PAGE)
    assert_same(run, locks.alone(words[380:1027], 8))


def test_requests_share_a_chunk(odd: Traced, locks: Traced, words: list[int]) -> None:
    prompts = [words[490:740], words[910:1160]]
    runs = odd.together(prompts, 8)
    for run, prompt in zip(runs, prompts, strict=True):
        assert_same(run, locks.alone(prompt, 8))


def test_cache_on_and_off(odd: Traced, locks: Traced, words: list[int]) -> None:
    """The server without a prefix cache selects what the other selects on pages that it shares."""
    prompt, new = words[160:640], 8
    locks.run(words[160:460], 2)
    partly = locks.run(prompt, new)
    wholly = locks.run(prompt, new)
    assert (partly.cached_tokens, wholly.cached_tokens) == (288, 464)
    odd.run(words[200:700], 1)
    without = [odd.run(prompt, new) for _ in range(2)]
    assert [run.cached_tokens for run in without] == [0, 0]
    for run in (partly, wholly, without[1]):
        assert_same(run, without[0])
