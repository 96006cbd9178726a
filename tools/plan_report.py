"""The planner against what was measured: its fixed costs, docs/plan.md and the figure."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
import pages
from locks_sglang.config import LocksConfig
from locks_sglang.plan import command, costs
from locks_sglang.plan.costs import Costs
from locks_sglang.plan.machines import MACHINES, Machine
from locks_sglang.plan.model import PlanModel, read
from locks_sglang.plan.step import step_bytes, step_ms

MODELS = Path(__file__).resolve().parents[1] / "benchmark" / "models"
# Whose steps the costs are fitted to.
MAIN = "glm4-9b-1m-kv4"
Rows = list[dict[str, Any]]
Features = Callable[[dict[str, Any]], list[float]]

# The paper: GLM-4-9B-Chat-1M on one GH200. Its dense batches are those that 96 GB hold.
# Table B.13, batch 1, KV on the GPU: context -> ms of the faster dense backend, and of r4i4.
PAPER_ONE = {
    16384: (7.07, 7.05), 32768: (7.43, 7.20), 65536: (8.14, 7.55), 131072: (9.56, 8.26),
    262144: (12.42, 9.01), 524288: (18.03, 10.11),
}  # fmt: skip
# Table 3: context -> the faster dense row (batch, ms), the host tier (batch, ms, hot share), its gain.
PAPER_TABLE_3 = {
    65536: ((12, 24.3), (58, 30.7, 0.903), 3.82),
    131072: ((6, 23.7), (29, 27.2, 0.910), 4.22),
    262144: ((3, 23.6), (14, 26.4, 0.892), 4.18),
}


def model_of(name: str) -> PlanModel:
    """The model of a result row. LocksError where ``benchmark/models`` has no such configuration."""
    return read(MODELS / f"{name}.json")


def predict(row: dict[str, Any], fixed: Costs, machine: Machine | None = None) -> float:
    """Milliseconds of a measured row's step, at the hot share that was measured where there is one."""
    model = model_of(row["model"])
    machine = machine or MACHINES["h200"]
    tier = tier_of(row)
    config = LocksConfig(
        selector="locks", summary=row["format"] or "r6h", budget=row["budget"] or LocksConfig().budget
    )
    moved = step_bytes(model, config, tier, row["batch"], row["context"], row.get("hot_share") or 0.0)
    return step_ms(model, machine, fixed, moved, tier, row["batch"])


def tier_of(row: dict[str, Any]) -> str:
    return "dense" if row["budget"] is None else row.get("tier", "resident")


def usable(rows: Rows) -> Rows:
    """Steps of what the planner knows: dense ones, and those that score records of the paper's kind.

    Not the dense steps of a sparse server, which a dense server's stand for; of one geometry.
    """
    rows = [row for row in rows if row["model"] == MAIN and row["tp"] == 1]
    known = [row for row in rows if row["backend"] not in ("quest", "oracle")]
    return [row for row in known if not row.get("dense_rows_share")]


def root(row: dict[str, Any]) -> list[float]:
    """How the time of a sparse layer is modelled: a part of its own, and one that grows with the batch."""
    return [1, row["batch"] ** 0.5]


def fit(rows: Rows, source: str) -> Costs:
    """Fixed costs with the least squares of relative errors.

    Layers and step cannot be told apart by steps of one model; the step's part is what a row's step took
    longer than its CUDA graph, where that was timed.
    """
    outside = [row["step_ms"] - row["graph_ms"] for row in rows if row.get("graph_ms")]
    step = statistics.median(outside) if outside else 0.0
    fixed = Costs(step, 0, 0, 0, 0, source)
    dense = [row for row in rows if tier_of(row) == "dense"]
    layers = _least_squares(dense, fixed, lambda row: [1])
    layers += _least_squares([row for row in rows if tier_of(row) == "resident"], fixed, root)
    values = [round(value, 3) for value in (step, *layers)]
    return Costs(*values, max(row["batch"] for row in rows), source)


def _least_squares(rows: Rows, fixed: Costs, features: Features) -> list[float]:
    """Microseconds a layer for each feature."""
    columns = numpy.array([features(row) for row in rows]) * _layers_ms(rows)[:, None]
    measured = numpy.array([row["step_ms"] for row in rows])
    known = numpy.array([predict(row, fixed) for row in rows])
    found, *_ = numpy.linalg.lstsq(columns / measured[:, None], 1 - known / measured, rcond=None)
    return found.tolist()


