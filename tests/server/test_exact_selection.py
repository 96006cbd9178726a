"""The selected pages are those of the paper's equations, on the very queries and keys of each step.

Whatever was cached, evicted, chunked or batched before: a record that was not rebuilt, or a page table of
another request, would select other pages.
"""

import random
from collections.abc import Callable
from pathlib import Path

import locks_test_probe
import pytest
from probed import Agreement, compare, samples
from traced import BUDGET, PAGE, Running, Traced

FORMAT = "r6h"
NEW = 5
LAYERS = 3  # that a server audits unless told otherwise


@pytest.fixture
def agreement(
    probe: dict[str, str], record_property: Callable[[str, object], None]
) -> Callable[[Traced, list[Running]], Agreement]:
    """Compares all steps of requests that have been answered."""

    def check(traced: Traced, requests: list[Running]) -> Agreement:
        found = Agreement()
        steps = 0
        rows = {request.rid: traced.rows_of(request.rid) for request in requests}
        for sample in samples(Path(probe[locks_test_probe.FOLDER]), set(rows)):
            compare(sample, rows[sample.rid][sample.seq_len, sample.layer], FORMAT, found)
            steps += 1
        assert steps >= LAYERS * sum(len(request.result().tokens) - 1 for request in requests)
        assert found.slots == steps * 3 * BUDGET // PAGE
        record_property("page_slots", found.slots)
        record_property("page_slots_same", found.same)
        record_property("worst_share_lost", found.worst)
        return found

    return check


def answered(request: Running) -> Running:
    request.result()
    return request


def test_cached_and_rebuilt_pages(locks: Traced, words: list[int], agreement: Callable) -> None:
    prompt = words[:480]
    requests = [answered(locks.start(prompt, NEW, probe=True)) for _ in range(2)]
    locks.run(random.Random(6).choices(range(1000, 40000), k=1200), 1)
    # Another text: the first one may get its old pages again, each where it was.
    requests.append(answered(locks.start(words[600:1080], NEW, probe=True)))
    assert [request.result().cached_tokens for request in requests] == [0, 464, 0]
    found = agreement(locks, requests)
    assert found.rate > 0.99
    assert found.worst < 2e-3


def test_a_batch(locks: Traced, words: list[int], agreement: Callable) -> None:
    """Three rows at once, more than the largest CUDA graph of the GPU's server takes."""
    prompts = [words[:300], words[400:650], words[700:1000]]
    requests = [locks.start(prompt, 4 * NEW, probe=True) for prompt in prompts]
    found = agreement(locks, [answered(request) for request in requests])
    assert locks.overlap(requests[0], requests[1]) and locks.overlap(requests[0], requests[2])
    assert found.rate > 0.99
    assert found.worst < 2e-3


def test_odd_chunks_without_a_cache(odd: Traced, words: list[int], agreement: Callable) -> None:
    found = agreement(odd, [answered(odd.start(words[200:847], NEW, probe=True))])
    assert found.rate > 0.99
    assert found.worst < 2e-3
