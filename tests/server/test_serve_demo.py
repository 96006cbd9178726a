"""`make serve`, as a user runs it: an answer from the document, and a selection that really is sparse."""

import re
import socket
import subprocess
import sys
from pathlib import Path

from serving.ports import free_ports

ROOT = Path(__file__).parents[2]


def test_one_command_serves_and_answers_sparsely(demo_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "tools/serve.py", "--once", "--model", str(demo_model)]
        command += ["--port", str(port), "--", "--nccl-port", str(*free_ports(1))]
        returncode, output = run_to_the_end(command)
    assert returncode == 0, output
    assert f"port {port} is in use" in output
    assert "941.3 hectopascals" in output
    attended, available = map(int, numbers(r"pages attended: (\d+) of (\d+)", output))
    sparse, dense = map(int, numbers(r"decode rows: +(\d+) sparse, (\d+) dense", output))
    assert dense == 0
    assert attended == 32 * sparse  # 512 tokens in pages of 16, for every row
    assert available > 4 * attended
    (mass,) = numbers(r"retained mass: +([0-9.]+)", output)
    assert 0.8 < float(mass) <= 1
    assert "curl -s http://127.0.0.1:" in output


def run_to_the_end(command: list[str]) -> tuple[int, str]:
    """Exit status and output. One that takes too long is asked to stop: it has a server to stop itself."""
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=850)
        except subprocess.TimeoutExpired:
            process.terminate()
            output, _ = process.communicate(timeout=30)
        return process.returncode, output


def numbers(pattern: str, text: str) -> tuple[str, ...]:
    found = re.search(pattern, text)
    assert found, f"{pattern!r} is not in:\n{text}"
    return found.groups()
