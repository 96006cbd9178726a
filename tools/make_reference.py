"""Write the generated parts of docs/reference.md from the code that they describe.

    python tools/make_reference.py            # update the page
    python tools/make_reference.py --check    # exit status 1 if it is out of date

A generated part lies between `<!-- generated: NAME -->` and `<!-- end -->`; the rest of the page is written
by hand and stays.
"""

import argparse
import inspect
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import locks_kernels
import pages
from locks_kernels import precompile
from locks_sglang import cli, demo_model, refusals
from locks_sglang.config import DEFAULT_PAGE_SIZE, argument_name, flag_name, options
from locks_sglang.plan import command as plan
from locks_sglang.telemetry import METRICS, TIER_METRICS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference.md"

# What /server_info says below `internal_states[i].locks`, in its order; a test compares the names.
SERVER_INFO = {
    "selector": "`locks`, `quest` or `oracle`",
    "attend": "`native` or `flashinfer`: the kernel that attends the selected pages",
    "format": "record format; `minmax` for quest, null for oracle",
    "budget": "tokens that a request attends unless it asks for another budget",
    "max_budget": "largest budget that a request may ask for, tokens",
    "min_len": "requests with fewer tokens attend everything",
    "dense_below": "decode steps that would leave out fewer tokens than this run dense; 0 is none",
    "page_size": "tokens a page",
    "bytes_per_token": "bytes that the summaries add to a token of the KV pool, all layers of this rank",
    "summary_bytes": "bytes of all summaries of this rank",
    "step_bytes": "bytes on the GPU for the decode steps: tables, workspaces, and what is kept for audits",
    "sparse_layers": "number of layers that decode sparse",
    "dense_layers": "object: layer -> why it keeps dense attention",
    "rows_sparse": "decode rows that attended fewer pages than they had, since the start",
    "rows_dense": "decode rows that attended all their pages",
    "pages_attended": "pages attended, per KV head and layer, summed over rows",
    "pages_available": "pages present, per KV head and layer, summed over rows",
    "summaries_built": "pages whose summaries were built, all layers together",
    "audited_rows": "sparse rows whose retained mass was measured (`--sparse-decode-audit-interval`)",
    "retained_mass": "mean share of the exact attention mass on the selected pages; null before an audit",
    "retained_mass_by_layer": "object: audited layer -> the same",
}


# And below it with --sparse-decode-kv-tier host.
TIER_INFO = {
    "kv_tier": "`host`",
    "host_bytes": "bytes of the KV pool in host memory, of this rank",
    "hot_tiles": "tiles (a layer, KV head and page: K and V) that the hot cache has room for",
    "hot_bytes": "bytes of them on the GPU; the open page of every request slot comes on top",
    "hot_share": "share of the tiles read by decode that the hot cache held; null before the first",
    "hot_hits": "tiles that decode read from the hot cache, since the start",
    "hot_misses": "tiles that decode read and the hot cache did not hold",
    "host_bytes_read": "bytes read from it: tiles for decode, prefixes for prefill, keys for summaries",
    "host_bytes_written": "bytes written to it",
    "host_pages_used": "pages in use, by the prefix cache too",
    "host_pages_free": "pages that are free",
    "prefills_staged": "prefill forwards that read their prefix once, into GPU memory",
    "prefills_unstaged": "prefill forwards with more tokens than that has room for, and all on SGLang "
    "0.5.23; their attention reads the host's memory",
}


def flags() -> str:
    rows = []
    for option in options():
        settings = option.metadata["argparse"]
        value = "" if settings.get("action") == "store_true" else " " + _placeholder(settings)
        default = "off" if option.default is False else "none" if option.default is None else option.default
        rows.append(
            [
                f"`{flag_name(option.name)}{value}`",
                f"`{argument_name(option.name)}`",
                f"`{default}`",
                _text(option.metadata["help"]),
            ]
        )
    return pages.table(["flag", "`sgl.Engine` argument", "default", "meaning"], rows)


def page_size() -> str:
    return (
        f"SGLang's own `--page-size` becomes {DEFAULT_PAGE_SIZE} where it is not given and sparse decode "
        "is on; legal: " + ", ".join(map(str, locks_kernels.layout.PAGE_SIZES)) + "."
    )


def metrics() -> str:
    return _metrics(METRICS)


def tier_metrics() -> str:
    return _metrics(TIER_METRICS)


def _metrics(listed: dict[str, tuple[str, str]]) -> str:
    # prometheus_client adds the suffix of counters.
    shown = {name: name + "_total" if kind == "counter" else name for name, (kind, _) in listed.items()}
    return pages.table(
        ["metric", "kind", "meaning"],
        [[f"`{shown[name]}`", kind, text] for name, (kind, text) in listed.items()],
    )


def server_info() -> str:
    return _fields(SERVER_INFO)


def tier_info() -> str:
    return _fields(TIER_INFO)


def _fields(listed: dict[str, str]) -> str:
    return pages.table(["field", "meaning"], [[f"`{name}`", text] for name, text in listed.items()])


def refused_options() -> str:
    rows = []
    for row in refusals.REFUSALS:
        since = "" if row.since == "0.5.17" else f" (SGLang {row.since})"
        passes = "with `--sparse-decode-allow-untested`" if row.untested else "no"
        rows.append([f"`{row.option}`{since}", row.reason, row.legal, passes])
    return pages.table(["option", "why", "legal", "can be started all the same"], rows)


def refused_variables() -> str:
    rows = []
    for row in refusals.REFUSED_VARIABLES:
        since = "" if row.since == "0.5.17" else f" (SGLang {row.since})"
        rows.append([f"`{row.name}`{since}", row.reason])
    return pages.table(["environment variable", "why"], rows)


def python_api() -> str:
    parts = []
    for name in sorted(locks_kernels.__all__, key=lambda name: (name[0].isupper(), name)):
        parts.append(_describe(name, getattr(locks_kernels, name)))
    return "\n\n".join(parts)


def command_line() -> str:
    parser = cli.make_parser()
    check = next(
        action.choices["check"]
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    parsers = (check, plan.make_parser(), demo_model.make_parser(), precompile.make_parser())
    return "\n\n".join(f"```text\n{_help(p)}\n```" for p in parsers)


PARTS: dict[str, Callable[[], str]] = {
    "flags": flags,
    "page size": page_size,
    "metrics": metrics,
    "tier metrics": tier_metrics,
    "server info": server_info,
    "tier info": tier_info,
    "refused options": refused_options,
    "refused variables": refused_variables,
    "python api": python_api,
    "command line": command_line,
}


def render(page: str) -> str:
    """The page with its generated parts made anew."""
    return pages.render(page, PARTS)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 if out of date")
    arguments = parser.parse_args()
    return 0 if pages.update(PAGE, PARTS, arguments.check, "python tools/make_reference.py") else 1


def _describe(name: str, thing: Any) -> str:
    if inspect.isclass(thing):
        members = [f.name for f in fields(thing)] if is_dataclass(thing) else []
        shown = f"class {name}({', '.join(members)})"
        methods = [
            m
            for m, value in vars(thing).items()
            if not m.startswith("_") and m not in members and value.__doc__
        ]
        extra = "".join(f"\n- `.{m}`: {_first(_doc_of(thing, m))}" for m in methods)
        return f"**`{shown}`** {_first(thing.__doc__)}{extra and chr(10)}{extra}"
    if callable(thing):
        return f"**`{name}{_signature(thing)}`** {_first(thing.__doc__)}"
    if name == "ATTEND_ALL":
        return f"**`{name}`** = {thing}. Budget that makes a row attend all its pages."
    return f"**`{name}`** = `{str(thing).replace('locks_kernels.layout.', '')}`"


def _doc_of(owner: type, member: str) -> str:
    return inspect.getdoc(getattr(owner, member)) or ""


def _signature(function: Callable[..., Any]) -> str:
    """Names and defaults; the types are in the docstring, with shapes."""
    bare = [
        p.replace(annotation=inspect.Parameter.empty)
        for p in inspect.signature(function).parameters.values()
    ]
    return str(inspect.Signature(bare))


def _first(text: str | None) -> str:
    """First sentence of a docstring, with Markdown's code marks."""
    first = " ".join((inspect.cleandoc(text or "").split("\n\n")[0]).split())
    sentence = re.split(r"(?<=\.) (?=[A-Z])", first)[0].replace("``", "`")
    return re.sub(r":\w+:`([^`]+)`", r"`\1`", sentence)


def _placeholder(settings: dict[str, Any]) -> str:
    if "choices" in settings:
        return "{" + ",".join(settings["choices"]) + "}"
    return f"[{settings['metavar']}]" if settings.get("nargs") == "?" else settings["metavar"]


def _help(parser: argparse.ArgumentParser) -> str:
    """Help text at a width that does not depend on the terminal."""
    parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=100)  # type: ignore
    return parser.format_help().rstrip()


def _text(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    raise SystemExit(main())
