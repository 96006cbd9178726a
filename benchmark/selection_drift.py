"""How much of a selection the next decode step keeps, and what a host tier's hot cache would have held.

    python benchmark/selection_drift.py --model-path MODEL --prompts a.txt,b.txt c.txt
    python benchmark/selection_drift.py --trace trace.jsonl

The first starts a server of a local model and has it answer prompts, each made of the files between two
commas, one after another (everything that is not listed below goes to SGLang).  The second takes what a
server with ``--sparse-decode-trace-file trace.jsonl`` wrote: the pages of every decode row and layer.  Each
request is looked at alone; its lists go through the cache of ``locks_kernels.tier`` (the reference on CPU
tensors, no keys or values), of sizes in what one step reads.  Steps in which a layer attends everything are
left out.  With ``--machine-name`` a result file is written.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import results_file
import torch
from locks_kernels import Selection, page_view, tier
from locks_kernels.hot_cache import HotCache
from serving.server import launched, stop_when_told_to_end
from tokenizers import Tokenizer

SIZES = (1, 2, 4, 8)
PAGE = 16
WARM_UP = 8
"""Steps of a request before hits count, in which the cache fills."""

Steps = list[list[list[list[int]]]]
"""Step after step, layer by layer: the pages of every KV head, the open one last."""


def trace_of(model: Path, prompts: Sequence[str], answer: int, flags: Sequence[str], folder: Path) -> Path:
    """The trace of a server that answered the prompts one after another with so many greedy tokens each."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    trace = folder / "trace.jsonl"
    own = ["--model-path", str(model), "--sparse-decode", "locks", "--sparse-decode-trace-file", str(trace)]
    with launched([*own, *flags], folder / "server.log") as server:
        for prompt in prompts:
            text = "\n".join(Path(name).read_text() for name in prompt.split(","))
            server.generate([tokenizer.encode(text).ids], answer)
            print(f"answered {prompt}", flush=True)
    return trace


def read(trace: Path) -> dict[str, Steps]:
    """Decode steps of every request in which all layers were sparse."""
    found: dict[str, dict[int, dict[int, list[list[int]]]]] = defaultdict(lambda: defaultdict(dict))
    for text in trace.read_text().splitlines():
        line = json.loads(text)
        if line["pages"] is not None:
            found[line["rid"]][line["seq_len"]][line["layer"]] = line["pages"]
    requests = {}
    for rid, steps in found.items():
        layers = max(map(len, steps.values()))
        whole = [steps[length] for length in sorted(steps) if len(steps[length]) == layers]
        requests[rid] = [[step[layer] for layer in sorted(step)] for step in whole]
    return requests


def kept(steps: Steps) -> float:
    """Share of the complete pages of a step's lists that the lists of the step before held."""
    same = total = 0
    for before, after in pairwise(steps):
        for old, new in zip(before, after, strict=True):
            for past, now in zip(old, new, strict=True):
                same += len(set(past) & set(now[:-1]))
                total += len(now) - 1
    return same / total


def hot_share(steps: Steps, size: float) -> float:
    """Share of the complete pages read that a cache of ``size`` steps' reads held."""
    layers, heads = len(steps[0]), len(steps[0][0])
    width = max(len(pages) for step in steps for layer in step for pages in layer)
    pages = 2 + max(max(pages) for step in steps for layer in step for pages in layer)
    cache = HotCache.allocate(
        layers=layers, pages=pages, kv_heads=heads, page_size=PAGE, head_dim=1, dtype=torch.float32,
        capacity=round(size * layers * heads * (width - 1)), max_rows=1, width=width,
    )  # fmt: skip
    pool = [page_view(torch.zeros(pages * PAGE, heads, 1), PAGE)] * layers
    table = torch.arange(pages, dtype=torch.int32).unsqueeze(0)
    request, before = torch.zeros(1, dtype=torch.int64), cache.counters.clone()
    for number, step in enumerate(steps):
        if number == WARM_UP:
            before = cache.counters.clone()
        tier.begin_step(cache, pool, pool, table, torch.tensor([step[0][0][-1] * PAGE + 1]), request)
        for layer, lists in enumerate(step):
            chosen = torch.zeros(1, heads, width, dtype=torch.int32)
            for head, selected in enumerate(lists):
                chosen[0, head, : len(selected)] = torch.tensor(selected)
            count = torch.tensor([len(lists[0])], dtype=torch.int32)
            tier.resolve(cache, layer, Selection(chosen, chosen, count), None)
    done = cache.counted(since=before)
    return done["hits"] / (done["hits"] + done["misses"])


def rows_of(trace: Path, sizes: Sequence[float]) -> list[dict[str, Any]]:
    """A row for every request with enough steps."""
    return [
        {
            "rid": rid[:8],
            "steps": len(steps),
            "selected": len(steps[-1][0][0]),
            "pages": steps[-1][0][0][-1] + 1,
            "kept": round(kept(steps), 4),
            **{f"hot_share_{size:g}": round(hot_share(steps, size), 4) for size in sizes},
        }
        for rid, steps in read(trace).items()
        if len(steps) > 2 * WARM_UP
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path, help="that a server has written")
    source.add_argument("--model-path", type=Path, help="folder of a model to serve")
    parser.add_argument("--prompts", nargs="+", default=[], help="FILE[,FILE...] ...")
    parser.add_argument("--answer", type=int, default=96, help="tokens of an answer")
    parser.add_argument("--budget", type=int, default=256, help="tokens attended per KV head")
    parser.add_argument("--sizes", type=float, nargs="+", default=SIZES, help="of the cache, in steps")
    parser.add_argument("--machine-name", help="write a result file under this name")
    parser.add_argument("--out", type=Path, help="folder of the result file")
    arguments, flags = parser.parse_known_args()
    if arguments.model_path and not arguments.prompts:
        parser.error("--prompts is empty; legal with --model-path: FILE[,FILE...] ...")
    with tempfile.TemporaryDirectory() as folder:
        trace = arguments.trace
        if trace is None:
            flags = ["--sparse-decode-budget", str(arguments.budget), *flags]
            trace = trace_of(arguments.model_path, arguments.prompts, arguments.answer, flags, Path(folder))
        rows = rows_of(trace, arguments.sizes)
    for row in rows:
        shares = ", ".join(f"{size:g}: {row[f'hot_share_{size:g}']:.1%}" for size in arguments.sizes)
        print(
            f"{row['rid']}: {row['steps']} steps, {row['selected']} of {row['pages']} pages; the next step "
            f"keeps {row['kept']:.1%}; hot share by cache size: {shares}"
        )
    if arguments.machine_name:
        name, out = arguments.machine_name, arguments.out
        print("written to", results_file.write("selection_drift", rows, machine_name=name, out=out))


if __name__ == "__main__":
    stop_when_told_to_end()
    main()
