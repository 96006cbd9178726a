"""The figures under docs/figures, each drawn from a result file."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import benchmark_path  # noqa: F401
import fidelity_report
import kernel_report
import model_rows
import plan_report
import step_report
from figures import save
from matplotlib import pyplot
from matplotlib.axes import Axes

Rows = list[dict[str, Any]]
# Order and name of the lines of the fidelity figure: (selector, format) -> label.
SELECTORS = {
    ("oracle", "keys"): "oracle",
    ("locks", "r8h"): "r8h",
    ("locks", "r8i4"): "r8i4",
    ("locks", "r6h"): "r6h",
    ("locks", "r4i4"): "r4i4",
    ("locks", "r2i4"): "r2i4",
    ("centroid", "mu"): "centroid only",
    ("quest", "minmax"): "Quest",
}


def step_time(rows: Rows, path: Path) -> None:
    """Step against context at batch 1, of one geometry; steps that overlap where all were timed so."""
    figure, axes = pyplot.subplots(figsize=(7, 4))
    chosen = [row for row in model_rows.first(rows, step_report.MAIN) if row["batch"] == 1]
    overlap = all(row.get("pipelined_ms") for row in chosen)
    lines(axes, chosen, "variant", "context", "pipelined_ms" if overlap else "step_ms")
    name = "decode step while the next is prepared, ms" if overlap else "decode step, waited for, ms"
    axes.set(xscale="log", xlabel="context, tokens (batch 1)", ylabel=name, ylim=(0, None))
    save(figure, [axes], path)


def layer_time(rows: Rows, path: Path) -> None:
    """One layer against context at batch 1: dense, the author's kernels, ours, and the floor."""
    figure, axes = pyplot.subplots(figsize=(7, 4))
    one = [row for row in model_rows.first(rows, kernel_report.MAIN) if row["batch"] == 1]
    one.sort(key=lambda row: row["context"])
    for label, op, impl, form in (
        ("FlashInfer, dense", "dense", "flashinfer", None),
        ("locks-kv (the author's), r4i4", "layer", "locks-kv", "r4i4"),
        ("ours, r8i4", "layer", "cuda", "r8i4"),
        ("ours, r6h", "layer", "cuda", "r6h"),
        ("ours, r4i4", "layer", "cuda", "r4i4"),
    ):
        chosen = [r for r in one if (r["op"], r["impl"]) == (op, impl) and form in (None, r["format"])]
        if not chosen:
            continue
        # Dense decode may have been timed beside every format: the first counts, as in the table.
        us_of = {r["context"]: r["us"] for r in reversed(chosen)}
        contexts = sorted(us_of)
        axes.plot(contexts, [us_of[context] for context in contexts], marker="o", label=label)
        if form == "r4i4" and impl == "cuda":
            floors = [r["floor_us"] for r in chosen]
            axes.plot(contexts, floors, "k:", label="r4i4, its bytes at the copy rate")
    axes.set(xscale="log", yscale="log", xlabel="context, tokens (batch 1)", ylabel="one layer, us")
    contexts = sorted({row["context"] for row in one})
    axes.xaxis.set_ticks(contexts, [f"{context // 1024}K" for context in contexts])
    axes.yaxis.set_ticks(us := [1, 2, 5, 10, 20, 50, 100, 200], list(map(str, us)))
    axes.xaxis.set_ticks([], minor=True)
    save(figure, [axes], path)


def plan(pairs: list[tuple[str, float, float]], path: Path) -> None:
    """Predicted against measured steps, (variant, measured, predicted) in ms, and the 15 % around them.

    A variant's marker says what it is: dense, sparse, or the host tier.
    """
    figure, axes = pyplot.subplots(figsize=(5, 4.5))
    ends = [min(pair[1] for pair in pairs) * 0.9, max(pair[1] for pair in pairs) * 1.1]
    axes.plot(ends, ends, color="black", lw=0.8)
    axes.fill_between(ends, [0.85 * x for x in ends], [1.15 * x for x in ends], color="0.9", label="15 %")
    for variant in dict.fromkeys(pair[0] for pair in pairs):
        chosen = [pair[1:] for pair in pairs if pair[0] == variant]
        marker = "^" if variant.startswith("host") else "x" if variant.startswith("dense") else "o"
        axes.plot(*zip(*chosen, strict=True), marker, ms=5, label=variant)
    axes.set(xscale="log", yscale="log", xlabel="measured step, ms", ylabel="predicted, ms")
    ticks = [tick for tick in (5, 7, 10, 15, 20, 30, 50, 70, 100, 150) if ends[0] <= tick <= ends[1]]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(ticks, [str(tick) for tick in ticks])
        axis.set_ticks([], minor=True)
    save(figure, [axes], path)


