"""A machine as its `/sys` and `/proc` describe it, in a folder."""

from pathlib import Path

GIB = 1 << 30


class FakeMachine:
    """Nodes are added one by one; everything else is there only if it is asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str | int) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def node(
        self, number: int, cpus: str, gib: int, free: int, cached: int = 0, distances: str = ""
    ) -> None:
        folder = f"sys/devices/system/node/node{number}"
        self.write(f"{folder}/cpulist", cpus)
        self.write(f"{folder}/distance", distances)
        sizes = {
            "MemTotal": gib, "MemFree": free, "Active": 3, "Active(file)": cached, "Inactive(file)": 0,
        }  # fmt: skip
        lines = (f"Node {number} {name}: {size * 2**20:>12} kB" for name, size in sizes.items())
        self.write(f"{folder}/meminfo", "\n".join(lines))

    def gpu(self, address: str, node: int) -> None:
        self.write(f"sys/bus/pci/devices/{address}/numa_node", node)

    def available(self, gib: int) -> None:
        self.write("proc/meminfo", f"MemTotal: {999 * 2**20} kB\nMemAvailable: {gib * 2**20} kB")

    def status(self, capabilities: str = "0000000000000000", nodes: str = "0-63") -> None:
        self.write("proc/self/status", f"Name:\tx\nCapEff:\t{capabilities}\nMems_allowed_list:\t{nodes}")

    def cgroup2(self, path: str, limit: int | str, used: int = 0, cached: int = 0) -> None:
        """A cgroup of version 2 with sizes in GiB; ``limit`` may be ``max``."""
        folder = f"sys/fs/cgroup{path.rstrip('/')}"
        self.write(f"{folder}/memory.max", limit if limit == "max" else int(limit) * GIB)
        self.write(f"{folder}/memory.current", used * GIB)
        self.write(f"{folder}/memory.stat", f"anon 1\ninactive_file {cached * GIB}\nfile 5")

    def cgroup1(self, path: str, limit: int, used: int = 0, cached: int = 0) -> None:
        folder = f"sys/fs/cgroup/memory{path.rstrip('/')}"
        self.write(f"{folder}/memory.limit_in_bytes", limit)
        self.write(f"{folder}/memory.usage_in_bytes", used * GIB)
        self.write(
            f"{folder}/memory.stat", f"inactive_file {9 * GIB}\ntotal_inactive_file {cached * GIB}\ncache 5"
        )


def grace(root: Path) -> FakeMachine:
    """Two GH200 on a board: nodes 0 and 1 are Grace memory, 2 and 10 the GPUs' own."""
    machine = FakeMachine(root)
    machine.node(0, "0-71", 480, 400, 20, "10 40 80 120")
    machine.node(1, "72-143", 480, 300, 20, "40 10 120 80")
    machine.node(2, "", 95, 94, 0, "80 120 10 160")
    machine.node(10, "", 95, 94, 0, "120 80 160 10")
    machine.available(900)
    machine.status()
    return machine
