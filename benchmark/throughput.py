"""Throughput and latency of SGLang servers, dense and sparse, one after another under one memory cap.

    python benchmark/throughput.py --model-path MODEL

Every variant is a server of its own on the same GPU, started with the same flags (everything that is not
listed below goes to SGLang, such as ``--mem-fraction-static`` or ``--max-total-tokens``) and driven by
SGLang's own serving benchmark with the same prompts.  The prefix cache is emptied before every case, and
what it gave is a column.  After every case the server must say that it decoded sparse (or, dense, that it
did not); otherwise the run ends with an error.  Steps that would leave little out run dense in a sparse
server, unless ``--sparse-decode-dense-below 0`` is given; the table marks the cases that mostly did with a
D.  The result file is written after every case; at the end comes a figure of the cases that ran both dense
and sparse.

On an H200, with the geometry of GLM-4-9B-Chat-1M and dummy weights (a folder with a ``config.json``, such
as those of benchmark/models, is enough; the tokenizer is made here), the default grid of 32K and 128K
tokens of context:

    python benchmark/throughput.py --model-path glm4-9b-1m-kv4 --load-format dummy \\
        --mem-fraction-static 0.85 --disable-prefill-cuda-graph

``--gpu-gib 95.6 --host-gib 230 --variants dense:fa3,host:r4i4`` compares with a KV cache in host memory, on
a GPU as small as a GH200's.  ``--append FILE`` takes along the rows of an earlier run's file, so that
variants can be measured in several calls.  On a CPU, with the demo model:

    python benchmark/throughput.py --model-path .models/SmolLM2-135M-Instruct --machine-name cpu \\
        --budget 512 --variants dense:torch_native,locks:r6h --grid 2x2048x32
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import results_file
import torch
from gpu_memory import ballast, in_use_gib
from locks_sglang.dense_steps import left_out
from result_rows import SERVED_CASE, compared, served_by, served_gains
from serving import word_tokenizer
from serving.load import WORKLOADS, Case, drive
from serving.server import LoadWatch, Server, ServerFailed, launched, on_gpu, stop_when_told_to_end
from serving.variants import Variant

VARIANTS = "dense:fa3,dense:flashinfer,locks:r6h,locks:r4i4"
# Estimated: four to five minutes a variant on an H200, most of it prefill.
GRID = (
    "random:1x32768x256,random:4x32768x256,random:16x32768x256,shared-prefix:32x32768x256,multi-turn:8x32768x128,"
    "random:4x131072x256,shared-prefix:8x131072x256"
)
# Of the decode rows that the requests' lengths imply. SGLang may run some more.
SPARSE_ROWS_NEEDED = 0.98
WARM_UP_TOKENS = 16384
# What a row holds as its median over the repetitions, with _min and _max beside it.
MEASURED = ("tokens_per_s", "ttft_ms", "ttft_p99_ms", "itl_ms", "itl_p99_ms", "duration_s")
KEY = ("variant", *SERVED_CASE)

Row = dict[str, Any]


def parse_arguments(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--variants",
        default=VARIANTS,
        help="dense:BACKEND or SELECTOR[:FORMAT[:BACKEND]], ...; host is locks with its KV in host memory",
    )
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="of grid entries that name none")
    parser.add_argument("--grid", default=GRID, help="[WORKLOAD:]CLIENTSxCONTEXTxOUTPUT, ...")
    parser.add_argument("--requests", type=int, default=1, help="prompts (conversations) per client")
    parser.add_argument("--repeats", type=int, default=1, help="runs of every case; the median counts")
    parser.add_argument("--budget", type=int, default=2048, help="tokens attended per KV head")
    parser.add_argument("--host-gib", type=float, help="host memory for the KV cache of host variants")
    parser.add_argument("--gpu-gib", type=float, help="leave no more than this of the GPU to the servers")
    parser.add_argument("--url", help="VARIANT=URL, ...: servers that are up already; starts none")
    parser.add_argument("--tokenizer", help="folder; default: the model's, or one made for dummy weights")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--append", type=Path, help="result file whose other rows are kept")
    parser.add_argument("--out", type=Path, help="folder of the result file, the figure and the logs")
    parser.add_argument("--machine-name", default="h200")
    parser.add_argument("--commit", help="commit to write down where git is not there")
    return parser.parse_known_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments, flags = parse_arguments(argv)
    cases = parse_cases(arguments)
    earlier = results_file.read(arguments.append)
    given = dict(pair.split("=", 1) for pair in arguments.url.split(",")) if arguments.url else {}
    names = list(given) or arguments.variants.split(",")
    backend = "fa3" if on_gpu() else "torch_native"
    variants = [Variant.parse(name, backend) for name in names]
    logs = (arguments.out or Path(tempfile.mkdtemp(prefix="throughput-"))) / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    results_file.machine()  # before any server, so that what it takes of the GPU is the same for all
    held = ballast(arguments.gpu_gib)
    rows: list[Row] = []
    for number, variant in enumerate(variants, 1):
        say(f"[{number}/{len(variants)}] {variant.name}")
        with server_of(variant, given, arguments, flags, cases, logs) as (server, tokenizer):
            for row in measured(server, variant, cases, tokenizer, arguments, logs, held):
                rows.append(row)
                # After every case, so that a run that is cut short is not lost.
                write(rows, arguments, earlier, copy_rate=None)
    del held
    if not rows:
        say(f"no case of {arguments.grid} fitted into the pool of any variant; nothing is written")
        return 1
    path = write(rows, arguments, earlier, copy_rate=results_file.copy_rate_tb_s())
    both = results_file.merged(earlier, rows, KEY)
    rows = [row for row in both if row["model"] == rows[0]["model"]]
    print_table(rows)
    say(f"written to {path}; logs in {logs}")
    draw(rows, logs.parent / f"{path.stem}.svg")
    return 0


def parse_cases(arguments: argparse.Namespace) -> list[Case]:
    cases = []
    for entry in arguments.grid.split(","):
        *workload, numbers = entry.split(":")
        concurrency, context, output = map(int, numbers.split("x"))
        for name in workload or arguments.workloads.split(","):
            cases.append(Case(name, concurrency, context, output, concurrency * arguments.requests))
            cases[-1].check()
    return cases


@contextmanager
def server_of(
    variant: Variant,
    given: dict[str, str],
    arguments: argparse.Namespace,
    flags: list[str],
    cases: list[Case],
    logs: Path,
) -> Iterator[tuple[Server, str | None]]:
    """The variant's server, warm, and the tokenizer folder for its prompts (None: the server knows)."""
    warm_up = min(WARM_UP_TOKENS, max(case.context for case in cases))
    if variant.name in given:
        yield Server(given[variant.name].rstrip("/")), arguments.tokenizer
        return
    tokenizer = arguments.tokenizer or tokenizer_for(flags)
    most = max(case.concurrency for case in cases)
    own = [*variant.flags(arguments.budget, arguments.host_gib), "--max-running-requests", str(most)]
    if on_gpu():
        own += ["--cuda-graph-max-bs-decode", str(most)]
        if not {"--mem-fraction-static", "--max-total-tokens"} & set(flags):
            own += ["--mem-fraction-static", "0.85"]
    own += ["--tokenizer-path", tokenizer] if tokenizer else []
    begun = time.monotonic()
    with launched([*own, *flags], logs / f"server-{variant.name.replace(':', '-')}.log") as server:
        say(f"  up after {time.monotonic() - begun:.0f} s")
        server.warm_up(warm_up, requests_together=min(most, 4) if on_gpu() else 1)
        yield server, tokenizer


