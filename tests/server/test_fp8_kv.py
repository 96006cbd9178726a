"""An fp8 KV cache: dense SGLang's tokens with the same cache, and a selection that holds the mass."""

import pytest
from greedy import ASKED, Greedy, assert_same_tokens
from server import ON_GPU, Server, ServerPool
from traced import BUDGET, LOCKS, PAGE

DENSE = ("--kv-cache-dtype", "fp8_e4m3", *(("--attention-backend", "flashinfer") if ON_GPU else ()))
SPARSE = (*DENSE, *LOCKS, *(("--sparse-decode-dense-below", "0") if ON_GPU else ()))
NEW = 8
# Where in the text a prompt of so many tokens begins, as in test_exact_budget.py.
STARTS = {16: 24, 33: 344, 120: 450}

pytestmark = [
    pytest.mark.launches(*DENSE),
    pytest.mark.launches(*SPARSE),
    *(() if ON_GPU else (pytest.mark.slow,)),
]


@pytest.fixture
def dense(servers: ServerPool) -> Server:
    return servers.get(*DENSE)


@pytest.fixture
def sparse(servers: ServerPool) -> Server:
    return servers.get(*SPARSE)


@pytest.mark.parametrize("length", STARTS)
def test_budget_that_covers_the_context(
    dense: Server, sparse: Server, words: list[int], length: int
) -> None:
    prompt = words[STARTS[length] :][:length]
    before = sparse.locks_info()
    found = Greedy.of(sparse.generate(prompt, NEW, **ASKED))
    after = sparse.locks_info()
    assert after["rows_sparse"] == before["rows_sparse"]
    assert after["rows_dense"] >= before["rows_dense"] + NEW - 1
    assert_same_tokens(found, Greedy.of(dense.generate(prompt, NEW, **ASKED)))


def test_longer_requests_are_sparse_and_keep_most_of_the_mass(sparse: Server, words: list[int]) -> None:
    before = sparse.locks_info()
    sparse.generate(words[:900], NEW)
    after = sparse.locks_info()
    rows = after["rows_sparse"] - before["rows_sparse"]
    assert rows >= NEW - 1
    assert after["pages_attended"] - before["pages_attended"] == BUDGET // PAGE * rows
    assert after["audited_rows"] > before["audited_rows"]
    # Random pages would hold a seventh of it, besides the sink.
    assert 0.5 < after["retained_mass"] <= 1


def test_the_pool_takes_one_byte_an_element(sparse: Server) -> None:
    ((gib, tokens),) = sparse.find_in_log(r"beside ([\d.]+) GiB of KV for (\d+) tokens")
    # 30 layers, keys and values of 3 heads of 64; one page more than the tokens.
    assert float(gib) == pytest.approx(2 * 30 * 3 * 64 * (int(tokens) + 16) / 2**30, abs=1e-3)
