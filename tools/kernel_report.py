"""The kernels' tables: every op of a layer beside the author's, FlashInfer's and the floor."""

from __future__ import annotations

from typing import Any

import pages
from model_rows import by_model

Rows = list[dict[str, Any]]
OPS = {
    "score": "score",
    "select": "select",
    "path": "score + select, one call",
    "attend": "attend",
    "layer": "the whole layer",
}
# Geometries have names of their own in kernel_floor.py: this one has 4 KV heads.
MAIN = "glm4-9b-1m"
NAMES = {MAIN: "GLM-4-9B-Chat-1M", "glm4-9b": "GLM-4-9B", "llama31-8b": "Llama-3.1-8B"}
# What is aimed at for a layer at 512K tokens, batch 1, of MAIN: (op, format) -> us.
TARGETS = {
    ("score", "r4i4"): 20, ("score", "r8i4"): 34, ("select", "r4i4"): 10, ("attend", "r4i4"): 8,
    ("layer", "r4i4"): 35,
}  # fmt: skip
FORMATS = ("r4i4", "r8i4", "r6h")
AUTHOR, DENSE = "locks-kv", "flashinfer"


def report(rows: Rows) -> str:
    """For every model a table a record format that was run, and dense decode."""
    parts = []
    for model, of_model in by_model(rows, MAIN).items():
        parts.append(title(of_model[0]))
        ran = {row["format"] for row in of_model}
        parts += [times(of_model, form) for form in FORMATS if form in ran]
        parts.append(dense(of_model, targets=model == MAIN))
    return "\n\n".join(parts)


def title(row: dict[str, Any]) -> str:
    name = NAMES.get(row["model"], row["model"])
    return (
        f"A layer of {name}: {row['kv_heads']} KV heads, {row['group']} query heads each, "
        f"d = {row['head_dim']}."
    )


def times(rows: Rows, form: str) -> str:
    """Microseconds of one record format: ours / the author's, and the target where there is one.

    ValueError for rows of more than one model, which would take each other's place.
    """
    models = {row.get("model", MAIN) for row in rows}
    if len(models) > 1:
        raise ValueError(f"rows of {', '.join(sorted(models))} in one table; legal: one model")
    cases = list(dict.fromkeys((row["batch"], row["context"]) for row in rows))
    found = {
        (r["op"], r["batch"], r["context"], r["impl"] == AUTHOR): r for r in rows if r["format"] == form
    }
    targets = models <= {MAIN}
    table = []
    for op, name in OPS.items():
        cells = [f"{name}, {form}"]
        for case in cases:
            ours, theirs = (found.get((op, *case, author)) for author in (False, True))
            cells.append(f"{ours['us']:.1f}" if ours else "-")
            if theirs:
                cells[-1] += f" / {theirs['us']:.1f}"
        table.append([*cells, str(TARGETS.get((op, form), ""))] if targets else cells)
    return pages.table(head(cases, "us", targets), table)


def dense(rows: Rows, targets: bool = True) -> str:
    """FlashInfer's dense decode of the same cases."""
    cases = list(dict.fromkeys((row["batch"], row["context"]) for row in rows))
    found: dict[tuple[int, int], float] = {}
    for row in rows:
        if row["impl"] == DENSE:
            # Of the first format: dense decode reads no records.
            found.setdefault((row["batch"], row["context"]), row["us"])
    cells = ["FlashInfer, dense", *(f"{found[case]:.1f}" if case in found else "-" for case in cases)]
    return pages.table(head(cases, "us", targets), [[*cells, ""] if targets else cells])


def head(cases: list[tuple[int, int]], unit: str, targets: bool) -> list[str]:
    last = ["target, 1 x 512K"] if targets else []
    return [unit, *(f"{batch} x {context // 1024}K" for batch, context in cases), *last]
