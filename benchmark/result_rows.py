"""What rows of steps and servers say, the same in the tables that benchmarks print and on the pages."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]
# What a server's row shares with the rows that it is compared with.
SERVED_CASE = ("model", "tp", "workload", "concurrency", "context", "output")
MOSTLY = 0.5


def ran_dense(row: Row) -> bool:
    """Whether a sparse server decoded most of the case's rows in dense steps."""
    return row.get("dense_rows_share", 0) > MOSTLY


def served_by(row: Row) -> str:
    """A server's variant with what else tells its row apart: ranks, and D where it ran dense."""
    parts = [row["variant"].replace(":", " ")]
    parts += [f"TP {row['tp']}"] if row["tp"] > 1 else []
    parts += ["D"] if ran_dense(row) else []
    return " ".join(parts)


def served_gains(row: Row, rows: list[Row]) -> tuple[float, float] | None:
    """Tokens a second and time between tokens, against the faster dense backend of the row's case.

    More than 1 is faster than dense; None where ``rows`` have no dense server of the case.
    """
    same = [other for other in rows if all(other[name] == row[name] for name in SERVED_CASE)]
    dense = [other for other in same if other["budget"] is None]
    if not dense:
        return None
    return (
        row["tokens_per_s"] / max(other["tokens_per_s"] for other in dense),
        min(other["itl_ms"] for other in dense) / row["itl_ms"],
    )


def compared(rows: list[Row]) -> dict[tuple[Any, ...], list[Row]]:
    """Rows of servers by their `SERVED_CASE`, of the cases that ran both dense and sparse."""
    cases: dict[tuple[Any, ...], list[Row]] = {}
    order = ("tp", "context", "workload", "concurrency")
    for row in sorted(rows, key=lambda row: [row[name] for name in order]):
        cases.setdefault(tuple(row[name] for name in SERVED_CASE), []).append(row)
    return {case: same for case, same in cases.items() if len({row["budget"] is None for row in same}) == 2}
