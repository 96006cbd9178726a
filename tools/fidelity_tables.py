"""The generated tables of docs/fidelity.md on selectors: ours, and the paper's ablations on our texts."""

from __future__ import annotations

from typing import Any

import pages
from fidelity_report import pick
from locks_kernels import EnvelopeLayout, SummaryLayout

Row = dict[str, Any]
Rows = list[Row]

LABELS = {"oracle": "oracle", "centroid": "centroid only", "quest": "Quest"}
DEFAULT = "r6h"
LOST = ("r8h", "r8i4", "r6h", "r4h", "r4i4")
PAGE = 16


def selectors(rows: Rows) -> str:
    """Mass / recall by budget, in falling order of mass at the smallest budget."""
    found = pick(rows, table="selectors")
    budgets = sorted({row["budget"] for row in found})
    names = sorted(
        dict.fromkeys(map(label, found)),
        key=lambda name: (name == "Quest", -mean(found, "mass", name, budget=256)),
    )
    lines = []
    for name in names:
        line = [f"**{name}**" if name == DEFAULT else name]
        line += [f"{size(name, 64):,}", f"{size(name, 128):,}"]
        lines.append(line + [pair(found, name, budget=budget) for budget in budgets])
    first, *others = budgets
    head = ["selector", "bytes, d = 64", "bytes, d = 128", f"b = {first}", *map(str, others)]
    return pages.table(head, lines)


def lost(rows: Rows) -> str:
    """Points of mass below the oracle's."""
    found = pick(rows, table="selectors")
    budgets = sorted({row["budget"] for row in found})
    lines = [
        [
            name,
            *(
                f"{mean(found, 'mass', 'oracle', budget=b) - mean(found, 'mass', name, budget=b):.2f}"
                for b in budgets
            ),
        ]
        for name in LOST
    ]
    first, *others = budgets
    return pages.table(["mass lost, points", f"b = {first}", *map(str, others)], lines)


def basis(rows: Rows) -> str:
    """Figure 5: recall by rank and precision of the basis."""
    bits = ("bf16", "int8", "int4", "int2")
    lines = [
        [
            str(rank),
            *(f"{mean(rows, 'recall', f'r{rank}{b}', table='basis', budget=128):.1f}" for b in bits),
        ]
        for rank in (8, 4, 2)
    ]
    return pages.table(["rank; recall at b = 128", *bits], lines)


def scope(rows: Rows) -> str:
    """Table B.6: mass / recall of shared parts at equal bytes."""
    lines = []
    for name in dict.fromkeys(row["scope"] for row in pick(rows, table="scope")):
        line = [name]
        for tier in ("r4i4", "r8i4"):
            for budget in (128, 2048):
                line.append(pair(rows, tier, table="scope", scope=name, budget=budget))
        lines.append(line)
    head = [
        "centroid / basis of a",
        "r4i4's bytes, b = 128",
        "b = 2048",
        "r8i4's bytes, b = 128",
        "b = 2048",
    ]
    return pages.table(head, lines)


def combine(rows: Rows) -> str:
    """Table C.16: mass by combine rule, exact scores."""
    lines = []
    for rule in dict.fromkeys(row["combine"] for row in pick(rows, table="combine")):
        line = [rule]
        for budget in (256, 2048):
            case = {"table": "combine", "combine": rule, "budget": budget}
            line += [f"{mean(rows, figure, **case):.1f}" for figure in ("mass", "worst_head")]
        lines.append(line)
    return pages.table(
        ["rule", "b = 256: mean mass", "worst head", "b = 2048: mean mass", "worst head"], lines
    )


def rope(rows: Rows) -> str:
    """Table C.17: fitted after and before RoPE."""
    lines = []
    for name in dict.fromkeys(row["format"] for row in pick(rows, table="rope")):
        line = [name]
        for budget in (128, 1024):
            line += [pair(rows, name, table="rope", rope=side, budget=budget) for side in ("post", "pre")]
        lines.append(line)
    return pages.table(["format", "b = 128: after RoPE", "before", "b = 1024: after RoPE", "before"], lines)


def page_size(rows: Rows) -> str:
    """Figure 5: page size at one budget."""
    sizes = (16, 32, 64)
    names = dict.fromkeys(label(row) for row in pick(rows, table="page"))
    lines = [
        [name, *(pair(rows, name, table="page", page=tokens, budget=256) for tokens in sizes)]
        for name in names
    ]
    return pages.table(["b = 256", *(f"page {tokens}" for tokens in sizes)], lines)


def label(row: Row) -> str:
    return row["format"] if row["selector"] == "locks" else LABELS[row["selector"]]


def size(name: str, dim: int) -> int:
    """Bytes that a selector reads of a page."""
    fixed = {
        "oracle": 2 * PAGE * dim,
        "centroid only": dim + 2,
        "Quest": EnvelopeLayout(dim, PAGE).bytes_per_page,
    }
    return fixed[name] if name in fixed else SummaryLayout.parse(name, dim, PAGE).bytes_per_page


def mean(rows: Rows, figure: str, name: str | None = None, **case: Any) -> float:
    """Per cent, mean over the texts."""
    found = [row[figure] for row in pick(rows, **case) if name in (None, label(row))]
    return 100 * sum(found) / len(found)


def pair(rows: Rows, name: str, **case: Any) -> str:
    return f"{mean(rows, 'mass', name, **case):.1f} / {mean(rows, 'recall', name, **case):.1f}"
