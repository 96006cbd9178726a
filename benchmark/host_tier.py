"""Decode throughput at the largest batch: dense, and with the KV cache in host memory, under a memory cap.

    python benchmark/host_tier.py --model-path glm4-9b-1m-kv4 --load-format dummy --host-gib 230

Every variant is a process of its own: SGLang's model runner with its CUDA graphs, driven directly, as in
``decode_step.py``, whose synthetic pool it uses, so that no context need be prefilled.  The GPU is made as
small as a GH200's 96 GB (``--gpu-gib``) by memory that is taken before SGLang looks how much is free.  A
batch is the largest that the pool of the variant holds; tokens move from step to step, as sampled.

Which pages a step selects follows from queries and keys, and those of dummy weights say nothing.  So the
queries of every layer are replaced by ones that drift as told:

    q(step) = rho q(step - 1) + sqrt(1 - rho^2) noise,    noise ~ N(0, 1)

half of whose variance is shared by the query heads of a KV head.  Keys are those of ``decode_step.py``:
every page has a centre of its own, N(0, 1), and each of its tokens as much noise around it.  ``--drift`` is
a list of rho, chosen for hot shares of about 80, 90 and 95 %; what the hot cache really served is measured
and is a column.  (How much real texts keep of a selection: ``selection_drift.py``.)  Attention over a dense
pool takes the same time whatever the queries are.

``link_bytes_per_step`` is what misses read from the host; the KV of new tokens, some 80 KiB a request and
step, which goes back, is not in it.  The hot cache is sized once for the largest of the batches, so at
contexts of fewer requests it holds more of their steps.

On a CPU, with the demo model, to try it out:

    python benchmark/host_tier.py --model-path .models/SmolLM2-135M-Instruct --machine-name cpu \\
        --variants dense:torch_native,host:r6h::torch_native --contexts 512 --host-gib 0.1 --steps 4 \\
        --budget 128
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import decode_step
import results_file
import torch
from gpu_memory import ballast, in_use_gib
from graph_timing import OtherStreams
from locks_sglang.plan.machines import MACHINES

VARIANTS = "dense:fa3,dense:flashinfer,host:r4i4"
CONTEXTS = "65536,131072,262144"
DRIFT = "0.92,0.97,0.985"
MOST_DENSE = 16
"""Largest batch that a dense variant has a CUDA graph for."""
PARTS = 4
"""The measured steps are timed in so many parts; between them the GPU ends its work."""
SHARED = 0.5
"""Share of the variance of a query that all heads of its group have in common."""


def parse_arguments(argv: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--variants", default=VARIANTS, help="dense:BACKEND or host:FORMAT[:HOT_GIB[:BACKEND]], ...")
    add("--contexts", default=CONTEXTS, help="tokens of a request, ...")
    add("--host-gib", type=float, required=True, help="of the KV pool in host memory")
    add(
        "--gpu-gib",
        type=float,
        default=MACHINES["gh200-96"].gpu_bytes / 2**30,
        help="memory that the GPU is made to have (default: a GH200's, %(default).1f)",
    )
    add("--drift", default=DRIFT, help="correlation of a query with that of the step before, ...")
    add("--steps", type=int, default=192, help="measured steps of every case")
    add("--warm-up", type=int, default=24, help="steps before them")
    add("--budget", type=int, default=2048, help="tokens attended per KV head")
    add("--append", type=Path, help="result file of an earlier run of this day whose rows are kept")
    add("--out", type=Path, help="folder of the result file")
    add("--machine-name", default="h200")
    add("--commit", help="commit to write down where git is not there")
    add("--child", help=argparse.SUPPRESS)
    return parser.parse_known_args(argv)


def main() -> int:
    arguments, server_flags = parse_arguments()
    if arguments.child:
        return run_child(arguments, server_flags)
    earlier = results_file.read(arguments.append)
    rows = list(earlier["rows"]) if earlier else []
    copy_rate = results_file.copy_rate_tb_s()
    torch.cuda.empty_cache()
    for variant in arguments.variants.split(","):
        print(variant, flush=True)
        for row in rows_of(variant):
            rows.append(row)
            # After every row, so that a run that is cut short is not lost.
            path = results_file.write(
                "host_tier", rows, machine_name=arguments.machine_name, out=arguments.out,
                made_from=arguments.commit, copy_tb_s=copy_rate, earlier=earlier,
            )  # fmt: skip
    if not rows:
        return 1
    print_table(rows)
    print(f"written to {path}")
    return 0


def rows_of(variant: str) -> Iterator[dict[str, Any]]:
    """Rows of a variant as its process measures them; what else it prints is passed on."""
    for line in decode_step.child_lines(__file__, variant):
        print(line, end="", flush=True)
        if line.startswith("ROW "):
            yield json.loads(line[4:])


def run_child(arguments: argparse.Namespace, server_flags: list[str]) -> int:
    kind, form, hot_gib, backend = (*arguments.child.split(":"), "", "", "")[:4]
    if kind not in ("dense", "host"):
        raise SystemExit(f"{arguments.child!r}; legal: dense:BACKEND, host:FORMAT[:HOT_GIB[:BACKEND]]")
    contexts = [int(context) for context in arguments.contexts.split(",")]
    drifts = [float(rho) for rho in arguments.drift.split(",")]
    host = kind == "host"
    extra = (arguments.warm_up + arguments.steps) * (len(drifts) if host else 1) + 64
    flags = ["--attention-backend", (backend or "fa3") if host else form, "--page-size", "16"]
    if "--context-length" not in server_flags:
        flags += ["--context-length", str(max(contexts) + extra)]
    batches = [*range(1, MOST_DENSE + 1)]
    if host:
        model = Path(server_flags[server_flags.index("--model-path") + 1])
        batches = host_batches(model, arguments.host_gib, contexts, extra)
        flags += ["--sparse-decode", "locks", "--sparse-decode-summary", form]
        flags += ["--sparse-decode-budget", str(arguments.budget), "--sparse-decode-kv-tier", "host"]
        flags += ["--sparse-decode-host-gib", str(arguments.host_gib)]
        flags += ["--sparse-decode-hot-gib", hot_gib] if hot_gib else []
        Drift.install()
    held = ballast(arguments.gpu_gib)
    started = time.perf_counter()
    runner = decode_step.start_runner([*flags, *server_flags], batches)
    print(f"  up in {time.perf_counter() - started:.0f} s", flush=True)
    decode_step.fill_pool(runner)
    for context in contexts:
        batch = min(runner.max_total_num_tokens // (context + extra), max(batches))
        if batch < 1:
            print(f"{context} does not fit into {runner.max_total_num_tokens} tokens; not run")
            continue
        for row in measure(runner, batch, context, drifts if host else [None], arguments):
            row = {
                "variant": arguments.child,
                "backend": "locks" if host else form,
                "tier": "host" if host else "resident",
                "format": form if host else None,
                "budget": arguments.budget if host else None,
                "model": Path(runner.server_args.model_path).name,
                "tp": 1,
                "context": context,
                "batch": batch,
                "kv_tokens": runner.max_total_num_tokens,
                "fill": "synthetic",
                "source": "measured",
                "gpu_gib": in_use_gib(held),
                **row,
            }
            print("ROW " + json.dumps(row), flush=True)
    return 0


def host_batches(model: Path, host_gib: float, contexts: list[int], extra: int) -> list[int]:
    """The largest batch of each context by the bytes of the pool, less the page that is nobody's."""
    from locks_sglang.plan.model import read

    token = read(model, weights_gib=1.0).kv_bytes
    return [max(1, (int(host_gib * 2**30) // token - 32) // (context + extra)) for context in contexts]


class Drift:
    """Queries of all layers that drift from step to step, in the place of the model's own."""

    rho = 0.98
    _current: torch.Tensor | None = None
    _fed: torch.Tensor | None = None

    @classmethod
    def install(cls) -> None:
        """From now on sparse decode of this process gets them."""
        from locks_sglang.runtime import SparseDecode

        begin_step, decode = SparseDecode.begin_step, SparseDecode.decode

        def begun(state: SparseDecode, forward_batch: Any) -> None:
            begin_step(state, forward_batch)
            if forward_batch.forward_mode.is_decode():
                cls.move(state)

        def drifting(state: SparseDecode, queries: torch.Tensor, layer: Any) -> torch.Tensor:
            assert cls._fed is not None
            return decode(state, cls._fed[state.summaries.index(layer.layer_id), : len(queries)], layer)

        SparseDecode.begin_step, SparseDecode.decode = begun, drifting  # type: ignore[method-assign]

    @classmethod
    def move(cls, state: Any) -> None:
        """A step on. Outside of CUDA graphs, which read the tensor at its one address."""
        table, geometry, keys = state._token_table, state.geometry, state.summaries.keys
        shape = (len(keys), len(table), geometry.kv_heads, -1, geometry.head_dim)
        group = geometry.q_heads // geometry.kv_heads
        if cls._current is None:
            cls._current = cls._noise(shape, group, state.device)
            fed = (len(keys), len(table), geometry.q_heads, geometry.head_dim)
            cls._fed = torch.empty(fed, dtype=geometry.query_dtype, device=state.device)
        noise = cls._noise(shape, group, state.device)
        cls._current.mul_(cls.rho).add_(noise, alpha=(1 - cls.rho**2) ** 0.5)
        assert cls._fed is not None
        cls._fed.copy_(cls._current.view(cls._fed.shape))

    @staticmethod
    def _noise(shape: tuple[int, ...], group: int, device: torch.device) -> torch.Tensor:
        layers, rows, heads, _, dim = shape
        noise = torch.randn(layers, rows, heads, group, dim, device=device)
        common = torch.randn(layers, rows, heads, 1, dim, device=device)
        return noise.mul_((1 - SHARED) ** 0.5).add_(common, alpha=SHARED**0.5)


def measure(
    runner: Any, batch_size: int, context: int, drifts: list[float | None], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row for each drift, of one batch that goes on decoding."""
    from locks_sglang import runtime
    from sglang.benchmark import one_batch

    state = runtime.active()
    tier = state.tier if state is not None else None
    rows, others = [], OtherStreams()
    with torch.no_grad():
        batch, extra = decode_step.filled(runner, batch_size, context)
        tokens = torch.zeros(batch_size, dtype=torch.int64, device=runner.device)
        for rho in drifts:
            if rho is not None:
                Drift.rho = rho
            for _ in range(arguments.warm_up):
                others.touch()
                tokens, _ = one_batch.decode(tokens, batch, runner)
            before = tier.cache.counters.clone() if tier is not None else None
            times, seen = [], []
            for _ in range(PARTS):
                one_batch.synchronize(runner.device)
                started = time.perf_counter()
                for _ in range(arguments.steps // PARTS):
                    others.touch()
                    tokens, _ = one_batch.decode(tokens, batch, runner)
                    seen.append(tokens)
                one_batch.synchronize(runner.device)
                times.append(1e3 * (time.perf_counter() - started) / (arguments.steps // PARTS))
            step_ms = sum(times) / PARTS
            rows.append(
                {
                    "drift": rho,
                    "steps": len(seen),
                    "itl_ms": round(step_ms, 4),
                    "itl_ms_min": round(min(times), 4),
                    "itl_ms_max": round(max(times), 4),
                    "tokens_per_s": round(1e3 * batch_size / step_ms, 1),
                    "distinct_tokens": len(set(torch.stack(seen)[:, 0].tolist())),
                    **extra,
                    **(tier_columns(tier, before, len(seen)) if before is not None else {}),
                }
            )
    return rows


def tier_columns(tier: Any, before: torch.Tensor, steps: int) -> dict[str, Any]:
    """What the hot cache served since ``before``, its counters then, and what crossed the link for it."""
    done = tier.cache.counted(since=before)
    reads = done["hits"] + done["misses"]
    described = tier.describe(0, 0)
    return {
        "hot_share": round(done["hits"] / reads, 4) if reads else None,
        "link_bytes_per_step": round((done["fills"] + done["host_reads"]) * tier.cache.tile_bytes / steps),
        "hot_gib": round(described["hot_bytes"] / 2**30, 3),
        "host_gib": round(described["host_bytes"] / 2**30, 2),
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    """All rows; the last column compares with the faster dense backend at its largest batch."""
    print(
        f"{'context':>9}{'variant':>28}{'drift':>7}{'batch':>6}{'ITL ms':>9}{'tokens/s':>10}{'hot':>8}"
        f"{'GB/step':>9}{'gain':>7}"
    )
    for row in sorted(rows, key=lambda row: row["context"]):
        dense = [r for r in rows if r["context"] == row["context"] and r["tier"] == "resident"]
        gain = f"{row['tokens_per_s'] / max(r['tokens_per_s'] for r in dense):.2f}x" if dense else "-"
        hot = f"{100 * row['hot_share']:.1f} %" if row.get("hot_share") else "-"
        link = f"{row['link_bytes_per_step'] / 1e9:.2f}" if "link_bytes_per_step" in row else "-"
        print(
            f"{row['context']:>9}{row['variant']:>28}{row['drift'] or '-':>7}{row['batch']:>6}"
            f"{row['itl_ms']:>9.2f}{row['tokens_per_s']:>10.1f}{hot:>8}{link:>9}{gain:>7}"
        )


if __name__ == "__main__":
    sys.exit(main())
