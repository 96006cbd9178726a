"""Table of what servers take of the GPU at their start (``benchmark/start_up.py``)."""

from __future__ import annotations

import pages
from model_rows import Rows

HEAD = [
    "server", "healthy after, s", "weights, GiB", "KV, GiB", "tokens that fit", "summaries, GiB",
    "decode steps, GiB", "CUDA graphs, GiB", "all in use, GiB",
]  # fmt: skip


def memory(rows: Rows) -> str:
    """A server a line; "-" for what a dense server does not have."""
    lines = []
    for row in rows:
        lines.append(
            [
                row["variant"].replace(":", " "),
                f"{row['healthy_s']:.0f}",
                f"{row['weights_gib']:.1f}",
                f"{row['kv_gib']:.1f}",
                f"{row['kv_tokens']:,}",
                *(f"{row[name]:.1f}" if row[name] else "-" for name in ("summaries_gib", "steps_gib")),
                f"{row['graphs_gib']:.1f}",
                f"{row['in_use_gib']:.1f}" if row["in_use_gib"] else "-",
            ]
        )
    return pages.table(HEAD, lines)
