"""A layer of a short context, as a decode step meets it: selecting, attending everything, dense.

    python benchmark/short_context.py --out benchmark/results

One layer of GLM-4-9B-Chat-1M in a CUDA graph, each call behind a product with a weight
matrix larger than the L2 cache: in a model the weights push keys, records and code out of it.  The
time is what a call adds to the product alone.  The page table has room for 1M tokens, as in a server.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import grid
import kernel_floor
import results_file
import torch
from graph_timing import graph_us
from kernel_floor import Case, Inputs
from locks_kernels import ATTEND_ALL

GRID = grid.named([(batch, context) for batch in (1, 4, 16) for context in (4096, 8192, 16_384, 32_768)])
MODEL = "glm4-9b-1m"
TABLE_TOKENS = 2**20
CALLS = 12


class Behind:
    """Times calls that each follow a product with a weight matrix."""

    def __init__(self) -> None:
        self.weights = kernel_floor.bf16(13_696, 4096)
        self.vector = kernel_floor.bf16(4096, 1)
        self.small = torch.zeros(64, device="cuda")
        self.alone = graph_us([self.product] * CALLS)[0]

    def product(self) -> None:
        torch.matmul(self.weights, self.vector)
        self.small.add_(1)  # as small as the kernels between a projection and the attention

    def us(self, call: Callable[[], object]) -> tuple[float, float, float]:
        def both() -> None:
            self.product()
            call()

        median, least, most = graph_us([both] * CALLS)
        return median - self.alone, least - self.alone, most - self.alone


def measure(context: int, batch: int, form: str, budget: int, behind: Behind) -> list[dict]:
    geometry, budget_pages = kernel_floor.GEOMETRIES[MODEL], budget // kernel_floor.PAGE
    case = Case(MODEL, *geometry, context, batch, form, budget_pages, TABLE_TOKENS)
    inputs = Inputs(case, with_values=True)
    rows = []
    dense = kernel_floor.flashinfer_call(inputs)
    if dense is not None:
        rows.append(kernel_floor.row(case, "dense", "flashinfer", 0, behind.us(dense)))
    for op, pages in (("select", case.budget_pages), ("everything", ATTEND_ALL)):
        inputs.budgets.fill_(pages)
        rows.append(kernel_floor.row(case, op, "cuda", 0, behind.us(partial(inputs.layer, 0))))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--grid", type=grid.parse, default=GRID, help=grid.HELP)
    parser.add_argument("--format", default="r6h")
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--commit", help="commit to name in the results")
    parser.add_argument("--machine", default="h200", help="short machine name in the file's name")
    parser.add_argument("--out", type=Path, help="folder to write the results file to")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("short_context needs an NVIDIA GPU")
    behind = Behind()
    rows = []
    for batch, context in arguments.grid:
        found = measure(context, batch, arguments.format, arguments.budget, behind)
        rows += found
        times = "  ".join(f"{row['op']} {row['us']:.1f}" for row in found)
        print(f"{batch:>3} x {context:>6} tokens, us: {times}", flush=True)
    if arguments.out:
        path = results_file.write(
            "short_context",
            rows,
            machine_name=arguments.machine,
            out=arguments.out,
            made_from=arguments.commit,
            copy_tb_s=results_file.copy_rate_tb_s(2),
        )
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
