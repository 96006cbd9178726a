"""Complete decode steps of SGLang, dense and sparse, in one run.

    python benchmark/decode_step.py --model-path MODEL --load-format dummy

Every variant runs in a process of its own, one after another, on the same GPU: the model
runner of SGLang with its CUDA graphs, driven directly, so that the step is all that is
measured.  ``step_ms`` waits for the GPU after every step; ``pipelined_ms`` prepares a step while
the GPU is at the one before, as SGLang's scheduler does by default.  Other streams are kept in use,
so that no variant has shorter gaps between its kernels by chance (``graph_timing.OtherStreams``).
A long context need not be prefilled: the pool is filled with keys and values that differ by layer,
head and page, and the summaries are built by the product's own path.  Steps that would leave little out run
dense unless ``--sparse-decode-dense-below 0`` is given; the table marks them with a D.
``--prefill`` really prefills, to prove that this gives the same step time.  A run that is no plain one
goes to a file of its own: ``decode_step_prefilled``, ``decode_step_profile``, or as ``--name`` says.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grid
import results_file
from result_rows import ran_dense

if TYPE_CHECKING:
    from graph_timing import OtherStreams

GRID = "1x16384,1x32768,1x65536,1x131072,1x262144,1x524288,1x1000000,4x262144,8x131072,16x65536,32x32768"
VARIANTS = "dense:fa3,dense:flashinfer,locks:r4i4,locks:r8i4"
WARM_UP = 6
PIPELINES = 3
SEED = 7
KEY = ("variant", "model", "tp", "fill", "batch", "context")  # what no two rows share
TP_FLAGS = ("--tp-size", "--tp", "--tensor-parallel-size")


def parse_arguments(argv: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--variants", default=VARIANTS, help="dense:BACKEND or SELECTOR:FORMAT[:BACKEND], ..."
    )
    parser.add_argument("--grid", type=grid.parse, default=GRID, help=grid.HELP)
    parser.add_argument("--steps", type=int, default=30, help="measured steps a case; the median counts")
    parser.add_argument("--budget", type=int, default=2048, help="tokens attended per KV head")
    parser.add_argument("--prefill", action="store_true", help="really prefill, in chunks of 8192 tokens")
    parser.add_argument("--check", action="store_true", help="compare tokens where the budget covers all")
    parser.add_argument("--profile", action="store_true", help="add where the time of a step goes")
    parser.add_argument("--append", type=Path, help="result file whose other rows are kept")
    parser.add_argument("--out", type=Path, help="folder of the result file")
    parser.add_argument("--name", help="of the result file: decode_step_NAME")
    parser.add_argument("--machine-name", default="h200")
    parser.add_argument("--commit", help="commit to write down where git is not there")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument(*TP_FLAGS, dest="tp", type=int, default=1, help="1: the runner drives one GPU")
    arguments, server_flags = parser.parse_known_args(argv)
    if arguments.tp != 1:
        parser.error(
            f"{TP_FLAGS[0]} is {arguments.tp}; legal: 1, since the runner is driven in one process; "
            "servers with more GPUs are measured by benchmark/throughput.py"
        )
    try:
        name = arguments.name or "_".join(
            part
            for part, given in (("prefilled", arguments.prefill), ("profile", arguments.profile))
            if given
        )
        arguments.benchmark = results_file.named("decode_step", name)
    except ValueError as error:
        parser.error(str(error))
    return arguments, server_flags


def main() -> int:
    arguments, server_flags = parse_arguments()
    if arguments.child:
        return run_child(arguments, server_flags)
    earlier = results_file.read(arguments.append)
    rows: list[dict[str, Any]] = []
    checks: dict[str, list[list[int]]] = {}
    variants = arguments.variants.split(",")
    copy_rate = results_file.copy_rate_tb_s()
    for number, variant in enumerate(variants, 1):
        print(f"[{number}/{len(variants)}] {variant}", flush=True)
        rows += run_variant(variant, checks)
        if not rows:
            continue
        # Written after every variant, so that a run that is cut short is not lost.
        path = results_file.write(
            arguments.benchmark,
            results_file.merged(earlier, rows, KEY),
            machine_name=arguments.machine_name,
            out=arguments.out,
            made_from=arguments.commit,
            copy_tb_s=copy_rate,
            earlier=earlier,
        )
    print_agreement(checks)
    if not rows:
        print(f"no case of {grid.named(arguments.grid)} ran in any variant; nothing is written")
        return 1
    all_rows = results_file.merged(earlier, rows, KEY)
    print_table([row for row in all_rows if row["model"] == rows[0]["model"]])
    print(f"written to {path}")
    return 0


def run_variant(
    variant: str, checks: dict[str, list[list[int]]], script: str = __file__
) -> list[dict[str, Any]]:
    """Run one variant of ``script`` in its own process; its rows come as JSON lines on its output."""
    rows = []
    for line in child_lines(script, variant):
        if line.startswith("ROW "):
            rows.append(json.loads(line[4:]))
            print("  ", rows[-1]["batch"], "x", rows[-1]["context"], rows[-1]["step_ms"], "ms", flush=True)
        elif line.startswith("CHECK "):
            checks[variant] = json.loads(line[6:])["tokens"]
        else:
            print(line, end="", flush=True)
    return rows


def child_lines(script: str, variant: str) -> Iterator[str]:
    """What a variant of ``script`` prints in a process of its own; says so where that fails."""
    command = [sys.executable, script, "--child", variant, *sys.argv[1:]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        yield from child.stdout
    if child.returncode:
        print(f"{variant} ended with status {child.returncode}; its missing rows are not in the table")


def print_table(rows: list[dict[str, Any]]) -> None:
    """Step times, and the ratio of the faster dense backend to each sparse variant."""
    for key in ("step_ms", "pipelined_ms"):
        timed = [row for row in rows if row.get(key)]
        if timed:
            print(f"\n{key}")
            print_times(timed, key)


def print_times(rows: list[dict[str, Any]], key: str) -> None:
    names = list(dict.fromkeys(row["variant"] for row in rows))
    cases = list(dict.fromkeys((row["batch"], row["context"]) for row in rows))
    found = {(row["variant"], row["batch"], row["context"]): row[key] for row in rows}
    marked = {(row["variant"], row["batch"], row["context"]) for row in rows if ran_dense(row)}
    width = max(18, *(len(name) + 2 for name in names))
    print(f"{'batch x context':>18}" + "".join(f"{name:>{width}}" for name in names))
    for batch, context in cases:
        times = {name: found.get((name, batch, context)) for name in names}
        dense = [t for name, t in times.items() if t and name.startswith("dense")]
        cells = []
        for name, t in times.items():
            ratio = f" {min(dense) / t:.2f}x" if t and dense and not name.startswith("dense") else ""
            mark = " D" if (name, batch, context) in marked else ""
            cells.append(f"{t:.3f} ms{ratio}{mark}" if t else "-")
        print(f"{batch:>6} x {context:<9}" + "".join(f"{cell:>{width}}" for cell in cells))


def print_agreement(checks: dict[str, list[list[int]]]) -> None:
    """Steps up to the first that differs from the first variant's tokens."""
    names = list(checks)
    for name in names[1:]:
        pairs = list(zip(checks[names[0]], checks[name], strict=True))
        same = next((step for step, (a, b) in enumerate(pairs) if a != b), len(pairs))
        print(f"tokens of {name} equal those of {names[0]} for {same} of {len(pairs)} steps")


