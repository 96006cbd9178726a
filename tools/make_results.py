"""Write the measured parts of the pages, and the planner's costs, from benchmark/results/*.json.

python tools/make_results.py            # update the pages and the figures
python tools/make_results.py --check    # exit status 1 if a page is out of date
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import fidelity_report
import fidelity_tables
import kernel_report
import pages
import plan_report
import quality_report

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmark" / "results"
# Table C.22 and C.23 of the paper: r8i4 against the faster of FA3 and FlashInfer on an H200 NVL.
PAPER = {
    (1, 16384): 0.98, (1, 32768): 0.96, (1, 65536): 1.08, (1, 131072): 1.06, (1, 262144): 1.30,
    (1, 524288): 1.54, (1, 1000000): 2.02, (4, 262144): 1.80, (8, 131072): 1.59, (16, 65536): 1.43,
    (32, 32768): 1.26,
}  # fmt: skip
SELECTION_TABLES = ("lost", "basis", "scope", "combine", "rope", "page_size")
THROUGHPUT_CASE = ("tp", "workload", "concurrency", "context", "output")
THROUGHPUT_HEAD = [
    "workload", "clients x context + output", "variant", "TTFT, s", "ITL p50 / p99, ms", "ITL gain",
    "tokens/s", "gain", "batch", "cached", "KV pool, tokens",
]  # fmt: skip
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


def step_times(result: dict[str, Any]) -> dict[tuple[int, int], dict[str, dict[str, Any]]]:
    cases: dict[tuple[int, int], dict[str, dict[str, Any]]] = {}
    for row in result["rows"]:
        cases.setdefault((row["batch"], row["context"]), {})[row["variant"]] = row
    return cases


def fastest_dense(found: dict[str, dict[str, Any]], time: str) -> float:
    """Milliseconds of the faster dense backend of a case."""
    return min(row[time] for name, row in found.items() if name.startswith("dense"))


def step_table(result: dict[str, Any], time: str) -> str:
    """One time of every variant, and the ratio of the faster dense backend's to each sparse one's."""
    variants = list(dict.fromkeys(row["variant"] for row in result["rows"]))
    dense = [name for name in variants if name.startswith("dense")]
    sparse = [name for name in variants if not name.startswith("dense")]
    rows = []
    for case, found in step_times(result).items():
        fastest = fastest_dense(found, time)
        cells = [f"{found[name][time]:.2f}" for name in dense]
        for name in sparse:
            ran_dense = " D" if found[name].get("dense_rows_share") else ""
            cells.append(f"{found[name][time]:.2f} ({fastest / found[name][time]:.2f}x){ran_dense}")
        rows.append([f"{case[0]} x {case[1]:,}", *cells, f"{PAPER[case]:.2f}x" if case in PAPER else "-"])
    head = ["batch x context", *(f"{name.replace(':', ' ')}, ms" for name in dense + sparse), "paper, r8i4"]
    return pages.table(head, rows)


def decode_step() -> str:
    """Steps that overlap, as a server's do, and steps that are waited for."""
    result = needed("decode_step")
    return (
        "A step while the next one is prepared (`pipelined_ms`):\n\n"
        f"{step_table(result, 'pipelined_ms')}\n\n"
        "A step that is waited for (`step_ms`), with all of the host's part:\n\n"
        f"{step_table(result, 'step_ms')}\n\n"
        "D: a step of so few tokens that it ran dense, in a sparse server "
        f"(`--sparse-decode-dense-below`).\n\n{origin(result)}"
    )


