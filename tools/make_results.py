"""Write the measured parts of the pages, and the planner's costs, from benchmark/results/*.json.

python tools/make_results.py            # update the pages and the figures
python tools/make_results.py --check    # exit status 1 if a page is out of date
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import benchmark_path  # noqa: F401
import fidelity_report
import fidelity_tables
import kernel_report
import pages
import plan_report
import profile_report
import quality_report
import start_report
import step_report
import tier_report
from model_rows import Rows, by_model, first
from result_rows import compared, ran_dense, served_by, served_gains

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmark" / "results"
SELECTION_TABLES = ("lost", "basis", "scope", "combine", "rope", "page_size")
AUDIT_HEAD = [
    "batch x context", "step, ms", "processes differ by, us", "copies, us a step", "an audit, ms",
    "interval", "cost",
]  # fmt: skip
THROUGHPUT_HEAD = [
    "workload", "clients x context + output", "variant", "TTFT, s", "ITL p50 / p99, ms", "ITL gain",
    "tokens/s", "gain", "batch", "cached", "KV pool, tokens",
]  # fmt: skip
NOT_RUN = "Not run yet."
QUALITY_ALSO = {"ruler-synthetic": ("ruler-synthetic-4096",)}
THROUGHPUT_FIGURES = {"h200": "throughput.svg", "cpu": "throughput_cpu.svg"}


def newest(benchmark: str, machine: str = "h200") -> dict[str, Any] | None:
    """The newest result file of a benchmark on a machine; None where there is none."""
    paths = sorted(RESULTS.glob(f"{benchmark}-{machine}-*.json"), key=lambda path: path.name[-15:])
    return json.loads(paths[-1].read_text()) if paths else None


def needed(benchmark: str, machine: str = "h200") -> dict[str, Any]:
    """As `newest`, where a page cannot do without. FileNotFoundError names the file."""
    result = newest(benchmark, machine)
    if result is None:
        raise FileNotFoundError(f"no {benchmark}-{machine}-*.json in {RESULTS}")
    return result


def origin(result: dict[str, Any]) -> str:
    """Where, when, from which commit, with which command, and what a reader has to know besides."""
    machine = result["machine"]
    versions = ", ".join(
        f"{name} {machine[name]}" for name in ("torch", "sglang", "flashinfer") if machine.get(name)
    )
    rate = f"; measured copy rate {result['copy_tb_s']} TB/s" if result.get("copy_tb_s") else ""
    note = f"Note: {result['note']}\n\n" if result.get("note") else ""
    return (
        f"{note}{machine['gpu'] or machine['cpu']}, {versions}; {result['date']}, "
        f"commit `{result['commit']}`{rate}.\n"
        + "\n".join(f"Command: `{line}`" for line in result.get("commands", [result["command"]]))
    )


def of_models(name: str, part: Callable[[Rows], str]) -> str:
    """``part`` of every model of the newest run, with its origin."""
    result = newest(name)
    return f"{step_report.each_model(result['rows'], part)}\n\n{origin(result)}" if result else NOT_RUN


def decode_step(name: str = "decode_step") -> str:
    """Complete steps, a model after the other."""
    result = newest(name)
    if result is None:
        return NOT_RUN
    marked = ""
    if any(ran_dense(row) for row in result["rows"]):
        marked = (
            "D: a step that would have left out so little that it ran dense, in a sparse server "
            "(`--sparse-decode-dense-below`).\n\n"
        )
    return f"{step_report.each_model(result['rows'], step_report.steps)}\n\n{marked}{origin(result)}"


def beside_decode_step(name: str, time: str, names: tuple[str, str]) -> str:
    """Sparse steps of a run that differs in one thing, beside plain ones with the same kernels.

    Those are the newest of ``decode_step``, or of ``decode_step_before``, which is kept while such runs are
    older than the newest kernels.
    """
    result = newest(name)
    if result is None:
        return NOT_RUN
    others = newest("decode_step_before") or needed("decode_step")
    table = step_report.beside(result["rows"], others["rows"], time, names)
    return f"{table}\n\n{origin(result)}\n\nBeside it: commit `{others['commit']}`, {others['date']}."


def prefilled() -> str:
    """Steps behind a context that was really prefilled, beside those behind a filled pool."""
    names = ("prefilled, GPU alone, ms", "filled pool, ms")
    return beside_decode_step("decode_step_prefilled", "graph_ms", names)


def flashinfer_attend() -> str:
    """Steps whose selected pages FlashInfer attends, beside those with the native kernel."""
    names = ("FlashInfer attends, GPU alone, ms", "native, ms")
    return beside_decode_step("decode_step_flashinfer_attend", "graph_ms", names)


def short_steps() -> str:
    """Steps that leave little out, all of them sparse, beside dense ones: where the two meet."""
    return of_models("decode_step_short", partial(step_report.step_table, time="pipelined_ms"))


def step_profile() -> str:
    """The kernels of a layer, dense beside sparse, and what the host waits for."""
    return of_models("decode_step_profile", profile_report.cases)


def cpu_step() -> str:
    """Medians and spread of a step of the demo model on a CPU."""
    result = needed("decode_step", "cpu")
    return f"{step_report.spread(result['rows'])}\n\n{origin(result)}"


def audit_cost(rows: Rows) -> str:
    """What audits take of a decode step of one model, an interval a line."""
    return pages.table(AUDIT_HEAD, [audit_cells(row) for row in rows])


def audit_cells(row: dict[str, Any]) -> list[str]:
    """Of one row; in brackets the least and the most, where there is more than one pair of processes."""
    alone = row["processes"] == "1 off, 1 on"

    def spread(name: str, digits: int, scale: float = 1) -> str:
        mean, least, most = (f"{scale * row[name + end]:.{digits}f}" for end in ("", "_min", "_max"))
        return mean if alone else f"{mean} ({least} to {most})"

    return [
        f"{row['batch']} x {row['context']:,}",
        f"{row['step_ms']:.2f}",
        "one of each"
        if alone
        else f"{1000 * row['off_spread_ms']:.0f} off, {1000 * row['on_spread_ms']:.0f} on",
        spread("copies_ms", 0, 1000),
        spread("audit_ms", 3),
        f"{row['interval']:,}",
        spread("cost_percent", 2) + " %",
    ]


def gains() -> str:
    """The README's short table: steps that overlap, as in a server, of one geometry."""
    return step_report.gains(needed("decode_step")["rows"])


