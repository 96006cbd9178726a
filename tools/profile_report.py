"""Where a decode step's time goes: the kernels of a layer, dense beside sparse, and host waits."""

from __future__ import annotations

from difflib import SequenceMatcher
from typing import Any

import pages
from model_rows import Rows
from step_report import case_name, is_dense, of_cases, ran_dense

Row = dict[str, Any]
WIDTH = 64  # of a kernel's name in a table
HEAD = [
    "variant", "launches a step", "a layer", "added a layer", "its kernels, us", "its gaps, us",
    "GPU busy, ms", "first to last kernel, ms", "host waits a step",
]  # fmt: skip


def cases(rows: Rows) -> str:
    """Two tables a case of one model: steps as a whole, and the kernels of a layer in order."""
    parts = []
    for case, found in of_cases(rows).items():
        found = {name: row for name, row in found.items() if "layer" in row}
        if found:
            ordered = dict(sorted(found.items(), key=lambda item: not is_dense(item[0])))
            parts += [f"{case_name(case)} tokens:", whole(ordered), layer(ordered)]
    return "\n\n".join(parts)


def whole(found: dict[str, Row]) -> str:
    """Launches, times and host waits of a step of every variant of a case."""
    lines = []
    for name, row in found.items():
        base = dense_of(name, found)
        added = len(row["layer"]) - len(base["layer"]) if base and row["layer"] and base["layer"] else None
        waits = [
            f"{call} {count / row['profiled_steps']:g}" for call, count in sorted(row["host_waits"].items())
        ]
        lines.append(
            [
                label(name, row),
                str(row["launches"]),
                str(len(row["layer"])) if row["layer"] else "-",
                "-" if added is None else f"{added:+d}",
                f"{sum(kernel['us'] for kernel in row['layer']):.1f}" if row["layer"] else "-",
                f"{sum(kernel['gap_us'] for kernel in row['layer']):.1f}" if row["layer"] else "-",
                f"{row['gpu_busy_ms']:.2f}",
                f"{row['gpu_span_ms']:.2f}",
                ", ".join(waits) or "none",
            ]
        )
    return pages.table(HEAD, lines)


def dense_of(name: str, found: dict[str, Row]) -> Row | None:
    """The dense step that a sparse one is compared with: of the same backend, or the first."""
    if is_dense(name):
        return None
    backend = name.split(":")[2] if name.count(":") == 2 else "fa3"
    dense = [row for other, row in found.items() if is_dense(other)]
    return found.get(f"dense:{backend}") or (dense[0] if dense else None)


def label(name: str, row: Row) -> str:
    return name.replace(":", " ") + (" D" if ran_dense(row) else "")


def layer(found: dict[str, Row]) -> str:
    """Kernels of a layer from behind one attention to the next, those of the same name in one line."""
    merged: list[tuple[str, dict[str, float]]] = []
    for name, row in found.items():
        merged = merge(merged, name, row["layer"])
    lines = [
        [f"`{short(kernel)}`", *(f"{times[name]:.1f}" if name in times else "-" for name in found)]
        for kernel, times in merged
    ]
    return pages.table(["kernel", *(f"{label(name, row)}, us" for name, row in found.items())], lines)


def merge(
    merged: list[tuple[str, dict[str, float]]], variant: str, kernels: list[dict[str, Any]]
) -> list[tuple[str, dict[str, float]]]:
    """The lines with one more variant's kernels, whose order stays."""
    new = [(kernel["kernel"], {variant: kernel["us"]}) for kernel in kernels]
    names, more = [line[0] for line in merged], [line[0] for line in new]
    out: list[tuple[str, dict[str, float]]] = []
    for kind, a, b, c, d in SequenceMatcher(None, names, more, autojunk=False).get_opcodes():
        if kind == "equal":
            out += [
                (name, {**old, **times})
                for (name, old), (_, times) in zip(merged[a:b], new[c:d], strict=True)
            ]
        else:
            out += merged[a:b] + new[c:d]
    return out


def short(kernel: str) -> str:
    """A kernel's name without what every one has, as it may stand in a table."""
    return kernel.removeprefix("void ")[:WIDTH].strip().replace("|", "\\|").replace("`", "'")