def prefilled() -> str:
    """Steps behind a context that was really prefilled, beside those behind a filled pool."""
    result = needed("decode_step_prefilled")
    filled = step_times(needed("decode_step"))
    rows = []
    for case, found in step_times(result).items():
        for name, row in found.items():
            if name.startswith("dense") or row.get("dense_rows_share"):
                continue
            other = filled[case][name]["graph_ms"]
            cells = [f"{case[0]} x {case[1]:,}", name.replace(":", " "), f"{row['graph_ms']:.2f}"]
            rows.append([*cells, f"{other:.2f}", f"{row['graph_ms'] / other - 1:+.1%}"])
    head = ["batch x context", "variant", "prefilled, GPU alone, ms", "filled pool, ms", "difference"]
    return f"{pages.table(head, rows)}\n\n{origin(result)}"


def cpu_step() -> str:
    """Medians and spread of a step of the demo model on a CPU."""
    result = needed("decode_step", "cpu")
    rows = [
        [row["variant"], f"{row['step_ms']:.0f}", f"{row['step_ms_min']:.0f} to {row['step_ms_max']:.0f}"]
        for row in result["rows"]
    ]
    return f"{pages.table(['variant', 'step, ms', 'spread, ms'], rows)}\n\n{origin(result)}"


def audit_cost(machine: str) -> str:
    """What audits take of a decode step, an interval a line."""
    result = newest("audit_cost", machine)
    if result is None:
        return "Not run yet."
    rows = [
        [
            f"{row['batch']} x {row['context']:,}",
            f"{row['step_ms']:.2f}",
            f"{1000 * row['copies_ms']:.0f}",
            f"{row['audit_ms']:.3f}",
            f"{row['interval']:,}",
            f"{row['cost_percent']:.2f} %",
        ]
        for row in result["rows"]
    ]
    head = ["batch x context", "step, ms", "copies, us a step", "an audit, ms", "interval", "cost"]
    return f"{pages.table(head, rows)}\n\n{origin(result)}"


def gains() -> str:
    """The README's short table: steps that overlap, as in a server."""
    result = needed("decode_step")
    sparse = ("locks:r4i4", "locks:r8i4")
    rows = []
    for (batch, context), found in step_times(result).items():
        fastest = fastest_dense(found, "pipelined_ms")
        cells = [f"{batch} x {context:,}", f"{fastest:.2f}"]
        for name in sparse:
            ran_dense = " (dense)" if found[name].get("dense_rows_share") else ""
            time = found[name]["pipelined_ms"]
            cells += [f"{time:.2f}{ran_dense}", f"{fastest / time:.2f}x"]
        rows.append(cells)
    head = ["batch x context", "dense, ms"]
    for name in sparse:
        head += [f"sparse {name[6:]}, ms", "speedup"]
    return pages.table(head, rows)


def kernel_times() -> str:
    """Every op of one layer, ours and the author's, a table a record format."""
    result = needed("kernel_floor")
    tables = [kernel_report.times(result["rows"], form) for form in ("r4i4", "r8i4", "r6h")]
    return "\n\n".join([*tables, kernel_report.dense(result["rows"]), origin(result)])


def throughput(machine: str) -> str:
    """Every case of the newest run of servers, against the faster dense backend of the same case."""
    result = newest("throughput", machine)
    if result is None:
        return "Not run yet."
    rows = []
    for row in sorted(
        result["rows"], key=lambda row: (row["workload"], row["context"], row["concurrency"])
    ):
        same = [r for r in result["rows"] if all(r[name] == row[name] for name in THROUGHPUT_CASE)]
        dense = [r for r in same if r["budget"] is None]
        gain = slowdown = "-"
        if dense and row["budget"] is not None:
            gain = f"{row['tokens_per_s'] / max(r['tokens_per_s'] for r in dense):.2f}x"
            slowdown = f"{min(r['itl_ms'] for r in dense) / row['itl_ms']:.2f}x"
        rows.append(
            [
                row["workload"],
                f"{row['concurrency']} x {row['context']:,} + {row['output']:,}",
                served_by(row),
                f"{row['ttft_ms'] / 1000:.2f}",
                f"{row['itl_ms']:.2f} / {row['itl_p99_ms']:.2f}",
                slowdown,
                f"{row['tokens_per_s']:.1f}",
                gain,
                str(row["batch"]),
                f"{row['cached_share']:.0%}",
                f"{row['kv_tokens']:,}",
            ]
        )
    figure = ""
    if any(row["workload"] == "random" for row in result["rows"]):
        name = THROUGHPUT_FIGURES[machine]
        figure = f"\n\n![tokens/s and time between tokens against clients](figures/{name})"
    return f"{pages.table(THROUGHPUT_HEAD, rows)}\n\n{origin(result)}{figure}"


