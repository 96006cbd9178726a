"""Tables of complete decode steps, each of one model: dense beside sparse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import benchmark_path  # noqa: F401
import pages
import plan_report
from model_rows import Rows, by_model, first
from result_rows import ran_dense

# The geometry of the README, of the figures and of the paper's tables of steps.
MAIN = plan_report.MAIN
NAMES = {MAIN: "GLM-4-9B-Chat-1M", "glm4-9b-1m": "GLM-4-9B", "llama31-8b-1m": "Llama-3.1-8B"}
# Table C.22 and C.23 of the paper: r8i4 against the faster of FA3 and FlashInfer on an H200 NVL.
PAPER = {
    (1, 16384): 0.98, (1, 32768): 0.96, (1, 65536): 1.08, (1, 131072): 1.06, (1, 262144): 1.30,
    (1, 524288): 1.54, (1, 1000000): 2.02, (4, 262144): 1.80, (8, 131072): 1.59, (16, 65536): 1.43,
    (32, 32768): 1.26,
}  # fmt: skip
DEFAULT = "locks:r6h"
GAINS = ("locks:r4i4", DEFAULT, "locks:r8i4")

Case = tuple[int, int]
Row = dict[str, Any]


def each_model(rows: Rows, part: Callable[[Rows], str]) -> str:
    """``part`` of every model's rows, under the model's geometry."""
    return "\n\n".join(
        f"{title(model)}\n\n{part(of_model)}" for model, of_model in by_model(rows, MAIN).items()
    )


def title(model: str) -> str:
    """What a model is called, and its geometry."""
    if model not in NAMES:
        return f"`{model}`:"
    plan = plan_report.model_of(model)
    return (
        f"{NAMES[model]} geometry (`{model}`): {plan.layers} layers, {plan.q_heads} query heads, "
        f"{plan.kv_heads} KV heads, d = {plan.head_dim}."
    )


def of_cases(rows: Rows) -> dict[Case, dict[str, Row]]:
    """Rows of one model by case and variant. ValueError where two would take one place."""
    cases: dict[Case, dict[str, Row]] = {}
    for row in rows:
        found = cases.setdefault((row["batch"], row["context"]), {})
        other = found.setdefault(row["variant"], row)
        if other is not row:
            names = f"{other['model']} and {row['model']}"
            raise ValueError(
                f"two rows of {row['variant']}, {row['batch']} x {row['context']} ({names}); "
                "legal: one in a table"
            )
    return cases


def fastest_dense(found: dict[str, Row], time: str) -> float | None:
    """Milliseconds of the faster dense backend of a case."""
    times = [row[time] for name, row in found.items() if is_dense(name) and row.get(time)]
    return min(times, default=None)


def time_of(found: dict[str, Row], variant: str, time: str) -> float | None:
    """Milliseconds of a variant of a case; of ``dense`` those of its faster backend."""
    return fastest_dense(found, time) if variant == "dense" else found.get(variant, {}).get(time)


def is_dense(variant: str) -> bool:
    return variant.startswith("dense")


def ratio(dense: float | None, time: float) -> str:
    return f"{dense / time:.2f}x" if dense else "-"


def case_name(case: Case) -> str:
    return f"{case[0]} x {case[1]:,}"


def steps(rows: Rows) -> str:
    """Steps of one model that overlap, as a server's do, and steps that are waited for."""
    parts = []
    if any(row.get("pipelined_ms") for row in rows):
        parts.append("A step while the next one is prepared (`pipelined_ms`):")
        parts.append(step_table(rows, "pipelined_ms"))
    parts.append("A step that is waited for (`step_ms`), with all of the host's part:")
    return "\n\n".join([*parts, step_table(rows, "step_ms")])


def step_table(rows: Rows, time: str) -> str:
    """One time of every variant, and the ratio of the faster dense backend's to each sparse one's."""
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    variants.sort(key=lambda name: not is_dense(name))
    in_paper = rows[0]["model"] == MAIN
    lines = []
    for case, found in of_cases(rows).items():
        dense = fastest_dense(found, time)
        cells = [case_name(case)]
        for name in variants:
            row = found.get(name, {})
            if not row.get(time):
                cells.append("-")
            elif is_dense(name):
                cells.append(f"{row[time]:.2f}")
            else:
                mark = " D" if ran_dense(row) else ""
                cells.append(f"{row[time]:.2f} ({ratio(dense, row[time])}){mark}")
        lines.append([*cells, f"{PAPER[case]:.2f}x" if case in PAPER else "-"] if in_paper else cells)
    head = ["batch x context", *(f"{name.replace(':', ' ')}, ms" for name in variants)]
    return pages.table(head + (["paper, r8i4"] if in_paper else []), lines)


def gains(rows: Rows) -> str:
    """The README's short table, of one geometry: steps that overlap, as in a server."""
    rows = first(rows, MAIN)
    ran = {row["variant"] for row in rows}
    sparse = [name for name in GAINS if name in ran]
    lines = []
    for case, found in of_cases(rows).items():
        dense = fastest_dense(found, "pipelined_ms")
        cells = [case_name(case), f"{dense:.2f}" if dense else "-"]
        for name in sparse:
            time = found.get(name, {}).get("pipelined_ms")
            if not time:
                cells += ["-", "-"]
                continue
            cells += [f"{time:.2f}{' (dense)' if ran_dense(found[name]) else ''}", ratio(dense, time)]
        lines.append(cells)
    head = ["batch x context", "dense, ms"]
    for name in sparse:
        head += [f"sparse {name[6:]}, ms", "speedup"]
    note = "" if DEFAULT in ran else f"\n\nThe default record format, `{DEFAULT[6:]}`, was not in this run."
    return f"{pages.table(head, lines)}{note}"


def beside(rows: Rows, others: Rows, time: str, names: tuple[str, str]) -> str:
    """One time of the sparse steps of two runs, and how far the first is from the second."""
    there = by_model(others)

    def part(of_model: Rows) -> str:
        known = of_cases(there.get(of_model[0]["model"], []))
        lines = []
        for case, found in of_cases(of_model).items():
            for name, row in found.items():
                if is_dense(name) or ran_dense(row) or not row.get(time):
                    continue
                other = known.get(case, {}).get(name, {}).get(time)
                cells = [case_name(case), name.replace(":", " "), f"{row[time]:.2f}"]
                cells += [f"{other:.2f}", f"{row[time] / other - 1:+.1%}"] if other else ["-", "-"]
                lines.append(cells)
        return pages.table(["batch x context", "variant", *names, "difference"], lines)

    return each_model(rows, part)


def spread(rows: Rows) -> str:
    """Medians and spread of steps that are waited for."""
    lines = [
        [row["variant"], f"{row['step_ms']:.0f}", f"{row['step_ms_min']:.0f} to {row['step_ms_max']:.0f}"]
        for row in first(rows)
    ]
    return pages.table(["variant", "step, ms", "spread, ms"], lines)
