"""The generated tables of docs/fidelity.md: quantised KV caches, and budgets by estimated mass."""

from __future__ import annotations

import itertools
import math
import statistics
from typing import Any

import pages

Row = dict[str, Any]
Rows = list[Row]

# Table B.15 of the paper, rank 8: RULER-32K by budget; bf16, then 4-bit and 2-bit KV as post / pre.
PAPER_KIVI = {
    64: (73.1, (72.8, 73.0), (68.0, 67.6)),
    256: (85.5, (85.2, 85.2), (81.9, 80.7)),
    2048: (88.0, (87.6, 87.4), (85.0, 85.3)),
}
TARGETS = (0.8, 0.9, 0.95, 0.98)
RULES = {
    "head": "each row and head",
    "layer": "each row and layer",
    "calibrated": "constant a head",
    "threshold": "share threshold",
}


def kv_selection(rows: Rows) -> str:
    """Retained mass and recall by the keys that summaries are made of."""
    lines = []
    for name in formats(rows):
        for budget in budgets(rows):
            line = ["oracle" if name == "keys" else name, str(budget)]
            for kv, summaries in (
                ("bf16", "bf16"),
                ("fp8", "stored"),
                ("kivi4", "stored"),
                ("kivi2", "stored"),
            ):
                found = pick(rows, kv=kv, format=name, summaries=summaries, budget=budget)
                line.append(f"{percent(found, 'mass')} / {percent(found, 'recall')}")
            lines.append(line)
    head = ["selector", "b", "bf16 keys (post)", "fp8 keys (pre)", "4-bit keys (pre)", "2-bit keys (pre)"]
    return pages.table(head, lines)


def kv_error(rows: Rows) -> str:
    """Relative error of the attention output, the paper's scores beside those of r8i4."""
    caches = ("bf16", "fp8", "kivi4", "kivi2")
    dense = [percent(pick(rows, kv=kv, selector="dense"), "error") for kv in caches]
    lines = [["all pages", "", *dense, "-"]]
    for name in formats(rows):
        for budget in budgets(rows):
            line = ["oracle" if name == "keys" else name, str(budget)]
            for kv in caches:
                case = {"kv": kv, "format": name, "budget": budget}
                kinds = ("bf16",) if kv == "bf16" else ("bf16", "stored")
                found = [percent(pick(rows, summaries=kind, **case), "error") for kind in kinds]
                line.append(" / ".join(found))
            lines.append([*line, paper_scores(budget) if name == "r8i4" else "-"])
    head = [
        "selector", "b", "bf16", "fp8, post / pre", "4-bit, post / pre", "2-bit, post / pre",
        "paper's RULER-32K: bf16; 4-bit; 2-bit",
    ]  # fmt: skip
    return pages.table(head, lines)


def auto_mass(rows: Rows) -> str:
    """Every rule: pages taken, and retained masses beside those of a fixed budget of as many pages."""
    lines = []
    for rule, label in RULES.items():
        for target in TARGETS:
            found = pick(served_masses(rows), rule=rule, target=target)
            line = [label, f"{target:.2f}", f"{mean(found, 'pages'):.1f}"]
            lines.append(line + [beside(found, figure) for figure in ("mass", "p25", "p5", "p1")])
    head = ["pages chosen for", "target", "mean pages", "mean mass", "p25", "p5", "p1"]
    return pages.table(head, lines)


def served_masses(rows: Rows) -> Rows:
    """Those of the default format with a cap of 2,048 tokens, as in the decoded texts."""
    return pick([row for row in rows if row["table"] == "mass"], format="r6h", cap=128)


def auto_decode(rows: Rows) -> str:
    """Divergence from dense decoding by rule, and a fixed budget's of as many pages."""
    decoded = [row for row in rows if row["table"] == "decode"]
    points = [(mean(group, "pages"), mean(group, "kl")) for group in by_pages(pick(decoded, rule="fixed"))]
    lines = []
    for rule, target in dict.fromkeys((row["rule"], row["target"]) for row in decoded):
        found = pick(decoded, rule=rule, target=target)
        for chosen in by_pages(found) if rule == "fixed" else [found]:
            taken, kl = mean(chosen, "pages"), mean(chosen, "kl")
            line: list[str] = [
                RULES.get(rule) or str(rule),
                "-" if target is None else f"{target:.2f}",
                f"{taken:.1f}",
            ]
            line += [f"{kl:.4f}", percent(chosen, "agree")]
            if rule == "fixed":
                lines.append([*line, "-", "-"])
                continue
            equal_pages = interpolated(points, taken)
            equal_kl = interpolated([(y, x) for x, y in points], kl)
            lines.append(
                [
                    *line,
                    f"{equal_pages:.4f} ({kl / equal_pages:.2f}x)",
                    f"{equal_kl:.0f} ({taken / equal_kl:.2f}x)",
                ]
            )
    head = [
        "pages chosen for", "target", "mean pages", "KL, nats", "same token, %",
        "KL of a fixed budget of as many pages", "fixed budget of the same KL, pages",
    ]  # fmt: skip
    return pages.table(head, lines)


def interpolated(points: list[tuple[float, float]], at: float) -> float:
    """Linear in logarithms between the points on either side, or of the two last ones."""
    pairs = list(itertools.pairwise(sorted(points)))
    (x0, y0), (x1, y1) = next((pair for pair in pairs if at <= pair[1][0]), pairs[-1])
    part = math.log(at / x0) / math.log(x1 / x0)
    return math.exp(math.log(y0) + part * math.log(y1 / y0))


def by_pages(rows: Rows) -> list[Rows]:
    return [pick(rows, pages=taken) for taken in sorted({row["pages"] for row in rows})]


def pick(rows: Rows, **case: Any) -> Rows:
    return [row for row in rows if all(row[name] == value for name, value in case.items())]


def mean(rows: Rows, figure: str) -> float:
    return statistics.mean(row[figure] for row in rows)


def percent(rows: Rows, figure: str) -> str:
    return f"{100 * mean(rows, figure):.1f}"


def beside(rows: Rows, figure: str) -> str:
    """Ours, and the fixed budget's in brackets."""
    return f"{percent(rows, figure)} ({percent(rows, f'fixed_{figure}')})"


def formats(rows: Rows) -> list[str]:
    return list(dict.fromkeys(row["format"] for row in rows if row["budget"]))


def budgets(rows: Rows) -> list[int]:
    return sorted({row["budget"] for row in rows if row["budget"]})


def paper_scores(budget: int) -> str:
    if budget not in PAPER_KIVI:
        return "-"
    plain, *quantised = PAPER_KIVI[budget]
    return "; ".join([str(plain), *(f"{post} / {pre}" for post, pre in quantised)])
