"""Links between the pages lead somewhere: files are there, and headings are what the anchors say.

Addresses on the web are not asked.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path
    for path in (*ROOT.glob("*.md"), *ROOT.glob("[a-z]*/**/*.md"))
    if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
)
_LINK = re.compile(r"\[[^\]]*\]\(([^()\s]+)\)|(?:src|href)=\"([^\"]+)\"")
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.M | re.S)
_CODE = re.compile(r"`[^`]*`")


def links(page: Path) -> list[str]:
    """Targets of the links and images of a page; what stands in code is no link."""
    text = _CODE.sub("", _FENCE.sub("", page.read_text()))
    return [first or second for first, second in _LINK.findall(text)]


def anchors(page: Path) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    found: dict[str, int] = {}
    result = set()
    for heading in re.findall(r"^#{1,6} (.*)$", _FENCE.sub("", page.read_text()), re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")
        count = found.get(name, 0)
        found[name] = count + 1
        result.add(f"{name}-{count}" if count else name)
    return result


def broken(page: Path) -> list[str]:
    """Links of a page that lead nowhere."""
    wrong = []
    for link in links(page):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        inside = target == ROOT or ROOT in target.parents or not page.is_relative_to(ROOT)
        lost = anchor and target.suffix == ".md" and target.exists() and anchor not in anchors(target)
        if lost or not (inside and target.exists()):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_every_page_in_docs_is_linked_from_the_readme() -> None:
    linked = {link.partition("#")[0] for link in links(ROOT / "README.md")}
    pages = {str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("*.md")}
    assert pages - linked == set()


def test_addresses_are_whole() -> None:
    addresses = {link for page in PAGES for link in links(page) if link.startswith("http")}
    assert addresses and all(re.fullmatch(r"https://[\w.-]+/?[\w./#?=&%+~-]*", link) for link in addresses)


def test_broken_links_are_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One `two`: three\n# Same\n# Same\n[a](#one-two-three) [b](#same-1) [c](other.md)\n"
        '[d](#same-2) ![e](figure.svg) `[f](code.md)` [g](https://example.org) <img src="gone.png">\n'
        "```\n[h](fenced.md)\n```\n[i](next.md#there) [j](next.md#absent)\n"
    )
    (tmp_path / "next.md").write_text("## There\n")
    assert broken(page) == ["other.md", "#same-2", "figure.svg", "gone.png", "next.md#absent"]
