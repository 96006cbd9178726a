"""`make serve`, as a user runs it: an answer from the document, and a selection that really is sparse."""

import re
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_one_command_serves_and_answers_sparsely(demo_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "tools/serve.py", "--once", "--model", str(demo_model), "--port", str(port)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=850,
        )
    assert done.returncode == 0, done.stderr
    assert f"port {port} is in use" in done.stdout
    assert "941.3 hectopascals" in done.stdout
    attended, available = map(int, numbers(r"pages attended: (\d+) of (\d+)", done.stdout))
    sparse, dense = map(int, numbers(r"decode rows: +(\d+) sparse, (\d+) dense", done.stdout))
    assert dense == 0
    assert attended == 32 * sparse  # 512 tokens in pages of 16, for every row
    assert available > 4 * attended
    (mass,) = numbers(r"retained mass: +([0-9.]+)", done.stdout)
    assert 0.8 < float(mass) <= 1
    assert "curl -s http://127.0.0.1:" in done.stdout


def numbers(pattern: str, text: str) -> tuple[str, ...]:
    found = re.search(pattern, text)
    assert found, f"{pattern!r} is not in:\n{text}"
    return found.groups()