def tokenizer_for(flags: list[str]) -> str | None:
    """A tokenizer made for a model with dummy weights; None where the model has its own."""
    if "dummy" not in flags or "--model-path" not in flags:
        return None
    model = Path(flags[flags.index("--model-path") + 1])
    return str(word_tokenizer.write(model, Path(tempfile.gettempdir()) / f"words-{model.name}"))


def measured(
    server: Server,
    variant: Variant,
    cases: list[Case],
    tokenizer: str | None,
    arguments: argparse.Namespace,
    logs: Path,
    held: torch.Tensor,
) -> Iterator[Row]:
    """Rows of a variant's cases, as each is done."""
    check_what_runs(server, variant)
    info = server.get("/server_info")
    locks = server.locks()
    pool = server.load()["max_total_num_tokens"]
    for case in cases:
        if locks and case.first_prompt <= locks["budget"]:
            raise ServerFailed(
                f"{case}: the budget of {locks['budget']} covers a prompt, so nothing is sparse"
            )
        if case.context + case.output > pool:
            say(f"  {case}: does not fit into the pool of {pool:,} tokens; not run")
            continue
        log = logs / f"load-{variant.name.replace(':', '-')}.log"
        runs = [
            measure(server, variant, case, tokenizer, arguments.seed + i, log)
            for i in range(arguments.repeats)
        ]
        row = {
            "variant": variant.name,
            "backend": variant.backend if variant.dense else variant.selector,
            "tier": variant.tier,
            "format": locks and locks["format"],
            "budget": locks and locks["budget"],
            "model": Path(info["model_path"]).name,
            "tp": info["tp_size"],
            "workload": case.workload,
            "context": case.context,
            "output": case.output,
            "concurrency": case.concurrency,
            "requests": case.requests,
            "kv_tokens": pool,
            "gpu_gib": in_use_gib(held),
            "host_gib": round(locks["host_bytes"] / 2**30, 2) if variant.tier == "host" else None,
            "source": "measured",
            **merge(runs),
        }
        yield row
        say(
            f"  {case}: {row['tokens_per_s']:.1f} tokens/s, TTFT {row['ttft_ms']:.0f} ms, "
            f"ITL {row['itl_ms']:.2f} ms, batch {row['batch']}, {row['cached_share']:.0%} cached"
        )


