"""The kernels' table and figure: every op of a layer beside the author's, FlashInfer's and the floor."""

from __future__ import annotations

from typing import Any

import pages

Rows = list[dict[str, Any]]
OPS = {
    "score": "score",
    "select": "select",
    "path": "score + select, one call",
    "attend": "attend",
    "layer": "the whole layer",
}
# What is aimed at for a layer at 512K tokens, batch 1: (op, format) -> us.
TARGETS = {
    ("score", "r4i4"): 20, ("score", "r8i4"): 34, ("select", "r4i4"): 10, ("attend", "r4i4"): 8,
    ("layer", "r4i4"): 35,
}  # fmt: skip
AUTHOR, DENSE = "locks-kv", "flashinfer"


def times(rows: Rows, form: str) -> str:
    """Microseconds of one record format: ours / the author's, and the target where there is one."""
    cases = list(dict.fromkeys((row["batch"], row["context"]) for row in rows))
    found = {
        (r["op"], r["batch"], r["context"], r["impl"] == AUTHOR): r for r in rows if r["format"] == form
    }
    table = []
    for op, name in OPS.items():
        cells = [f"{name}, {form}"]
        for case in cases:
            ours, theirs = (found.get((op, *case, author)) for author in (False, True))
            cells.append(f"{ours['us']:.1f}" if ours else "-")
            if theirs:
                cells[-1] += f" / {theirs['us']:.1f}"
        cells.append(str(TARGETS.get((op, form), "")))
        table.append(cells)
    return pages.table(head(cases, "us"), table)


def dense(rows: Rows) -> str:
    """FlashInfer's dense decode of the same cases."""
    cases = list(dict.fromkeys((row["batch"], row["context"]) for row in rows))
    cells = ["FlashInfer, dense"]
    for case in cases:
        here = [row for row in rows if (row["batch"], row["context"]) == case]
        cells.append(f"{next(row['us'] for row in here if row['impl'] == DENSE):.1f}")
    return pages.table(head(cases, "us"), [[*cells, ""]])


def head(cases: list[tuple[int, int]], unit: str) -> list[str]:
    return [unit, *(f"{batch} x {context // 1024}K" for batch, context in cases), "target, 1 x 512K"]
