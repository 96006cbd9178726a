"""Rows of a result file by model, the one that the README and the figures are about first."""

from __future__ import annotations

from typing import Any

Rows = list[dict[str, Any]]


def by_model(rows: Rows, main: str | None = None) -> dict[str, Rows]:
    """The rows of every model, ``main`` first where it is among them."""
    names = sorted(dict.fromkeys(row["model"] for row in rows), key=lambda name: name != main)
    return {name: [row for row in rows if row["model"] == name] for name in names}


def first(rows: Rows, main: str | None = None) -> Rows:
    """The rows of ``main``, or of the first model where it is not among them."""
    return next(iter(by_model(rows, main).values()), [])
