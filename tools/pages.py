"""Pages with generated parts, between ``<!-- generated: NAME -->`` and ``<!-- end -->``."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

Parts = Mapping[str, Callable[[], str]]


def render(page: str, parts: Parts) -> str:
    """The page with its generated parts made anew. ValueError for a part that is unknown or missing."""

    def replace(match: re.Match[str]) -> str:
        name = match[1]
        if name not in parts:
            raise ValueError(f"unknown part {name!r}; legal: {', '.join(parts)}")
        seen.add(name)
        return f"<!-- generated: {name} -->\n{parts[name]()}\n<!-- end -->"

    seen: set[str] = set()
    rendered = re.sub(r"<!-- generated: (.+?) -->\n.*?<!-- end -->", replace, page, flags=re.S)
    if missing := set(parts) - seen:
        raise ValueError(f"the page has no place for {', '.join(sorted(missing))}")
    return rendered


def update(path: Path, parts: Parts, check: bool, command: str) -> bool:
    """Write the page anew, or with ``check`` only say whether it is up to date."""
    before = path.read_text(encoding="utf-8")
    after = render(before, parts)
    if check and after != before:
        print(f"{path} is out of date; run: {command}", file=sys.stderr)
        return False
    if not check:
        path.write_text(after, encoding="utf-8")
    return True


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
