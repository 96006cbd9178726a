"""Copies of SGLang's sources in which one file differs: what a version that broke a contract looks like."""

import ast
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path

from locks_sglang import compat

Break = Callable[[str, Callable[[str], str]], Path]
"""``broken(dotted, change)``: a tree of SGLang's sources where the file of ``dotted`` is changed."""


def with_changed_file(root: Path, copy: Path, relative: Path, change: Callable[[str], str]) -> Path:
    """Make `copy` a tree of the files of `root/sglang` that contracts read, where `relative` is changed."""
    for path in contract_files(root):
        target = copy / "sglang" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if path != relative:
            target.symlink_to(root / "sglang" / path)
    before = (root / "sglang" / relative).read_text(encoding="utf-8")
    after = change(before)
    assert after != before, f"nothing was changed in {relative}"
    (copy / "sglang" / relative).write_text(after, encoding="utf-8")
    return copy


@cache
def contract_files(root: Path) -> tuple[Path, ...]:
    """Files, relative to `root/sglang`, that `compat.run_checks` reads."""
    rows = {check.name for check in compat.run_checks(root)}
    fields = (root / "sglang/srt/arg_groups/fields").glob("*.py")
    relative = {file_of(root, row) for row in rows} | {path.relative_to(root / "sglang") for path in fields}
    return (Path("_version.py"), *sorted(relative))


def file_of(root: Path, dotted: str) -> Path:
    """File, relative to `root/sglang`, of the module that the dotted path starts with."""
    parts = dotted.split(".")[1:]
    for length in range(len(parts), 0, -1):
        base = Path(*parts[:length])
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if (root / "sglang" / path).is_file():
                return path
    raise AssertionError(f"no module of {dotted} below {root}")


def find(source: str, name: str, owner: str | None) -> ast.FunctionDef | ast.AsyncFunctionDef:
    """The function `name`, in class `owner` or in the module."""
    body = _parse(source).body
    if owner is not None:
        body = next(n for n in body if isinstance(n, ast.ClassDef) and n.name == owner).body
    return next(n for n in body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name == name)


@lru_cache(maxsize=1)  # neighbouring tests change the same file
def _parse(source: str) -> ast.Module:
    return ast.parse(source)


def rename_function(source: str, function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    lines = source.split("\n")
    at = function.lineno - 1
    lines[at] = lines[at].replace(f"def {function.name}", f"def {function.name}_of_old", 1)
    return "\n".join(lines)


def rename_parameter(source: str, function: ast.FunctionDef | ast.AsyncFunctionDef, parameter: str) -> str:
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    found = next(argument for argument in every if argument.arg == parameter)
    lines = source.split("\n")
    line = lines[found.lineno - 1].encode()
    start = found.col_offset
    changed = line[:start] + b"other_" + line[start:]
    lines[found.lineno - 1] = changed.decode()
    return "\n".join(lines)


def change_binding(source: str, function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Make a static or class method an ordinary one, and anything else a static method."""
    lines = source.split("\n")
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Name) and decorator.id in ("staticmethod", "classmethod"):
            del lines[decorator.lineno - 1]
            return "\n".join(lines)
    first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
    lines.insert(first - 1, " " * function.col_offset + "@staticmethod")
    return "\n".join(lines)
