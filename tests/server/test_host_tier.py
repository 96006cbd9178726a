"""A KV pool in host memory answers as a resident one does, and gives back every page that it lent."""

import time
from importlib.metadata import version

import psutil
import pytest
from conftest import HOST_CHUNK as CHUNK
from locks_sglang.telemetry import METRICS, TIER_METRICS
from server import ON_GPU
from traced import LONG, PAGE, Run, Running, Traced, assert_all_rows, assert_same

NEW = 12
# SGLang 0.5.23 plans where a prefill reads before its backend is asked; it then reads the host's memory.
STAGES = version("sglang").startswith("0.5.17")


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
    staged, unstaged = info["prefills_staged"], info["prefills_unstaged"]
    assert (staged > 0, unstaged > 0) == (STAGES, not STAGES)


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
    name = "prefills_staged" if STAGES else "prefills_unstaged"
    assert after[name] - before[name] == chunks
    written = after["host_bytes_written"] - before["host_bytes_written"]
    token = after["host_bytes"] // (host.server.server_info()["max_total_num_tokens"] + PAGE)
    # SGLang may decode a step more than it answers.
    assert written // token in (len(prompt) + 3, len(prompt) + 4) and written % token == 0
    staged = sum(range(0, len(prompt), CHUNK)) * token if STAGES else 1
    assert after["host_bytes_read"] - before["host_bytes_read"] >= staged


def pages(host: Traced) -> tuple[int, int]:
    """Pages of the pool in use, and free, once nothing runs and nothing is cached."""
    host.server.flush_cache()
    info = host.server.locks_info()
    return info["host_pages_used"], info["host_pages_free"]


def test_aborts_and_retractions_leave_no_page_behind(host: Traced, words: list[int]) -> None:
    """Six requests of 12 pages fit into the 80 pages of the pool, not with the 14 of each later."""
    assert pages(host) == (0, 80)
    for _ in range(5):  # on a busy machine the last may come too late to meet the others
        before = retractions(host)
        running = six(host, words, 24)  # SGLang lets in what has room for its answer
        while retractions(host) == before and not all(request.done() for request in running):
            time.sleep(0.1)
        abort(host, running)
        assert pages(host) == (0, 80)
        if retractions(host) > before:
            break
    else:
        pytest.fail("nothing was retracted")
    for _ in range(2):
        reasons = abort(host, six(host, words, 200))
        assert "abort" in reasons and pages(host) == (0, 80)


def six(host: Traced, words: list[int], new: int) -> list[Running]:
    # As in test_exact_batches: six at once do not fit by SGLang's sum, and none would be let in.
    with host.server.held():
        running = [host.start(words[150 * number :][:190], new, may_end=True) for number in range(5)]
    running[0].wait_for_rows(1)
    running.append(host.start(words[750:940], new, may_end=True))
    assert host.server.locks_info()["host_pages_used"] > 0
    return running


def abort(host: Traced, running: list[Running]) -> set[str]:
    """Why each ended."""
    while not all(request.done() for request in running):  # one may still be on its way
        host.server.abort(abort_all=True)
        time.sleep(0.2)
    return {request.result().meta["finish_reason"]["type"] for request in running}


def retractions(host: Traced) -> float:
    return host.server.metrics().get("sglang:num_retracted_requests_total", 0.0)


def test_the_end_of_the_pool_ends_an_answer(host: Traced, words: list[int]) -> None:
    """A request that alone would outgrow the pool stops there, says why, and the next one is answered."""
    answer = host.start(words[:1240], 400, may_end=False)._answer.result()
    assert answer["meta_info"]["finish_reason"]["type"] == "length"
    assert 1240 + len(answer["output_ids"]) <= 80 * PAGE
    assert pages(host) == (0, 80)
    assert len(host.run(words[:64], 4).tokens) == 4


@pytest.mark.skipif(not ON_GPU, reason="five minutes on a CPU")
def test_a_thousand_requests_take_no_memory(
    host: Traced, backend: tuple[str, ...], words: list[int]
) -> None:
    if "fa3" not in backend:
        pytest.skip("a minute; what it looks at is the same with either backend")
    server = host.server
    used = []
    for number in range(50):
        prompts = [words[(37 * number + 61 * row) % 900 :][: 20 + row] for row in range(20)]
        server.generate_together([{"prompt": prompt, "max_new_tokens": 4} for prompt in prompts])
        used.append(resident_set(server.process.pid))
    assert used[-1] <= 1.02 * used[9], used[::5]
    assert pages(host) == (0, 80)


def resident_set(pid: int) -> int:
    """Bytes in memory of a process and all that it started."""
    root = psutil.Process(pid)
    return sum(process.memory_info().rss for process in (root, *root.children(recursive=True)))


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
