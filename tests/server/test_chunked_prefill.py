"""Prefill in odd pieces leaves the same summaries: a page may begin in one chunk and end in the next."""

from collections.abc import Callable

from traced import LOCKS, Traced, assert_all_rows, assert_same, assert_selects

CHUNK = 112  # 7 pages; SGLang refuses what is not a multiple of the page


def chunks_of(traced: Traced) -> int:
    return traced.server.log.count(f"#new-token: {CHUNK},")


def test_odd_chunks(traced_server: Callable[..., Traced], locks: Traced, words: list[int]) -> None:
    chunked = traced_server(*LOCKS, "--chunked-prefill-size", str(CHUNK))
    before = chunks_of(chunked)
    run = chunked.run(words[:647], 8)
    assert chunks_of(chunked) - before == 647 // CHUNK
    assert_all_rows(run, layers=30)
    assert_selects(run, pages=8)
    assert_same(run, locks.alone(words[:647], 8))


def test_requests_share_a_chunk(
    traced_server: Callable[..., Traced], locks: Traced, words: list[int]
) -> None:
    chunked = traced_server(*LOCKS, "--chunked-prefill-size", str(CHUNK))
    prompts = [words[:301], words[600:1007]]
    before = chunked.server.log.count("#new-seq: 2,")
    runs = chunked.together(prompts, 8)
    # Sent at the same time, they share a chunk: the second one's is what the first one's last leaves.
    assert chunked.server.log.count("#new-seq: 2,") >= before
    for run, prompt in zip(runs, prompts, strict=True):
        assert_same(run, locks.alone(prompt, 8))
