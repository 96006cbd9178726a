"""A KV pool in host memory answers as a resident one does, whatever share of it is on the GPU."""

import random
from collections.abc import Callable

import pytest
from traced import LOCKS, SMALL_POOL, Run, Traced, assert_all_rows, assert_same

NEW = 24
TIER = ("--sparse-decode-kv-tier", "host", "--sparse-decode-hot-gib")
SIZES = ("0", "0.004", "2")  # GiB: nothing, some tiles, everything


@pytest.fixture(scope="module")
def expected() -> dict[str, Run]:
    """Runs on the resident server, which all sizes are compared with."""
    return {}


@pytest.mark.parametrize("size", SIZES)
def test_answers_of_a_resident_pool(
    size: str,
    locks: Traced,
    traced_server: Callable[..., Traced],
    words: list[int],
    expected: dict[str, Run],
) -> None:
    noise = random.Random(3).choices(range(1000, 40000), k=880)
    prompts = {"long": words[:480], "middle": words[300:560], "short": words[40:71]}
    if not expected:
        expected |= {name: locks.alone(prompt, NEW) for name, prompt in prompts.items()}
    host = traced_server(*SMALL_POOL, *LOCKS, *TIER, size)

    def compare(name: str, run: Run) -> None:
        assert_all_rows(run, layers=30)
        assert run.tokens == expected[name].tokens
        assert run.rows == expected[name].rows

    for name, prompt in prompts.items():
        compare(name, host.alone(prompt, NEW))
    # The prefix comes from the cache; then everything is evicted and the pages are used again.
    host.run(prompts["long"], 1)
    hit = host.run(prompts["long"], NEW)
    assert hit.cached_tokens > 0
    assert_same(hit, expected["long"])
    host.run(noise, 1)
    again = host.run(prompts["long"], NEW)
    assert again.cached_tokens == 0
    compare("long", again)
    # In company, rows of other shapes may turn ties.
    for name, run in zip(prompts, host.together(list(prompts.values()), NEW), strict=True):
        assert_same(run, expected[name])
    info = host.server.locks_info()
    assert info["kv_tier"] == "host" and info["host_bytes_read"] > 0
    assert (info["hot_tiles"] > 0) == (info["hot_share"] > 0) == (size != "0")
