"""Real SGLang servers for tests: start one, talk to it, stop it with everything that it spawned.

    with launch(model, "--sparse-decode", "locks", log_dir=tmp_path) as server:
        server.generate("Once upon a time", max_new_tokens=8)["text"]

Where there is a GPU the server runs on it; otherwise it runs on the CPU with the flags and stand-ins that
`locks_sglang.cpu_stand_ins` names. Nothing depends on a fixed port.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import requests
import torch
from locks_sglang import cpu_stand_ins
from prometheus_client.parser import text_string_to_metric_families
from serving.ports import server_flags
from serving.process import ServerFailed, running, wait_until_healthy

ON_GPU = torch.cuda.is_available()
# Measured on two CPU cores: 28 s alone on the machine; a loaded machine takes several times as long.
START_TIMEOUT_S = 240.0 if ON_GPU else 480.0
REQUEST_TIMEOUT_S = 300.0
# A pool like the CPU's, so that the tests which fill it behave alike, and few graphs, which start sooner.
GPU_FLAGS = (
    *("--page-size", "16", "--max-total-tokens", "16384"),
    *("--cuda-graph-max-bs", "4", "--disable-prefill-cuda-graph"),
    *("--sparse-decode-dense-below", "0"),  # the demo model's requests are all short
)
AS_SHIPPED = "as shipped"
"""In the place of the first flag: none of GPU_FLAGS."""
# Two servers may be up at once: an idle one has to leave the cores to the other.
COMMON_FLAGS = (
    *("--enable-metrics", "--enable-cache-report", "--sleep-on-idle", "--skip-server-warmup"),
    *("--max-running-requests", "16"),
)


@dataclass(frozen=True)
class Server:
    """A healthy server. Methods raise requests.HTTPError with the server's message on an error status."""

    base_url: str
    log_path: Path
    process: subprocess.Popen[bytes]

    @property
    def log(self) -> str:
        """All that the server has printed so far."""
        return self.log_path.read_text(errors="replace")

    def find_in_log(self, pattern: str, since: int = 0, count: int = 1) -> list[Any]:
        """`re.findall` in the log from character `since`, once it finds `count` or after ten seconds.

        An answer may reach its client before the step that it ended is logged.
        """
        deadline = time.monotonic() + 10
        while len(found := re.findall(pattern, self.log[since:])) < count and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def post(self, path: str, body: Any = None, **arguments: Any) -> requests.Response:
        """POST without raising on an error status: for tests of refusals."""
        return requests.post(self.base_url + path, json=body, timeout=REQUEST_TIMEOUT_S, **arguments)

    def get(self, path: str) -> requests.Response:
        """GET without raising on an error status."""
        return requests.get(self.base_url + path, timeout=REQUEST_TIMEOUT_S)

    def generate(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = 16,
        sampling: Mapping[str, Any] | None = None,
        **body: Any,
    ) -> dict[str, Any]:
        """Native /generate, greedy and running to `max_new_tokens` unless `sampling` says otherwise.

        `prompt` is text or token ids. The answer holds "text", "output_ids" and "meta_info".
        """
        key = "text" if isinstance(prompt, str) else "input_ids"
        parameters = {
            "temperature": 0,
            "max_new_tokens": max_new_tokens,
            "ignore_eos": True,
            **(sampling or {}),
        }
        value = prompt if isinstance(prompt, str) else list(prompt)
        return _json(self.post("/generate", {key: value, "sampling_params": parameters, **body}))

    def generate_together(self, requests_: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """`generate` with each mapping's arguments, all at the same time; answers in the order asked."""
        with ThreadPoolExecutor(max_workers=len(requests_)) as pool:
            return list(pool.map(lambda arguments: self.generate(**arguments), requests_))

    def chat(
        self, messages: str | Sequence[Mapping[str, str]], max_tokens: int = 32, **body: Any
    ) -> dict[str, Any]:
        """OpenAI chat completion, greedy; a string is one user message. Returns the response's JSON."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        asked = {"model": "demo", "messages": list(messages), "temperature": 0, "max_tokens": max_tokens}
        return _json(self.post("/v1/chat/completions", {**asked, **body}))

    def server_info(self) -> dict[str, Any]:
        """/server_info as it is."""
        return _json(self.get("/server_info"))

    def locks_info(self) -> dict[str, Any]:
        """The section that the plugin adds to /server_info. KeyError on a server without its flag."""
        return self.server_info()["internal_states"][0]["locks"]

    def metrics(self) -> dict[str, float]:
        """Prometheus samples by name, summed over labels (histograms: _count, _sum, _bucket)."""
        totals: dict[str, float] = {}
        answer = self.get("/metrics/")
        answer.raise_for_status()
        for family in text_string_to_metric_families(answer.text):
            for sample in family.samples:
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
        return totals

    def flush_cache(self, timeout_s: float = 30.0) -> None:
        """Empty the radix cache, waiting for running requests up to `timeout_s`."""
        answer = self.post(f"/flush_cache?timeout={timeout_s}")
        if answer.status_code != 200:
            raise requests.HTTPError(answer.text, response=answer)

    @contextmanager
    def held(self, settle_s: float = 0.3) -> Iterator[None]:
        """Requests sent meanwhile all begin at its end; those still on their way then have `settle_s`."""
        self.post("/pause_generation", {"mode": "in_place"}).raise_for_status()
        try:
            yield
            time.sleep(settle_s)
        finally:
            self.post("/continue_generation", {}).raise_for_status()

    def abort(self, rid: str = "", abort_all: bool = False) -> None:
        """Abort the request whose body carried `rid`, or all of them."""
        answer = self.post("/abort_request", {"rid": rid, "abort_all": abort_all})
        answer.raise_for_status()


@contextmanager
def launch(
    model: Path | str,
    *flags: str,
    log_dir: Path,
    env: Mapping[str, str] | None = None,
    timeout_s: float = START_TIMEOUT_S,
) -> Iterator[Server]:
    """A running server on `model`. `flags` come last, so they override the defaults; `env` adds variables.

    Raises ServerFailed when the server stops before it is healthy, or is not healthy after `timeout_s`.
    """
    port, ports = server_flags()
    log_path = log_dir / f"server-{port}.log"
    base = {**os.environ, **(env or {})}
    environment = base if ON_GPU else cpu_stand_ins.environment(base)
    with running(_command(model, ports, flags), log_path, environment) as process:
        server = Server(f"http://127.0.0.1:{port}", log_path, process)
        wait_until_healthy(server.base_url, process, log_path, timeout_s)
        yield server


def launch_refused(
    model: Path | str,
    *flags: str,
    log_dir: Path,
    env: Mapping[str, str] | None = None,
    timeout_s: float = START_TIMEOUT_S,
) -> ServerFailed:
    """Start a server that must not start, and return how it failed. AssertionError if it does start."""
    try:
        with launch(model, *flags, log_dir=log_dir, env=env, timeout_s=timeout_s):
            pass
    except ServerFailed as failure:
        assert failure.returncode is not None, f"the server neither started nor stopped: {failure}"
        return failure
    raise AssertionError(f"the server started with {flags}")


class ServerPool:
    """Servers by their flags, each started at first use and kept. More than `limit` are never up
    (each takes about 1.5 GB): the one unused longest stops first."""

    def __init__(
        self, model: Path, log_dir: Path, limit: int = 2, env: Mapping[str, str] | None = None
    ) -> None:
        self._model, self._log_dir, self._limit, self._env = model, log_dir, limit, env
        self._running: dict[tuple[str, ...], tuple[Any, Server]] = {}
        self._started: dict[tuple[str, ...], Future[tuple[Any, Server]]] = {}
        self._starters = ThreadPoolExecutor(limit)

    def start(self, *flag_sets: tuple[str, ...]) -> None:
        """Begin to start several servers side by side; `get` waits for its own, or says how it failed."""
        assert len(flag_sets) <= self._limit
        for flags in flag_sets:
            self._started[flags] = self._starters.submit(self._launch, flags)

    def _launch(self, flags: tuple[str, ...]) -> tuple[Any, Server]:
        context = launch(self._model, *flags, log_dir=self._log_dir, env=self._env)
        return context, context.__enter__()

    def get(self, *flags: str) -> Server:
        """The server with these flags, with an empty cache."""
        if flags in self._started:
            self._running[flags] = self._started[flags].result()
            del self._started[flags]  # a failure stays, to be raised again
        context, server = self._running.pop(flags, (None, None))
        if server is not None and server.process.poll() is not None:
            raise ServerFailed(f"the server with {flags} died", server.log, server.process.returncode)
        if server is None:
            while len(self._running) >= self._limit:
                self._close(next(iter(self._running)))
            context, server = self._launch(flags)
        self._running[flags] = (context, server)  # last: used most recently
        server.flush_cache()
        return server

    def kill(self, server: Server) -> None:
        """End a server as a crash does, and wait until nothing of it is left; `get` starts it again."""
        (flags,) = (flags for flags, (_, running) in self._running.items() if running is server)
        tree = [psutil.Process(server.process.pid)]
        tree += tree[0].children(recursive=True)
        os.killpg(server.process.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(tree, timeout=10)
        assert not alive, alive
        self._close(flags)

    def close(self) -> None:
        """Stop all servers."""
        self._starters.shutdown()
        for future in self._started.values():
            if future.exception() is None:
                context, _ = future.result()
                context.__exit__(None, None, None)
        for flags in list(self._running):
            self._close(flags)

    def _close(self, flags: tuple[str, ...]) -> None:
        context, _ = self._running.pop(flags)
        context.__exit__(None, None, None)


def _command(model: Path | str, ports: Sequence[str], flags: Sequence[str]) -> list[str]:
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
    machine = GPU_FLAGS if ON_GPU else cpu_stand_ins.SERVER_FLAGS
    if flags[:1] == (AS_SHIPPED,):
        machine, flags = (), flags[1:]
    return [*command, *ports, *machine, *COMMON_FLAGS, *flags]


def _json(answer: requests.Response) -> dict[str, Any]:
    if not answer.ok:
        raise requests.HTTPError(f"{answer.status_code}: {answer.text}", response=answer)
    return answer.json()
