"""Two ranks select what one selects, each for its own KV heads, and generate the same tokens.

Sums over ranks round differently from sums on one, so tokens and pages are compared as between batches.
"""

import random
from collections.abc import Callable, Iterator

import pytest
import random_model
import torch
from server import ON_GPU, ServerPool
from traced import BUDGET, LOCKS, PAGE, SMALL_POOL, Run, Traced, assert_same, assert_selects

pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two NVIDIA GPUs, or none")

NEW = 12
PROMPTS = [
    random.Random(seed).choices(range(3, 1024), k=length) for seed, length in enumerate((400, 250, 517))
]
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
    assert_same(two, one)


def test_a_batch_and_its_second_time(ranks: Callable[[int], Traced]) -> None:
    two = ranks(2)
    for _ in range(2):
        for run, prompt in zip(two.together(PROMPTS, NEW), PROMPTS, strict=True):
            assert_same(run, ranks(1).alone(prompt, NEW))
    assert run.cached_tokens > 0
