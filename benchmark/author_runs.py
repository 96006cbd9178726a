"""Times the kernels of the paper's author (PyPI package locks-kv) on the cases of kernel_floor.py.

    python benchmark/author_runs.py --build     # only compile, all at once: minutes, and no GPU

kernel_floor.py compiles what is missing before it times; AUTHOR_BUILDS names the folder of the
libraries (default: torch's folder for extensions).

The package reads its switches from the environment when it is imported, so every summary rank and set
of switches runs in a process of its own (author_kernels.py); what one of them does wrong cannot touch
the rest of a benchmark.  Of the sets that its sources recommend for a context, the fastest counts, for
every op by itself: what is compared with is the best that the package can do.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kernel_case import Case

RANKS = {"r4i4": 4, "r8i4": 8}  # what its CUDA sources cover and locks_kernels has, too
WORKER = Path(__file__).with_name("author_kernels.py")
MOST_GROUP = 8  # query heads a KV head that its select takes
LIMIT_S = 400
ALL_OPS = ("score", "select", "path", "attend", "layer", "summarize")
# The select of these sets cannot be replayed alone: it consumes and resets what score left behind.
PAIRED_OPS = ("score", "path", "layer")


@dataclass(frozen=True)
class Switches:
    """Environment variables of the package that belong together.

    Attributes:
        name: what messages call the set.
        library: name of the compiled score kernel, which sets with the same compiler flags share.
        variables: the environment.
        ops: what to time with them.
        takes: whether the package's sources recommend, or allow, the set for a case.
    """

    name: str
    library: str
    variables: dict[str, str]
    ops: tuple[str, ...]
    takes: Callable[[Case], bool]


def page_parallel(case: Case) -> bool:
    """Whether its select runs as page-parallel kernels: where one block's shared memory or a small batch
    is the limit.  Its flat scores are understood only there."""
    return case.row_pages >= 32_768 or (case.batch <= 4 and case.row_pages >= 16_384)


TENSOR_CORES = {"RKI4_MMA": "1"}
RECORDS = {**TENSOR_CORES, "RKI4_MMA_AOS": "1", "RKI4_MMA_PFR": "1"}
SETS = (
    Switches(
        "six slabs",
        "slabs",
        TENSOR_CORES,
        ALL_OPS,
        lambda case: True,
    ),
    Switches(
        "six slabs, maxima handed over",
        "slabs",
        {**TENSOR_CORES, "LOCKS_HMAX": "1", "LOCKS_SEL_V2": "1"},
        ("path", "layer"),
        lambda case: 64 <= case.row_pages <= 8192,
    ),
    Switches("records", "records", RECORDS, PAIRED_OPS, lambda case: case.group == 8),
    Switches(
        "records, any group",
        "records-any-group",
        {**RECORDS, "RKI4_MMA_ALLG": "1", "LOCKS_RKI4_MUC": "0"},
        PAIRED_OPS,
        lambda case: case.group == 4,
    ),
    Switches(
        "records, flat scores",
        "records-flat",
        {
            **RECORDS,
            "RKI4_MMA_FLAT": "1",
            "LOCKS_FLAT": "1",
            "LOCKS_PMAX_FOLD": "1",
            "LOCKS_PMAX_FOLDR": "1",
        },
        PAIRED_OPS,
        lambda case: case.group == 8 and page_parallel(case),
    ),
)


def installed() -> str | None:
    """Version of locks-kv, or None where it cannot be imported."""
    try:
        return version("locks-kv")
    except PackageNotFoundError:
        return None


def measure(cases: list[Case], ops: list[str], repeats: int) -> Iterator[dict]:
    """Rows of the results file, the fastest set of switches for each op and case.

    Prints a line for everything that could not be timed, once, and yields no row for it.
    """
    release = installed()
    if release is None or not set(ops) & set(ALL_OPS):
        return
    for model, group in dict.fromkeys((case.model, case.group) for case in cases):
        if group > MOST_GROUP:
            print(f"locks-kv, {model}: no times: it takes at most {MOST_GROUP} query heads a KV head")
    cases = [case for case in cases if case.format in RANKS and case.group <= MOST_GROUP]
    if not cases:
        return
    build(cases)
    rows: list[dict] = []
    said: set[str] = set()
    for name, switches in runs(cases):
        job = {
            "release": release,
            "switches": switches.name,
            "cases": [asdict(case) for case in cases if case.format == name and switches.takes(case)],
            "ops": [op for op in switches.ops if op in ops],
            "repeats": repeats,
        }
        if not job["ops"]:
            continue
        for event in run(name, switches, job):
            if "row" in event:
                rows.append(event["row"])
            elif event["say"] not in said:
                said.add(event["say"])
                print(f"locks-kv, {name}, {switches.name}: {event['say']}", flush=True)
    yield from fastest(rows)


def runs(cases: list[Case]) -> Iterator[tuple[str, Switches]]:
    """The processes to start: summary format and switches."""
    for name in RANKS:
        for switches in SETS:
            if any(case.format == name and switches.takes(case) for case in cases):
                yield name, switches


def fastest(rows: list[dict]) -> list[dict]:
    """The row with the least time of each op and case, in the order in which they were first seen."""
    best: dict[tuple, dict] = {}
    for row in rows:
        key = tuple(row[name] for name in ("format", "model", "batch", "context", "op"))
        if key not in best or row["us"] < best[key]["us"]:
            best[key] = row
    return list(best.values())


def run(name: str, switches: Switches, job: dict) -> Iterator[dict]:
    """What a process of its own reports: ``{"row": ...}`` or ``{"say": ...}``."""
    with tempfile.TemporaryDirectory() as folder:
        events = Path(folder, "events")
        events.touch()
        problem = worker([json.dumps(job), str(events)], environment(name, switches))
        for line in events.read_text().splitlines():
            yield json.loads(line)
        if problem is not None:
            yield {"say": problem}


def build(cases: list[Case]) -> None:
    """Compile what the cases need, all at once; a failure is printed, and met again when it is timed."""
    started = time.perf_counter()
    jobs = {}
    for name, switches in runs(cases):
        jobs[f"score {switches.library} {name}"] = (["score"], environment(name, switches))
    for what in ("select", "eigenvectors"):
        jobs[what] = ([what], environment("r4i4", SETS[0]))
    for tile in {4 if case.group <= 4 else 8 for case in cases}:
        jobs[f"attend {tile}"] = (["attend", str(tile)], environment("r4i4", SETS[0]))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        problems = pool.map(lambda job: worker(["--build", *job[0]], job[1]), jobs.values())
        for what, problem in zip(jobs, problems, strict=True):
            if problem is not None:
                print(f"locks-kv: {what} did not compile: {problem}", flush=True)
    print(f"locks-kv: {len(jobs)} libraries ready in {time.perf_counter() - started:.0f} s", flush=True)


def environment(name: str, switches: Switches) -> dict[str, str]:
    """Environment of a process: this one's without switches of the package, and the chosen ones."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("LOCKS_", "RKI4_"))}
    return {
        **kept,
        **switches.variables,
        "LOCKS_RKI4_RANK": str(RANKS[name]),
        "LOCKS_RKI4_EIGH": "jacobi",
        "AUTHOR_SCORE_LIBRARY": f"{switches.library}-{name}",
    }


def worker(arguments: list[str], variables: dict[str, str]) -> str | None:
    """Run author_kernels.py; what went wrong in one line, or None."""
    command = [sys.executable, str(WORKER), *arguments]
    try:
        ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"no end after {LIMIT_S} s"
    if ended.returncode == 0:
        return None
    lines = [line for line in ended.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or [f"exit status {ended.returncode}"])[-1].strip()[:300]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--build", action="store_true", required=True, help="compile what is timed")
    parser.add_argument("--formats", nargs="+", choices=list(RANKS), default=list(RANKS))
    parser.add_argument("--groups", nargs="+", type=int, default=[4, 8], help="query heads a KV head")
    arguments = parser.parse_args()
    if installed() is None:
        sys.exit("author_runs needs the package locks-kv")
    build(
        [
            Case("any", 8, group, 128, 2**20, 1, name, 128)
            for name in arguments.formats
            for group in arguments.groups
        ]
    )


if __name__ == "__main__":
    main()