def run_child(arguments: argparse.Namespace, server_flags: list[str]) -> int:
    kind, _, rest = arguments.child.partition(":")
    form, _, backend = rest.partition(":")
    dense = kind == "dense"
    backend = form if dense else backend or "fa3"
    flags = ["--attention-backend", backend, "--page-size", "16", *server_flags]
    if not dense:
        flags += ["--sparse-decode", kind, "--sparse-decode-summary", form]
        flags += ["--sparse-decode-budget", str(arguments.budget)]

    runner = start_runner(flags, [2, *(batch for batch, _ in arguments.grid)])
    if arguments.check:
        tokens = generated_tokens(runner, context=arguments.budget - 150)
        print("CHECK " + json.dumps({"variant": arguments.child, "tokens": tokens}), flush=True)
    fill_pool(runner)
    unprofiled: list[dict[str, Any]] = []
    steps = WARM_UP + (1 + PIPELINES) * arguments.steps
    fitting = [case for case in arguments.grid if fits(runner, *case, steps)]
    if not fitting:
        print(f"nothing of {grid.named(arguments.grid)} fits; {arguments.child} has no row", flush=True)
        return 1
    for batch, context in fitting:
        row = {
            "variant": arguments.child,
            "backend": backend if dense else kind,
            "format": None if dense else form,
            "budget": None if dense else arguments.budget,
            "model": Path(runner.server_args.model_path).name,
            "context": context,
            "batch": batch,
            "tp": runner.server_args.tp_size,
            "fill": "prefill" if arguments.prefill else "synthetic",
        }
        row |= measure(runner, batch, context, arguments)
        if arguments.profile:
            unprofiled.append(row)
        else:
            print("ROW " + json.dumps(row), flush=True)
    # Last: after a profile every replay of this process is slower (0.7 ms here), profiled or not.
    for row in unprofiled:
        row |= profile_case(runner, row["batch"], row["context"], arguments)
        print("ROW " + json.dumps(row), flush=True)
    return 0