def check_what_runs(server: Server, variant: Variant) -> None:
    """ServerFailed where a server's flags are not the variant's."""
    locks = server.locks()
    if variant.dense:
        if locks is not None:
            raise ServerFailed(f"{variant.name}: the server decodes sparse ({locks['selector']})")
    elif locks is None:
        raise ServerFailed(f"{variant.name}: the server is dense; it has no locks section in /server_info")
    elif locks["selector"] != variant.selector or variant.form not in (None, locks["format"]):
        raise ServerFailed(f"{variant.name}: the server runs {locks['selector']}:{locks['format']}")
    elif (locks.get("kv_tier") == "host") != (variant.tier == "host"):
        raise ServerFailed(f"{variant.name}: the server's KV tier is {locks.get('kv_tier', 'gpu')}")


def measure(
    server: Server, variant: Variant, case: Case, tokenizer: str | None, seed: int, log: Path
) -> dict[str, Any]:
    """One run of one case from an empty cache."""
    server.flush_cache()
    before, rows_before = server.token_counts(), server.locks()
    with LoadWatch(server) as watch:
        result = drive(server.url, case, tokenizer, seed, log)
    after, rows_after = server.token_counts(), server.locks()
    prompt = after["prompt"] - before["prompt"]
    run = {
        "tokens_per_s": round(result["output_throughput"], 3),
        "ttft_ms": round(result["median_ttft_ms"], 2),
        "ttft_p99_ms": round(result["p99_ttft_ms"], 2),
        "itl_ms": round(result["median_itl_ms"], 3),
        "itl_p99_ms": round(result["p99_itl_ms"], 3),
        "duration_s": round(result["duration"], 2),
        "batch": watch.largest,
        "batch_mean": watch.mean_batch and round(watch.mean_batch, 2),
        "prompt_tokens": round(prompt / result["completed"], 1),
        "cached_share": round((after["cached"] - before["cached"]) / prompt, 4),
    }
    if rows_before is not None and rows_after is not None:
        sparse, dense = (rows_after[name] - rows_before[name] for name in ("rows_sparse", "rows_dense"))
        check_rows(variant, case, sparse, dense, result["completed"], rows_after)
        run |= {"rows_sparse": sparse, "rows_dense": dense}
        run["dense_rows_share"] = round(dense / (sparse + dense), 3)
        run |= tier_columns(rows_before, rows_after)
    return run


