"""docs/troubleshooting.md: its headings are messages that exist, and every error has one."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from locks_sglang.refusals import REFUSALS, REFUSED_VARIABLES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text()
PACKAGE, KERNELS = ROOT / "python/locks_sglang", ROOT / "kernels/locks_kernels"
SOURCES = [
    *PACKAGE.glob("*.py"),
    *PACKAGE.glob("plan/*.py"),
    *PACKAGE.glob("tier/*.py"),
    *KERNELS.glob("*.py"),
]
# What raises errors for users; the ops of locks_kernels raise theirs for programmers.
SPEAKING = [path for path in SOURCES if path.parent != KERNELS or path.stem in ("build", "precompile")]
ERRORS = ("LocksError", "SystemExit", "RuntimeError", "BuildError", "DemoModelError")
HEADINGS = re.findall(r"^### (.*)$", PAGE, re.M)
MESSAGES = [m[1] for heading in HEADINGS if (m := re.fullmatch(r"`(.*)`", heading))]
ENOUGH = 20  # fewer literal characters than this would fit many messages

Template = list[str | None]  # a string of the source: its literal parts, and None for what is filled in


def template_of(node: ast.expr) -> Template:
    """What an expression prints; None for what is no literal."""
    if isinstance(node, ast.JoinedStr):
        return [part.value if isinstance(part, ast.Constant) else None for part in node.values]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        # Messages of the logging module fill in %s.
        pieces = re.split(r"(%[sd])", node.value)
        return [None if piece in ("%s", "%d") else piece for piece in pieces if piece]
    if isinstance(node, ast.BinOp):
        return [*template_of(node.left), *template_of(node.right)]
    return [None]


def literal(template: Template) -> str:
    return "".join(part or "" for part in template)


def templates() -> list[Template]:
    """Every string of the sources."""
    found: list[Template] = []
    for path in SOURCES:
        inside = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                inside |= {id(part) for part in node.values}
            elif not isinstance(node, ast.Constant | ast.BinOp) or id(node) in inside:
                continue
            found.append(template_of(node))
    return found


def raised(path: Path) -> Iterator[tuple[str, Template]]:
    """Place and template of every error that a file raises with a text of its own."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args):
            continue
        template = template_of(node.exc.args[0])
        if ast.unparse(node.exc.func) in ERRORS and len(literal(template)) >= ENOUGH:
            yield f"{path.stem}: {literal(template)[:50]}", template


def is_said(text: str, template: Template) -> bool:
    """Whether the template prints `text`; one that ends in `...` may stop in the middle of the template."""
    cut = text.endswith("...")
    text = text.removesuffix("...").rstrip()
    pattern, length = "", 0
    for part in template:
        if part is None:
            pattern += ".+?"
            continue
        for count in range(1, len(part) + 1) if cut else ():
            start = part[:count]
            fits = length + count >= ENOUGH and text.endswith(start)
            if fits and re.fullmatch(pattern + re.escape(start), text, re.S):
                return True
        pattern += re.escape(part)
        length += len(part)
    return length >= ENOUGH and re.fullmatch(pattern, text, re.S) is not None


TEMPLATES = templates()
RAISED = dict(pair for path in sorted(SPEAKING) for pair in raised(path))


def test_headings_are_messages() -> None:
    other = [heading for heading in HEADINGS if not re.fullmatch(r"`.*`", heading)]
    assert len(MESSAGES) > 20
    assert all("(from SGLang)" in heading or heading.startswith("Nothing is sparse") for heading in other)


@pytest.mark.parametrize("message", MESSAGES)
def test_message_still_exists(message: str) -> None:
    assert any(is_said(message, template) for template in TEMPLATES), f"nothing prints: {message}"


@pytest.mark.parametrize("place", RAISED)
def test_every_error_has_a_heading(place: str) -> None:
    assert any(is_said(message, RAISED[place]) for message in MESSAGES)


def test_errors_are_found() -> None:
    assert len(RAISED) > 50
    for start in ("config: --page-size ", "build: nvcc failed on ", "command: --context is "):
        assert any(place.startswith(start) for place in RAISED), start


@pytest.mark.parametrize(
    "name", [*(row.option for row in REFUSALS), *(row.name for row in REFUSED_VARIABLES)]
)
def test_every_refused_option_is_named(name: str) -> None:
    assert re.search(rf"`{name}[`=]", PAGE)


@pytest.mark.parametrize(
    "message",
    [
        "--page-size 1 does not work with sparse decode; legal: 16",
        "custom_params.locks has unknown keys ['mod']; legal: everything",
        "sparse decode could not begin: ...",
        "--sparse-decode does not work with the moon ...",
        "no such message at all",
    ],
)
def test_message_that_does_not_exist(message: str) -> None:
    assert not any(is_said(message, template) for template in TEMPLATES)
