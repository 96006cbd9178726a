"""The command ``python -m locks_sglang plan``: its options, its rows, its screen."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from locks_kernels.layout import PAGE_SIZES

from .. import __version__
from ..config import DEFAULT_PAGE_SIZE, LocksConfig, LocksError
from ..tier.capacity import STEPS_HELD
from . import capacity, costs
from .machines import MACHINES, Machine
from .model import PlanModel, read
from .step import TIERS, step_bytes, step_ms

PREDICTED, PLANNED = "predicted", "planned"
"""What a row is: from costs and rates measured on this kind of GPU, or with some that others published."""
HOT_SHARE = 0.9
_GIB = 2**30
_WIDTH = 110


def make_parser() -> argparse.ArgumentParser:
    defaults = LocksConfig()
    parser = argparse.ArgumentParser(
        prog="python -m locks_sglang plan",
        description="What a GPU can serve of a model, and how fast: dense, sparse with the KV cache on the "
        "GPU, and sparse with it in host memory (the host tier). Predicted where rates were measured on "
        "this kind of GPU, else planned.",
    )
    parser.add_argument(
        "--model", type=Path, required=True, metavar="PATH", help="config.json or the folder that holds it"
    )
    parser.add_argument("--gpu", choices=MACHINES, required=True)
    parser.add_argument(
        "--context", type=int, required=True, metavar="TOKENS", help="of a request, its answer included"
    )
    parser.add_argument("--tp", type=int, default=1, metavar="RANKS", help="default: %(default)s")
    parser.add_argument("--format", default=defaults.summary, help="record format (default: %(default)s)")
    parser.add_argument(
        "--budget", type=int, default=defaults.budget, metavar="TOKENS", help="default: %(default)s"
    )
    parser.add_argument(
        "--page-size", type=int, choices=PAGE_SIZES, default=DEFAULT_PAGE_SIZE, help="default: %(default)s"
    )
    parser.add_argument(
        "--batch", type=int, metavar="REQUESTS", help="at a time (default: as many as each way holds)"
    )
    parser.add_argument(
        "--hot-share",
        type=float,
        default=HOT_SHARE,
        metavar="SHARE",
        help="of the selected pages, that the host tier finds on the GPU (default: %(default)s)",
    )
    parser.add_argument(
        "--host-gib", type=float, metavar="GIB", help="host memory for each GPU (default: the machine's)"
    )
    parser.add_argument(
        "--weights-gib", type=float, metavar="GIB", help="where they cannot be counted; all ranks together"
    )
    parser.add_argument(
        "--mem-fraction-static",
        type=float,
        default=0.88,
        metavar="SHARE",
        help="of the GPU's memory for weights and caches, as SGLang's flag (default: %(default)s)",
    )
    parser.add_argument("--output-json", action="store_true", help="print JSON instead of the screen")
    return parser


def main(argv: list[str]) -> int:
    """Run the command; the result is the exit status: 0, or 1 for an option that is wrong."""
    arguments = make_parser().parse_args(argv)
    try:
        plan = make_plan(arguments)
    except LocksError as error:
        print(f"plan: {error}", file=sys.stderr)
        return 1
    print(json.dumps(plan, indent=1) if arguments.output_json else render(plan))
    return 0


def make_plan(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything that is printed: model, machine, assumptions, and a row for each tier.

    Raises:
        LocksError: an option is wrong; the message names the legal values.
    """
    config = LocksConfig(
        selector="locks", summary=arguments.format, budget=arguments.budget, page_size=arguments.page_size
    )
    config.validate()
    model = read(arguments.model, arguments.tp, arguments.weights_gib)
    _check(arguments, model)
    machine = MACHINES[arguments.gpu]
    if arguments.host_gib is not None:
        machine = replace(machine, host_bytes=int(arguments.host_gib * _GIB))
    rows = [_row(tier, model, machine, config, arguments) for tier in TIERS]
    return {
        "version": __version__,
        "model": asdict(model) | {"kv_bytes": model.kv_bytes},
        "machine": machine.name,
        "tp": arguments.tp,
        "assumptions": _assumptions(machine, arguments, rows),
        "rows": rows,
    }


def _check(arguments: argparse.Namespace, model: PlanModel) -> None:
    if not 1 <= arguments.context <= model.context:
        raise LocksError(f"--context is {arguments.context}; legal: 1 to {model.context}, the model's")
    for name in ("hot_share", "mem_fraction_static"):
        if not 0 <= getattr(arguments, name) <= 1:
            flag = "--" + name.replace("_", "-")
            raise LocksError(f"{flag} is {getattr(arguments, name)}; legal: 0 to 1")
    for name in ("batch", "host_gib", "weights_gib"):
        value = getattr(arguments, name)
        if value is not None and value <= 0:
            raise LocksError(f"--{name.replace('_', '-')} is {value}; legal: more than 0")