def kernel_times(name: str = "kernel_floor") -> str:
    """Every op of one layer, ours and the author's, a table a model and record format."""
    result = newest(name)
    if result is None:
        return NOT_RUN
    return f"{kernel_report.report(result['rows'])}\n\n{origin(result)}"


def throughput(machine: str) -> str:
    """Every case of the newest run of servers, against the faster dense backend of the same case."""
    result = newest("throughput", machine)
    if result is None:
        return NOT_RUN
    models = by_model(result["rows"], step_report.MAIN)
    tables = []
    for model, of_model in models.items():
        tables += [step_report.title(model)] if len(models) > 1 else []
        tables.append(throughput_table(of_model))
    figure = ""
    if compared(first(result["rows"], step_report.MAIN)):
        name = THROUGHPUT_FIGURES[machine]
        figure = f"\n\n![time between tokens and tokens/s of every case](figures/{name})"
    return "\n\n".join([*tables, origin(result)]) + figure


def throughput_table(served: Rows) -> str:
    """The cases of one model."""
    rows, with_link = [], tier_report.has_link(served)
    for row in sorted(served, key=lambda row: (row["workload"], row["context"], row["concurrency"])):
        gains = None if row["budget"] is None else served_gains(row, served)
        in_tokens, in_time = [f"{gain:.2f}x" for gain in gains] if gains else ["-", "-"]
        rows.append(
            [
                row["workload"],
                f"{row['concurrency']} x {row['context']:,} + {row['output']:,}",
                served_by(row),
                f"{row['ttft_ms'] / 1000:.2f}",
                f"{row['itl_ms']:.2f} / {row['itl_p99_ms']:.2f}",
                in_time,
                f"{row['tokens_per_s']:.1f}",
                in_tokens,
                str(row["batch"]),
                f"{row['cached_share']:.0%}",
                f"{row['kv_tokens']:,}",
                *(tier_report.link_cells(row) if with_link else []),
            ]
        )
    return pages.table(THROUGHPUT_HEAD + (tier_report.LINK_HEAD if with_link else []), rows)


def host_ttft(machine: str) -> str:
    """Time to first token from a host tier beside that of a resident pool."""
    result = newest("throughput", machine)
    found = tier_report.ttft(result["rows"]) if result else None
    return f"{found}\n\n{origin(result)}" if result and found else NOT_RUN


def quality() -> str:
    """Scores of every run of a recipe here, each with its origin."""
    parts = [
        f"### {name} ({quality_setting(rows)})\n\n{quality_report.scores(name, rows)}\n\n{origin(result)}"
        for name, result, rows in quality_runs()
    ]
    return "\n\n".join(parts) or NOT_RUN


def quality_means() -> str:
    """Means over the tasks of every run of more than one task."""
    parts = [
        f"{name}, {quality_setting(rows)}:\n\n{quality_report.means(name, rows)}\n\n{origin(result)}"
        for name, result, rows in quality_runs()
        if len({row["task"] for row in rows}) > 1
    ]
    return "\n\n".join(parts) or NOT_RUN


def quality_runs() -> Iterator[tuple[str, dict[str, Any], Rows]]:
    """Recipe, result and rows of a model, of every result; QUALITY_ALSO names those of other lengths."""
    for name in quality_report.RECIPES:
        for run in (name, *QUALITY_ALSO.get(name, ())):
            for machine in ("h200", "cpu"):
                result = newest(f"quality-{run}", machine)
                for rows in by_model(result["rows"]).values() if result else ():
                    yield name, result, rows


def quality_setting(rows: Rows) -> str:
    length = f" of {rows[0]['length']:,} tokens" if rows[0]["length"] else ""
    return f"{rows[0]['model']}, {rows[0]['prompts']} prompts a task{length}"