def served_by(row: dict[str, Any]) -> str:
    """Variant of a row of servers, with what else tells it apart."""
    parts = [row["variant"].replace(":", " ")]
    parts += [f"TP {row['tp']}"] if row["tp"] > 1 else []
    parts += ["D"] if row.get("dense_rows_share", 0) > 0.5 else []
    return " ".join(parts)


def quality() -> str:
    """Scores of every recipe that has a result here, each with its origin."""
    parts = []
    for name in quality_report.RECIPES:
        for machine in ("h200", "cpu"):
            result = newest(f"quality-{name}", machine)
            if result is not None:
                rows = result["rows"]
                first = rows[0]
                setting = f"{first['model']}, {first['prompts']} prompts a task"
                setting += f" of {first['length']:,} tokens" if first["length"] else ""
                parts.append(
                    f"### {name} ({setting})\n\n{quality_report.scores(name, rows)}\n\n{origin(result)}"
                )
    return "\n\n".join(parts) or "Not run yet."


def quality_not_run() -> str:
    """Recipes without a result of the paper's model."""
    done = set()
    for name, recipe in quality_report.RECIPES.items():
        found = [newest(f"quality-{name}", machine) for machine in ("h200", "cpu")]
        if recipe.model.split("/")[1] in [result["rows"][0]["model"] for result in found if result]:
            done.add(name)
    return quality_report.not_run(done)


def fidelity(study: str, table: Callable[[list[dict[str, Any]]], str]) -> str:
    """The last table of a fidelity study, and where its figures come from."""
    result = needed(f"fidelity_{study}", "cpu")
    return f"{table(result['rows'])}\n\n{origin(result)}"


def selection(table: str) -> str:
    """One of the tables on selectors."""
    return getattr(fidelity_tables, table)(needed("fidelity", "cpu")["rows"])


def figures() -> None:
    """Draw every figure whose result file is there."""
    import plots

    folder = ROOT / "docs" / "figures"
    plots.step_time(needed("decode_step")["rows"], folder / "step_time.svg")
    plots.layer_time(needed("kernel_floor")["rows"], folder / "layer_time.svg")
    steps = plan_report.pairs(needed("decode_step")) + plan_report.host_pairs(newest("host_tier"))
    plots.plan(steps, folder / "plan.svg")
    plots.fidelity(needed("fidelity", "cpu")["rows"], folder / "fidelity.svg")
    plots.auto_budget(needed("fidelity_auto", "cpu")["rows"], folder / "auto_budget.svg")
    for machine, name in THROUGHPUT_FIGURES.items():
        if served := newest("throughput", machine):
            plots.throughput(served["rows"], folder / name)


PAGES: dict[Path, pages.Parts] = {
    ROOT / "docs" / "results.md": {
        "decode_step": decode_step,
        "prefilled": prefilled,
        "audit_cost": lambda: audit_cost("h200"),
        "throughput": lambda: throughput("h200"),
        "cpu_step": cpu_step,
        "cpu_throughput": lambda: throughput("cpu"),
    },
    ROOT / "docs" / "plan.md": {
        "constants": lambda: plan_report.constants(needed("decode_step")),
        "points": lambda: plan_report.points(needed("decode_step")),
        "host_points": lambda: plan_report.host_points(newest("host_tier"), origin),
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
    ROOT / "docs" / "kernels.md": {"kernel_times": kernel_times},
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