def check_rows(
    variant: Variant, case: Case, sparse: int, dense: int, completed: int, locks: dict[str, Any]
) -> None:
    """ServerFailed where a server did not decode as it should for the lengths of `case`.

    `sparse` and `dense` rows were decoded by a server that runs a step dense where it would leave out fewer
    than ``dense_below`` tokens (`locks` is its part of ``/server_info``). A case whose prompts each leave
    out as many must be sparse throughout, one whose requests never do dense throughout; between them both
    may occur.
    """
    below, budget = locks["dense_below"], locks["budget"]
    due = SPARSE_ROWS_NEEDED * completed * (case.output - 1)
    stray = (1 - SPARSE_ROWS_NEEDED) * (sparse + dense)
    if left_out(torch.tensor([case.first_prompt]), budget) >= below:
        good = sparse >= due and dense <= stray
    elif left_out(torch.full((case.concurrency,), case.context + case.output), budget) < below:
        good = dense >= due and sparse <= stray
    else:
        good = sparse + dense >= due
    if not good:
        raise ServerFailed(
            f"{variant.name}, {case}: {sparse} sparse and {dense} dense rows decoded by a server that runs "
            f"steps dense that would leave out fewer than {below} tokens; at least {due:.0f} were due"
        )


def tier_columns(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What a host tier served from its hot tiles, and the bytes that crossed the link, prefill included."""
    if "hot_hits" not in after:
        return {}
    names = ("hot_hits", "hot_misses", "host_bytes_read", "host_bytes_written", "prefills_unstaged")
    done = {name: after[name] - before[name] for name in names}
    hits, misses = done.pop("hot_hits"), done.pop("hot_misses")
    return {"hot_share": round(hits / (hits + misses), 4) if hits + misses else None, **done}


def merge(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the measured figures with their spread; the rest from the last run."""
    merged = dict(runs[-1])
    for name in MEASURED:
        values = [run[name] for run in runs]
        merged |= {name: statistics.median(values), f"{name}_min": min(values), f"{name}_max": max(values)}
    return merged


def write(
    rows: list[Row], arguments: argparse.Namespace, earlier: dict[str, Any] | None, copy_rate: float | None
) -> Path:
    """Write the result file of the rows measured so far, with those of an earlier run."""
    return results_file.write(
        "throughput",
        results_file.merged(earlier, rows, KEY),
        machine_name=arguments.machine_name,
        out=arguments.out,
        made_from=arguments.commit,
        copy_tb_s=copy_rate,
        earlier=earlier,
    )


def print_table(rows: list[Row]) -> None:
    """All rows; the last two columns compare with the faster dense backend of the same case.

    A sparse variant's D: most of the case's rows were decoded in dense steps.
    """
    head = f"{'workload':>14}{'clients x context + output':>28}{'variant':>26}{'TTFT ms':>10}{'ITL p50':>9}"
    say(f"\n{head}{'p99':>9}{'tokens/s':>10}{'batch':>7}{'cached':>8}{'tokens/s':>10}{'ITL':>8}")
    for row in sorted(rows, key=lambda row: (row["workload"], row["context"], row["concurrency"])):
        gains = served_gains(row, rows)
        ratios = [f"{gain:.2f}x" for gain in gains] if gains else ["-", "-"]
        where = f"{row['concurrency']} x {row['context']:,} + {row['output']}"
        say(
            f"{row['workload']:>14}{where:>28}{served_by(row):>26}{row['ttft_ms']:>10.0f}{row['itl_ms']:>9.2f}"
            f"{row['itl_p99_ms']:>9.2f}{row['tokens_per_s']:>10.1f}{row['batch']:>7}{row['cached_share']:>8.1%}"
            f"{ratios[0]:>10}{ratios[1]:>8}"
        )


def draw(rows: list[Row], path: Path) -> None:
    """The figure of the cases that ran both dense and sparse; says why where there is none."""
    if not compared(rows):
        say("no figure: no case ran both dense and sparse")
    elif find_spec("matplotlib") is None:
        say("no figure: it needs pip install '.[bench]'")
    else:
        import figures

        figures.throughput(rows, path)
        say(f"figure: {path}")


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    stop_when_told_to_end()
    raise SystemExit(main())
