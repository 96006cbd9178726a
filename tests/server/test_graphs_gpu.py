"""CUDA graphs on and off give the same: single rows replay a graph, larger batches run outside of graphs.

The server's largest graph has two rows (`conftest.SPARSE`). What it selects is checked in
test_exact_selection.py; here it is shown that the steps of both kinds really occur, and meet.
"""

import re

from traced import BUDGET, LONG, PAGE, Traced, assert_same, assert_selects


def steps(locks: Traced, seen: int) -> dict[tuple[int, bool], int]:
    """(rows, in a CUDA graph) -> decode log lines since the log was `seen` characters long."""
    counted: dict[tuple[int, bool], int] = {}
    line = re.compile(r"Decode batch.*#running-req: (\d+),.*cuda graph: (True|False)")
    for rows, graph in line.findall(locks.server.log[seen:]):
        key = (int(rows), graph == "True")
        counted[key] = counted.get(key, 0) + 1
    return counted


def test_one_row_replays_a_graph(locks: Traced, words: list[int]) -> None:
    seen = len(locks.server.log)
    run = locks.run(words[:480], LONG)
    assert_selects(run, BUDGET // PAGE)
    found = steps(locks, seen)
    assert found and all(key == (1, True) for key in found)


def test_rows_above_the_largest_graph(locks: Traced, words: list[int]) -> None:
    """Four rows, of which two end early: the steps go from outside of graphs into one."""
    asked = [(words[100:350], LONG), (words[400:610], LONG), (words[:190], 16), (words[900:1101], 16)]
    cold = [locks.alone(prompt, new) for prompt, new in asked]
    locks.server.flush_cache()
    seen = len(locks.server.log)
    running = [locks.start(prompt, new) for prompt, new in asked]
    for request, reference in zip(running, cold, strict=True):
        assert_same(request.result(), reference)
    found = steps(locks, seen)
    assert found.get((4, False)) and not found.get((4, True))
    assert found.get((2, True)) and not found.get((2, False))
