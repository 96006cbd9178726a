"""What a server takes of the GPU when it is started as a user does, with no flag about memory.

    python benchmark/start_up.py --model-path MODEL

Every variant is one server on an empty GPU, at SGLang's default share of memory (``--mem-fraction-static``)
and with all the CUDA graphs that it captures by default. Once it is healthy it says what weights, KV cache,
summaries and graphs take and how many tokens fit, and answers one long and several short requests, so that
whatever is allocated late is there, too. A server that does not start, or cannot answer, is an error with
the end of its log. With ``--load-format dummy`` a folder with a ``config.json`` is model enough.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import results_file
from gpu_memory import in_use_gib
from serving.server import launched, on_gpu, stop_when_told_to_end
from serving.variants import Variant

Row = dict[str, Any]


def parse_arguments(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--variants", help="dense:BACKEND or SELECTOR[:FORMAT[:BACKEND]], ...")
    parser.add_argument("--prompt", type=int, default=65536, help="tokens of the long request")
    parser.add_argument("--together", type=int, default=16, help="short requests at a time")
    parser.add_argument("--out", type=Path, help="folder of the result file and of the logs")
    parser.add_argument("--machine-name", default="h200")
    parser.add_argument("--commit", help="commit to write down where git is not there")
    return parser.parse_known_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments, flags = parse_arguments(argv)
    backend = "fa3" if on_gpu() else "torch_native"
    names = (arguments.variants or f"dense:{backend},locks").split(",")
    logs = (arguments.out or Path(tempfile.mkdtemp(prefix="start-up-"))) / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    others = in_use_gib()
    rows: list[Row] = []
    for number, name in enumerate(names, 1):
        print(f"[{number}/{len(names)}] {name}", flush=True)
        row = started(Variant.parse(name, backend), arguments, flags, logs)
        if row["in_use_gib"] is not None and others is not None:
            row["in_use_gib"] = round(row["in_use_gib"] - others, 2)
        rows.append(row)
        print("  " + ", ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    path = results_file.write(
        "start_up",
        rows,
        machine_name=arguments.machine_name,
        out=arguments.out,
        made_from=arguments.commit,
    )
    print(f"written to {path}; logs in {logs}")
    return 0


def started(variant: Variant, arguments: argparse.Namespace, flags: list[str], logs: Path) -> Row:
    """Start one server, use it, and what it said."""
    begun = time.monotonic()
    log = logs / f"server-{variant.name.replace(':', '-')}.log"
    with launched([*variant.flags(), "--skip-tokenizer-init", *flags], log) as server:
        seconds = time.monotonic() - begun
        server.generate([[1] * arguments.prompt], 8)
        server.generate([[number + 1] * 1024 for number in range(arguments.together)], 8)
        info = server.get("/server_info")
        state = info["internal_states"][0]
        memory, locks = state["memory_usage"], state.get("locks")
        return {
            "variant": variant.name,
            "model": Path(info["model_path"]).name,
            "tp": info["tp_size"],
            "mem_fraction_static": round(info["mem_fraction_static"], 4),
            "healthy_s": round(seconds, 1),
            "weights_gib": memory["weight"],
            "kv_gib": memory["kvcache"],
            "kv_tokens": memory["token_capacity"],
            "summaries_gib": locks and round(locks["summary_bytes"] / 2**30, 3),
            "steps_gib": locks and round(locks["step_bytes"] / 2**30, 3),
            "graphs_gib": round(sum(memory["graph"].values()), 3),
            "in_use_gib": in_use_gib(),
            "sparse_rows": locks and locks["rows_sparse"],
        }


if __name__ == "__main__":
    stop_when_told_to_end()
    raise SystemExit(main())
