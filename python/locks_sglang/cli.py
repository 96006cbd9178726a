"""``python -m locks_sglang {check, demo-model}``."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import __version__, compat


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand; the result is the exit status."""
    parser = argparse.ArgumentParser(prog="locks_sglang", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="will this SGLang run sparse decode?")
    check.add_argument(
        "--sources", type=Path, help="folder with another 'sglang' package, to check its sources"
    )
    commands.add_parser("demo-model", help="make the small demo model", add_help=False)
    arguments, rest = parser.parse_known_args(argv)
    if arguments.command == "demo-model":
        from .demo_model import main as demo_model

        return demo_model(rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return run_check(arguments.sources)


def run_check(sources: Path | None) -> int:
    """Print the table of contracts; 0 if all hold, 1 otherwise."""
    root = sources or compat.sglang_root()
    found = _version_of(sources) if sources else compat.sglang_version()
    checks = compat.run_checks(root)
    tested = found in compat.TESTED_VERSIONS
    print(f"locks-sglang {__version__}, SGLang {found} ({'tested' if tested else 'NOT tested'})")
    width = max(len(check.name) for check in checks)
    for check in checks:
        mark = "pass" if check.ok else "FAIL"
        print(f"{mark}  {check.name:<{width}}  {check.purpose}{check.detail and '  <- '}{check.detail}")
    broken = sum(not check.ok for check in checks)
    print(f"{len(checks) - broken} of {len(checks)} contracts hold")
    return 0 if not broken and tested else 1


def _version_of(sources: Path) -> str:
    """Version of an unpacked wheel, from the name of its dist-info folder."""
    found = sorted(sources.glob("sglang-*.dist-info"))
    return found[0].name.split("-")[1].removesuffix(".dist") if found else "unknown"
