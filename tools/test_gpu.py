"""The GPU tests with one command: kernels and servers side by side, a time limit, a result file.

python tools/test_gpu.py --demo-model .models/SmolLM2-135M-Instruct --machine-name h200

Needs an NVIDIA GPU, a CUDA compiler, SGLang, and this package installed (its entry point is how SGLang
finds it). The sources of this checkout are used. Options after ``--`` go to pytest. Where there are two
GPUs, the kernels and the host tier have the second, and the tests of tensor parallelism run, on both.
"""

from __future__ import annotations

import argparse
import ast
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmark"))
import results_file  # noqa: E402

# What the servers load is compiled first: it takes about as long as a server takes to ask for it. Then each
# of the others compiles what the tests of a few files load, many libraries at a time.
PRECOMPILE = ("-m", "locks_kernels.precompile", "--geometry", "9x3x64")
# The model of the tensor-parallel tests, on one GPU and each of two.
RANKS = ("--geometry", "8x4x64", "--geometry", "4x2x64")
FOR_SERVERS = ((*PRECOMPILE, *RANKS), (*PRECOMPILE, "--kv-dtype", "fp8_e4m3"))
PREBUILD = (
    (*PRECOMPILE, "--host-tier"),
    ("tests/kernels/prebuild.py",),
    ("tests/kernels/test_score_gpu.py",),
)
HOST_TIER = ("tests/server/test_host_tier.py", "tests/server/test_host_tier_gpu.py")
RANKS_TESTS = "tests/server/test_tensor_parallel.py"
# Side by side. The server of test_host_tier_gpu.py starts after the others, so the part with it has the
# attention backend without the thousand requests.
PARTS = {
    "kernels": ["tests/kernels", *map(str, sorted(ROOT.glob("tests/[pt]*/test_*_gpu.py")))],
    "server": ["tests/server", *(f"--ignore={path}" for path in (*HOST_TIER, RANKS_TESTS))],
    "tensor_parallel": [RANKS_TESTS],
    "host_tier": [*HOST_TIER, "-k", "not fa3"],
    "host_tier_fa3": [*HOST_TIER, "-k", "fa3"],
}
NEEDS_TWO = "tensor_parallel"
ON_THE_SECOND = ("kernels", "host_tier", "host_tier_fa3")
Row = dict[str, Any]


