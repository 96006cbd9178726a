"""`make serve` leaves no server behind, however it is ended; the server here only waits."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

TOOLS = Path(__file__).parents[1] / "tools"

# A server that takes a second to end, so that the next signal arrives while it is being stopped.
SERVER = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), sys.exit()))
print("up", flush=True)
time.sleep(60)
"""
SERVE = f"""
import sys
sys.path.insert(0, {str(TOOLS)!r})
import serve
serve.server_command = lambda args, port: [sys.executable, "-c", {SERVER!r}]
serve.wait_until_healthy = lambda url, process, log: None
serve.show_answer = lambda url: None
serve.show_next_request = lambda url, model: None
raise SystemExit(serve.main())
"""


@pytest.mark.parametrize("signals", [[signal.SIGTERM], 3 * [signal.SIGTERM], 2 * [signal.SIGINT]], ids=str)
def test_no_server_is_left(signals: list[signal.Signals]) -> None:
    # SIGINT is ignored where a shell in the background started the tests.
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        serve = subprocess.Popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert serve.stdout is not None
    while "until Ctrl-C" not in serve.stdout.readline():
        assert serve.poll() is None
    (server,) = psutil.Process(serve.pid).children()
    time.sleep(0.5)
    for number in signals:
        os.kill(serve.pid, number)
        time.sleep(0.3)
    serve.wait(timeout=30)
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE
