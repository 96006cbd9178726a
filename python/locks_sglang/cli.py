"""``python -m locks_sglang {check, plan, demo-model}``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from locks_kernels.layout import PAGE_SIZES

from . import check, machine
from .config import DEFAULT_PAGE_SIZE, SELECTORS, LocksConfig, LocksError


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand; the result is the exit status."""
    arguments, rest = make_parser().parse_known_args(argv)
    if arguments.command == "demo-model":
        from .demo_model import main as demo_model

        return demo_model(rest)
    if arguments.command == "plan":
        from .plan.command import main as plan

        return plan(rest)
    if rest:
        make_parser().error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return run_check(arguments)
    except LocksError as error:
        print(f"check: {error}", file=sys.stderr)
        return check.BROKEN


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; ``demo-model`` parses its own arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m locks_sglang", description="Tools beside the sparse-decode plugin."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    _add_check(commands.add_parser("check", help="will it run here?", epilog=check.EXIT_STATUS))
    commands.add_parser("plan", help="what fits on a GPU, and how fast it decodes", add_help=False)
    commands.add_parser("demo-model", help="make the small demo model", add_help=False)
    return parser


def _add_check(parser: argparse.ArgumentParser) -> None:
    defaults = LocksConfig()
    parser.description = "Will this machine, this SGLang and this model run sparse decode?"
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="folder or name of a model, whose configuration is read (no weights)",
    )
    parser.add_argument(
        "--tp-size", type=int, default=1, metavar="RANKS", help="of the server, for the model's heads"
    )
    parser.add_argument(
        "--sparse-decode", choices=SELECTORS[1:], default="locks", help="default: %(default)s"
    )
    parser.add_argument(
        "--sparse-decode-summary",
        default=defaults.summary,
        metavar="FORMAT",
        help="record format (default: %(default)s)",
    )
    parser.add_argument(
        "--page-size", type=int, choices=PAGE_SIZES, default=DEFAULT_PAGE_SIZE, help="default: %(default)s"
    )
    parser.add_argument("--contracts", action="store_true", help="list the contracts that hold, too")
    parser.add_argument(
        "--sources",
        type=Path,
        metavar="FOLDER",
        help="check the SGLang sources in FOLDER/sglang (an unpacked wheel) and not the installed ones",
    )


def run_check(arguments: argparse.Namespace) -> int:
    """Print what stands for and against sparse decode here; the result is the exit status.

    Raises:
        LocksError: there is no SGLang to check, or an option is wrong.
    """
    config = LocksConfig(
        selector=arguments.sparse_decode,
        summary=arguments.sparse_decode_summary,
        page_size=arguments.page_size,
    )
    config.validate()
    version, contracts = check.check_sources(arguments.sources)
    installed = arguments.sources is None
    result = check.Result(
        version,
        contracts,
        config,
        machine=machine.look() if installed else None,
        model=_model(arguments, config) if arguments.model else None,
    )
    print(check.render(result, arguments.contracts))
    return result.status


def _model(arguments: argparse.Namespace, config: LocksConfig) -> check.ModelFacts:
    import torch

    from . import cpu_stand_ins
    from .model_facts import read_model

    # SGLang, which reads the configuration, does not import without them where there is no GPU.
    if not torch.cuda.is_available():
        cpu_stand_ins.activate()
    return read_model(arguments.model, config, arguments.tp_size)
