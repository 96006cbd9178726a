"""CUDA graphs on and off give the same: single rows replay a graph, larger batches run outside of graphs.

The server's largest graph has two rows (`conftest.SPARSE`). What it selects is checked in
test_exact_selection.py; here it is shown that the steps of both kinds really occur, and meet.
"""

from collections import Counter

from traced import BUDGET, LONG, PAGE, Traced, assert_same, assert_selects


def steps(locks: Traced, seen: int) -> Counter[tuple[int, bool]]:
    """(rows, in a CUDA graph) -> decode log lines since the log was `seen` characters long.

    There is one every two steps, and no test here has fewer than LONG.
    """
    pattern = r"Decode batch.*#running-req: (\d+),.*cuda graph: (True|False)"
    found = locks.server.find_in_log(pattern, seen, LONG // 2 - 1)
    return Counter((int(rows), graph == "True") for rows, graph in found)


def test_one_row_replays_a_graph(locks: Traced, words: list[int]) -> None:
    seen, before = len(locks.server.log), locks.server.locks_info()["summaries_built"]
    request = locks.start(words[160:640], LONG)
    assert_selects(request.result(), BUDGET // PAGE)
    assert set(steps(locks, seen)) == {(1, True)}
    # Each page once, whether prefill or a replay completed it.
    built = locks.server.locks_info()["summaries_built"] - before
    assert built == locks.lengths_of(request.rid)[-1] // PAGE


def test_rows_above_the_largest_graph(locks: Traced, words: list[int]) -> None:
    """Four rows, of which two end early: the steps go from outside of graphs into one."""
    asked = [(words[490:740], LONG), (words[740:940], LONG), (words[350:540], 16), (words[50:240], 16)]
    cold = [locks.alone(prompt, new) for prompt, new in asked]
    locks.server.flush_cache()
    seen = len(locks.server.log)
    running = [locks.start(prompt, new) for prompt, new in asked]
    for request, reference in zip(running, cold, strict=True):
        assert_same(request.result(), reference)
    found = steps(locks, seen)
    assert found[4, False] and not found[4, True]
    assert found[2, True] and not found[2, False]
