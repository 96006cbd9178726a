"""A request that outgrows dense steps on a server without a GPU."""

import pytest
from locks_sglang.dense_steps import ROW_TOKENS
from server import ServerPool

PAGE, BUDGET, BELOW = 16, 128, 64
FLAGS = (
    *("--sparse-decode", "locks", "--sparse-decode-budget", str(BUDGET), "--max-total-tokens", "8192"),
    *("--sparse-decode-dense-below", str(BELOW)),
)
FIRST_SPARSE = BUDGET + ROW_TOKENS + BELOW
DENSE, NEW = 21, 32


@pytest.mark.launches(*FLAGS)
def test_outgrown(servers: ServerPool) -> None:
    """Its steps count as what they were, and its tokens are those of a request that was prefilled.

    Which pages a dense step builds is checked in tests/plugin/test_dense_steps.py: one page more or
    less need not change these tokens.
    """
    server = servers.get(*FLAGS)
    prompt = [1000 + 7 * number % 2003 for number in range(FIRST_SPARSE - DENSE - 1)]
    before = server.locks_info()
    answer = server.generate(prompt, NEW)["output_ids"]
    after = server.locks_info()
    # The first token comes from the prefill; SGLang launches one more step than it then uses.
    steps = range(NEW - 1, NEW + 1)
    assert after["rows_dense"] - before["rows_dense"] == DENSE
    assert after["rows_sparse"] - before["rows_sparse"] + DENSE in steps
    assert len(prompt) // PAGE < (FIRST_SPARSE - 1) // PAGE, "no page was completed in a dense step"
    assert after["summaries_built"] - before["summaries_built"] == (len(prompt) + NEW) // PAGE
    server.flush_cache()
    known = DENSE + 3
    assert server.generate([*prompt, *answer[:known]], NEW - known)["output_ids"] == answer[known:]
    assert server.locks_info()["rows_dense"] == after["rows_dense"]
