"""What the online audit costs a decode step: the same steps with audits off and on.

    python benchmark/audit_cost.py --model-path MODEL --load-format dummy --max-total-tokens 700000

Two processes, one after another, drive SGLang's model runner as ``decode_step`` does: one without
audits, one with an audit every few steps, so that many are seen in a short run.  An audit costs a
step twice: the copies of queries and page lists in every step (captured in its CUDA graph), and the
exact scores of a few rows in the audited step, which the step after it collects.  The share of a
step's time at a real interval N follows: (copies + audit / N) / step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import decode_step
import results_file

GRID = "1x16384,1x131072,8x65536"
INTERVALS = "16,100,1000"
EVERY = 4
"""Steps from audit to audit in the measured run: the audited, the one that collects it, two others."""


def parse_arguments(argv: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--grid", default=GRID, help="BATCHxCONTEXT, ...")
    parser.add_argument("--intervals", default=INTERVALS, help="intervals whose cost is reported, in steps")
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
    found = {}
    for number, child in enumerate(("off", "on"), 1):
        print(f"[{number}/2] audits {child}", flush=True)
        rows = decode_step.run_variant(child, {}, script=__file__)
        found[child] = {(row["batch"], row["context"]): row for row in rows}
    intervals = [int(interval) for interval in arguments.intervals.split(",")]
    rows = [
        row
        for case, off in found["off"].items()
        if case in found["on"]
        for row in cost(off, found["on"][case], intervals)
    ]
    print_table(rows)
    path = results_file.write(
        "audit_cost",
        rows,
        machine_name=arguments.machine_name,
        out=arguments.out,
        made_from=arguments.commit,
        copy_tb_s=copy_rate,
    )
    print(f"written to {path}")
    return 0 if rows else 1


def run_child(arguments: argparse.Namespace, server_flags: list[str]) -> int:
    grid = [tuple(map(int, case.split("x"))) for case in arguments.grid.split(",")]
    flags = ["--attention-backend", arguments.backend, "--page-size", "16", *server_flags]
    flags += ["--sparse-decode", "locks", "--sparse-decode-summary", arguments.format]
    flags += ["--sparse-decode-budget", str(arguments.budget), "--sparse-decode-dense-below", "0"]
    if arguments.child == "on":
        flags += ["--sparse-decode-audit-interval", str(EVERY)]
    started = time.monotonic()
    runner = decode_step.start_runner(flags, [2, *(batch for batch, _ in grid)])
    decode_step.fill_pool(runner)
    print(f"ready after {time.monotonic() - started:.0f} s", flush=True)
    for batch, context in grid:
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
    from sglang.benchmark import one_batch

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
                others.touch()
                before = state.audits_launched
                one_batch.synchronize(runner.device)
                start = time.perf_counter()
                tokens, _ = one_batch.decode(tokens, batch, runner)
                one_batch.synchronize(runner.device)
                if step >= warm_up:
                    times.append(1e3 * (time.perf_counter() - start))
                    audited = state.audits_launched > before
                    places.append(0 if audited else places[-1] + 1 if places else EVERY - 1)
        replays = graph_times()[warm_up:] if torch.cuda.is_available() else []
    plain = [t for t, place in zip(times, places, strict=True) if place > 1]

    def median(of: list[float]) -> float | None:
        return round(statistics.median(of), 4) if of else None

    return {
        "step_ms": median(plain),
        "step_ms_min": round(min(plain), 4),
        "step_ms_max": round(max(plain), 4),
        "audited_ms": median([t for t, place in zip(times, places, strict=True) if place == 0]),
        "after_ms": median([t for t, place in zip(times, places, strict=True) if place == 1]),
        "graph_ms": median(replays),
    }


def cost(off: dict[str, Any], on: dict[str, Any], intervals: list[int]) -> list[dict[str, Any]]:
    """One row an interval of a case.

    Args:
        off: what :func:`measure` found without audits, with the fields of the case.
        on: the same with an audit every :data:`EVERY` steps.
        intervals: decode steps from audit to audit that are reported.
    """
    if on["audited_ms"] is None:
        raise ValueError(f"no step of {on['batch']} x {on['context']} was audited")
    # The graph holds the copies, and its time varies less from process to process than a step's.
    by = "graph_ms" if off["graph_ms"] and on["graph_ms"] else "step_ms"
    copies = on[by] - off[by]
    audit = max(on["audited_ms"] - on["step_ms"], 0) + max(on["after_ms"] - on["step_ms"], 0)
    measured = {
        "tapped_step_ms": on["step_ms"],
        "tapped_graph_ms": on["graph_ms"],
        "copies_ms": round(copies, 4),
        "audit_ms": round(audit, 4),
    }
    shared = {name: value for name, value in off.items() if name not in ("audited_ms", "after_ms")}
    return [
        {
            **shared,
            **measured,
            "interval": interval,
            "cost_percent": round(100 * (copies + audit / interval) / off["step_ms"], 3),
        }
        for interval in intervals
    ]


def print_table(rows: list[dict[str, Any]]) -> None:
    heads = ("step", "copies", "an audit", "interval", "cost")
    print(f"\n{'batch x context':>18}" + "".join(f"{head:>12}" for head in heads))
    for row in rows:
        times = (row["step_ms"], row["copies_ms"], row["audit_ms"])
        print(
            f"{row['batch']:>6} x {row['context']:<9}"
            + "".join(f"{time:>9.3f} ms" for time in times)
            + f"{row['interval']:>12}{row['cost_percent']:>10.2f} %"
        )


if __name__ == "__main__":
    raise SystemExit(main())
