"""NUMA nodes, and the one whose memory a GPU reaches best."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from ..config import LocksError

ROOT = Path("/")
_NODES = "sys/devices/system/node"
_BELIEVED = 0.5
"""Share of the machine's memory that a node must have to be believed, where there is no other."""


@dataclass(frozen=True)
class Node:
    """A NUMA node.

    Attributes:
        number: as the system counts it.
        cpu_list: CPUs as the system writes them, such as ``0-2,8``; empty for memory alone, as the HBM of a
            GPU on a Grace machine.
        total, free: bytes; free counts what only caches files, which the system gives up when asked.
        distances: to every node by number, smaller is nearer; empty where the system does not say.
    """

    number: int
    cpu_list: str
    total: int
    free: int
    distances: dict[int, int]

    @property
    def cpus(self) -> frozenset[int]:
        """The CPUs by number."""
        return numbers_of(self.cpu_list)


def nodes(root: Path = ROOT) -> dict[int, Node]:
    """Nodes by number; where the system knows no NUMA, or its names alone, one node 0 with all of it.

    An only node has all of the machine's memory, too, where its own file tells of less than half.
    """
    found = listed(root)
    # Sandboxes (gVisor) show a folder of a node with neither its CPUs nor its memory,
    if not host_nodes(found):
        return {0: _all_of_it(root)}
    # or with a made-up size.
    if len(found) == 1:
        (node,), whole = found.values(), _all_of_it(root)
        if node.total < _BELIEVED * whole.total:
            return {node.number: replace(node, total=whole.total, free=whole.free)}
    return found


def listed(root: Path = ROOT) -> dict[int, Node]:
    """Nodes by number as the system lists them; it may list none, or without CPUs and memory."""
    folder = root / _NODES
    numbers = sorted(int(path.name[4:]) for path in folder.glob("node[0-9]*"))
    found = {}
    for number in numbers:
        path = folder / f"node{number}"
        facts = meminfo(path / "meminfo")
        distances = read_text(path / "distance").split()
        found[number] = Node(
            number,
            read_text(path / "cpulist").strip(),
            facts.get("MemTotal", 0),
            sum(facts.get(name, 0) for name in ("MemFree", "Active(file)", "Inactive(file)")),
            # The file has one figure for each node, in their order.
            dict(zip(numbers, map(int, distances), strict=False)),
        )
    return found


def host_nodes(found: dict[int, Node]) -> list[int]:
    """Nodes that memory of the host may lie on: those with CPUs and memory."""
    return [node.number for node in found.values() if node.cpus and node.total]


def node_of_gpu(bus_id: str, root: Path = ROOT) -> int:
    """The node with CPUs and memory that is nearest to a GPU.

    The system names a node for each PCI device.  On Grace that can be the GPU's own memory, whose nearest
    node with CPUs is taken then.

    Args:
        bus_id: as ``nvidia-smi`` or CUDA print it, such as ``00000009:01:00.0``.

    Raises:
        LocksError: the system names no node and there are several.
    """
    found = nodes(root)
    legal = host_nodes(found)
    domain, _, rest = bus_id.lower().partition(":")
    named = read_text(root / "sys/bus/pci/devices" / f"{domain[-4:]:0>4}:{rest}" / "numa_node").strip()
    node = found.get(int(named)) if named else None
    if node is None:
        if len(legal) == 1:
            return legal[0]
        raise LocksError(
            f"the system does not say which NUMA node the GPU {bus_id} belongs to; legal: a system that "
            f"names one of {', '.join(map(str, legal))}, or --sparse-decode-kv-tier gpu"
        )
    if node.number in legal:
        return node.number
    if not node.distances:
        raise LocksError(
            f"the GPU {bus_id} belongs to NUMA node {node.number}, which has no CPUs, and the system gives "
            f"no distances; legal: a system that gives them, to {', '.join(map(str, legal))}, or "
            "--sparse-decode-kv-tier gpu"
        )
    return min(legal, key=lambda number: (node.distances.get(number, 1 << 30), number))


def meminfo(path: Path) -> dict[str, int]:
    """Bytes by name, of ``/proc/meminfo`` or a node's own."""
    rows = re.findall(r"^(?:Node +\d+ +)?([\w()]+): +(\d+) kB", read_text(path), re.M)
    return {name: 1024 * int(count) for name, count in rows}


def numbers_of(text: str) -> frozenset[int]:
    """``0-2,8`` as numbers."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found |= set(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _all_of_it(root: Path) -> Node:
    facts = meminfo(root / "proc/meminfo")
    cpus = read_text(root / "sys/devices/system/cpu/online").strip() or "0"
    return Node(0, cpus, facts.get("MemTotal", 0), facts.get("MemAvailable", 0), {})


def read_text(path: Path) -> str:
    """Text of a file; empty where it is not there or cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
