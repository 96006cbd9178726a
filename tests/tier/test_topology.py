"""NUMA nodes and the GPU's one, on machines that are described in a folder."""

from pathlib import Path

import pytest
from fake_machine import GIB, FakeMachine, grace
from locks_sglang.config import LocksError
from locks_sglang.tier import topology
from locks_sglang.tier.topology import node_of_gpu, nodes, numbers_of


def test_grace(tmp_path: Path) -> None:
    grace(tmp_path)
    found = nodes(tmp_path)
    assert list(found) == [0, 1, 2, 10]
    assert found[1].cpus == frozenset(range(72, 144)) and found[2].cpus == frozenset()
    assert (found[0].total, found[0].free) == (480 * GIB, 420 * GIB), "what caches files is free"
    assert found[10].distances == {0: 120, 1: 80, 2: 160, 10: 10}
    assert topology.host_nodes(found) == [0, 1]


@pytest.mark.parametrize(
    ("named", "expected"), [(0, 0), (1, 1), (2, 0), (10, 1)], ids=["cpu 0", "cpu 1", "HBM of 0", "HBM of 1"]
)
def test_a_gpu_gets_grace_memory_and_not_its_own(named: int, expected: int, tmp_path: Path) -> None:
    grace(tmp_path).gpu("0009:01:00.0", named)
    # As nvidia-smi prints it (eight digits, capitals), and as CUDA does.
    assert node_of_gpu("00000009:01:00.0", tmp_path) == expected
    assert node_of_gpu("0009:01:00.0", tmp_path) == expected


def test_domains_in_capitals(tmp_path: Path) -> None:
    grace(tmp_path).gpu("000a:1b:00.0", 1)
    assert node_of_gpu("0000000A:1B:00.0", tmp_path) == 1


@pytest.mark.parametrize("named", [-1, None])
def test_a_gpu_without_a_node(named: int | None, tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    machine.node(0, "0-31", 200, 100)
    if named is not None:
        machine.gpu("0000:41:00.0", named)
    assert node_of_gpu("0000:41:00.0", tmp_path) == 0
    machine.node(1, "32-63", 200, 100)
    with pytest.raises(LocksError, match=r"41:00.0.*legal: .*one of 0, 1, or --sparse-decode-kv-tier gpu"):
        node_of_gpu("0000:41:00.0", tmp_path)


def test_no_distances(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    for number, cpus in enumerate(("0-3", "4-7", "")):
        machine.node(number, cpus, 64, 32)
    machine.gpu("0000:01:00.0", 2)
    with pytest.raises(LocksError, match=r"node 2, .*no distances; legal: .+to 0, 1, or --sparse"):
        node_of_gpu("0000:01:00.0", tmp_path)


def test_a_system_without_numa_is_one_node(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    machine.available(30)
    machine.write("sys/devices/system/cpu/online", "0-7")
    node = nodes(tmp_path)[0]
    assert (len(node.cpus), node.total, node.free) == (8, 999 * GIB, 30 * GIB)
    # A sandbox shows a folder of the node, and nothing of what is there.
    machine.write("sys/devices/system/node/node0/cpumap", "ff")
    assert nodes(tmp_path) == {0: node} and node_of_gpu("0000:01:00.0", tmp_path) == 0


def test_an_only_node_of_a_made_up_size(tmp_path: Path) -> None:
    """gVisor shows 8 GiB where there are 125; what is free is then the system's figure."""
    machine = FakeMachine(tmp_path)
    machine.available(900)
    machine.node(0, "0-15", 8, 7, distances="10")
    node = nodes(tmp_path)[0]
    assert (len(node.cpus), node.total, node.free, node.distances) == (16, 999 * GIB, 900 * GIB, {0: 10})
    # Firmware and the kernel take a little of a node; and of several none can have all.
    machine.node(0, "0-15", 990, 400)
    assert nodes(tmp_path)[0].free == 400 * GIB
    machine.node(0, "0-15", 8, 7)
    machine.node(1, "16-31", 8, 6)
    assert [node.free for node in nodes(tmp_path).values()] == [7 * GIB, 6 * GIB]


def test_numbers() -> None:
    assert numbers_of("0-2,8,10-11\n") == {0, 1, 2, 8, 10, 11} and numbers_of("\n") == frozenset()


def test_this_machine() -> None:
    found = nodes()
    assert topology.host_nodes(found)
    assert all(0 < found[number].free <= found[number].total for number in topology.host_nodes(found))
