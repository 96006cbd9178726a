"""Whether there is room for the host memory that the ranks of a server ask for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..config import LocksError
from ..machine import memlock_limit
from .topology import ROOT, host_nodes, meminfo, nodes, numbers_of, read_text

RESERVE = 4 << 30
"""Bytes that stay free on every node and in the system, for the server's own processes and for others."""
_LOCK_ANYTHING = 14  # CAP_IPC_LOCK
_NO_LIMIT = 1 << 62  # cgroup v1 writes a number of this size


@dataclass(frozen=True)
class Request:
    """What a rank asks for: ``nbytes`` on a NUMA node."""

    rank: int
    node: int
    nbytes: int


@dataclass(frozen=True)
class Limit:
    """Room for some requests together: its name, its bytes, and what to do where they are too few."""

    name: str
    nbytes: int
    remedy: str
    requests: tuple[Request, ...]

    @property
    def needed(self) -> int:
        return sum(request.nbytes for request in self.requests)


def check(
    requests: Sequence[Request],
    root: Path = ROOT,
    memlock: int | None = None,
    reserve: int = RESERVE,
) -> None:
    """Refuse what would not fit, before anything is allocated.

    Args:
        requests: of all ranks on this machine.
        root: where ``sys`` and ``proc`` are.
        memlock: bytes that a process may lock; default: of this process.
        reserve: bytes to leave.

    Raises:
        LocksError: with the bytes asked for, the bytes there are, and what is legal.
    """
    _check_nodes(requests, root)
    limits = find(requests, root, memlock_limit() if memlock is None else memlock, reserve)
    short = [limit for limit in limits if limit.needed > limit.nbytes]
    if not short:
        return
    worst = max(short, key=lambda limit: limit.needed - limit.nbytes)
    ranks = ", ".join(str(request.rank) for request in worst.requests)
    raise LocksError(
        f"host memory of {gib(worst.needed)} (rank {ranks}) is more than {worst.name}, "
        f"{gib(worst.nbytes)}; legal: at most {gib(max(0, worst.nbytes) // len(worst.requests))} a rank, "
        f"or {worst.remedy}"
    )


def find(requests: Sequence[Request], root: Path, memlock: int | None, reserve: int) -> list[Limit]:
    """Every limit that the requests meet."""
    together = tuple(requests)
    keep = f"less {gib(reserve)} to spare"
    found = [
        Limit(
            f"the free memory of NUMA node {number} {keep}",
            nodes(root)[number].free - reserve,
            "end what uses that memory",
            tuple(request for request in requests if request.node == number),
        )
        for number in sorted({request.node for request in requests})
    ]
    available = meminfo(root / "proc/meminfo").get("MemAvailable")
    if available is not None:
        name = f"the system's available memory {keep}"
        found.append(Limit(name, available - reserve, "end what uses memory", together))
    room = cgroup_room(root)
    if room is not None:
        remedy = "a larger memory limit of the container"
        found.append(Limit("what the memory limit of the cgroup leaves", room, remedy, together))
    if memlock is not None and not _may_lock_anything(root):
        remedy = "ulimit -l unlimited (docker run --ulimit memlock=-1)"
        # Counted by process, so by rank.
        found += [Limit("what a process may lock", memlock, remedy, (request,)) for request in requests]
    return found


def cgroup_room(root: Path = ROOT) -> int | None:
    """Bytes that this process's cgroup and those above it still allow; None without a limit.

    Both versions: limit less use, plus what only caches files and goes when memory is needed.
    """
    rooms = [
        limit - used + cached
        for folder, names in _cgroups(root)
        if (limit := _number(folder / names[0])) is not None and limit < _NO_LIMIT
        for used, cached in [(_number(folder / names[1]) or 0, _cached(folder / "memory.stat", names[2]))]
    ]
    return min(rooms, default=None)


def gib(nbytes: int) -> str:
    """``1.5 GiB``, or MiB where it is less than one."""
    return f"{nbytes / 2**30:.1f} GiB" if abs(nbytes) >= 2**30 else f"{nbytes / 2**20:.1f} MiB"


def _check_nodes(requests: Iterable[Request], root: Path) -> None:
    """Every request on a node of the host that this process may use."""
    found = nodes(root)
    listed = re.search(r"^Mems_allowed_list:\s*(\S+)", read_text(root / "proc/self/status"), re.M)
    allowed = numbers_of(listed[1]) if listed else frozenset(found)
    legal = [number for number in host_nodes(found) if number in allowed]
    for request in requests:
        if request.node in legal:
            continue
        node = found.get(request.node)
        why = "does not exist" if node is None else "is closed to this process (cpuset)"
        if node is not None and not node.cpus:
            why = "has no CPUs: it is a GPU's own memory, not the host's"
        raise LocksError(
            f"rank {request.rank} asks for host memory on NUMA node {request.node}, which {why}; "
            f"legal: {', '.join(map(str, legal)) or 'none'}"
        )


def _may_lock_anything(root: Path) -> bool:
    """Whether this process has the capability that lifts the limit of locked memory."""
    effective = re.search(r"^CapEff:\s*([0-9a-fA-F]+)", read_text(root / "proc/self/status"), re.M)
    return bool(effective and int(effective[1], 16) >> _LOCK_ANYTHING & 1)


def _cgroups(root: Path) -> list[tuple[Path, tuple[str, str, str]]]:
    """Folders of this process's memory cgroup and those above it, with the names of their files."""
    found = []
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = top / path.strip("/")
        # In a container of version 1 the path is the host's, and what is mounted is the container's own.
        while folder != top:
            found.append((folder, names))
            folder = folder.parent
        found.append((top, names))
    return found


def _number(path: Path) -> int | None:
    """A number in a file; None where there is no file, or it says ``max``."""
    text = read_text(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _cached(path: Path, name: str) -> int:
    match = re.search(rf"^{name} (\d+)", read_text(path), re.M)
    return int(match[1]) if match else 0
