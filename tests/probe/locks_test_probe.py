"""A plugin for SGLang that tests bring along: it keeps the queries and keys behind traced selections, and
makes the GPU of a host tier small.

A trace says what was selected. With the very queries and keys of that step, a test can compute what
should have been. Kept are rows of requests whose id begins with ``probe``, in the layers that audits look
at (their taps hold queries).
"""

import os
from pathlib import Path
from typing import Any

FOLDER = "LOCKS_TEST_PROBE"
"""Environment variable: where to write."""
GPU_MIB = "LOCKS_TEST_GPU_MIB"
"""Environment variable: what a host tier finds free of its GPU, or of the memory that is one on a CPU."""


def register() -> None:
    """Entry point; SGLang calls it in every process of a server."""
    if GPU_MIB in os.environ:
        from locks_sglang import scheduler_hooks

        pool_bytes, free = scheduler_hooks._host_pool_bytes, int(os.environ[GPU_MIB]) << 20
        scheduler_hooks._host_pool_bytes = lambda _, *rest: pool_bytes(free, *rest)  # type: ignore[assignment]
    folder = os.environ.get(FOLDER)
    if not folder:
        return
    from locks_sglang.trace import Trace

    write = Trace.after_step

    def after_step(trace: Any, step: Any, taps: Any, rows: int, rids: Any) -> None:
        write(trace, step, taps, rows, rids)
        for row in range(rows):
            if rids and str(rids[row]).startswith("probe"):
                _keep(Path(folder), step, taps, row, rids[row])

    Trace.after_step = after_step  # type: ignore[method-assign]


def _keep(folder: Path, step: Any, taps: Any, row: int, rid: str) -> None:
    import torch
    from locks_sglang.runtime import active

    state = active()
    assert state is not None
    length = int(step.seq_lens[row])
    for layer, tap in taps.items():
        if tap.queries is None:
            continue
        pool = state.summaries.keys[layer]  # [pages, B, kv_heads, d]
        pages = step.page_table[row, : -(-length // pool.shape[1])].long()
        name = f"{rid}-{length}-{layer}"
        torch.save(
            {
                "rid": rid,
                "seq_len": length,
                "layer": layer,
                "queries": tap.queries[row].float().cpu(),
                "keys": pool[pages].flatten(0, 1)[:length].float().cpu(),
                "sm_scale": tap.sm_scale,
            },
            folder / f"{name}.partial",
        )
        os.replace(folder / f"{name}.partial", folder / f"{name}.pt")


def install(folder: Path) -> dict[str, str]:
    """Prepare ``folder`` to bring the probe to a server, and return the variables that the server needs."""
    package = folder / "locks_test_probe-1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: locks-test-probe\nVersion: 1\n")
    (package / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nlocks-test-probe = locks_test_probe:register\n"
    )
    (folder / "samples").mkdir()
    path = [str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, path)), FOLDER: str(folder / "samples")}
