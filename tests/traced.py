"""A server whose selection can be seen: requests with the pages that they attended, alone or in company."""

import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from server import Server

PAGE = 16
BUDGET = 128
LOCKS = ("--sparse-decode", "locks", "--sparse-decode-budget", "128", "--sparse-decode-audit-interval", "3")
# Conservativeness 0 admits requests without room for their answers, so that retraction can be provoked.
SMALL_POOL = (
    "--max-total-tokens",
    "1280",
    "--schedule-conservativeness",
    "0",
    "--decode-log-interval",
    "2",
)
# Rows of another batch shape go through other matrix kernels, whose rounding can turn a tie between two
# pages: 1 slot of 6,480 was seen to move. A stale summary of one page moves some 2 % of them.
MOVED_SLOTS_ALLOWED = 0.002
WAIT_S = 240.0

Pages = list[list[int]] | None
"""Logical pages a KV head; None for a row that attends everything."""


@dataclass(frozen=True)
class Run:
    """One answered request: its greedy tokens and what every decode row attended.

    `rows` maps (tokens present, layer) to pages, for each of the `len(tokens) - 1` decode steps. (The first
    token comes from the prefill.)
    """

    prompt: tuple[int, ...]
    tokens: list[int]
    rows: dict[tuple[int, int], Pages]
    meta: dict[str, Any]

    @property
    def cached_tokens(self) -> int:
        return self.meta["cached_tokens"]

    def rows_after(self, length: int) -> dict[tuple[int, int], Pages]:
        """The rows with more than `length` tokens present."""
        return {row: pages for row, pages in self.rows.items() if row[0] > length}

    def rows_until(self, length: int) -> dict[tuple[int, int], Pages]:
        """The rows with at most `length` tokens present."""
        return {row: pages for row, pages in self.rows.items() if row[0] <= length}


class Running:
    """A request that has been sent."""

    def __init__(self, traced: "Traced", rid: str, prompt: tuple[int, ...], answer: Future) -> None:
        self._traced, self.rid, self._prompt, self._answer = traced, rid, prompt, answer

    def done(self) -> bool:
        return self._answer.done()

    def wait_for_rows(self, count: int) -> None:
        """Until it has decoded `count` steps. AssertionError if it ends or hangs before."""
        deadline = time.monotonic() + WAIT_S
        while len(self._traced.lengths_of(self.rid)) < count:
            assert not self.done(), f"ended before decode step {count}: {self._answer.result()}"
            assert time.monotonic() < deadline, f"no decode step {count} after {WAIT_S} s"
            time.sleep(0.05)

    def result(self) -> Run:
        answer = self._answer.result()
        tokens = answer["output_ids"]
        # The scheduler may run one step more than it needs and drop the result.
        last = len(self._prompt) + len(tokens) - 1
        rows = {row: pages for row, pages in self._traced.rows_of(self.rid).items() if row[0] <= last}
        return Run(self._prompt, tokens, rows, answer["meta_info"])


class Traced:
    """A server started with ``--sparse-decode-trace-file trace``.

    `solo` remembers runs of `alone` (give the same dictionary to servers with the same flags only).
    """

    def __init__(self, server: Server, trace: Path, solo: dict[tuple, Run]) -> None:
        self.server, self._trace, self._solo = server, trace, solo
        self._offset = trace.stat().st_size  # what came before is of no interest
        self._seen: list[dict[str, Any]] = []
        self._senders = ThreadPoolExecutor(16)

    def start(self, prompt: Sequence[int], new: int, locks: Mapping[str, Any] | None = None) -> Running:
        """Send a request for `new` greedy tokens; `locks` are its sparse-decode options."""
        rid = uuid4().hex
        options = {"custom_params": {"locks": locks}} if locks is not None else None
        answer = self._senders.submit(self.server.generate, prompt, new, options, rid=rid)
        return Running(self, rid, tuple(prompt), answer)

    def run(self, prompt: Sequence[int], new: int, locks: Mapping[str, Any] | None = None) -> Run:
        return self.start(prompt, new, locks).result()

    def together(self, prompts: Sequence[Sequence[int]], new: int) -> list[Run]:
        return [running.result() for running in [self.start(prompt, new) for prompt in prompts]]

    def alone(self, prompt: Sequence[int], new: int, locks: Mapping[str, Any] | None = None) -> Run:
        """The reference: the same request with nothing beside it and nothing cached. Flushes the cache."""
        key = (tuple(prompt), new, json.dumps(locks))
        if key not in self._solo:
            self.server.flush_cache()
            run = self.run(prompt, new, locks)
            assert run.cached_tokens == 0
            self._solo[key] = run
        return self._solo[key]

    def rows_of(self, rid: str) -> dict[tuple[int, int], Pages]:
        """All rows of a request: (tokens present, layer) -> pages."""
        return {
            (line["seq_len"], line["layer"]): line["pages"] for line in self._lines() if line["rid"] == rid
        }

    def lengths_of(self, rid: str) -> list[int]:
        """Tokens present at each decode step of a request, in the order of the steps."""
        return [line["seq_len"] for line in self._lines() if line["rid"] == rid and line["layer"] == 0]

    def overlap(self, one: Running, other: Running) -> bool:
        """Did the two decode at the same time?"""
        order = [line["rid"] for line in self._lines()]
        spans = [(order.index(rid), len(order) - order[::-1].index(rid)) for rid in (one.rid, other.rid)]
        return max(start for start, _ in spans) < min(end for _, end in spans)

    def _lines(self) -> list[dict[str, Any]]:
        with self._trace.open("rb") as trace:
            trace.seek(self._offset)
            new = trace.read()
        new = new[: new.rfind(b"\n") + 1]
        self._offset += len(new)
        self._seen += [json.loads(line) for line in new.splitlines()]
        return self._seen


def assert_all_rows(run: Run, layers: int) -> None:
    """Every layer of every decode step is in the trace, and nothing else."""
    first, last = len(run.prompt) + 1, len(run.prompt) + len(run.tokens) - 1
    assert run.rows.keys() == {
        (length, layer) for length in range(first, last + 1) for layer in range(layers)
    }


def assert_selects(run: Run, pages: int) -> None:
    """Every row is sparse: each KV head attends `pages` pages, the sink and the current one among them."""
    assert run.rows
    for (length, layer), heads in run.rows.items():
        current = (length - 1) // PAGE
        assert heads is not None, f"layer {layer} attends everything at {length} tokens"
        for chosen in heads:
            assert chosen == sorted(set(chosen))
            assert len(chosen) == pages
            assert (chosen[0], chosen[-1]) == (0, current)


def assert_same(run: Run, reference: Run) -> None:
    """Same tokens, same rows, same pages but for ties that rounding turned."""
    assert run.tokens == reference.tokens
    assert_same_pages(run.rows, reference.rows)


def assert_same_pages(
    rows: dict[tuple[int, int], Pages],
    reference: dict[tuple[int, int], Pages],
    allowed: float = MOVED_SLOTS_ALLOWED,
) -> None:
    """At most the share `allowed` of the page slots holds another page."""
    assert rows.keys() == reference.keys()
    moved, slots, where = 0, 0, []
    for row, expected in reference.items():
        found = rows[row]
        assert (found is None) == (expected is None), f"row {row} is sparse in one run alone"
        if found is None or expected is None:
            continue
        for chosen, wanted in zip(found, expected, strict=True):
            assert len(chosen) == len(wanted)
            slots += len(wanted)
            moved += len(set(wanted) - set(chosen))
        if found != expected:
            where.append(row)
    assert moved <= allowed * slots, f"{moved} of {slots} page slots differ, in rows {where[:10]} ..."
