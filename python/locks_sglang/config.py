"""The flags: one table, one dataclass, their validation."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import Field, asdict, dataclass, field, fields
from typing import Any

from locks_kernels.layout import PAGE_SIZES, PAPER_FORMATS, ROTATED_FORMATS, legal_formats
from locks_kernels.layout import SummaryLayout as _SummaryLayout

SELECTORS = ("off", "locks", "quest", "oracle")
ATTEND = ("auto", "flashinfer", "native")
KV_TIERS = ("gpu", "host")
DEFAULT_PAGE_SIZE = 16
AUDIT_INTERVAL = 100
"""Decode steps between audits where they are asked for without a number."""


class LocksError(ValueError):
    """A wrong option or an unsupported combination; the message names the legal values."""


def _option(default: Any, help_text: str, **argparse_kwargs: Any) -> Any:
    return field(default=default, metadata={"help": help_text, "argparse": argparse_kwargs})


@dataclass(frozen=True)
class LocksConfig:
    """What the user asked for.  Field ``budget`` is the flag ``--sparse-decode-budget`` and the
    ``sgl.Engine`` argument ``sparse_decode_budget``; ``selector`` is ``--sparse-decode`` itself.
    """

    selector: str = _option(
        "off",
        "Sparse decode: 'locks' scores pages from compact key summaries; 'quest' from per-dimension "
        "minima and maxima; 'oracle' from every key (quality ceiling, not fast); 'off' is plain SGLang.",
        choices=SELECTORS,
    )
    summary: str = _option(
        "r6h",
        "Record format of a page's key summary. The paper's: "
        f"{', '.join(PAPER_FORMATS)}; rotated: {', '.join(ROTATED_FORMATS)}. The default keeps within 0.2 "
        "points of the attention mass of r8i4 in 70 percent of its bytes.",
        metavar="FORMAT",
    )
    budget: int = _option(
        2048,
        "Tokens attended per request, layer and KV head; a multiple of the page size, at least two "
        "pages. A request with no more tokens attends all of them.",
        type=int,
        metavar="TOKENS",
    )
    max_budget: int | None = _option(
        None,
        "Largest budget that a single request may ask for. Default: four times the budget.",
        type=int,
        metavar="TOKENS",
    )
    min_len: int = _option(
        0,
        "Requests with fewer tokens than this attend everything, whatever the budget.",
        type=int,
        metavar="TOKENS",
    )
    dense_below: int | None = _option(
        None,
        "Decode steps that would leave out fewer tokens than this, all requests together, run SGLang's own "
        "dense attention, which then is the faster one; of each request what is beyond the server's budget "
        "and 1536 tokens counts. 0 is never, so that what a request attends does not depend on its "
        "neighbours. Default: on a GPU, the tokens of 48 MiB of keys and values a layer (24576 at 2 KiB a "
        "token); elsewhere, and with a trace or another selector than locks, 0.",
        type=int,
        metavar="TOKENS",
    )
    attend: str = _option(
        "auto",
        "Kernel that attends the selected pages: 'native', ours; 'flashinfer', FlashInfer's paged decode; "
        "'auto' is native, the faster one where both were measured.",
        choices=ATTEND,
    )
    kv_tier: str = _option(
        "gpu",
        "Where the KV pool lies: 'gpu', or 'host': in host memory, with summaries and the pages that are "
        "read often on the GPU.",
        choices=KV_TIERS,
    )
    host_gib: float | None = _option(
        None,
        "Host memory of the KV pool per rank with --sparse-decode-kv-tier host. Default: an equal share of "
        "what is free on the GPU's NUMA node and in the container, less 4 GiB.",
        type=float,
        metavar="GIB",
    )
    hot_gib: float | None = _option(
        None,
        "Memory on the GPU for pages that are read often, per rank, with --sparse-decode-kv-tier host; 0 "
        "is none. It changes the speed and no result. Default: what the pages of the host leave there, at "
        "most what four decode steps read.",
        type=float,
        metavar="GIB",
    )
    audit_interval: int = _option(
        0,
        "Measure every so many decode steps, on one audited layer in turn and a few requests, the "
        "attention mass that the selected pages really retained; without a number every "
        f"{AUDIT_INTERVAL} steps, 0 is never.",
        type=int,
        nargs="?",
        const=AUDIT_INTERVAL,
        metavar="STEPS",
    )
    audit_layers: int = _option(
        3,
        "Layers that audits look at, spread evenly over the sparse ones, the first and the last among "
        "them.",
        type=int,
        metavar="COUNT",
    )
    trace_file: str | None = _option(
        None,
        "Write the selected pages of every decode row and layer as JSON lines (for debugging: every "
        "decode step waits for it); further tensor-parallel ranks to PATH.rank1, ...",
        metavar="PATH",
    )
    allow_untested: bool = _option(
        False,
        "Start on an SGLang version or with options that locks-sglang was not tested with.",
        action="store_true",
    )

    # Not an option of ours: SGLang's --page-size, set when the server arguments are complete.
    page_size: int = field(default=DEFAULT_PAGE_SIZE, metadata={"internal": True})

    @property
    def enabled(self) -> bool:
        return self.selector != "off"

    @property
    def largest_budget(self) -> int:
        """Largest budget in tokens that a request may ask for; sizes the page lists."""
        return 4 * self.budget if self.max_budget is None else self.max_budget

    def validate(self) -> None:
        """Raise LocksError where an option is wrong by itself or for the page size."""
        page_size = self.page_size
        if self.selector not in SELECTORS:
            raise LocksError(f"--sparse-decode {self.selector!r} is unknown; legal: {', '.join(SELECTORS)}")
        if page_size not in PAGE_SIZES:
            raise LocksError(
                f"--page-size {page_size} does not work with --sparse-decode; "
                f"legal: {', '.join(map(str, PAGE_SIZES))}"
            )
        try:
            _SummaryLayout.parse(self.summary, head_dim=128, page_size=page_size)
        except ValueError:
            raise LocksError(
                f"--sparse-decode-summary {self.summary!r} is unknown; legal: {legal_formats()}"
            ) from None
        check_budget("--sparse-decode-budget", self.budget, page_size)
        check_budget("--sparse-decode-max-budget", self.largest_budget, page_size)
        if self.attend not in ATTEND:
            raise LocksError(
                f"--sparse-decode-attend {self.attend!r} is unknown; legal: {', '.join(ATTEND)}"
            )
        if self.kv_tier not in KV_TIERS:
            raise LocksError(
                f"--sparse-decode-kv-tier {self.kv_tier!r} is unknown; legal: {', '.join(KV_TIERS)}"
            )
        if self.kv_tier == "host" and self.attend == "flashinfer":
            raise LocksError(
                "--sparse-decode-attend flashinfer reads one pool; legal with --sparse-decode-kv-tier "
                "host: auto, native"
            )
        if self.kv_tier == "host" and self.dense_below:
            raise LocksError(
                f"--sparse-decode-dense-below is {self.dense_below}; legal with --sparse-decode-kv-tier "
                "host: 0, since a dense step would read all keys from host memory"
            )
        if self.hot_gib is not None and self.hot_gib < 0:
            raise LocksError(f"--sparse-decode-hot-gib is {self.hot_gib}; legal: 0 or more")
        if self.host_gib is not None and self.host_gib <= 0:
            raise LocksError(f"--sparse-decode-host-gib is {self.host_gib}; legal: more than 0")
        if self.attend == "flashinfer" and self.min_len > self.largest_budget + 1:
            raise LocksError(
                f"--sparse-decode-min-len is {self.min_len}; legal with --sparse-decode-attend flashinfer: "
                f"at most one token more than --sparse-decode-max-budget ({self.largest_budget})"
            )
        if self.largest_budget < self.budget:
            raise LocksError(
                f"--sparse-decode-max-budget is {self.largest_budget}; legal: at least the budget "
                f"({self.budget})"
            )
        for name in ("min_len", "dense_below", "audit_interval"):
            if (getattr(self, name) or 0) < 0:
                raise LocksError(f"{flag_name(name)} is {getattr(self, name)}; legal: 0 or more")
        if self.trace_file and self.dense_below:
            raise LocksError(
                f"--sparse-decode-dense-below is {self.dense_below}; legal with "
                "--sparse-decode-trace-file: 0, since a dense step selects nothing that could be written"
            )
        if self.audit_layers < 1:
            raise LocksError(f"{flag_name('audit_layers')} is {self.audit_layers}; legal: 1 or more")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LocksConfig:
        return cls(**values)

    @classmethod
    def from_namespace(cls, namespace: argparse.Namespace) -> LocksConfig:
        values: dict[str, Any] = {
            option.name: getattr(namespace, argument_name(option.name), option.default)
            for option in options()
        }
        return cls(**values)

    @classmethod
    def take_from_kwargs(cls, kwargs: dict[str, Any]) -> LocksConfig:
        """Remove our arguments from those of ``sgl.Engine(...)`` and make the configuration."""
        names = {argument_name(f.name): f.name for f in options()}
        taken = {names[key]: kwargs.pop(key) for key in list(kwargs) if key in names}
        return cls(**taken)


def options() -> list[Field]:
    """The fields that are options of the user, in the order of the help text."""
    return [option for option in fields(LocksConfig) if "internal" not in option.metadata]


def check_budget(name: str, budget: int, page_size: int) -> None:
    """Raise LocksError unless ``budget`` is a legal number of tokens for this page size."""
    if budget < 2 * page_size or budget % page_size:
        raise LocksError(
            f"{name} is {budget}; legal: a multiple of the page size ({page_size}) and at least "
            f"two pages ({2 * page_size} tokens), for the sink page and the current page"
        )


def argument_name(name: str) -> str:
    """Name of the field as a Python argument: ``budget`` -> ``sparse_decode_budget``."""
    return "sparse_decode" if name == "selector" else f"sparse_decode_{name}"


def flag_name(name: str) -> str:
    """Name of the field on the command line: ``budget`` -> ``--sparse-decode-budget``."""
    return "--" + argument_name(name).replace("_", "-")


def add_arguments(parser: argparse.ArgumentParser, selector: bool = True) -> None:
    """Add the flags to SGLang's parser; ``--config`` YAML files accept them too.

    Without ``selector`` all but ``--sparse-decode``, which an SGLang with seams has itself.
    """
    group = parser.add_argument_group("sparse decode (locks-sglang)")
    for option in options():
        if option.name == "selector" and not selector:
            continue
        group.add_argument(
            flag_name(option.name),
            default=option.default,
            help=_help(option),
            **option.metadata["argparse"],
        )


def _help(option: Field) -> str:
    text = option.metadata["help"]
    shown = option.default not in (None, False) and "Default:" not in text
    return f"{text} Default: {option.default}." if shown else text
