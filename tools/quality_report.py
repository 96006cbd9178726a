"""The tables of docs/quality.md: our scores beside the paper's, and what was not run."""

from __future__ import annotations

import json
import statistics
from typing import Any

import pages
from benchmark_path import BENCHMARK
from quality.recipes import RECIPES, Recipe

# Ours -> the paper's column. The paper has no rotated formats.
COLUMNS = {
    "oracle": "Oracle",
    "r8i4": "r8i4",
    "r6h": None,
    "r4i4": "r4i4",
    "r2i4": "r2i4",
    "quest": "Quest",
}

Row = dict[str, Any]


def paper() -> dict[str, Any]:
    """Tables B.7 to B.12 of the paper: recipe -> budget -> row -> column -> score."""
    return json.loads((BENCHMARK / "quality" / "paper.json").read_text())


def scores(name: str, rows: list[Row]) -> str:
    """One line a budget and task, `ours (paper's)`; the mean over tasks last.

    Tasks that only FullKV was given, because it cannot do them, stand below the table.
    """
    recipe = RECIPES[name]
    table = paper()[recipe.paper or name]
    tasks = list(dict.fromkeys(row["task"] for row in rows if row["budget"]))
    columns = [column for column in COLUMNS if any(label(row) == column for row in rows)]
    budgets = sorted({row["budget"] for row in rows if row["budget"]})
    lines = []
    for budget in budgets:
        found: dict[str, list[tuple[float, float | None]]] = {}
        for task in tasks:
            line = [str(budget), recipe.tasks[task]]
            for column in ("FullKV", *columns):
                ours = [
                    row["score"]
                    for row in rows
                    if row["task"] == task and label(row) == column and row["budget"] in (None, budget)
                ]
                name_there = COLUMNS.get(column, column)
                theirs = table.get(str(budget), {}).get(recipe.tasks[task], {}).get(name_there)
                line.append(cell(ours[0], theirs) if ours else "-")
                if ours:
                    found.setdefault(column, []).append((ours[0], theirs))
            lines.append(line)
        lines.append(
            [
                str(budget),
                "**mean**",
                *(mean(found.get(column), len(tasks)) for column in ("FullKV", *columns)),
            ]
        )
    parts = [pages.table(["budget", "task", "FullKV", *columns], lines)] if lines else []
    alone = [
        f"{recipe.tasks[row['task']]} {row['score']:.1f}"
        for row in rows
        if row["selector"] == "FullKV" and row["task"] not in tasks
    ]
    if alone:
        parts.append(f"FullKV alone: {', '.join(alone)}.")
    return "\n\n".join(parts)


def label(row: Row) -> str:
    return row["format"] if row["selector"] == "locks" else row["selector"]


def cell(ours: float, theirs: float | None) -> str:
    return f"{ours:.1f}" + (f" ({theirs:.1f})" if theirs is not None else "")


def mean(pairs: list[tuple[float, float | None]] | None, tasks: int) -> str:
    """Over all the tasks; "-" where one is missing."""
    if not pairs or len(pairs) < tasks:
        return "-"
    theirs = [there for _, there in pairs if there is not None]
    return cell(
        statistics.mean(ours for ours, _ in pairs),
        statistics.mean(theirs) if len(theirs) == len(pairs) else None,
    )


def not_run(done: set[str]) -> str:
    """Recipes that are not in ``done``: command, what they need, and what the paper has."""
    lines = []
    for name, recipe in RECIPES.items():
        if name in done:
            continue
        lines.append(
            [
                f"`python benchmark/task_quality.py {name} --model-path {recipe.model}`",
                recipe.data or "nothing",
                paper_means(recipe, name, "FullKV"),
                " / ".join(paper_means(recipe, name, "r8i4", budget) for budget in ("64", "512", "2048")),
                " / ".join(paper_means(recipe, name, "Quest", budget) for budget in ("64", "512", "2048")),
            ]
        )
    budgets = "b = 64 / 512 / 2048"
    head = ["command", "downloads", "paper: FullKV", f"paper: r8i4, {budgets}", f"paper: Quest, {budgets}"]
    return pages.table(head, lines)


def paper_means(recipe: Recipe, name: str, column: str, budget: str = "64") -> str:
    """The paper's mean over the recipe's tasks."""
    table = paper()[recipe.paper or name][budget]
    return f"{statistics.mean(table[row][column] for row in recipe.tasks.values()):.1f}"
