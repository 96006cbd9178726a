"""Results of the fidelity microscope: JSON, a table on the screen, a plot."""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
import sys
from collections import defaultdict
from datetime import date
from pathlib import Path

import torch

LABELS = ("table", "selector", "format", "scope", "page", "combine", "rope", "rank")


def save(rows: list[dict], about: dict, path: Path, benchmark: str, made_from: str | None) -> None:
    """Write rows with what is needed to measure them again; ``made_from`` is a `commit`."""
    result = {
        "benchmark": benchmark,
        "commit": made_from,
        "date": date.today().isoformat(),
        "machine": {
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "cpu": platform.machine(),
            "torch": torch.__version__,
        },
        # Folders are this machine's own; names tell what was measured.
        "command": shlex.join(["python", "-m", "locks_sglang.fidelity", *map(_name, sys.argv[1:])]),
        **about,
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    body = json.dumps({**result, "rows": []}, indent=1)
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    path.write_text(body.replace('"rows": []', f'"rows": [\n{lines}\n ]') + "\n")


def commit() -> str | None:
    """Commit of the checkout, ``-dirty`` where this package or the kernels differ from it."""
    # Other files cannot change a figure.
    found = _git("rev-parse", "--short", "HEAD")
    changed = _git("status", "--porcelain", "--", ".", ":/kernels")
    return f"{found}-dirty" if found and changed else found or None


def _git(*arguments: str) -> str:
    answer = subprocess.run(
        ["git", *arguments], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    )
    return answer.stdout.strip()


def _name(argument: str) -> str:
    return Path(argument).name if Path(argument).is_absolute() else argument


def mean_over_texts(rows: list[dict]) -> list[dict]:
    """One row a case and budget: the mean over the texts, each counting the same."""
    groups: dict[tuple, list[dict]] = defaultdict(list)
    for row in rows:
        groups[tuple(row[name] for name in (*LABELS, "budget"))].append(row)
    means = []
    for members in groups.values():
        merged = dict(members[0], text="mean")
        for figure in ("mass", "worst_head", "recall", "bytes"):
            merged[figure] = sum(member[figure] for member in members) / len(members)
        means.append(merged)
    return means


def table(rows: list[dict]) -> str:
    """Mass and recall in per cent by budget, one block a table."""
    means = mean_over_texts(rows)
    lines: list[str] = []
    for name in dict.fromkeys(row["table"] for row in means):
        block = [row for row in means if row["table"] == name]
        budgets = sorted({row["budget"] for row in block})
        lines.append("")
        lines.append(f"{name}: retained mass / recall of the exact selection, %, by budget in tokens")
        head = f"{'':42s}{'bytes':>7s}" + "".join(f"{budget:>13d}" for budget in budgets)
        lines.append(head)
        cases: dict[tuple, dict[int, dict]] = defaultdict(dict)
        for row in block:
            cases[tuple(row[label] for label in LABELS)][row["budget"]] = row
        for by_budget in cases.values():
            row = next(iter(by_budget.values()))
            cells = "".join(
                f"{100 * by_budget[b]['mass']:7.1f}/{100 * by_budget[b]['recall']:5.1f}"
                if b in by_budget
                else " " * 13
                for b in budgets
            )
            lines.append(f"{_label(row):42s}{row['bytes'] or '':>7}{cells}")
    return "\n".join(lines)


def _label(row: dict) -> str:
    """Only what tells a case from the others of its table."""
    parts = [row["selector"], row["format"]]
    if row["table"] == "scope":
        parts = [row["scope"], f"rank {row['rank']}", f"(as {row['format']})"]
    if row["table"] == "page":
        parts.append(f"page {row['page']}")
    if row["table"] == "rope":
        parts.append(f"{row['rope']}-RoPE")
    if row["table"] == "combine":
        parts = [row["combine"], f"(worst head {100 * row['worst_head']:.1f})"]
    return " ".join(parts)


def kv_table(rows: list[dict]) -> str:
    """Figures of the quantised caches, one line a case and budget, means over texts."""
    names = ("kv", "selector", "format", "summaries", "budget")
    figures = ("mass", "stored_mass", "recall", "error")
    return _lines(rows, names, figures)


def auto_table(rows: list[dict]) -> str:
    """Rules for the number of pages, means over texts: masses first, decoded texts below."""
    names = ("format", "rule", "target", "cap")
    masses = [row for row in rows if row["table"] == "mass"]
    decoded = [row for row in rows if row["table"] == "decode"]
    ours = ("pages", "mass", "p1", "p5", "p25")
    parts = [_lines(masses, names, (*ours, *(f"fixed_{name}" for name in ours[1:])))]
    if decoded:
        fixed = [dict(row, cap=round(row["pages"])) for row in decoded if row["rule"] == "fixed"]
        others = [row for row in decoded if row["rule"] != "fixed"]
        parts.append(_lines(fixed + others, names, ("pages", "kl", "agree")))
    return "\n\n".join(parts)


def _lines(rows: list[dict], names: tuple[str, ...], figures: tuple[str, ...]) -> str:
    groups: dict[tuple, list[dict]] = defaultdict(list)
    for row in rows:
        groups[tuple(row[name] for name in names)].append(row)
    lines = ["".join(f"{name:>11s}" for name in (*names, *figures))]
    for case, members in groups.items():
        means = [sum(row[figure] for row in members) / len(members) for figure in figures]
        cells = [f"{'-' if part is None else part!s:>11s}" for part in case]
        lines.append("".join(cells + [f"{mean:11.4f}" for mean in means]))
    return "\n".join(lines)


def plot(rows: list[dict], path: Path) -> None:
    """Mass and recall against budget for the selectors (needs matplotlib, extra ``bench``)."""
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit("--plot needs matplotlib: pip install 'locks-sglang[bench]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    means = [row for row in mean_over_texts(rows) if row["table"] == "selectors"]
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), sharex=True)
    for name in dict.fromkeys((row["selector"], row["format"]) for row in means):
        points = sorted((r["budget"], r) for r in means if (r["selector"], r["format"]) == name)
        budgets = [budget for budget, _ in points]
        row = points[0][1]
        label = f"{row['format'] if row['selector'] == 'locks' else row['selector']} ({row['bytes']:.0f} B)"
        style = {"locks": "-", "oracle": "k--"}.get(row["selector"], ":")
        for axis, figure_name in zip(axes, ("mass", "recall"), strict=True):
            axis.plot(budgets, [100 * r[figure_name] for _, r in points], style, marker=".", label=label)
    for axis, title in zip(axes, ("Retained attention mass", "Recall of the exact selection"), strict=True):
        axis.set(title=f"{title}, %", xlabel="budget, tokens")
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.grid(alpha=0.3)
    axes[1].legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