def _layers_ms(rows: Rows) -> numpy.ndarray:
    """Milliseconds of a step for each microsecond of a layer."""
    return numpy.array([model_of(row["model"]).layers for row in rows]) / 1e3


def left_out(rows: Rows, features: Features) -> float:
    """Worst relative error of sparse steps whose batch the fit did not see, with layers modelled so."""
    sparse = [row for row in rows if tier_of(row) == "resident"]
    fixed = Costs(fit(rows, "").step_ms, 0, 0, 0, 0, "")
    worst = 0.0
    for batch in {row["batch"] for row in sparse}:
        seen = [row for row in sparse if row["batch"] != batch]
        others = _least_squares(seen, fixed, features)
        for row in (row for row in sparse if row["batch"] == batch):
            layers = _layers_ms([row])[0] * numpy.dot(others, features(row))
            worst = max(worst, abs((predict(row, fixed) + layers) / row["step_ms"] - 1))
    return worst


def source_of(result: dict[str, Any]) -> str:
    return f"decode_step of {result['date']}, commit {result['commit']}"


def write_costs(result: dict[str, Any]) -> None:
    """Fit anew and write the constants that the package ships."""
    found = fit(usable(result["rows"]), source_of(result))
    costs.FILE.write_text(json.dumps(asdict(found), indent=1) + "\n")
    costs.load.cache_clear()


def constants(result: dict[str, Any]) -> str:
    """The costs, and why a sparse layer's grow with the square root of the batch."""
    found, rows = costs.load(), usable(result["rows"])
    forms = (left_out(rows, form) for form in (root, lambda row: [1, row["batch"]]))
    table = pages.table(
        ["fixed cost", "value"],
        [
            [
                "a step, outside of its CUDA graph",
                f"{found.step_ms:.3f} ms" if found.step_ms else "not timed",
            ],
            ["a layer, dense", f"{found.dense_layer_us:.1f} us"],
            ["a layer, sparse", f"{found.sparse_layer_us:.1f} us"],
            ["a sparse layer more, times the square root of the batch", f"{found.sparse_root_us:.1f} us"],
        ],
    )
    return (
        f"{table}\n\nThe square root is a form that fits, not a law: where all sparse steps of a batch are "
        "left out of the fit, it misses them by {:.0%} at worst, and one that grows with the batch itself "
        "by {:.0%}."
    ).format(*forms)


def points(result: dict[str, Any]) -> str:
    """Every measured step, its prediction, and that of costs fitted without any step of its batch."""
    rows = usable(result["rows"])
    batches = {row["batch"] for row in rows}
    unseen = {b: fit([row for row in rows if row["batch"] != b], "") for b in batches}
    table, worst = [], [0.0, 0.0]
    for row in sorted(rows, key=lambda row: (row["batch"], row["context"])):
        found = [predict(row, fixed) for fixed in (costs.load(), unseen[row["batch"]])]
        errors = [value / row["step_ms"] - 1 for value in found]
        worst = [max(most, abs(error)) for most, error in zip(worst, errors, strict=True)]
        table.append(
            [
                f"{row['batch']} x {row['context']:,}",
                row["variant"].replace(":", " "),
                f"{row['step_ms']:.2f}",
                f"{found[0]:.2f}",
                *(f"{error:+.1%}" for error in errors),
            ]
        )
    head = [
        "batch x context",
        "variant",
        "measured, ms",
        "predicted, ms",
        "off by",
        "fitted without its batch",
    ]
    return (
        f"At worst {worst[0]:.1%} of {len(table)} steps, and {worst[1]:.1%} with costs that were fitted "
        f"without any step of that batch. Measured: {source_of(result)}.\n\n{pages.table(head, table)}"
    )


