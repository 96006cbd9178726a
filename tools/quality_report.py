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
BUDGETS = ("64", "128", "256", "512", "1024", "2048")

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


def means(name: str, rows: list[Row]) -> str:
    """The lines of `scores` that are means over tasks."""
    head, rule, *lines = scores(name, rows).splitlines()
    kept = [line.replace(" **mean** |", "") for line in lines if "| **mean** |" in line]
    return "\n".join([head.replace(" task |", ""), rule.replace(" --- |", "", 1), *kept])


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
    """Recipes that are not in ``done``: command and what they need, then what the paper has."""
    left = {name: recipe for name, recipe in RECIPES.items() if name not in done}
    commands = [
        [f"`python benchmark/task_quality.py {name} --model-path {recipe.model}`", recipe.data or "nothing"]
        for name, recipe in left.items()
    ]
    expected = [
        [name, paper_means(recipe, name, "FullKV", "64"), column, *budgets]
        for name, recipe in left.items()
        for column in filter(None, COLUMNS.values())
        if set(budgets := [paper_means(recipe, name, column, budget) for budget in BUDGETS]) != {"-"}
    ]
    head = ["recipe", "FullKV", "selector", *(f"b = {budget}" for budget in BUDGETS)]
    return f"{pages.table(['command', 'downloads'], commands)}\n\n{pages.table(head, expected)}"


def paper_means(recipe: Recipe, name: str, column: str, budget: str) -> str:
    """The paper's mean over the recipe's tasks; "-" where it has none."""
    table = paper()[recipe.paper or name][budget]
    found = [table[row][column] for row in recipe.tasks.values() if column in table[row]]
    return f"{statistics.mean(found):.1f}" if len(found) == len(recipe.tasks) else "-"
