"""Results of servers with their KV in host memory: first tokens, hot share, bytes over the link."""

from __future__ import annotations

from typing import Any

import pages

Rows = list[dict[str, Any]]
TTFT_TARGET = 1.3
"""Time to first token from a host tier over that of a resident pool, at most, at 64K tokens over PCIe."""
LINK_HEAD = ["hot share", "GB read / written over the link"]
SAME = ("model", "tp", "context", "output", "format", "budget")
"""What the two servers of a comparison share, besides one client with random prompts."""


def has_link(rows: Rows) -> bool:
    """Whether any of these servers had its KV in host memory."""
    return any("host_bytes_read" in row for row in rows)


def link_cells(row: dict[str, Any]) -> list[str]:
    """Of one row, for `LINK_HEAD`: the whole case, prefill included."""
    if "host_bytes_read" not in row:
        return ["-", "-"]
    share = "-" if row["hot_share"] is None else f"{row['hot_share']:.1%}"
    moved = " / ".join(f"{row[name] / 1e9:,.1f}" for name in ("host_bytes_read", "host_bytes_written"))
    return [share, moved]


def ttft(rows: Rows) -> str | None:
    """Time to first token of a sparse server's only client, by where its KV lies; None without a pair."""
    one = [
        r for r in rows if r["workload"] == "random" and r["concurrency"] == 1 and r["budget"] is not None
    ]
    table = []
    for host in (row for row in one if row["tier"] == "host"):
        same = [r for r in one if r["tier"] == "resident" and all(r[name] == host[name] for name in SAME)]
        for resident in same:
            ratio = host["ttft_ms"] / resident["ttft_ms"]
            name = f"{host['model']}, TP {host['tp']}" if host["tp"] > 1 else host["model"]
            table.append(
                [
                    name,
                    f"{host['context']:,}",
                    host["format"],
                    f"{resident['ttft_ms'] / 1000:.2f}",
                    f"{host['ttft_ms'] / 1000:.2f}",
                    f"{ratio:.2f}x",
                    f"{TTFT_TARGET}x",
                ]
            )
    head = ["model", "context", "record", "resident, s", "host tier, s", "ratio", "target at 64K"]
    return pages.table(head, table) if table else None