def host_tier(rows: Rows, predict: Callable[[dict[str, Any]], float], path: Path) -> None:
    """Tokens a second of the largest batches, a bar a hot share; and all steps against the hot share.

    Args:
        rows: of ``host_tier``, of one model; dense rows and smaller batches may be among them.
        predict: milliseconds that the plan gives a row, for the dashed lines.
    """
    figure, (bars, steps) = pyplot.subplots(1, 2, figsize=(10, 4))
    largest = plan_report.largest(rows)
    contexts = sorted({row["context"] for row in rows})
    for place, context in enumerate(contexts):
        of_context = [row for row in largest if row["context"] == context]
        dense = max((r for r in of_context if r["budget"] is None), key=lambda r: r["tokens_per_s"])
        host = sorted((r for r in of_context if r["tier"] == "host"), key=lambda r: r["hot_share"])
        for number, row in enumerate([dense, *host]):
            name = f"dense, {row['backend']}" if row is dense else f"host tier, drift {row['drift']}"
            at = place + 0.2 * (number - len(host) / 2)
            bars.bar(at, row["tokens_per_s"], 0.18, color=f"C{number}", label="" if place else name)
            note = f"{row['batch']}" if row is dense else f"{row['hot_share']:.0%}"
            gain = row["tokens_per_s"] / dense["tokens_per_s"]
            note += "" if row is dense else f"\n{gain:.1f}x"
            bars.annotate(note, (at, row["tokens_per_s"]), ha="center", va="bottom", fontsize="x-small")
    labels = [f"{context // 1024}K" for context in contexts]
    bars.xaxis.set_ticks(range(len(contexts)), labels)
    bars.set(xlabel="context, tokens (on bars: dense requests; hot share, gain)", ylabel="tokens / s")
    bars.margins(y=0.12)
    cases = dict.fromkeys((r["context"], r["batch"]) for r in rows if r["tier"] == "host")
    for number, (context, batch) in enumerate(sorted(cases)):
        case = [r for r in rows if (r["tier"], r["context"], r["batch"]) == ("host", context, batch)]
        case.sort(key=lambda row: row["hot_share"])
        shares = [100 * row["hot_share"] for row in case]
        label = f"{batch} x {context // 1024}K"
        steps.plot(shares, [row["itl_ms"] for row in case], "o", color=f"C{number}", label=label)
        steps.plot(shares, [predict(row) for row in case], "--", color=f"C{number}")
    steps.set(xlabel="hot share, per cent (dashed: planned)", ylabel="step, ms", ylim=(0, None))
    steps.legend(frameon=False, fontsize="small")
    save(figure, [bars, steps], path)


def batches(steps: Rows, hosted: Rows, path: Path) -> None:
    """Tokens a second against the batch: of steps with KV on the GPU, and of the largest of the host tier.

    Args:
        steps: of ``decode_step``, of one model; contexts that ran at one batch alone are left out.
        hosted: of ``host_tier``, of one model; empty where it was not run.
    """
    figure, (resident, host) = pyplot.subplots(1, 2, figsize=(10, 4))
    cases = step_report.of_cases(steps)
    contexts = sorted({context for _, context in cases})
    several = [context for context in contexts if sum(case[1] == context for case in cases) > 1]
    for number, context in enumerate(several):
        of_context = sorted((batch, found) for (batch, at), found in cases.items() if at == context)
        for name, style in (("dense", "x--"), (step_report.DEFAULT, "o-")):
            points = [
                (batch, 1000 * batch / time)
                for batch, found in of_context
                if (time := step_report.time_of(found, name, "pipelined_ms"))
            ]
            if points:
                label = f"{context // 1024}K, {name.replace('locks:', 'sparse ')}"
                resident.plot(*zip(*points, strict=True), style, color=f"C{number}", label=label)
    resident.set(
        xscale="log", yscale="log", xlabel="batch (KV on the GPU)", ylabel="tokens / s, decode alone"
    )
    ticks = sorted({batch for batch, context in cases if context in several})
    resident.xaxis.set_ticks(ticks, map(str, ticks))
    resident.yaxis.set_ticks(ticks := [100, 200, 500, 1000, 2000], map(str, ticks))
    for axis in (resident.xaxis, resident.yaxis):
        axis.set_ticks([], minor=True)
    for number, context in enumerate(sorted({row["context"] for row in hosted})):
        largest = [row for row in plan_report.largest(hosted) if row["context"] == context]
        dense = [row for row in largest if row["budget"] is None]
        sparse = [row for row in largest if row["tier"] == "host"]
        if not dense or not sparse:
            continue
        start = max(dense, key=lambda row: row["tokens_per_s"])
        for row in sparse:
            ends = [(end["batch"], end["tokens_per_s"]) for end in (start, row)]
            label = f"{context // 1024}K" if row is sparse[0] else ""
            host.plot(*zip(*ends, strict=True), "-", lw=0.8, color=f"C{number}", label=label)
            host.plot(*ends[1], "o", color=f"C{number}")
            note = f"{row['hot_share']:.0%}"
            host.annotate(note, ends[1], textcoords="offset points", xytext=(5, -3), fontsize="x-small")
        host.plot(start["batch"], start["tokens_per_s"], "x", color=f"C{number}")
    host.set(xlabel="batch (x dense on the GPU, o KV in host memory, hot share)", ylabel="tokens / s")
    if hosted:
        host.legend(frameon=False, fontsize="small")
    save(figure, [resident, host], path)