def fits(runner: Any, batch: int, context: int, steps: int) -> bool:
    """Whether the pool has room for a case; says so where it has not."""
    tokens = runner.max_total_num_tokens
    if batch * (context + steps + 64) <= tokens:
        return True
    print(f"{batch} x {context} does not fit into {tokens} tokens; not run")
    return False


def start_runner(flags: list[str], batches: list[int]) -> Any:
    """SGLang's model runner with pools and graphs, as its own benchmark drives it."""
    import torch

    if not torch.cuda.is_available():
        from locks_sglang import cpu_stand_ins

        cpu_stand_ins.activate()
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.benchmark import one_batch
    from sglang.srt.entrypoints.engine import _set_envs_and_config
    from sglang.srt.server_args import PortArgs, prepare_server_args

    flags = [*flags, "--max-running-requests", str(max(batches) + 1)]
    if torch.cuda.is_available():
        sizes = [str(size) for size in sorted(set(batches))]
        flags += ["--cuda-graph-bs", *sizes, "--disable-prefill-cuda-graph"]
    server_args = prepare_server_args(flags)
    from locks_sglang.activation import config_of, enable_process

    config = config_of(server_args)
    if config.enabled:
        enable_process(config, "scheduler")
    _set_envs_and_config(server_args)
    runner, _ = one_batch.load_model(server_args, PortArgs.init_new(server_args), 0, 0)
    return runner.torch_runner


def fill_pool(runner: Any) -> None:
    """Keys and values that differ by layer, head and page, and by token within it."""
    import torch

    pool = runner.token_to_kv_pool
    generator = torch.Generator(device=runner.device).manual_seed(SEED)
    for layer, buffers in enumerate(zip(pool.k_buffer, pool.v_buffer, strict=True)):
        for buffer in buffers:
            for part in buffer.split(1 << 18):
                heads = torch.arange(1, part.shape[1] + 1, device=part.device).view(1, -1, 1)
                noise = torch.randn(part.shape, generator=generator, device=part.device, dtype=part.dtype)
                pages = noise[::16].repeat_interleave(16, 0)[: len(part)]
                # By a kernel: a copy may not cross the chunks that a pool in host memory is registered in.
                torch.add((noise + pages) * (1 + 0.1 * heads / len(heads[0])), 0.01 * layer, out=part)


