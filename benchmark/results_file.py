"""Result files: one JSON a run, with what is needed to judge and to repeat it."""

from __future__ import annotations

import json
import platform
import re
import shlex
import subprocess
import sys
from datetime import date
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
PACKAGES = {"torch": "torch", "sglang": "sglang", "flashinfer": "flashinfer-python", "triton": "triton"}


def named(benchmark: str, name: str | None) -> str:
    """The benchmark's name in a file's: with ``name`` behind it, so that two runs of a day are two files.

    ValueError for a name that tools/make_results.py could not tell from a machine's.
    """
    if not name:
        return benchmark
    if not re.fullmatch(r"[a-z0-9_]+", name) or name.startswith(benchmark):
        raise ValueError(
            f"--name is {name!r}; legal: lower-case letters, digits and _, what stands behind {benchmark}_"
        )
    return f"{benchmark}_{name}"


@cache
def machine() -> dict[str, str | None]:
    """GPU (or CPU), driver and package versions of this machine."""
    found: dict[str, str | None] = {
        "gpu": None,
        "driver": None,
        "cpu": platform.processor() or platform.machine(),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found["driver"] = (
            subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0].strip()
        )
    for name, package in PACKAGES.items():
        try:
            found[name] = version(package)
        except PackageNotFoundError:
            found[name] = None
    return found


def commit() -> str:
    """Commit of the checkout, ``-dirty`` with uncommitted changes; ``unknown`` outside of one."""
    describe = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    answer = subprocess.run(describe, capture_output=True, text=True)
    return answer.stdout.strip() or "unknown"


def command(arguments: list[str]) -> str:
    """The command without the folders of absolute paths, which are this machine's own."""
    return shlex.join(["python", *(Path(a).name if Path(a).is_absolute() else a for a in arguments)])


def commands(earlier: dict[str, Any], content: dict[str, Any]) -> list[str]:
    """All that made a file: the earlier ones, with their commit where it is another, and this one."""
    kept = list(earlier.get("commands", [earlier["command"]]))
    if earlier["commit"] != content["commit"]:
        kept = [line if " # commit " in line else f"{line} # commit {earlier['commit']}" for line in kept]
    return [*(line for line in kept if line != content["command"]), content["command"]]


def copy_rate_tb_s(gigabytes: int = 4, repeats: int = 20) -> float | None:
    """Measured device-to-device copy rate in TB/s, bytes read plus bytes written; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    source = torch.randint(0, 255, (gigabytes << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    milliseconds = sorted(times)[repeats // 2]
    return round(2 * source.nbytes / milliseconds / 1e9, 3)


def read(path: Path | None) -> dict[str, Any] | None:
    """Content of the result file of an ``--append``; None without one."""
    return json.loads(path.read_text()) if path else None


def merged(
    earlier: dict[str, Any] | None, rows: list[dict[str, Any]], key: tuple[str, ...]
) -> list[dict[str, Any]]:
    """The rows, behind those of the earlier file that were not measured again: that differ in ``key``."""
    new = {tuple(row[name] for name in key) for row in rows}
    old = earlier["rows"] if earlier else []
    return [*(row for row in old if tuple(row[name] for name in key) not in new), *rows]


def write(
    benchmark: str,
    rows: list[dict[str, Any]],
    *,
    machine_name: str,
    out: Path | None = None,
    made_from: str | None = None,
    copy_tb_s: float | None = None,
    earlier: dict[str, Any] | None = None,
) -> Path:
    """Write a result file and return its path.

    Args:
        benchmark: name of the benchmark, as its rows are described in the documentation.
        rows: flat dictionaries, one a measurement.
        machine_name: short name for the file, such as ``h200`` or ``cpu``.
        out: folder to write to instead of ``benchmark/results``.
        made_from: commit, where the checkout itself cannot tell.
        copy_tb_s: measured copy rate.
        earlier: content of the result file whose rows are among these; its commands are kept.
    """
    today = date.today().isoformat()
    content = {
        "benchmark": benchmark,
        "commit": made_from or commit(),
        "date": today,
        "machine": machine(),
        "command": command(sys.argv),
        "copy_tb_s": copy_tb_s,
        "rows": rows,
    }
    if earlier is not None:
        content["commands"] = commands(earlier, content)
    path = (out or RESULTS) / f"{benchmark}-{machine_name}-{today}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path