def _row(
    tier: str, model: PlanModel, machine: Machine, config: LocksConfig, arguments: argparse.Namespace
) -> dict[str, Any]:
    """A row as those of result files; bytes and memory are of one rank."""
    context, share = arguments.context, arguments.mem_fraction_static
    largest = capacity.largest_batch(model, config, machine, tier, context, share)
    batch = arguments.batch or largest
    memory = capacity.need(model, config, tier, batch, context)
    moved = step_bytes(model, config, tier, batch, context, arguments.hot_share)
    itl = step_ms(model, machine, costs.load(), moved, tier, batch)
    return {
        "tier": tier,
        "source": PREDICTED if machine.measured else PLANNED,
        "format": None if tier == "dense" else config.summary,
        "budget": None if tier == "dense" else config.budget,
        "context": context,
        "batch": batch,
        "largest_batch": largest,
        "fits": 0 < batch <= largest,
        "itl_ms": round(itl, 3),
        "tokens_per_s": round(1e3 * batch / itl, 1),
        "hot_share": arguments.hot_share if tier == "host" else None,
        "bytes_per_step": asdict(moved),
        "link_bytes_per_step": moved.link,
        "gpu_gib": round(memory.gpu / _GIB, 2),
        "host_gib": round(memory.host / _GIB, 2),
        "memory_bytes": asdict(memory),
    }


def _assumptions(machine: Machine, arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> list[str]:
    """What is taken for true, one line each."""
    fixed = f"fixed costs of a step as measured on an NVIDIA H200 ({costs.load().source})"
    if not machine.measured:
        fixed += ", and the same here, whatever the CPU"
    lines = [
        *machine.assumptions,
        fixed,
        "every request has the full context; no prefix is shared; decode alone, no prefill between steps",
        f"host tier: it finds {arguments.hot_share:.0%} of the selected pages on the GPU "
        f"(the paper's Table 3: 89 to 91 %) with a cache of {STEPS_HELD} times what a step "
        "selects; lookup, eviction and copies cost nothing besides their bytes, and no copy overlaps; KV "
        f"takes at most {capacity.HOST_SHARE:.0%} of the host's memory. docs/plan.md has it against "
        "measured steps of an NVIDIA H200 over PCIe",
    ]
    if not machine.measured:
        lines.append("nothing was measured on this machine: the host tier never ran on Grace or over C2C")
    if any(row["batch"] > costs.load().largest_batch for row in rows):
        lines.append(
            f"fixed costs of more than {costs.load().largest_batch} requests at a time: extrapolated"
        )
    if arguments.tp > 1:
        lines.append("communication between ranks is not counted: it was never measured")
    return lines


def render(plan: dict[str, Any]) -> str:
    """The screen."""
    model, rows = plan["model"], plan["rows"]
    ranks = f" x {plan['tp']}" if plan["tp"] > 1 else ""
    per = " (of each rank)" if plan["tp"] > 1 else ""
    lines = [
        f"{model['name']} on {plan['machine']}{ranks}, {rows[0]['context']:,} tokens a request, "
        f"{rows[1]['format']}, budget {rows[1]['budget']:,}",
        f"weights {model['weight_bytes'] / _GIB:.1f} GiB, KV {model['kv_bytes']:,} bytes a token{per}",
        "",
        *_table(
            ["", "source", "batch", "ITL, ms", "tokens/s", "of dense"],
            [
                [
                    row["tier"],
                    row["source"],
                    f"{row['batch']:,}" + ("" if row["fits"] else " (too many)"),
                    f"{row['itl_ms']:.2f}" if row["batch"] else "-",
                    f"{row['tokens_per_s']:,.0f}",
                    f"{row['tokens_per_s'] / rows[0]['tokens_per_s']:.2f}x" if rows[0]["batch"] else "-",
                ]
                for row in rows
            ],
        ),
        "",
        *_table(
            ["GiB", "weights", "KV", "summaries", "buffers", "hot cache", "GPU", "host"],
            [_cells(row["tier"], row["memory_bytes"], _GIB, row["gpu_gib"]) for row in rows],
        ),
        "",
        *_table(
            ["GB a step", "weights", "records", "KV", "to GPU", "to host"],
            [
                [row["tier"], *(f"{count / 1e9:.3f}" for count in row["bytes_per_step"].values())]
                for row in rows
            ],
        ),
        "",
        "Taken for true:",
    ]
    for line in plan["assumptions"]:
        lines += textwrap.wrap(line, _WIDTH, initial_indent="- ", subsequent_indent="  ")
    return "\n".join(lines)


def _cells(tier: str, memory: dict[str, int], unit: int, gpu: float) -> list[str]:
    parts = [f"{memory[name] / unit:.1f}" for name in ("weights", "kv", "summaries", "buffers", "hot")]
    return [tier, *parts, f"{gpu:.1f}", f"{memory['host'] / unit:.1f}"]


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Columns as wide as their widest cell; the first ones to the left, numbers to the right."""
    widths = [max(len(line[column]) for line in [head, *rows]) for column in range(len(head))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in [head, *rows]
    ]