def main() -> int:
    """Exit status: 0 when each part came to its end, some of its tests passed and none failed."""
    arguments = parse_arguments()
    if not torch.cuda.is_available():
        print("there is no NVIDIA GPU here that torch can use", file=sys.stderr)
        return 2
    gpus = visible_gpus()
    chosen = [part for part in arguments.parts if part != NEEDS_TWO or len(gpus) > 1]
    if not chosen:
        print(f"{NEEDS_TWO} needs two NVIDIA GPUs, here is one", file=sys.stderr)
        return 2
    started = time.monotonic()
    deadline = started + arguments.limit
    with tempfile.TemporaryDirectory() as name:
        folder = (arguments.keep or Path(name)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        parts = {part: start(part, arguments, folder, gpus) for part in chosen}
        rows = []
        for part, process in parts.items():
            status = wait(process, deadline)
            print((folder / f"{part}.log").read_text(errors="replace"), flush=True)
            rows += read(part, status, folder / f"{part}.xml")
    left_out = [part for part in arguments.parts if part not in chosen]
    rows += [{"part": part, "note": "left out: needs two NVIDIA GPUs"} for part in left_out]
    seconds = round(time.monotonic() - started, 1)
    rows.append({"part": "all", "seconds": seconds, "limit_s": arguments.limit})
    for row in rows:
        print(row)
    if arguments.machine_name:
        print("written:", write(rows, arguments))
    wholes = [row for row in rows if "status" in row]
    good = all(row["status"] == 0 and row["passed"] and not row["failed"] for row in wholes)
    for line in not_run(rows, left_out):
        print(line)
    print(f"GPU tests {'passed' if good else 'FAILED'} in {seconds} s")
    return 0 if good else 1


def parse_arguments() -> argparse.Namespace:
    """The command line; run with --help."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--demo-model", type=Path, help="folder of the demo model (default: made at first use)")
    add("--machine-name", help="write a result file; a short name of the machine, such as h200")
    add("--out", type=Path, help="folder of the result file (default: benchmark/results)")
    add("--commit", help="commit of the sources, where the checkout itself cannot tell")
    add("--keep", type=Path, help="folder for logs and JUnit files")
    add("--limit", type=float, default=340, help="seconds; what still runs then is ended (%(default)s)")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("pytest", nargs="*", help="options for pytest, after --")
    return parser.parse_args()


def visible_gpus() -> list[str]:
    """Names of the GPUs that torch can use, as CUDA_VISIBLE_DEVICES has them."""
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    count = torch.cuda.device_count()
    return named[:count] if len(named) >= count else [str(index) for index in range(count)]


def start(
    part: str, arguments: argparse.Namespace, folder: Path, gpus: list[str]
) -> subprocess.Popen[bytes]:
    """Begin one part; its output and results go to files in ``folder``."""
    pytest = [sys.executable, "-m", "pytest", "-m", "gpu", *PARTS[part], "-q", "--durations=15"]
    pytest += ["-p", "no:cacheprovider", f"--junit-xml={folder / part}.xml"]
    if arguments.demo_model:
        pytest.append(f"--demo-model={arguments.demo_model.resolve()}")
    script = shlex.join([*pytest, *arguments.pytest])
    if part == "kernels":
        commands = (*FOR_SERVERS, *PREBUILD)
        first, second, *others = (shlex.join([sys.executable, *command]) for command in commands)
        workers = " -n 4" if find_spec("xdist") else ""
        script = f"{first} & {second} & wait; {' & '.join(others)} & wait; {script}{workers}"
    path = [str(ROOT / "python"), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    other = {"CUDA_VISIBLE_DEVICES": gpus[1]} if part in ON_THE_SECOND and len(gpus) > 1 else {}
    with (folder / f"{part}.log").open("wb") as log:
        return subprocess.Popen(
            ["bash", "-c", script],
            cwd=ROOT,
            env={
                "OMP_NUM_THREADS": "4",
                **os.environ,
                **other,
                "PYTHONPATH": os.pathsep.join(filter(None, path)),
            },
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def wait(process: subprocess.Popen[bytes], deadline: float) -> int:
    """Exit status of a part, which is ended at the deadline: pytest first gets the chance to report."""
    for sent, patience in ((None, deadline - time.monotonic()), (signal.SIGINT, 15), (signal.SIGKILL, 10)):
        if sent is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, sent)
        with suppress(subprocess.TimeoutExpired):
            return process.wait(max(patience, 0.1))
    return -1


def read(part: str, status: int, junit: Path) -> list[Row]:
    """Rows of one part: one for each test file, one for what the tests measured, one for the whole."""
    whole: Row = {"part": part, "status": status, "passed": 0, "failed": 0, "skipped": 0}
    if not junit.exists():
        return [{**whole, "failed": 1, "note": "ended before pytest could report"}]
    files: dict[str, Row] = {}
    measured: list[Row] = []
    suites = ElementTree.parse(junit).getroot()
    for case in suites.iter("testcase"):
        # A file that was skipped as a whole has its name where a test has its own.
        name = (case.get("classname") or case.get("name", "")).replace(".", "/")
        row = files.setdefault(name, {"file": name, "passed": 0, "failed": 0, "skipped": 0, "seconds": 0.0})
        row["seconds"] = round(row["seconds"] + float(case.get("time", 0)), 1)
        outcome = outcome_of(case)
        if outcome == "skipped":
            row["reasons"] = sorted({*row.get("reasons", []), reason_of(case)})
        row[outcome] += 1
        whole[outcome] += 1
        if outcome == "failed":
            row.setdefault("failures", []).append(case.get("name"))
        if properties := properties_of(case):
            measured.append({"file": name, "test": case.get("name"), **properties})
    for suite in suites.iter("testsuite"):
        whole.update(properties_of(suite))
        whole["seconds"] = round(float(suite.get("time", 0)), 1)
    return [*files.values(), *measured, whole]


def outcome_of(case: ElementTree.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    return "passed" if case.find("skipped") is None else "skipped"


def reason_of(case: ElementTree.Element) -> str:
    """Why a test, or a file as a whole, was skipped, in its own words."""
    skipped = case.find("skipped")
    assert skipped is not None
    if case.get("classname"):
        return skipped.get("message", "")
    # There pytest says where and why as Python writes a tuple: (file, line, "Skipped: why").
    file, line, why = ast.literal_eval(skipped.text or "")
    return f"{why.removeprefix('Skipped: ')} ({Path(file).name}:{line})"


def not_run(rows: list[Row], left_out: list[str]) -> list[str]:
    """The closing lines on what was not tested: parts that were left out, and tests that were skipped."""
    lines = [f"NOT RUN: {' '.join(PARTS[part])}: needs two NVIDIA GPUs" for part in left_out]
    for row in rows:
        if "file" in row and row.get("skipped"):
            some = row["skipped"] if row["passed"] + row["failed"] else "all"
            lines.append(f"NOT RUN: {some} of {row['file']}: {'; '.join(row['reasons'])}")
    return lines


def properties_of(element: ElementTree.Element) -> dict[str, float]:
    """What `record_property` or `record_testsuite_property` left there."""
    found = element.findall("properties/property")
    return {prop.attrib["name"]: float(prop.attrib["value"]) for prop in found}


def write(rows: list[Row], arguments: argparse.Namespace) -> Path:
    """The result file."""
    name, out = arguments.machine_name, arguments.out
    return results_file.write("gpu_tests", rows, machine_name=name, out=out, made_from=arguments.commit)


if __name__ == "__main__":
    raise SystemExit(main())