def quality_not_run() -> str:
    """Recipes without a result of the paper's model."""
    ran = {(name, rows[0]["model"]) for name, _, rows in quality_runs()}
    recipes = quality_report.RECIPES.items()
    return quality_report.not_run({name for name, r in recipes if (name, r.model.split("/")[1]) in ran})


def fidelity(study: str, table: Callable[[list[dict[str, Any]]], str]) -> str:
    """The last table of a fidelity study, and where its figures come from."""
    result = needed(f"fidelity_{study}", "cpu")
    return f"{table(result['rows'])}\n\n{origin(result)}"


def selection(table: str) -> str:
    """One of the tables on selectors."""
    return getattr(fidelity_tables, table)(needed("fidelity", "cpu")["rows"])


def figures() -> None:
    """Draw every figure whose result file is there."""
    import figures as run_figures
    import plots

    folder = ROOT / "docs" / "figures"
    steps, hosted = needed("decode_step"), newest("host_tier")
    host_rows = first(hosted["rows"], plan_report.MAIN) if hosted else []
    plots.step_time(steps["rows"], folder / "step_time.svg")
    plots.layer_time(needed("kernel_floor")["rows"], folder / "layer_time.svg")
    plots.batches(first(steps["rows"], step_report.MAIN), host_rows, folder / "batches.svg")
    plots.plan(plan_report.pairs(steps) + plan_report.host_pairs(hosted), folder / "plan.svg")
    if host_rows:
        predict = partial(plan_report.predict, fixed=plan_report.costs.load())
        plots.host_tier(host_rows, predict, folder / "host_tier.svg")
    plots.fidelity(needed("fidelity", "cpu")["rows"], folder / "fidelity.svg")
    plots.auto_budget(needed("fidelity_auto", "cpu")["rows"], folder / "auto_budget.svg")
    for machine, name in THROUGHPUT_FIGURES.items():
        served = newest("throughput", machine)
        rows = first(served["rows"], step_report.MAIN) if served else []
        if compared(rows):
            run_figures.throughput(rows, folder / name)


PAGES: dict[Path, pages.Parts] = {
    ROOT / "docs" / "results.md": {
        "decode_step": decode_step,
        "prefilled": prefilled,
        "flashinfer_attend": flashinfer_attend,
        "decode_step_llama31": partial(decode_step, "decode_step_llama31"),
        "decode_step_glm4_kv2": partial(decode_step, "decode_step_glm4_kv2"),
        "short_steps": short_steps,
        "step_profile": step_profile,
        "start_up": lambda: of_models("start_up", start_report.memory),
        "audit_cost": lambda: of_models("audit_cost", audit_cost),
        "throughput": lambda: throughput("h200"),
        "host_ttft": lambda: host_ttft("h200"),
        "cpu_step": cpu_step,
        "cpu_throughput": lambda: throughput("cpu"),
        "fidelity_selectors": lambda: f"{selection('selectors')}\n\n{origin(needed('fidelity', 'cpu'))}",
        "quality_means": quality_means,
    },
    ROOT / "docs" / "plan.md": {
        "constants": lambda: plan_report.constants(needed("decode_step")),
        "points": lambda: plan_report.points(needed("decode_step")),
        "host_points": lambda: plan_report.host_points(newest("host_tier"), origin),
        "drift": lambda: plan_report.drift(newest("selection_drift", "cpu"), origin),
        "gh200_host": plan_report.gh200_host,
        "gh200_one": plan_report.gh200_one,
        "gh200_plans": plan_report.gh200_plans,
    },
    ROOT / "docs" / "fidelity.md": {
        **{name: partial(selection, name) for name in SELECTION_TABLES},
        "selectors": lambda: f"{selection('selectors')}\n\n{origin(needed('fidelity', 'cpu'))}",
        "kv_selection": lambda: fidelity_report.kv_selection(needed("fidelity_kv", "cpu")["rows"]),
        "kv_error": lambda: fidelity("kv", fidelity_report.kv_error),
        "auto_mass": lambda: fidelity_report.auto_mass(needed("fidelity_auto", "cpu")["rows"]),
        "auto_decode": lambda: fidelity("auto", fidelity_report.auto_decode),
    },
    ROOT / "docs" / "kernels.md": {
        "kernel_times": kernel_times,
        "kernel_times_heads": partial(kernel_times, "kernel_floor_heads"),
    },
    ROOT / "docs" / "quality.md": {"quality": quality, "quality_not_run": quality_not_run},
    ROOT / "docs" / "gh200.md": {"gh200_sizing": plan_report.gh200_sizing},
    ROOT / "README.md": {"gains": gains},
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 if out of date")
    arguments = parser.parse_args()
    if not arguments.check:
        plan_report.write_costs(needed("decode_step"))
    current = [
        pages.update(path, parts, arguments.check, "python tools/make_results.py")
        for path, parts in PAGES.items()
    ]
    if not arguments.check:
        figures()
    return 0 if all(current) else 1


if __name__ == "__main__":
    raise SystemExit(main())
