"""The figure of a throughput run, and how every figure of the project is finished."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from result_rows import Row, compared

# The same file from the same data, so that a figure changes only when its numbers do.
matplotlib.rcParams["svg.hashsalt"] = "locks"


def throughput(rows: list[Row], path: Path) -> None:
    """Time between tokens and output tokens a second of the `compared` cases of one model.

    ValueError where there is none.
    """
    cases = compared(rows)
    if not cases:
        raise ValueError("no case ran both dense and sparse, so there is nothing to draw")
    # Dense first, so that the sparse bar is the last of its group whatever ran first.
    shown = [row for same in cases.values() for row in same]
    variants = dict.fromkeys(row["variant"] for row in sorted(shown, key=lambda row: row["budget"] or 0))
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 1.2 + 0.75 * len(cases)), sharey=True)
    height = 0.8 / len(variants)
    for axes, value, label in (
        (panels[0], "itl_ms", "between tokens (median), ms"),
        (panels[1], "tokens_per_s", "output tokens / s, prefill included"),
    ):
        for number, variant in enumerate(variants):
            found = [(at, row) for at, same in enumerate(cases.values()) for row in same]
            bars = [(at, row[value]) for at, row in found if row["variant"] == variant]
            places = [at + (number - (len(variants) - 1) / 2) * height for at, _ in bars]
            drawn = axes.barh(places, [size for _, size in bars], 0.9 * height, label=variant)
            axes.bar_label(drawn, fmt="%.3g", fontsize="x-small", padding=2)
        axes.set(xlabel=label)
        axes.margins(x=0.1)
    panels[0].set_yticks(range(len(cases)), [case_name(*case) for case in cases])
    panels[0].invert_yaxis()
    save(figure, panels, path)


def case_name(model: str, tp: int, workload: str, clients: int, context: int, output: int) -> str:
    """Of a case that is shown beside others of its model."""
    return f"{workload}, {clients} x {context:,} + {output}" + (f", TP {tp}" if tp > 1 else "")


def save(figure: Figure, panels: Iterable[Axes], path: Path) -> None:
    """Finish the panels, write the file and forget the figure."""
    for number, axes in enumerate(panels):
        axes.grid(alpha=0.3)
        if number == 0:
            axes.legend(frameon=False, fontsize="small")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
