"""Free TCP ports for servers that bind them seconds later."""

import os
import random
import socket
from contextlib import suppress

# Not among those (32768 and up) that the system gives to whoever asks, every HTTP client included.
FIRST, LAST = 20000, 32767


def free_ports(count: int) -> list[int]:
    """``count`` ports of 127.0.0.1 that nothing listens on and no other worker of pytest-xdist is given."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    step = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    found: list[int] = []
    for port in random.SystemRandom().sample(range(FIRST + worker, LAST + 1, step), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError(f"fewer than {count} free ports between {FIRST} and {LAST}")


def server_flags() -> tuple[int, list[str]]:
    """A server's port, and its flags for that port and for its processes' meeting point."""
    port, meeting = free_ports(2)
    return port, ["--port", str(port), "--nccl-port", str(meeting)]
