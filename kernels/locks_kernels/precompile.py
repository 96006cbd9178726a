"""Compile ahead of time what a server of some geometry loads, on a machine without a GPU.

    python -m locks_kernels.precompile --geometry 32x4x128 --geometry 32x8x128

Geometries are those of a rank: with tensor parallelism divide the heads by the ranks.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from dataclasses import dataclass

import torch

from . import build, cuda_attend, cuda_score, cuda_select, cuda_summarize
from .layout import EnvelopeLayout, Envelopes, Records, Summaries, SummaryLayout

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
KV_DTYPES = {**DTYPES, "fp8_e4m3": torch.float8_e4m3fn}
QUEST, ORACLE = "minmax", "none"
DEFAULT_FORMAT = "r6h"

_GEOMETRY = re.compile(r"(\d+)x(\d+)x(\d+)")


@dataclass(frozen=True)
class Geometry:
    """Attention of one rank.

    Attributes:
        records: a format name, ``minmax`` (quest) or ``none`` (oracle).
        dtype: of the queries.
        kv_dtype: of keys and values; that of the queries where it is None.
        host_tier: whether keys and values lie in host memory.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int = 16
    records: str = DEFAULT_FORMAT
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    host_tier: bool = False

    @classmethod
    def parse(
        cls,
        text: str,
        page_size: int,
        records: str,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        host_tier: bool = False,
    ) -> Geometry:
        """Make a geometry of ``QxKxD``: query heads, KV heads, head dimension.

        Raises:
            ValueError: another form, or heads that do not make groups of a legal size.
        """
        match = _GEOMETRY.fullmatch(text)
        q_heads, kv_heads, head_dim = map(int, match.groups()) if match else (0, 0, 0)
        if not kv_heads or q_heads % kv_heads or not 1 <= q_heads // kv_heads <= cuda_score.MAX_GROUP:
            raise ValueError(
                f"geometry {text!r}; legal: QxKxD, such as 32x8x128, with Q query heads, K KV heads and "
                f"1 to {cuda_score.MAX_GROUP} query heads a KV head"
            )
        return cls(q_heads, kv_heads, head_dim, page_size, records, dtype, kv_dtype, host_tier)


def libraries(geometry: Geometry) -> list[build.Library]:
    """The libraries that a decode step of this geometry loads, found by asking the ops themselves.

    Raises:
        ValueError: a format, head dimension or page size that is not supported.
    """
    queries = torch.empty(1, geometry.q_heads, geometry.head_dim, dtype=geometry.dtype, device="meta")
    kv_dtype = geometry.kv_dtype or geometry.dtype
    keys = torch.empty(
        1, geometry.page_size, geometry.kv_heads, geometry.head_dim, dtype=kv_dtype, device="meta"
    )
    records = _records(geometry)
    with build.naming() as named:
        if records is not None:
            cuda_summarize.load(records, kv_dtype)
        open_pages = geometry.host_tier and isinstance(records, Summaries)
        cuda_score.library(queries, keys, records, open_pages)
        cuda_select.library(geometry.q_heads // geometry.kv_heads)
        cuda_attend.library(queries, keys, geometry.host_tier)
    return named


def _records(geometry: Geometry) -> Records | None:
    lead = (1, 1, geometry.kv_heads)
    if geometry.records == ORACLE:
        return None
    if geometry.records == QUEST:
        return Envelopes.allocate(EnvelopeLayout(geometry.head_dim, geometry.page_size), lead, "meta")
    layout = SummaryLayout.parse(geometry.records, geometry.head_dim, geometry.page_size)
    return Summaries.allocate(layout, lead, "meta")


def main(argv: list[str] | None = None) -> int:
    """Command line; 0 when everything is compiled, 1 with a message on stderr when it is not."""
    arguments = make_parser().parse_args(argv)
    try:
        wanted = {
            library
            for text in arguments.geometry
            for records in arguments.format or [DEFAULT_FORMAT]
            for library in libraries(
                Geometry.parse(
                    text,
                    arguments.page_size,
                    records,
                    DTYPES[arguments.dtype],
                    KV_DTYPES[arguments.kv_dtype] if arguments.kv_dtype else None,
                    arguments.host_tier,
                )
            )
        }
        started = time.monotonic()
        compiled = build.compile_libraries(sorted(wanted), arguments.arch)
    except (ValueError, build.BuildError) as error:
        print(f"precompile: {error}", file=sys.stderr)
        return 1
    for label, path in compiled.items():
        print(f"{path}  {label}")
    print(f"{len(compiled)} libraries for sm_{arguments.arch} in {time.monotonic() - started:.0f} s")
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The parser of this command line."""
    parser = argparse.ArgumentParser(
        prog="python -m locks_kernels.precompile",
        description="Compile the CUDA kernels of some geometries ahead of time; no GPU is needed, nvcc is.",
    )
    parser.add_argument(
        "--geometry",
        action="append",
        required=True,
        metavar="QxKxD",
        help="query heads x KV heads x head dimension of a rank; may be given more than once",
    )
    parser.add_argument(
        "--format",
        action="append",
        metavar="FORMAT",
        help="record format, minmax for quest or none for oracle; may be given more than once "
        f"(default: {DEFAULT_FORMAT})",
    )
    parser.add_argument(
        "--host-tier", action="store_true", help="for a server with --sparse-decode-kv-tier host"
    )
    parser.add_argument("--page-size", type=int, default=16, metavar="TOKENS", help="default: %(default)s")
    parser.add_argument(
        "--dtype",
        choices=sorted(DTYPES),
        default="bfloat16",
        help="of queries and pool (default: %(default)s)",
    )
    parser.add_argument(
        "--kv-dtype", choices=sorted(KV_DTYPES), help="of the pool, where it is not that of the queries"
    )
    parser.add_argument(
        "--arch", default=build.CI_ARCH, metavar="SM", help="compute capability (default: %(default)s)"
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
