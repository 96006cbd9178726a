"""A running SGLang server, started here or given by its address, and what it says about itself."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
import torch
from locks_sglang import cpu_stand_ins
from prometheus_client.parser import text_string_to_metric_families

from serving.ports import server_flags
from serving.process import ServerFailed, running, wait_until_healthy

START_TIMEOUT_S = 900
POLL_S = 0.2
GPU_FLAGS = ("--page-size", "16", "--enable-cache-report")


@dataclass(frozen=True)
class Server:
    """The server at `url`, without a slash at the end."""

    url: str

    def get(self, path: str) -> Any:
        """JSON of a GET. requests.HTTPError on an error status."""
        answer = requests.get(self.url + path, timeout=120)
        answer.raise_for_status()
        return answer.json()

    def flush_cache(self) -> None:
        """Empty the prefix cache."""
        requests.post(f"{self.url}/flush_cache?timeout=60", timeout=120).raise_for_status()

    def locks(self) -> dict[str, Any] | None:
        """The plugin's section of ``/server_info``; None where sparse decode is off."""
        return self.get("/server_info")["internal_states"][0].get("locks")

    def load(self) -> dict[str, Any]:
        """SGLang's own view of its load: running requests and sums over decode steps."""
        return self.get("/v1/loads")["loads"][0]

    def token_counts(self) -> dict[str, float]:
        """Prompt and cached tokens since the start. ServerFailed without ``--enable-metrics``."""
        answer = requests.get(f"{self.url}/metrics/", timeout=60)
        if answer.status_code != 200:
            raise ServerFailed(f"{self.url} has no /metrics; start it with --enable-metrics")
        totals = {"sglang:prompt_tokens_total": 0.0, "sglang:cached_tokens_total": 0.0}
        for family in text_string_to_metric_families(answer.text):
            for sample in family.samples:
                if sample.name in totals:
                    totals[sample.name] += sample.value
        return {
            "prompt": totals["sglang:prompt_tokens_total"],
            "cached": totals["sglang:cached_tokens_total"],
        }

    def warm_up(self, prompt_tokens: int, requests_together: int) -> None:
        """Prefill a prompt and decode some tokens, alone and together, so that nothing compiles later."""
        for together in {1, requests_together}:
            self.generate([[number + 1] * prompt_tokens for number in range(together)], 8)
        self.flush_cache()

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> None:
        """Greedy answers of exactly so many tokens to prompts of token ids, all at once."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        body = {"input_ids": [list(prompt) for prompt in prompts], "sampling_params": sampling}
        requests.post(f"{self.url}/generate", json=body, timeout=1200).raise_for_status()


@dataclass
class LoadWatch:
    """Largest number of requests that ran together, and the mean batch of the decode steps.

    Used as a context around the load; its fields are there afterwards.
    """

    server: Server
    largest: int = 0
    mean_batch: float | None = None
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> LoadWatch:
        self._before = self._decode_sums()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        steps, rows = (b - a for a, b in zip(self._before, self._decode_sums(), strict=True))
        self.mean_batch = rows / steps if steps else None

    def _decode_sums(self) -> tuple[float, float]:
        """Decode steps and their rows, since the start of the server."""
        sums = self.server.load().get("decode_moments") or [0.0, 0.0]
        return sums[0], sums[1]

    def _poll(self) -> None:
        while not self._stop.wait(POLL_S):
            with suppress(requests.RequestException):
                self.largest = max(self.largest, self.server.load()["num_running_reqs"])


def on_gpu() -> bool:
    return torch.cuda.is_available()


@contextmanager
def launched(flags: Sequence[str], log_path: Path) -> Iterator[Server]:
    """A healthy server with `flags`, stopped with all its processes at the end.

    ServerFailed carries the end of the log.
    """
    port, ports = server_flags()
    common = GPU_FLAGS if on_gpu() else (*cpu_stand_ins.SERVER_FLAGS, "--sleep-on-idle")
    command = [sys.executable, "-m", "sglang.launch_server", "--host", "127.0.0.1", *ports]
    command += [*common, "--enable-metrics", "--skip-server-warmup", "--log-level-http", "warning"]
    command += flags
    env = dict(os.environ) if on_gpu() else cpu_stand_ins.environment()
    with running(command, log_path, env) as process:
        server = Server(f"http://127.0.0.1:{port}")
        wait_until_healthy(server.url, process, log_path, START_TIMEOUT_S)
        yield server


def stop_when_told_to_end() -> None:
    """SIGTERM ends this process in order. A server has a session of its own: it ends only then."""
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