def fidelity(rows: Rows, path: Path) -> None:
    """Retained mass and recall against the budget, means over texts."""
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 4))
    for axes, value in zip(panels, ("mass", "recall"), strict=True):
        for key, label in SELECTORS.items():
            chosen = [row for row in rows if is_main(row) and (row["selector"], row["format"]) == key]
            budgets = sorted({row["budget"] for row in chosen})
            means = [
                100 * statistics.mean(row[value] for row in chosen if row["budget"] == budget)
                for budget in budgets
            ]
            axes.plot(budgets, means, "--" if key[0] != "locks" else "-", marker="o", ms=4, label=label)
        axes.set(xscale="log", xlabel="budget, tokens", ylabel=f"{value}, per cent")
        axes.set_xticks(budgets, [str(budget) for budget in budgets], minor=False)
        axes.minorticks_off()
    save(figure, panels, path)


def auto_budget(rows: Rows, path: Path) -> None:
    """Low percentile and mean of the retained mass, and KL of decoded texts, against mean pages."""
    figure, panels = pyplot.subplots(1, 3, figsize=(12, 4))
    masses = fidelity_report.served_masses(rows)
    decoded = [row for row in rows if row["table"] == "decode"]
    for number, (rule, label) in enumerate(fidelity_report.RULES.items()):
        style = {"color": f"C{number}", "marker": "o", "ms": 4, "label": label}
        chosen = fidelity_report.pick(masses, rule=rule)
        panels[0].plot(*_means(chosen, ("target",), "mass", 100), **style)
        panels[1].plot(*_means(chosen, ("target",), "p5", 100), **style)
        if chosen := fidelity_report.pick(decoded, rule=rule):
            panels[2].plot(*_means(chosen, ("target",), "kl"), **style)
    style = {"color": "k", "ls": "--", "label": "fixed"}
    panels[0].plot(*_means(masses, ("rule", "target"), "fixed_mass", 100), **style)
    panels[1].plot(*_means(masses, ("rule", "target"), "fixed_p5", 100), **style)
    panels[2].plot(*_means(fidelity_report.pick(decoded, rule="fixed"), ("pages",), "kl"), **style)
    panels[0].set(ylabel="mean retained mass, per cent")
    panels[1].set(ylabel="5th percentile of retained mass, per cent")
    panels[2].set(ylabel="KL to dense decoding, nats", yscale="log")
    for axes in panels:
        axes.set(xscale="log", xlabel="mean pages attended")
        ticks = (8, 16, 32, 64, 128)
        axes.set_xticks(ticks, [str(tick) for tick in ticks], minor=False)
        axes.minorticks_off()
    save(figure, panels, path)


def _means(
    rows: Rows, by: tuple[str, ...], value: str, factor: float = 1.0
) -> tuple[list[float], list[float]]:
    """Mean pages and mean ``value`` of the rows that agree in ``by``, in ascending order of pages."""
    cases = {tuple(row[name] for name in by) for row in rows}
    groups = [fidelity_report.pick(rows, **dict(zip(by, case, strict=True))) for case in cases]
    points = sorted(
        (fidelity_report.mean(group, "pages"), factor * fidelity_report.mean(group, value))
        for group in groups
    )
    return [x for x, _ in points], [y for _, y in points]


def is_main(row: dict[str, Any]) -> bool:
    """Whether a fidelity row compares selectors: page scope, page 16, after RoPE, share-average."""
    setting = (row["scope"], row["page"], row["rope"], row["combine"])
    return row["table"] in ("page", "selectors") and setting == ("page", 16, "post", "share-average")


def lines(axes: Axes, rows: Rows, name: str, x: str, y: str) -> None:
    """One line for each value of `name`; dense ones dashed."""
    for value in dict.fromkeys(row[name] for row in rows):
        chosen = sorted((row[x], row[y]) for row in rows if row[name] == value)
        style = "--" if value.startswith("dense") else "-"
        axes.plot(*zip(*chosen, strict=True), style, marker="o", label=value)