def measure(runner: Any, batch_size: int, context: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Median step time of one case, of steps that overlap, and of the CUDA graph alone."""
    import torch
    from graph_timing import OtherStreams, replay_times

    rows_before = decode_rows()
    with torch.no_grad():
        batch, extra = ready_batch(runner, batch_size, context, arguments)
        tokens = torch.zeros(batch_size, dtype=torch.int64, device=runner.device)
        times = []
        others = OtherStreams()
        with replay_times() as graph_times:
            for _ in range(WARM_UP + arguments.steps):
                tokens, step_ms = timed_step(runner, batch, tokens, others)
                times.append(step_ms)
        replays = graph_times()[WARM_UP:] if torch.cuda.is_available() else []
        pipelined = []
        for _ in range(PIPELINES if replays else 0):
            tokens, step_ms, clock = timed_pipeline(runner, batch, tokens, others, arguments.steps)
            pipelined.append(step_ms)
    measured = {**spread("step_ms", times[WARM_UP:]), **spread("graph_ms", replays), **extra}
    if rows_before:
        dense, sparse = (now - before for now, before in zip(decode_rows(), rows_before, strict=True))
        measured["dense_rows_share"] = round(dense / (dense + sparse), 3)
    if pipelined:
        measured |= {**spread("pipelined_ms", pipelined), "sm_mhz": clock}
    return measured


def timed_step(runner: Any, batch: Any, tokens: Any, others: OtherStreams) -> tuple[Any, float]:
    """The tokens of a step between two waits for the GPU, and its milliseconds."""
    from sglang.benchmark import one_batch

    others.touch()
    one_batch.synchronize(runner.device)
    start = time.perf_counter()
    tokens, _ = one_batch.decode(tokens, batch, runner)
    one_batch.synchronize(runner.device)
    return tokens, 1e3 * (time.perf_counter() - start)


def timed_pipeline(
    runner: Any, batch: Any, tokens: Any, others: OtherStreams, steps: int
) -> tuple[Any, float, int | None]:
    """The last tokens of steps without a wait between them, milliseconds a step, and the clock in MHz."""
    from graph_timing import gpu_clock_mhz
    from sglang.benchmark import one_batch

    one_batch.synchronize(runner.device)
    start = time.perf_counter()
    for _ in range(steps):
        others.touch()
        tokens, _ = one_batch.decode(tokens, batch, runner)
    clock = gpu_clock_mhz()  # while the GPU is still at work
    one_batch.synchronize(runner.device)
    return tokens, 1e3 * (time.perf_counter() - start) / steps, clock


def spread(name: str, values: list[float]) -> dict[str, float | None]:
    """Median, least and most under ``name``, ``name_min`` and ``name_max``; None where there are none."""
    names = (name, f"{name}_min", f"{name}_max")
    if not values:
        return dict.fromkeys(names)
    found = (statistics.median(values), min(values), max(values))
    return {name: round(value, 4) for name, value in zip(names, found, strict=True)}


def decode_rows() -> tuple[int, ...]:
    """Rows so far that attended everything, and that did not; empty without sparse decode."""
    from locks_sglang import runtime

    state = runtime.active()
    if state is None:
        return ()
    totals = state.counters.totals()
    return totals["rows_dense"], totals["rows_sparse"]


def profile_case(
    runner: Any, batch_size: int, context: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Where the time of a step of one case goes; see ``step_profile``."""
    import torch
    from sglang.benchmark import one_batch
    from step_profile import profile

    with torch.no_grad():
        batch, _ = ready_batch(runner, batch_size, context, arguments)
        tokens = torch.zeros(batch_size, dtype=torch.int64, device=runner.device)
        for _ in range(WARM_UP):
            one_batch.decode(tokens, batch, runner)
        return profile(lambda: one_batch.decode(tokens, batch, runner))


def ready_batch(
    runner: Any, batch_size: int, context: int, arguments: argparse.Namespace
) -> tuple[Any, dict[str, Any]]:
    prepare = prefilled if arguments.prefill else filled
    return prepare(runner, batch_size, context)


def generated_tokens(runner: Any, context: int, batch_size: int = 2, steps: int = 24) -> list[list[int]]:
    """Greedy tokens of really prefilled requests that the budget covers: sparse must equal dense."""
    import torch
    from sglang.benchmark import one_batch

    tokens = []
    with torch.no_grad():
        batch, _ = prefilled(runner, batch_size, context)
        latest = torch.arange(batch_size, device=runner.device)
        for _ in range(steps):
            latest, _ = one_batch.decode(latest, batch, runner)
            tokens.append(latest.tolist())
    return tokens


def make_batch(runner: Any, batch_size: int, context: int) -> tuple[Any, list[Any]]:
    """A batch of requests of random tokens; its KV slots are allocated by ``prepare_for_extend``."""
    from sglang.benchmark.one_batch import TreeCacheNamespace
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    runner.req_to_token_pool.clear()
    runner.token_to_kv_pool_allocator.clear()
    requests = []
    for number in range(batch_size):
        ids = array("q", [(token * 7919 + number) % 10000 for token in range(context)])
        parameters = SamplingParams(temperature=0, max_new_tokens=1024)
        request = Req(
            rid=str(number), origin_input_text="", origin_input_ids=ids, sampling_params=parameters
        )
        request.full_untruncated_fill_ids = request.origin_input_ids
        request.logprob_start_len = -1
        requests.append(request)
    tree = TreeCacheNamespace(
        page_size=runner.server_args.page_size,
        device=runner.device,
        token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
    )
    batch = ScheduleBatch.init_new(
        reqs=requests,
        req_to_token_pool=runner.req_to_token_pool,
        token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
        tree_cache=tree,
        model_config=runner.model_config,
        enable_overlap=False,
        spec_algorithm=SpeculativeAlgorithm.NONE,
    )
    return batch, requests


def filled(runner: Any, batch_size: int, context: int) -> tuple[Any, dict[str, Any]]:
    """A batch whose keys and values are already in the pool; only its summaries are built."""
    from locks_sglang import runtime
    from sglang.benchmark import one_batch

    batch, requests = make_batch(runner, batch_size, context)
    for request in requests:
        request.set_extend_range(0, context)
    batch.prepare_for_extend()
    state = runtime.active()
    if state is None:
        return batch, {}
    one_batch.synchronize(runner.device)
    start = time.perf_counter()
    state.finish_forward(batch.out_cache_loc)
    one_batch.synchronize(runner.device)
    return batch, {"summaries_ms": round(1e3 * (time.perf_counter() - start), 3)}


def prefilled(runner: Any, batch_size: int, context: int, chunk: int = 8192) -> tuple[Any, dict[str, Any]]:
    """A batch that was really prefilled, a chunk at a time."""
    import torch
    from sglang.benchmark import one_batch

    _, requests = make_batch(runner, batch_size, context)
    start = time.perf_counter()
    batch = None
    for done in range(0, context, chunk):
        for request in requests:
            if done:
                row = runner.req_to_token_pool.req_to_token[request.req_pool_idx, :done]
                request.prefix_indices = row.to(torch.int64)
            request.set_extend_range(done, min(done + chunk, context))
        _, _, batch = one_batch.extend(requests, runner)
    one_batch.synchronize(runner.device)
    return batch, {"prefill_ms": round(1e3 * (time.perf_counter() - start), 1)}


if __name__ == "__main__":
    raise SystemExit(main())
