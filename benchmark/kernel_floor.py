"""Time of every op of one layer beside its floor, the bytes it must move at the copy rate.

    python benchmark/kernel_floor.py                          # everything, as a table
    python benchmark/kernel_floor.py --out results            # and as a file, written after every case
    python benchmark/kernel_floor.py --ops score select --formats r4i4 --grid 1x524288

Medians of CUDA-graph replays.  A graph runs the op once on each of several record sets, more
than the L2 cache holds, on pages in random order; the time is that of the replay over the sets.
In the same run FlashInfer's dense decode is timed where it can be imported, and the kernels of the
paper's author where the package locks-kv can (author_runs.py; it compiles them first).

A server's page table has room for the model's longest request, these only for the case's own; a run
with ``--table-tokens`` and a ``--name`` of its own shows what that costs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import author_runs
import grid
import results_file
import torch
from graph_timing import graph_us
from kernel_case import PAGE, Case, row
from locks_kernels import (
    Selection,
    Summaries,
    SummaryLayout,
    attend,
    cuda_score,
    cuda_select,
    score_select,
    summarize,
)
from locks_kernels.workspace import Workspace

OPS = ("score", "select", "path", "attend", "layer", "summarize", "dense")
GEOMETRIES = {"glm4-9b-1m": (4, 8, 128), "glm4-9b": (2, 16, 128), "llama31-8b": (8, 4, 128)}
GRID = "1x16384,1x32768,1x65536,1x131072,1x262144,1x524288,1x1048576,32x32768,16x65536,8x131072,4x262144"
KEY = ("op", "impl", "model", "kv_heads", "batch", "context", "format")  # what no two rows share


class Inputs:
    """Tensors of a case: several sets of records, one page table in random order."""

    def __init__(self, case: Case, with_values: bool = False):
        self.case = case
        layout = SummaryLayout.parse(case.format, case.head_dim, PAGE)
        self.sets = case.sets
        pages = case.batch * case.row_pages
        self.pool = random_records(layout, (self.sets, pages, case.kv_heads))
        shuffled = torch.randperm(pages, device="cuda")
        self.page_table = torch.zeros(case.batch, case.table_pages, dtype=torch.int32, device="cuda")
        self.page_table[:, : case.row_pages] = shuffled.view(case.batch, case.row_pages)
        self.seq_lens = torch.full((case.batch,), case.context - 5, dtype=torch.int32, device="cuda")
        self.budgets = torch.full((case.batch,), case.budget_pages, dtype=torch.int32, device="cuda")
        self.queries = bf16(case.batch, case.q_heads, case.head_dim)
        shape = (PAGE, case.kv_heads, case.head_dim)
        # Only the current page's keys are read unless the op attends.
        self.keys = bf16(pages, *shape) if with_values else bf16(1, *shape).expand(pages, *shape)
        self.values = bf16(pages, *shape) if with_values else self.keys
        self.scale = case.head_dim**-0.5
        self.workspace = Workspace.allocate(
            max_rows=case.batch,
            q_heads=case.q_heads,
            kv_heads=case.kv_heads,
            max_pages=case.table_pages,
            width=case.budget_pages,
            head_dim=case.head_dim,
            device="cuda",
        )

    def score(self, index: int) -> None:
        cuda_score.score_packed(
            self.queries,
            self.keys,
            self.pool.layer(index),
            self.page_table,
            self.seq_lens,
            self.budgets,
            self.scale,
            self.workspace.scores,
        )

    def select(self, _: int) -> None:
        out = self.workspace
        cuda_select.select(
            out.scores,
            None,
            self.page_table,
            self.seq_lens,
            self.budgets,
            self.case.q_heads,
            PAGE,
            out.pages[: self.case.batch],
            out.logical[: self.case.batch],
            out.counts[: self.case.batch],
        )

    def path(self, index: int) -> Selection:
        return score_select(
            self.queries,
            self.keys,
            self.pool.layer(index),
            self.page_table,
            self.seq_lens,
            self.budgets,
            self.scale,
            width=self.case.budget_pages,
            workspace=self.workspace,
            settled=True,
        )

    def layer(self, index: int) -> None:
        """What a decode step does for one layer: score, select and attend, overlapping."""
        self.attend(self.path(index), self.budgets)

    def attend(self, selection: Selection, budgets: torch.Tensor | None = None) -> None:
        attend(
            self.queries,
            self.keys,
            self.values,
            selection,
            self.page_table,
            self.seq_lens,
            self.scale,
            budgets=budgets,
            workspace=self.workspace,
        )


def copy_of(chosen: Selection) -> Selection:
    return Selection(chosen.pages.clone(), chosen.logical.clone(), chosen.counts.clone())


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(torch.bfloat16)


def random_records(layout: SummaryLayout, lead: tuple[int, ...]) -> Summaries:
    """Random codes with scales that give logits of a few units."""
    pool = Summaries.allocate(layout, lead, "cuda")
    for plane in (pool.basis, pool.coefficients, pool.centroid):
        plane.random_(0, 256)
    pool.scales.copy_(torch.rand(pool.scales.shape, device="cuda").mul_(0.03))
    return pool


def measure(case: Case, ops: list[str], repeats: int) -> Iterator[dict]:
    """Rows of the results file for one case."""
    if any(op in ops for op in ("score", "select", "path")):
        inputs = Inputs(case)
        for op in ("score", "select", "path"):
            if op in ops:
                inputs.path(0)
                function = getattr(inputs, op)
                calls = [partial(function, index) for index in range(inputs.sets)]
                yield row(case, op, "cuda", case.moved(op), graph_us(calls, repeats))
        del inputs
    if any(op in ops for op in ("attend", "layer", "dense")):
        inputs = Inputs(case, with_values=True)
        if "layer" in ops:
            calls = [partial(inputs.layer, index) for index in range(inputs.sets)]
            yield row(case, "layer", "cuda", case.moved("layer"), graph_us(calls, repeats))
        if "attend" in ops:
            # The workspace holds one selection at a time.
            copies = [copy_of(inputs.path(index)) for index in range(inputs.sets)]
            calls = [partial(inputs.attend, chosen) for chosen in copies]
            yield row(case, "attend", "auto", case.moved("attend"), graph_us(calls, repeats))
        if "dense" in ops:
            dense = flashinfer_call(inputs)
            if dense is not None:
                yield row(case, "dense", "flashinfer", case.moved("dense"), graph_us([dense] * 2, repeats))
    if "summarize" in ops:
        yield from measure_summarize(case, repeats)


def measure_summarize(case: Case, repeats: int) -> Iterator[dict]:
    """All pages of one layer at once, as at the end of a prefill."""
    pages = case.batch * case.row_pages
    layout = SummaryLayout.parse(case.format, case.head_dim, PAGE)
    keys = bf16(pages, PAGE, case.kv_heads, case.head_dim)
    records = Summaries.allocate(layout, (1, pages, case.kv_heads), "cuda")
    slots = torch.arange(PAGE - 1, pages * PAGE, PAGE, device="cuda")
    timed = graph_us([lambda: summarize([keys], slots, records)], repeats)
    yield row(case, "summarize", "auto", case.moved("summarize"), timed)


def flashinfer_call(inputs: Inputs) -> Callable[[], object] | None:
    """Dense decode of the same step by FlashInfer, or None where it is not installed."""
    try:
        import flashinfer
    except ImportError:
        return None
    case = inputs.case
    buffer = torch.zeros(256 * 2**20, dtype=torch.uint8, device="cuda")
    indptr = torch.arange(case.batch + 1, dtype=torch.int32) * case.row_pages
    pages = inputs.page_table[:, : case.row_pages].flatten()
    last = torch.full((case.batch,), (case.context - 6) % PAGE + 1, dtype=torch.int32)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        buffer,
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=indptr.cuda(),
        paged_kv_indices_buffer=pages.clone(),
        paged_kv_last_page_len_buffer=last.cuda(),
        backend="fa2",
    )
    wrapper.plan(
        indptr,
        pages,
        last,
        case.q_heads,
        case.kv_heads,
        case.head_dim,
        PAGE,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    output = torch.empty_like(inputs.queries)
    return lambda: wrapper.run(inputs.queries, (inputs.keys, inputs.values), out=output)


def cases(arguments: argparse.Namespace) -> Iterator[Case]:
    for model in arguments.models:
        for name in arguments.formats:
            for batch, context in arguments.grid:
                geometry, pages = GEOMETRIES[model], arguments.budget // PAGE
                yield Case(model, *geometry, context, batch, name, pages, arguments.table_tokens)


def show(result: dict, rate: float) -> dict:
    """Print a row with its floor, which is added to it."""
    us, moved = result["us"], result["bytes"]
    floor = result["floor_us"] = round(moved / rate * 1e-6, 2)
    name = f"{result['op']:<10}{result['impl']:<11}{result['model']:<12}{result['format']:<7}"
    size = f"{result['context']:>8}{result['batch']:>6}{moved / 1e6:>9.1f}"
    ratio = us / max(floor, 1e-3)
    note = f"  {result['note']}" if "note" in result else ""
    print(f"{name}{size}{floor:>9.1f}{us:>9.1f}{ratio:>7.2f}{moved / us * 1e-6:>6.2f}{note}", flush=True)
    return result


class File:
    """The results file of a run, written anew after every case, behind those of ``--append``."""

    def __init__(self, arguments: argparse.Namespace, rate: float):
        self.arguments, self.rate = arguments, rate
        self.earlier = results_file.read(arguments.append)
        self.rows: list[dict] = []

    def write(self) -> Path | None:
        """The path, or None where no folder was given. Rows that were measured again are replaced."""
        if self.arguments.out is None:
            return None
        return results_file.write(
            self.arguments.benchmark,
            results_file.merged(self.earlier, self.rows, KEY),
            machine_name=self.arguments.machine,
            out=self.arguments.out,
            made_from=self.arguments.commit,
            copy_tb_s=self.rate,
            earlier=self.earlier,
        )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--models", nargs="+", choices=list(GEOMETRIES), default=list(GEOMETRIES))
    parser.add_argument("--formats", nargs="+", default=["r4i4", "r8i4"])
    parser.add_argument("--grid", type=grid.parse, default=GRID, help=grid.HELP)
    parser.add_argument("--budget", type=int, default=2048, help="tokens a row attends")
    parser.add_argument("--table-tokens", type=int, default=0, help="room of the page table for each row")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--commit", help="commit to name in the results")
    parser.add_argument("--name", help="of the results file: kernel_floor_NAME")
    parser.add_argument("--machine", default="h200", help="short machine name in the file's name")
    parser.add_argument("--out", type=Path, help="folder to write the results file to")
    parser.add_argument("--append", type=Path, help="results file whose other rows are kept")
    arguments = parser.parse_args(argv)
    try:
        arguments.benchmark = results_file.named("kernel_floor", arguments.name)
    except ValueError as error:
        parser.error(str(error))
    if not torch.cuda.is_available():
        sys.exit("kernel_floor needs an NVIDIA GPU")

    rate = results_file.copy_rate_tb_s(2)
    print(f"copy rate {rate} TB/s")
    print("op        impl       model       format  context batch       MB floor us       us  ratio  TB/s")
    file = File(arguments, rate)
    path = None
    chosen = list(cases(arguments))
    for case in chosen:
        for result in measure(case, arguments.ops, arguments.repeats):
            file.rows.append(show(result, rate))
        path = file.write()
        torch.cuda.empty_cache()
    for result in author_runs.measure(chosen, arguments.ops, arguments.repeats):
        file.rows.append(show(result, rate))
        path = file.write()
    if path:
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
