"""Two ranks select what one selects, each for its own KV heads, and generate the same tokens.

Sums over ranks round differently from sums on one. The model's tokens are so far from ties that they are
the same nevertheless; of its pages a few move, and next to none in layer 0, whose queries and keys no sum
over ranks has been through.
"""

from collections.abc import Callable, Iterator

import pytest
import random_model
import torch
from greedy import assert_same_tokens
from server import ON_GPU, ServerPool
from traced import (
    BUDGET,
    LOCKS,
    MOVED_SLOTS_ALLOWED,
    PAGE,
    SMALL_POOL,
    Run,
    Traced,
    assert_same_pages,
    assert_selects,
)

pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two NVIDIA GPUs, or none")

NEW = 12
PROMPTS = [random_model.prompt(seed, length, NEW) for seed, length in enumerate((400, 250, 517))]
# In bf16 on a CPU, from one rank to two: of layer 0's 352 page slots of a prompt none moved, of the other
# layers' 1,056 between 41 and 63 did. (Exact scores would move a tenth of these: random keys have no
# principal directions, so rounding turns the bases of their records.) Where the KV heads of one rank have
# each other's pages, a quarter moves (emulated).
MOVED_IN_LAYER_0 = 0.02 if ON_GPU else 0.0
MOVED_ABOVE = 0.12 if ON_GPU else MOVED_SLOTS_ALLOWED
# Share of the pages asked for that a selection may lack: in float32 1 of 528 is missed, because records are
# not exact; of pages for another KV head a third.
MISSED = 0.02
FLAGS = (
    *SMALL_POOL,
    *LOCKS,
    *("--skip-tokenizer-init", "--disable-custom-all-reduce"),
    *(("--attention-backend", "fa3", "--cuda-graph-max-bs", "2") if ON_GPU else ()),
)
# A core for each rank; SGLang wants it said where the machine has one NUMA node.
CORES = {1: "0", 2: "0|1"}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Traced]]:
    """``ranks(n)``: the server of `n` tensor-parallel ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    model = random_model.make(folder / "model")
    flags = {
        count: (
            *FLAGS,
            "--tp-size",
            str(count),
            "--sparse-decode-trace-file",
            str(folder / f"{count}.jsonl"),
        )
        for count in (1, 2)
    }
    # Servers of other tests lie on the first GPU, so that the two have unequal memory left.
    uneven = {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}
    pools = {
        count: ServerPool(model, folder, 1, {"SGLANG_CPU_OMP_THREADS_BIND": CORES[count], **uneven})
        for count in flags
    }
    solo: dict[int, dict[tuple, Run]] = {1: {}, 2: {}}
    try:
        for count, pool in pools.items():
            pool.start(flags[count])
        yield lambda count: Traced(
            pools[count].get(*flags[count]), folder / f"{count}.jsonl", solo[count], ranks=count
        )
    finally:
        for pool in pools.values():
            pool.close()


@pytest.mark.parametrize("prompt", range(len(PROMPTS)))
def test_one_request(ranks: Callable[[int], Traced], prompt: int) -> None:
    one, two = (ranks(count).alone(PROMPTS[prompt], NEW) for count in (1, 2))
    assert_selects(two, BUDGET // PAGE)
    assert {len(heads or []) for heads in two.rows.values()} == {random_model.KV_HEADS}
    assert one.tokens == random_model.chain(PROMPTS[prompt][-1], NEW)
    assert_finds(one)
    assert_like_one(two, one)


def test_a_batch_and_its_second_time(ranks: Callable[[int], Traced]) -> None:
    two = ranks(2)
    for _ in range(2):
        for run, prompt in zip(two.together(PROMPTS, NEW), PROMPTS, strict=True):
            assert_like_one(run, ranks(1).alone(prompt, NEW))
    assert run.cached_tokens > 0


def assert_finds(run: Run) -> None:
    """Nearly every KV head of every layer and step attends the page that holds what it asks for."""
    wanted = random_model.wanted_pages(list(run.prompt), NEW, PAGE)
    assert wanted.keys() == run.rows.keys()
    missed = [
        (row, head)
        for row, heads in wanted.items()
        for head, (pages, chosen) in enumerate(zip(heads, run.rows[row] or [], strict=True))
        if not pages & set(chosen)
    ]
    assert len(missed) <= MISSED * random_model.KV_HEADS * len(wanted), f"(row, KV head): {missed}"


def assert_like_one(two: Run, one: Run) -> None:
    """The same tokens, the pages that these need, and the same others but for ties, fewest in layer 0."""
    assert_same_tokens(two.greedy, one.greedy, near_tie=0.0)
    assert_finds(two)
    for first in (True, False):
        rows, reference = (
            {row: pages for row, pages in run.rows.items() if (row[1] == 0) == first} for run in (two, one)
        )
        assert_same_pages(rows, reference, MOVED_IN_LAYER_0 if first else MOVED_ABOVE)
