"""A KV pool in host memory answers as a resident one does, and gives back every page that it lent."""

import time

import pytest
from conftest import HOST_CHUNK as CHUNK
from locks_sglang.telemetry import METRICS, TIER_METRICS
from server import ON_GPU
from traced import LONG, PAGE, Run, Traced, assert_all_rows, assert_same

NEW = 24


def compare(run: Run, expected: Run) -> None:
    """Bit for bit: of rows alone in their steps, no kernel differs."""
    assert_all_rows(run, layers=30)
    assert run.tokens == expected.tokens
    assert run.rows == expected.rows


def test_answers_of_a_resident_pool(host: Traced, locks: Traced, words: list[int]) -> None:
    prompts = [words[:480], words[300:560], words[40:71]]
    expected = [locks.alone(prompt, NEW) for prompt in prompts]
    for prompt, run in zip(prompts, expected, strict=True):
        compare(host.alone(prompt, NEW), run)
    # The prefix comes from the cache; then everything is evicted and the pages are used again.
    host.server.flush_cache()
    host.run(prompts[0], 1)
    hit = host.run(prompts[0], NEW)
    assert hit.cached_tokens > 0
    assert_same(hit, expected[0])
    host.run(words[391:1271], 1)
    again = host.run(prompts[0], NEW)
    assert again.cached_tokens == 0
    compare(again, expected[0])
    # In company, rows of other shapes may turn ties.
    for run, alone in zip(host.together(prompts, NEW), expected, strict=True):
        assert_same(run, alone)
    info = host.server.locks_info()
    assert info["kv_tier"] == "host" and info["hot_tiles"] > 0 and 0 < info["hot_share"] < 1
    assert info["prefills_staged"] > 0 and info["prefills_unstaged"] == 0


def test_a_prefill_in_chunks_reads_its_prefix_once_a_chunk(
    host: Traced, locks: Traced, words: list[int]
) -> None:
    prompt = words[100:740]
    expected = locks.alone(prompt, 4)
    before = host.server.locks_info()
    host.server.flush_cache()
    run = host.run(prompt, 4)
    assert_same(run, expected)
    if not ON_GPU:  # there the resident server does it in one
        compare(run, expected)
    after = host.server.locks_info()
    chunks = -(-len(prompt) // CHUNK)
    assert after["prefills_staged"] - before["prefills_staged"] == chunks
    written = after["host_bytes_written"] - before["host_bytes_written"]
    token = after["host_bytes"] // (host.server.server_info()["max_total_num_tokens"] + PAGE)
    # SGLang may decode a step more than it answers.
    assert written // token in (len(prompt) + 3, len(prompt) + 4) and written % token == 0
    staged = sum(range(0, len(prompt), CHUNK)) * token
    assert after["host_bytes_read"] - before["host_bytes_read"] >= staged


def pages(host: Traced) -> tuple[int, int]:
    """Pages of the pool in use, and free, once nothing runs and nothing is cached."""
    host.server.flush_cache()
    info = host.server.locks_info()
    return info["host_pages_used"], info["host_pages_free"]


def test_aborts_leave_no_page_behind(host: Traced, words: list[int]) -> None:
    assert pages(host) == (0, 80)
    for _ in range(3):
        running = [host.start(words[40 * number :][:190], 900) for number in range(6)]
        running[0].wait_for_rows(2)
        assert host.server.locks_info()["host_pages_used"] > 0
        while not all(request.done() for request in running):  # one may still be on its way
            host.server.abort(abort_all=True)
            time.sleep(0.2)
        for request in running:
            assert request.result().meta["finish_reason"]["type"] == "abort"
        assert pages(host) == (0, 80)


def test_retraction_leaves_no_page_behind(host: Traced, words: list[int]) -> None:
    """Six requests of 12 pages fit into the 80 pages of the pool, not with the 14 of each later."""
    prompts = [words[start : start + 190] for start in (50, 350, 450, 700, 750, 900)]
    for _ in range(5):  # on a busy machine the first may have ended before the last one comes
        host.server.flush_cache()
        # As in test_exact_batches: what SGLang reserves keeps six at once, or full answers, from meeting.
        with host.server.held():
            running = [host.start(prompt, NEW, may_end=True) for prompt in prompts[:5]]
        running[0].wait_for_rows(1)
        running.append(host.start(prompts[5], NEW, may_end=True))
        runs = [request.result() for request in running]
        if any(run.meta["num_retractions"] for run in runs):
            break
    assert any(run.meta["num_retractions"] for run in runs)
    assert all(len(run.tokens) == NEW for run in runs)
    assert pages(host) == (0, 80)


def test_the_end_of_the_pool_ends_an_answer(host: Traced, words: list[int]) -> None:
    """A request that alone would outgrow the pool stops there, says why, and the next one is answered."""
    answer = host.start(words[:1200], 400, may_end=False)._answer.result()
    assert answer["meta_info"]["finish_reason"]["type"] == "length"
    assert 1200 + len(answer["output_ids"]) <= 80 * PAGE
    assert pages(host) == (0, 80)
    assert len(host.run(words[:64], 4).tokens) == 4


def test_metrics(host: Traced, words: list[int]) -> None:
    host.run(words[:400], LONG)
    info = host.server.locks_info()
    samples = host.server.metrics()
    shares = [float(share) for share in host.server.find_in_log(r"hot share: ([\d.]+) %")]
    assert shares and all(0 <= share <= 100 for share in shares)
    for name, (kind, _) in {**METRICS, **TIER_METRICS}.items():
        if kind != "histogram":
            shown = samples[f"{name}_total" if kind == "counter" else name]
            assert shown == pytest.approx(info[name.removeprefix("locks:")])
