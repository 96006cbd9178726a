"""What the online audit costs a decode step: the same steps with audits off and on.

    python benchmark/audit_cost.py --model-path MODEL --load-format dummy --max-total-tokens 700000

Processes that take turns (``--order``) drive SGLang's model runner as ``decode_step`` does: without
audits, and with an audit every few steps, so that many are seen in a short run.  An audit costs a
step twice: the copies of queries and page lists in every step (captured in its CUDA graph), and the
exact scores of a few rows in the audited step, which the step after it collects.  The share of a
step's time at a real interval N follows: (copies + audit / N) / step.

Copies are the difference of two processes, and processes differ by themselves: figures are means over
the processes of a kind, with ``_min`` and ``_max`` those of the pairs that are furthest apart.  Where
they are on both sides of zero, no cost was seen.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from itertools import product
from pathlib import Path
from typing import Any

import decode_step
import grid
import results_file

GRID = "1x16384,1x131072,8x65536"
INTERVALS = "16,100,1000"
ORDER = "off,on,off,on"
EVERY = 4
"""Steps from audit to audit in the measured run: the audited, the one that collects it, two others."""


Found = dict[str, dict[tuple[int, int], list[dict[str, Any]]]]
"""By kind of process and case: what each of its processes measured."""


def parse_arguments(argv: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--grid", type=grid.parse, default=GRID, help=grid.HELP)
    parser.add_argument("--intervals", default=INTERVALS, help="intervals whose cost is reported, in steps")
    parser.add_argument("--order", default=ORDER, help="processes with audits off and on, in turns")
    parser.add_argument("--cycles", type=int, default=24, help="audits a case")
    parser.add_argument("--format", default="r6h", help="record format")
    parser.add_argument("--budget", type=int, default=2048, help="tokens attended per KV head")
    parser.add_argument("--backend", default="fa3", help="SGLang's attention backend under sparse decode")
    parser.add_argument("--out", type=Path, help="folder of the result file")
    parser.add_argument("--machine-name", default="h200")
    parser.add_argument("--commit", help="commit to write down where git is not there")
    parser.add_argument("--child", choices=("off", "on"), help=argparse.SUPPRESS)
    return parser.parse_known_args(argv)


def main() -> int:
    arguments, server_flags = parse_arguments()
    if arguments.child:
        return run_child(arguments, server_flags)
    copy_rate = results_file.copy_rate_tb_s()
    intervals = [int(interval) for interval in arguments.intervals.split(",")]
    children = arguments.order.split(",")
    if set(children) != {"off", "on"}:
        raise SystemExit(f"--order is {arguments.order!r}; legal: off and on, each at least once")
    found: Found = {"off": defaultdict(list), "on": defaultdict(list)}
    rows: list[dict[str, Any]] = []
    for number, child in enumerate(children, 1):
        print(f"[{number}/{len(children)}] audits {child}", flush=True)
        for row in decode_step.run_variant(child, {}, script=__file__):
            found[child][row["batch"], row["context"]].append(row)
        rows = costs(found, intervals)
        # After every process, so that a run that is cut short is not lost.
        if rows:
            path = results_file.write(
                "audit_cost",
                rows,
                machine_name=arguments.machine_name,
                out=arguments.out,
                made_from=arguments.commit,
                copy_tb_s=copy_rate,
            )
    if not rows:
        return 1
    print_table(rows)
    print(f"written to {path}")
    return 0


def costs(found: Found, intervals: list[int]) -> list[dict[str, Any]]:
    """One row a case and interval, of the cases that were measured with audits off and on."""
    return [
        row
        for case, off in found["off"].items()
        if case in found["on"]
        for row in cost(off, found["on"][case], intervals)
    ]


def run_child(arguments: argparse.Namespace, server_flags: list[str]) -> int:
    flags = ["--attention-backend", arguments.backend, "--page-size", "16", *server_flags]
    flags += ["--sparse-decode", "locks", "--sparse-decode-summary", arguments.format]
    flags += ["--sparse-decode-budget", str(arguments.budget), "--sparse-decode-dense-below", "0"]
    if arguments.child == "on":
        flags += ["--sparse-decode-audit-interval", str(EVERY)]
    started = time.monotonic()
    runner = decode_step.start_runner(flags, [2, *(batch for batch, _ in arguments.grid)])
    decode_step.fill_pool(runner)
    print(f"ready after {time.monotonic() - started:.0f} s", flush=True)
    for batch, context in arguments.grid:
        if not decode_step.fits(runner, batch, context, EVERY * (arguments.cycles + 4)):
            continue
        row = {
            "backend": "locks",
            "format": arguments.format,
            "budget": arguments.budget,
            "model": Path(runner.server_args.model_path).name,
            "context": context,
            "batch": batch,
            "tp": 1,
            "fill": "synthetic",
            **measure(runner, batch, context, arguments.cycles),
        }
        print("ROW " + json.dumps(row), flush=True)
    return 0


def measure(runner: Any, batch_size: int, context: int, cycles: int) -> dict[str, Any]:
    """Times of the steps of a case by their place after an audit, and of the CUDA graph alone."""
    import torch
    from graph_timing import OtherStreams, replay_times
    from locks_sglang import runtime

    state = runtime.active()
    assert state is not None
    places: list[int] = []
    times: list[float] = []
    with torch.no_grad():
        batch, _ = decode_step.filled(runner, batch_size, context)
        tokens = torch.zeros(batch_size, dtype=torch.int64, device=runner.device)
        # Every audited layer has had its turn, and what it runs is compiled, before the first time counts.
        warm_up = EVERY * 3
        others = OtherStreams()
        with replay_times() as graph_times:
            for step in range(warm_up + EVERY * cycles):
                before = state.audits_launched
                tokens, step_ms = decode_step.timed_step(runner, batch, tokens, others)
                if step >= warm_up:
                    times.append(step_ms)
                    audited = state.audits_launched > before
                    places.append(0 if audited else places[-1] + 1 if places else EVERY - 1)
        replays = graph_times()[warm_up:] if torch.cuda.is_available() else []
    plain = [t for t, place in zip(times, places, strict=True) if place > 1]

    def median(of: list[float]) -> float | None:
        return round(statistics.median(of), 4) if of else None

    return {
        **decode_step.spread("step_ms", plain),
        "audited_ms": median([t for t, place in zip(times, places, strict=True) if place == 0]),
        "after_ms": median([t for t, place in zip(times, places, strict=True) if place == 1]),
        "graph_ms": median(replays),
    }


def cost(off: list[dict[str, Any]], on: list[dict[str, Any]], intervals: list[int]) -> list[dict[str, Any]]:
    """One row an interval of a case.

    Args:
        off: what :func:`measure` found in each process without audits, with the fields of the case.
        on: the same with an audit every :data:`EVERY` steps.
        intervals: decode steps from audit to audit that are reported.
    """
    if any(run["audited_ms"] is None for run in on):
        raise ValueError(f"no step of {on[0]['batch']} x {on[0]['context']} was audited")
    # The graph holds the copies, and its time varies less from process to process than a step's.
    by = "graph_ms" if all(run["graph_ms"] for run in (*off, *on)) else "step_ms"
    copies = [with_audits[by] - without[by] for without, with_audits in product(off, on)]
    audits = [
        max(run["audited_ms"] - run["step_ms"], 0) + max(run["after_ms"] - run["step_ms"], 0) for run in on
    ]
    step = statistics.mean(run["step_ms"] for run in off)
    shared = {name: value for name, value in off[0].items() if name not in ("audited_ms", "after_ms")}
    measured = {
        "processes": f"{len(off)} off, {len(on)} on",
        "step_ms": round(step, 4),
        "step_ms_min": min(run["step_ms_min"] for run in off),
        "step_ms_max": max(run["step_ms_max"] for run in off),
        # From process to process, of the medians that copies are the differences of.
        "off_spread_ms": round(max(run[by] for run in off) - min(run[by] for run in off), 4),
        "on_spread_ms": round(max(run[by] for run in on) - min(run[by] for run in on), 4),
        "tapped_step_ms": round(statistics.mean(run["step_ms"] for run in on), 4),
        **spread("copies_ms", copies, 4),
        **spread("audit_ms", audits, 4),
    }
    if by == "graph_ms":
        measured["graph_ms"] = round(statistics.mean(run[by] for run in off), 4)
        measured["tapped_graph_ms"] = round(statistics.mean(run[by] for run in on), 4)
    rows = []
    for interval in intervals:
        percents = [100 * (copy + audit / interval) / step for copy, audit in product(copies, audits)]
        rows.append({**shared, **measured, "interval": interval, **spread("cost_percent", percents, 3)})
    return rows


def spread(name: str, values: list[float], digits: int) -> dict[str, float]:
    """Mean, least and most."""
    return {
        name: round(statistics.mean(values), digits),
        f"{name}_min": round(min(values), digits),
        f"{name}_max": round(max(values), digits),
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    heads = ("step", "copies", "an audit", "interval", "cost")
    print(f"\n{'batch x context':>18}" + "".join(f"{head:>12}" for head in heads))
    for row in rows:
        times = (row["step_ms"], row["copies_ms"], row["audit_ms"])
        print(
            f"{row['batch']:>6} x {row['context']:<9}"
            + "".join(f"{time:>9.3f} ms" for time in times)
            + f"{row['interval']:>12}{row['cost_percent']:>10.2f} % "
            + f"({row['cost_percent_min']:.2f} to {row['cost_percent_max']:.2f})"
        )


if __name__ == "__main__":
    raise SystemExit(main())
