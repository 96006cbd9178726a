"""The cases of a benchmark as its command line names them: ``1x16384,32x32768``."""

from __future__ import annotations

import argparse
import re

FORM = re.compile(r"([1-9]\d*)x([1-9]\d*)")
HELP = "BATCHxCONTEXT, ... (requests, tokens of each)"


def parse(text: str) -> list[tuple[int, int]]:
    """(Requests, tokens present of each) of every case, in order.

    For the ``type`` of an argument. Raises argparse.ArgumentTypeError, which names the form.
    """
    cases = []
    for case in text.split(","):
        found = FORM.fullmatch(case.strip())
        if found is None:
            raise argparse.ArgumentTypeError(f"{case!r} is no case; legal: {HELP}, as 1x16384,32x32768")
        cases.append((int(found[1]), int(found[2])))
    return cases


def named(cases: list[tuple[int, int]]) -> str:
    """The text that :func:`parse` takes."""
    return ",".join(f"{batch}x{context}" for batch, context in cases)
