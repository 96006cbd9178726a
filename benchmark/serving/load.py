"""Workloads, driven by SGLang's own serving benchmark (``sglang.benchmark.serving``, 0.5.17 to 0.5.23)."""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from locks_sglang import cpu_stand_ins

from .server import on_gpu

WORKLOADS = ("random", "shared-prefix", "multi-turn")
QUESTION = 64
TURNS = 4


class LoadFailed(RuntimeError):
    """Requests failed or did not run to their length."""


@dataclass(frozen=True)
class Case:
    """`concurrency` clients at a time, `requests` prompts (conversations) of `context` tokens in all.

    random: prompts that share nothing.  shared-prefix: one long prefix, another question of 64 tokens each.
    multi-turn: conversations that share nothing, of four questions of 64 tokens; the last prompt has
    `context` tokens, the earlier ones are its beginnings.
    """

    workload: str
    concurrency: int
    context: int
    output: int
    requests: int

    def __str__(self) -> str:
        return f"{self.workload} {self.concurrency} x {self.context:,} + {self.output}"

    @property
    def turns(self) -> int:
        return TURNS if self.workload == "multi-turn" else 1

    @property
    def first_prompt(self) -> int:
        """Tokens of the shortest prompt."""
        return self.context - (self.turns - 1) * (QUESTION + self.output)

    def check(self) -> None:
        """ValueError for a context that is too short for the workload."""
        if self.workload not in WORKLOADS:
            raise ValueError(f"{self.workload!r} is not a workload; legal: {', '.join(WORKLOADS)}")
        if self.workload != "random" and self.first_prompt <= QUESTION:
            raise ValueError(
                f"{self}: the context is too short for {self.turns} turns of {QUESTION} tokens"
            )

    def flags(self) -> list[str]:
        """Flags of SGLang's benchmark for the prompts."""
        if self.workload == "random":
            flags = ["--backend", "sglang", "--dataset-name", "random-ids", "--tokenize-prompt"]
            flags += ["--random-input-len", str(self.context), "--random-output-len", str(self.output)]
            return [*flags, "--random-range-ratio", "1.0", "--num-prompts", str(self.requests)]
        shared = self.workload == "shared-prefix"
        flags = ["--backend", "sglang" if shared else "sglang-oai-chat"]
        flags += ["--dataset-name", "generated-shared-prefix"]
        # The routing key is of no use to a single server, but with it SGLang neither reads nor writes its
        # file of earlier prompts, whose name does not tell one tokenizer from another.
        flags += ["--gsp-send-routing-key", "--gsp-num-turns", str(self.turns)]
        groups, each = (1, self.requests) if shared else (self.requests, 1)
        flags += ["--gsp-num-groups", str(groups), "--gsp-prompts-per-group", str(each)]
        flags += ["--gsp-system-prompt-len", str(self.first_prompt - QUESTION)]
        return [*flags, "--gsp-question-len", str(QUESTION), "--gsp-output-len", str(self.output)]


def drive(url: str, case: Case, tokenizer: str | None, seed: int, log_path: Path) -> dict[str, Any]:
    """Run one case against the server at `url`; SGLang's figures. LoadFailed where a request failed.

    In this process, since the import takes longer than a short case; its report goes to `log_path`.
    """
    flags = ["--base-url", url, *case.flags(), "--max-concurrency", str(case.concurrency)]
    flags += ["--seed", str(seed), "--warmup-requests", "0", "--output-details"]
    if tokenizer:
        flags += ["--tokenizer", tokenizer]
    with tempfile.TemporaryDirectory() as folder, log_path.open("a") as log, redirect_stdout(log):
        if not on_gpu():
            cpu_stand_ins.activate()
        from sglang.benchmark import serving

        written = Path(folder) / "result.jsonl"
        with mock.patch.object(sys, "argv", ["serving", *flags, "--output-file", str(written)]):
            try:
                serving.cli_main()
            except SystemExit as stop:
                raise LoadFailed(
                    f"{case}: SGLang's benchmark stopped ({stop.code}); see {log_path}"
                ) from stop
        result = json.loads(written.read_text())
    expected = case.requests * case.turns
    if result["completed"] != expected or min(result["output_lens"]) != case.output:
        errors = [error for error in result["errors"] if error]
        raise LoadFailed(
            f"{case}: {result['completed']} of {expected} requests answered, the shortest answer has "
            f"{min(result['output_lens'])} of {case.output} tokens; {errors[:1]}"
        )
    if min(result["ttfts"]) <= 0:
        raise LoadFailed(f"{case}: answers without text, so times cannot be told; give another --tokenizer")
    return result
