"""``python -m locks_sglang {check, demo-model}``."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from . import __version__, compat
from .config import LocksError

HOLDS, BROKEN, UNTESTED = 0, 1, 3
_EXIT_STATUS = (
    f"exit status: {HOLDS} sparse decode starts here; {BROKEN} it does not (a contract is broken, "
    f"or there is no SGLang); {UNTESTED} all contracts hold, but this version was not tested and needs "
    "--sparse-decode-allow-untested"
)
_NAME_WIDTH = 48
_INDENT = " " * 6


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand; the result is the exit status."""
    arguments, rest = make_parser().parse_known_args(argv)
    if arguments.command == "demo-model":
        from .demo_model import main as demo_model

        return demo_model(rest)
    if rest:
        make_parser().error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return run_check(arguments.sources)
    except LocksError as error:
        print(f"check: {error}", file=sys.stderr)
        return BROKEN


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; ``demo-model`` parses its own arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m locks_sglang", description="Tools beside the sparse-decode plugin."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="will this SGLang run sparse decode?", epilog=_EXIT_STATUS)
    check.add_argument(
        "--sources",
        type=Path,
        metavar="FOLDER",
        help="check the SGLang sources in FOLDER/sglang (an unpacked wheel) and not the installed ones",
    )
    commands.add_parser("demo-model", help="make the small demo model", add_help=False)
    return parser


def run_check(sources: Path | None) -> int:
    """Print the versions and the table of contracts; the result is the exit status.

    Raises:
        LocksError: there is no SGLang to check.
    """
    root = compat.sglang_root() if sources is None else sources
    if not (root / "sglang").is_dir():
        raise LocksError(f"{root} holds no folder 'sglang'; legal: the folder of an unpacked SGLang wheel")
    found = compat.sglang_version() if sources is None else compat.version_of_sources(root)
    tested = found in compat.TESTED_VERSIONS
    print(f"locks-sglang {__version__} on SGLang {found} ({'tested' if tested else 'NOT tested'})")
    if sources is None:
        print(_surroundings())
    print()
    checks = compat.run_checks(root)
    for check in checks:
        print(_row(check))
    broken = sum(not check.ok for check in checks)
    print(f"\n{len(checks) - broken} of {len(checks)} contracts hold: {_verdict(broken, tested)}")
    if broken:
        return BROKEN
    return HOLDS if tested else UNTESTED


def _verdict(broken: int, tested: bool) -> str:
    if broken:
        versions = ", ".join(compat.TESTED_VERSIONS)
        return f"sparse decode does not start on this SGLang; tested: {versions}"
    if tested:
        return "sparse decode starts on this SGLang"
    return "sparse decode starts on this SGLang with --sparse-decode-allow-untested"


def _row(check: compat.Check) -> str:
    """One line a contract that holds; a broken one says on more lines what is wrong and where."""
    # Longer lines are hard to read; a terminal that is narrower decides.
    width = max(60, min(120, shutil.get_terminal_size((100, 24)).columns))
    mark = "pass" if check.ok else "FAIL"
    line = f"{mark}  {short_name(check.name):<{_NAME_WIDTH}}  {check.purpose}"
    if check.ok:
        return line if len(line) <= width else line[: width - 3].rstrip(" ,") + "..."
    lines = [line]
    for text in (check.detail, f"in {check.name}"):
        lines += textwrap.wrap(text, width, initial_indent=_INDENT, subsequent_indent=_INDENT)
    return "\n".join(lines)


def short_name(target: str) -> str:
    """A dotted path from its class on; the bare name of a module's function."""
    parts = target.split(".")
    classes = [index for index, part in enumerate(parts) if part[:1].isupper()]
    return ".".join(parts[classes[0] if classes else -1 :])


def _surroundings() -> str:
    from locks_kernels import build

    packages = {"torch": "torch", "triton": "triton", "flashinfer": "flashinfer-python"}
    versions = ", ".join(f"{shown} {_version(name)}" for shown, name in packages.items())
    return f"{versions}, GPU: {_gpu()}, nvcc: {build.find_nvcc() or 'none'}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _gpu() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
