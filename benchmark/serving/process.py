"""A server's process: started with a log of its own, waited for, ended with all that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import requests

POLL_S = 0.2


class ServerFailed(RuntimeError):
    """The server stopped, did not become healthy in time, or does not run what it should.

    Attributes:
        reason: in one sentence.
        log: all that it printed; empty where that says nothing.
        returncode: its exit status where it stopped, else None.
    """

    def __init__(self, reason: str, log: str = "", returncode: int | None = None) -> None:
        super().__init__(f"{reason}; the end of its log:\n{_tail(log)}" if log else reason)
        self.reason, self.log, self.returncode = reason, log, returncode


@contextmanager
def running(
    command: Sequence[str], log_path: Path, env: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """The process of `command`; at the end it is stopped, with all that it started."""
    with log_path.open("wb") as log:
        # A session of its own: Ctrl-C reaches its starter first, which then stops the whole tree.
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
    try:
        yield process
    finally:
        _stop(process)


def wait_until_healthy(
    url: str,
    process: subprocess.Popen[bytes],
    log_path: Path,
    timeout_s: float,
    meanwhile: Callable[[], object] = lambda: None,
) -> None:
    """Return once the server at `url` answers; `meanwhile` is called before every look.

    Raises:
        ServerFailed: the process stopped first, or `timeout_s` passed.
    """
    begun = time.monotonic()
    while time.monotonic() - begun < timeout_s:
        meanwhile()
        if (status := process.poll()) is not None:
            raise ServerFailed(f"the server stopped with exit status {status}", _read(log_path), status)
        # The health check decodes a token, so it also stands for SGLang's warm-up request.
        with suppress(requests.RequestException):
            if requests.get(f"{url}/health", timeout=60).status_code == 200:
                return
        time.sleep(POLL_S)
    raise ServerFailed(f"the server was not healthy after {timeout_s:.0f} s", _read(log_path))


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server with all that it started; by itself SGLang first sleeps for five seconds."""
    tree: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    # The group also holds children whose parent has died already.
    for sent, patience in ((signal.SIGTERM, 1.0), (signal.SIGKILL, 10.0)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, sent)
        psutil.wait_procs(tree, timeout=patience)
    process.wait(timeout=10)


def _read(log_path: Path) -> str:
    return log_path.read_text(errors="replace")


def _tail(log: str, lines: int = 40, width: int = 400) -> str:
    return "\n".join(line[:width] for line in log.splitlines()[-lines:])