def pairs(result: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Variant, measured and predicted milliseconds of every measured step."""
    fixed = costs.load()
    return [(row["variant"], row["step_ms"], predict(row, fixed)) for row in usable(result["rows"])]


def host_pairs(result: dict[str, Any] | None) -> list[tuple[str, float, float]]:
    """As `pairs`, of the host tier's steps and of dense ones at the largest batches."""
    names = {"dense": "dense, largest batch", "host": "host tier"}
    rows = result["rows"] if result else []
    return [(names[tier_of(row)], row["itl_ms"], predict(row, costs.load())) for row in rows]


def of_case(row: dict[str, Any]) -> tuple[str, int]:
    return row["model"], row["context"]


def largest(rows: Rows) -> Rows:
    """Those of the largest batch of their context and tier; the others are of sizes of the hot cache."""
    most = {(of_case(row), row["tier"]): 0 for row in rows}
    for row in rows:
        most[of_case(row), row["tier"]] = max(most[of_case(row), row["tier"]], row["batch"])
    return [row for row in rows if row["batch"] == most[of_case(row), row["tier"]]]


def fastest_dense(rows: Rows, row: dict[str, Any]) -> float | None:
    """Tokens a second of the faster dense backend, at its own largest batch of the row's context."""
    dense = [r["tokens_per_s"] for r in rows if r["budget"] is None and of_case(r) == of_case(row)]
    return max(dense, default=None)


def host_points(result: dict[str, Any] | None, origin: Callable[[dict[str, Any]], str]) -> str:
    """Every measured point of the host tier, its gain over the faster dense batch, and its prediction."""
    if result is None:
        return "Not measured yet."
    rows = sorted(result["rows"], key=lambda row: (*of_case(row), row["tier"], row["variant"]))
    table = []
    for row in largest(rows):
        most, host = fastest_dense(rows, row), row["tier"] == "host"
        table.append(
            [
                f"{row['batch']} x {row['context']:,}",
                row["variant"].replace(":", " "),
                f"{row['hot_gib']:.1f}" if host else "-",
                f"{row['hot_share']:.1%}" if host else "-",
                f"{row['link_bytes_per_step'] / 1e9:.2f}" if host else "-",
                f"{row['tokens_per_s']:,.0f}",
                f"{row['tokens_per_s'] / most:.2f}x" if most else "-",
                *_against(predict(row, costs.load()), row["itl_ms"]),
            ]
        )
    head = [
        "batch x context", "variant", "hot cache, GiB", "hot share", "GB a step over the link", "tokens/s",
        "of dense", "measured, ms", "predicted", "off by",
    ]  # fmt: skip
    return f"{_worst(rows)}\n\n{pages.table(head, table)}{_hot_sizes(rows)}\n\n{origin(result)}"


def _worst(rows: Rows) -> str:
    """How far the plan is off, for both tiers."""
    errors = {row["tier"]: 0.0 for row in rows}
    for row in rows:
        off = abs(predict(row, costs.load()) / row["itl_ms"] - 1)
        errors[row["tier"]] = max(errors[row["tier"]], off)
    names = {"host": "steps of the host tier", "resident": "dense steps"}
    parts = [f"{error:.1%} at worst for {names[tier]}" for tier, error in sorted(errors.items())]
    return f"Predictions are off by {' and by '.join(parts)}."


def _hot_sizes(rows: Rows) -> str:
    """The table of sizes of the hot cache, at one batch; empty where there are none."""
    of_sizes = [row for row in rows if row not in largest(rows)]
    table = [
        [
            f"{row['batch']} x {row['context']:,}",
            f"{row['hot_gib']:.2f}",
            f"{row['hot_share']:.1%}",
            f"{row['link_bytes_per_step'] / 1e9:.2f}",
            f"{row['tokens_per_s']:,.0f}",
            *_against(predict(row, costs.load()), row["itl_ms"]),
        ]
        for row in sorted(of_sizes, key=lambda row: (*of_case(row), row["hot_gib"]))
    ]
    head = [
        "batch x context", "hot cache, GiB", "hot share", "GB a step over the link", "tokens/s",
        "measured, ms", "predicted", "off by",
    ]  # fmt: skip
    steps = ", ".join(str(steps) for steps in sorted({row["steps"] for row in of_sizes}))
    drift = ", ".join(str(drift) for drift in sorted({row["drift"] for row in of_sizes}))
    title = f"The same with hot caches of other sizes, drift {drift}, {steps} steps:"
    return f"\n\n{title}\n\n{pages.table(head, table)}" if table else ""


def drift(result: dict[str, Any] | None, origin: Callable[[dict[str, Any]], str]) -> str:
    """How much of a selection the next step keeps, and the hot shares of caches of some steps' reads."""
    if result is None:
        return "Not measured yet."
    sizes = [name for name in result["rows"][0] if name.startswith("hot_share_")]
    table = [
        [
            f"{row['selected']} of {row['pages']}",
            str(row["steps"]),
            f"{row['kept']:.1%}",
            *(f"{row[name]:.1%}" for name in sizes),
        ]
        for row in result["rows"]
    ]
    head = ["pages selected", "steps", "kept by the next step"]
    head += [f"hot share, cache of {name.rpartition('_')[2]}" for name in sizes]
    return f"{pages.table(head, table)}\n\n{origin(result)}"


def gh200_one() -> str:
    """Planned steps of a GH200 at batch 1 against the paper's measured ones."""
    rows = []
    for context, (dense, sparse) in PAPER_ONE.items():
        pairs = [("dense", dense), ("resident", sparse)]
        cells = [_against(_planned(tier, 1, context, 1.0), ms) for tier, ms in pairs]
        rows.append([f"{context:,}", *cells[0], *cells[1]])
    head = ["context", "paper, dense", "planned", "off by", "paper, r4i4", "planned", "off by"]
    return pages.table(head, rows)


def gh200_host() -> str:
    """Planned steps of a GH200's host tier against the paper's Table 3, at its batches and hot shares."""
    rows = []
    for context, ((dense_batch, dense_ms), (batch, ms, hot), gain) in PAPER_TABLE_3.items():
        dense = _planned("dense", dense_batch, context, 1.0)
        host = _planned("host", batch, context, hot)
        planned_gain = (batch / host) / (dense_batch / dense)
        rows.append(
            [
                f"{context:,}",
                str(dense_batch),
                *_against(dense, dense_ms),
                f"{batch}, {hot:.1%}",
                *_against(host, ms),
                *_against(planned_gain, gain),
            ]
        )
    head = [
        "context", "dense batch", "paper, ms", "planned", "off by", "host tier: batch, hot share",
        "paper, ms", "planned", "off by", "paper's gain", "planned", "off by",
    ]  # fmt: skip
    return pages.table(head, rows)


def gh200_plans() -> str:
    """What the command plans for both kinds of GH200 and the H200, at the batches that fit."""
    rows = []
    for machine in MACHINES:
        for context in PAPER_TABLE_3:
            model = str(MODELS / "glm4-9b-1m-kv4.json")
            flags = ["--model", model, "--gpu", machine, "--context", str(context)]
            plan = command.make_plan(command.make_parser().parse_args(flags))
            dense, *sparse = plan["rows"]
            cells = [
                f"{row['batch']}, {row['itl_ms']:.1f} ms, {row['tokens_per_s']:,.0f} "
                f"({row['tokens_per_s'] / dense['tokens_per_s']:.2f}x)"
                for row in sparse
            ]
            first = f"{dense['batch']}, {dense['itl_ms']:.1f} ms, {dense['tokens_per_s']:,.0f}"
            rows.append([machine, f"{context:,}", first, *cells, f"{sparse[1]['host_gib']:.0f} GiB"])
    head = ["machine", "context", "dense", "sparse, KV on the GPU", "host tier", "KV on the host"]
    return pages.table(head, rows)


def gh200_sizing() -> str:
    """What the command prints for the example of docs/gh200.md: its first two tables."""
    model = str(MODELS / "glm4-9b-1m-kv4.json")
    flags = ["--model", model, "--gpu", "gh200-96", "--context", "131072"]
    shown = command.render(command.make_plan(command.make_parser().parse_args(flags)))
    tables = shown.partition("\n\nGB a step")[0].replace(model, "/data/glm-4-9b-chat-1m")
    return f"```text\n{tables}\n```"


def _planned(tier: str, batch: int, context: int, hot: float) -> float:
    model, machine = model_of("glm4-9b-1m-kv4"), MACHINES["gh200-96"]
    config = LocksConfig(selector="locks", summary="r4i4", budget=2048)
    moved = step_bytes(model, config, tier, batch, context, hot)
    return step_ms(model, machine, costs.load(), moved, tier, batch)


def _against(planned: float, measured: float) -> list[str]:
    return [f"{measured:.2f}", f"{planned:.2f}", f"{planned / measured - 1:+.1%}"]
