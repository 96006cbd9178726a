"""Compile the Triton kernels for a GPU that is not there: ``python compile_triton.py``.

The ops run on CPU tensors, with a launch replaced by a compilation for sm_90; so the signatures are those
that the ops really pass. Needs a process without Triton's interpreter. Prints a line a kernel.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from locks_kernels import (
    EnvelopeLayout,
    Envelopes,
    Selection,
    Summaries,
    SummaryLayout,
    attend,
    page_view,
    score,
    select,
    summarize,
    tier,
)
from locks_kernels.hot_cache import HotCache
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type


def compile_instead(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """Stands for ``JITFunction.run``."""
    bound = dict(zip(kernel.arg_names, args, strict=False)) | options
    constants = {param.name: bound[param.name] for param in kernel.params if param.is_constexpr}
    signature = {
        name: "constexpr" if name in constants else mangle_type(bound[name]) for name in kernel.arg_names
    }
    source = ASTSource(kernel, signature, constexprs=constants)
    chosen = {name: value for name, value in options.items() if name not in bound or name == "num_warps"}
    done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=chosen)
    assert done.asm["cubin"], kernel.fn.__name__
    print(kernel.fn.__name__, len(done.asm["cubin"]))


def resident() -> None:
    """The ops of a decode step, and the builder for one format of each kind."""
    rows, heads, group, pages, page, dim = 2, 4, 8, 9, 16, 64
    pool = [page_view(torch.zeros(pages * page, heads, dim).bfloat16(), page) for _ in range(2)]
    table = torch.zeros(rows, 4, dtype=torch.int32)
    lengths = torch.full((rows,), 17)
    budgets = torch.full((rows,), 2, dtype=torch.int32)
    queries = torch.zeros(rows, heads * group, dim).bfloat16()
    formats = [SummaryLayout.parse(name, dim, page) for name in ("r4i4", "r2bf16", "r6h")]
    for layout in (*formats, EnvelopeLayout(dim, page)):
        kind = Envelopes if isinstance(layout, EnvelopeLayout) else Summaries
        records = kind.allocate(layout, (2, pages, heads))
        summarize(pool, torch.arange(3), records, impl="triton")
        scores = score(queries, pool[0], records.layer(0), table, lengths, 0.1, impl="triton")
    chosen = select(scores, table, lengths, budgets, kv_heads=heads, page_size=page, width=2, impl="triton")
    attend(queries, pool[0], pool[0], chosen, table, lengths, 0.1, impl="triton")


def tier_of_host_memory() -> None:
    rows, heads, width, pages, layers, page, dim = 2, 4, 128, 9, 3, 16, 128
    cache = HotCache.allocate(
        layers=layers, pages=pages, kv_heads=heads, page_size=page, head_dim=dim, capacity=300,
        max_rows=rows, width=width, open_rows=rows,
    )  # fmt: skip
    pool = [page_view(torch.zeros(pages * page, heads, dim).bfloat16(), page) for _ in range(layers)]
    table = torch.zeros(rows, 4, dtype=torch.int32)
    lengths, requests = torch.full((rows,), 17), torch.arange(rows)
    tier.begin_step(cache, pool, pool, table, lengths, requests, impl="triton")
    tier.invalidate(cache, torch.arange(3), impl="triton")
    new = torch.zeros(rows, heads, dim).bfloat16()
    tier.write_open(cache, 1, new, new, lengths, requests, impl="triton")
    lists = torch.zeros(rows, heads, width, dtype=torch.int32)
    selection = Selection(lists, lists, torch.full((rows,), 2, dtype=torch.int32))
    for given in (requests, None):
        for layer in ((pool[1], pool[1]), None):
            sources = tier.resolve(cache, 1, selection, layer, given, impl="triton")
    queries = torch.zeros(rows, heads * 8, dim).bfloat16()
    for hot in ((cache.keys, cache.values), None):
        attend(
            queries, pool[1], pool[1], sources, table, lengths, 0.1, hot=hot, impl="triton"
        )  # fmt: skip
    records = Summaries.allocate(SummaryLayout.parse("r6h", dim, page), (1, pages, heads))
    score(
        queries, cache.open_keys(1), records.layer(0), table, lengths, 0.1,
        open_pages=requests.int(), impl="triton",
    )  # fmt: skip


if __name__ == "__main__":
    JITFunction.run = compile_instead
    resident()
    tier_of_host_memory()
