"""The adapter to the author's kernels: state, inputs and calls of one case, timed in this process.

    python benchmark/author_kernels.py JOB EVENTS            # author_runs.py writes the job
    python benchmark/author_kernels.py --build score|select|eigenvectors|attend [TILE]

Nothing of the package is copied or replaced: records are its own (`Rki4State`), and what is timed are
`rki4_score_only` (score), `rki4_select_only` and `topb_select_cuda` (select: shares and the choice),
`sparse_paged_decode_batched_cuda` or its Triton twin, whichever is faster (attend), and
`rki4_build_bulk` (summarize).  `derive_page_params`, which it runs once a step for all layers, is not
timed.  The package attends its budget plus the sink and the last page, so it is given two pages less.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import statistics
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from graph_timing import graph_us
from kernel_case import PAGE, Case, row
from locks_kernels import Selection, Summaries, SummaryLayout, attend, score_select, summarize

SPLIT = 128  # parts of a row that its plugin allots (backend/builder.py)
SUMMARIZE_AT_ONCE = 4096  # pages; torch's batched eigensolver fails at 65,536 matrices
# Below this share of common pages (the two average over query heads differently) it is not the same work.
LEAST_OVERLAP = 0.35
MOST_ERROR = 0.02


class AuthorLayer:
    """State of the package and inputs for one case; every layer of the state is a set of records.

    Attributes:
        state: its `Rki4State`; page ids are those of `block_table`.
        views: a copy of the state for each set, with a selection of its own.
        pool: bf16 ``[2, pages, page, kv_heads, d]``, keys and values, or None.
    """

    def __init__(self, case: Case, sets: int, device: str = "cuda", with_values: bool = False):
        from locks.attention import ResidentVSource, ensure_stage_b_buffers
        from locks.selection import Rki4State

        self.case = case
        pages = case.batch * case.row_pages
        Rki4State.validate_geometry(head_dim=case.head_dim, G=case.group, page=PAGE)
        self.state: Any = Rki4State(
            device,
            num_layers=sets,
            num_blocks=pages,
            n_kv=case.kv_heads,
            G=case.group,
            head_dim=case.head_dim,
            page=PAGE,
            max_reqs=case.batch,
            max_pages=case.row_pages,
            budget_pages=case.budget_pages - 2,
            sink_pages=1,
            window_pages=1,
        )
        self.state.D, self.state.scale = case.head_dim, None
        ensure_stage_b_buffers(self.state, device, SPLIT)
        self.block_table = torch.randperm(pages, device=device).view(case.batch, case.row_pages).int()
        self.seq_lens = torch.full((case.batch,), case.context - 5, dtype=torch.int32, device=device)
        self.queries = torch.randn(case.batch, case.q_heads, case.head_dim, device=device).bfloat16()
        self.output = torch.empty_like(self.queries)
        self.scale = case.head_dim**-0.5
        self.pool: torch.Tensor | None = None
        if with_values:
            shape = (2, pages, PAGE, case.kv_heads, case.head_dim)
            self.pool = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()
            self.values = ResidentVSource(self.pool)
        self.views = [self.state] * sets

    def fill_random(self) -> None:
        """Codes and scales distributed as in kernel_floor.py: logits of a few units."""
        state = self.state
        state.pp_v4.random_(0, 256)
        for codes in (state.pp_c8, state.pp_mu8):
            codes.random_(-128, 128)
        for scales in (state.pp_vs, state.pp_cs, state.pp_mus):
            scales.copy_(torch.rand(scales.shape, device=scales.device).mul_(0.03))

    def prepare(self) -> None:
        """What the package does once a step, and a selection of its own for every set."""
        from locks.selection import derive_page_params

        derive_page_params(self.state, self.seq_lens, self.case.batch)
        self.path(0)  # allocates scratch that the copies share
        for index in range(len(self.views)):
            view = copy.copy(self.state)
            view.page_table, view.page_cnt = view.page_table.clone(), view.page_cnt.clone()
            self.views[index] = view
            self.path(index)

    def build(self, keys: torch.Tensor, layer: int = 0) -> None:
        """Records of all complete pages from keys ``[pages, page, kv_heads, d]``, into the first layer."""
        from locks.selection import rki4_build_bulk

        rki4_build_bulk(
            self.views[layer],
            [keys],
            self.block_table,
            self.seq_lens,
            self.case.batch,
            self.case.context // PAGE,
        )

    def score(self, index: int) -> None:
        from locks.selection.rki4_score_cuda import rki4_score_only

        rki4_score_only(
            self.views[index],
            index,
            self.queries,
            self.block_table,
            self.seq_lens,
            self.case.batch,
            self.scale,
        )

    def select(self, index: int) -> None:
        from locks.selection.rki4_score_cuda import rki4_select_only
        from locks.selection.select_cuda import topb_select_cuda

        rki4_select_only(self.views[index], self.case.batch)
        topb_select_cuda(self.views[index], self.case.batch)

    def path(self, index: int) -> None:
        self.score(index)
        self.select(index)

    def attend(self, index: int, cuda: bool) -> None:
        from locks.attention import decode, decode_cuda

        function = (
            decode_cuda.sparse_paged_decode_batched_cuda if cuda else decode.sparse_paged_decode_batched
        )
        function(
            self.queries,
            self.pool,
            self.block_table,
            self.seq_lens,
            self.views[index],
            self.output,
            self.values,
            scale=self.scale,
        )

    def layer(self, index: int, cuda: bool) -> None:
        self.path(index)
        self.attend(index, cuda)

    def selection(self, index: int) -> Selection:
        """Its choice in the terms of locks_kernels."""
        view, width = self.views[index], self.case.budget_pages
        counts = view.page_cnt
        if not bool((counts == width).all()):
            raise ValueError(
                f"selected {int(counts.min())} to {int(counts.max())} pages instead of {width}"
            )
        logical = view.page_table[:, :, :width].contiguous()
        rows = torch.arange(len(logical), device=logical.device)[:, None, None]
        return Selection(self.block_table[rows, logical.long()], logical, counts[:, 0].contiguous())


def tasks(case: Case, ops: Sequence[str], origin: str) -> Iterator[tuple[str, Callable[[int], dict]]]:
    """What to time for a case: a name and a function from repeats to a row.

    attend and layer come twice, with the package's CUDA kernel and with its Triton kernel.
    """
    path = {
        "score": "rki4_score_only",
        "select": "rki4_select_only",
        "path": "rki4_score_only + rki4_select_only",
    }
    if any(op in ops for op in path):
        layer = AuthorLayer(case, case.sets)
        layer.fill_random()
        layer.prepare()
        for op in path:
            if op in ops:
                calls = [partial(getattr(layer, op), index) for index in range(case.sets)]
                yield op, partial(timed_row, case, op, calls, f"{origin}; {path[op]}")
        del layer
    if "attend" in ops or "layer" in ops:
        layer = AuthorLayer(case, case.sets, with_values=True)
        layer.fill_random()
        layer.prepare()
        for op in ("attend", "layer"):
            for kind, cuda in (("CUDA", True), ("Triton", False)) if op in ops else ():
                calls = [partial(getattr(layer, op), index, cuda) for index in range(case.sets)]
                note = f"{origin}; {kind} sparse_paged_decode_batched"
                yield f"{op} ({kind})", partial(timed_row, case, op, calls, note)
        del layer
    if "summarize" in ops:
        layer = AuthorLayer(case, 1)
        keys = torch.randn(case.batch * case.row_pages, PAGE, case.kv_heads, case.head_dim, device="cuda")
        calls = [partial(layer.build, keys.bfloat16())]
        note = f"{origin}; rki4_build_bulk"
        yield "summarize", partial(timed_row, case, "summarize", calls, note, graph=False)


def timed_row(
    case: Case, op: str, calls: Sequence[Callable[[], object]], note: str, repeats: int, graph: bool = True
) -> dict:
    """A row timed in a CUDA graph or, where the op cannot be captured, with events around a loop."""
    if graph:
        try:
            return row(case, op, "locks-kv", case.moved(op), graph_us(calls, repeats), note)
        except RuntimeError as error:
            torch.cuda.synchronize()
            note = f"{note}; not capturable ({first_line(error)})"
    return row(
        case, op, "locks-kv", case.moved(op), loop_us(calls, repeats), f"{note}; events around a loop"
    )


def loop_us(calls: Sequence[Callable[[], object]], repeats: int) -> tuple[float, float, float]:
    """Median, least and most microseconds a call without a graph: the launches count, too."""
    times = []
    for _ in range(2 + repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for call in calls:
            call()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / len(calls))
    return statistics.median(times[2:]), min(times[2:]), max(times[2:])


def compare(case: Case, device: str = "cuda") -> str:
    """Both on the same keys: the share of common pages, and its output against fp32 over its own pages.

    Raises:
        ValueError: so little in common that times would not be of the same work.
    """
    layer = AuthorLayer(case, 1, device, with_values=True)
    assert layer.pool is not None
    # Pages that differ from one another, so that there is something to choose.
    layer.pool[0] += torch.randn(layer.pool.shape[1], 1, *layer.pool.shape[3:], device=device).bfloat16()
    keys, values = layer.pool
    layer.build(keys)
    layer.prepare()
    theirs = layer.selection(0)
    layer.attend(0, cuda=device == "cuda")

    records = Summaries.allocate(
        SummaryLayout.parse(case.format, case.head_dim, PAGE), (1, len(keys), case.kv_heads), device
    )
    slots = torch.arange(PAGE - 1, len(keys) * PAGE, PAGE, device=device)
    for part in slots.split(SUMMARIZE_AT_ONCE):
        summarize([keys], part, records, impl="torch")
    budgets = torch.full_like(layer.seq_lens, case.budget_pages)
    ours = score_select(
        layer.queries,
        keys,
        records.layer(0),
        layer.block_table,
        layer.seq_lens,
        budgets,
        layer.scale,
        width=case.budget_pages,
    )
    expected, _ = attend(
        layer.queries, keys, values, theirs, layer.block_table, layer.seq_lens, layer.scale, impl="torch"
    )
    common = overlap(theirs.logical, ours.logical)
    error = float((layer.output.float() - expected.float()).abs().max())
    found = (
        f"{case.model} at {case.context} x {case.batch}: {100 * common:.0f} % of its pages are ours, "
        f"its output is within {error:.1e} of fp32's over its pages"
    )
    if common < LEAST_OVERLAP or not error < MOST_ERROR:
        raise ValueError(f"{found}: not the same work, so no times")
    return found


def overlap(theirs: torch.Tensor, ours: torch.Tensor) -> float:
    """Share of common pages in page lists ``[rows, kv_heads, k]``."""
    return float((theirs.unsqueeze(-1) == ours.unsqueeze(-2)).any(-1).float().mean())


def work(job: dict, tell: Callable[[dict], None]) -> None:
    """Time the cases of a job; each geometry is compared with ours on its shortest case first."""
    origin = f"locks-kv {job['release']}, {job['switches']}"
    cases = [Case(**fields) for fields in job["cases"]]
    for model in dict.fromkeys(case.model for case in cases):
        chosen = [case for case in cases if case.model == model]
        with telling(model, tell):
            tell({"say": compare(min(chosen, key=lambda case: case.context * case.batch))})
            for case in chosen:
                # Its deployments fold the last digits of the select only from 1M tokens on.
                os.environ["LOCKS_SEL_FINFIX"] = str(int(case.context >= 2**20))
                place = f"{model} at {case.context} x {case.batch}"
                with telling(place, tell):
                    for name, timed in tasks(case, job["ops"], origin):
                        with telling(f"{place}, {name}", tell):
                            tell({"row": timed(job["repeats"])})
                torch.cuda.empty_cache()


@contextmanager
def telling(what: str, tell: Callable[[dict], None]) -> Iterator[None]:
    """Tell of an error instead of raising it; one of the GPU ends the process, which cannot go on."""
    try:
        yield
    except Exception as error:
        tell({"say": f"{what}: no times: {type(error).__name__}: {first_line(error)}"})
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:300]


def import_package() -> None:
    """Import the package, its vLLM-free modules alone where there is no vLLM.

    The score kernel's build reads compiler flags from `locks.backend._runtime`, which needs no vLLM;
    the `__init__` of that folder does, and is passed over.
    """
    import locks

    if importlib.util.find_spec("vllm") is None:
        folder = types.ModuleType("locks.backend")
        folder.__path__ = [str(Path(locks.__file__).parent / "backend")]
        sys.modules["locks.backend"] = folder


def load(what: str, tile: int = 8) -> None:
    """Compile, or find compiled, a library of the package. RuntimeError if it gives none."""
    from locks.attention import decode_cuda
    from locks.selection import jacobi_dual, rki4_score_cuda, select_cuda
    from torch.utils.cpp_extension import get_default_build_root

    name = os.environ["AUTHOR_SCORE_LIBRARY"] if what == "score" else "common"
    root = Path(os.environ.get("AUTHOR_BUILDS", get_default_build_root()), "locks-kv", name)
    root.mkdir(parents=True, exist_ok=True)
    os.environ["TORCH_EXTENSIONS_DIR"] = str(root)
    library = {
        "score": rki4_score_cuda._get,
        "select": select_cuda._get,
        "eigenvectors": jacobi_dual._mod,
        "attend": partial(decode_cuda._get, gtile=tile),
    }[what]()
    if library is None:
        raise RuntimeError(f"error: locks-kv gave no library for {what}")


def main() -> None:
    torch.manual_seed(0)
    import_package()
    if sys.argv[1] == "--build":
        load(sys.argv[2], *map(int, sys.argv[3:]))
        return
    job = json.loads(sys.argv[1])
    with open(sys.argv[2], "a", buffering=1) as events:
        tell = lambda event: print(json.dumps(event), file=events)  # noqa: E731
        for what in ("score", "select", "eigenvectors"):
            load(what)
        work(job, tell)


if __name__ == "__main__":
    main()
