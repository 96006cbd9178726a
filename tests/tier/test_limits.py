"""What is refused before host memory is allocated, and with which numbers."""

from pathlib import Path

import pytest
from fake_machine import GIB, FakeMachine, grace
from locks_sglang.config import LocksError
from locks_sglang.tier.limits import Request, cgroup_room, check

PLENTY = 1 << 60
ALL_CAPABILITIES = "000001ffffffffff"


def ask(*gib: float, node: int = 0) -> list[Request]:
    return [Request(rank, node, int(size * GIB)) for rank, size in enumerate(gib)]


def test_what_fits_passes(tmp_path: Path) -> None:
    grace(tmp_path)
    check([*ask(416), Request(1, 1, 300 * GIB)], tmp_path, PLENTY)


def test_ranks_of_a_node_are_added_up(tmp_path: Path) -> None:
    """Each of them would fit alone."""
    grace(tmp_path)
    check(ask(300), tmp_path, PLENTY)
    message = (
        r"host memory of 600.0 GiB \(rank 0, 1\) is more than the free memory of NUMA node 0 less 4.0 GiB "
        r"to spare, 416.0 GiB; legal: at most 208.0 GiB a rank"
    )
    with pytest.raises(LocksError, match=message):
        check(ask(300, 300), tmp_path, PLENTY)


def test_other_ranks_on_another_node_do_not_count(tmp_path: Path) -> None:
    grace(tmp_path)
    with pytest.raises(LocksError, match=r"330.0 GiB \(rank 7\).*NUMA node 1 .*316.0 GiB"):
        check([*ask(400), Request(7, 1, 330 * GIB)], tmp_path, PLENTY)


def test_all_ranks_count_for_the_system(tmp_path: Path) -> None:
    machine = grace(tmp_path)
    machine.available(500)
    with pytest.raises(
        LocksError, match=r"600.0 GiB \(rank 0, 1\).*the system's available memory.*496.0 GiB"
    ):
        check([*ask(300), Request(1, 1, 300 * GIB)], tmp_path, PLENTY)


def test_the_reserve_is_kept(tmp_path: Path) -> None:
    grace(tmp_path)
    check(ask(420), tmp_path, PLENTY, reserve=0)
    with pytest.raises(LocksError, match=r"less 4.0 GiB to spare"):
        check(ask(420), tmp_path, PLENTY)


def test_an_only_node_of_a_made_up_size_refuses_nothing(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    machine.node(0, "0-15", 8, 7)
    machine.available(124)
    machine.status()
    check(ask(120), tmp_path, PLENTY)
    with pytest.raises(LocksError, match=r"121.0 GiB \(rank 0\).*120.0 GiB"):
        check(ask(121), tmp_path, PLENTY)


@pytest.mark.parametrize(
    ("node", "why"),
    [
        (2, "has no CPUs: it is a GPU's own memory"),
        (5, "does not exist"),
        (1, r"closed to this process \(cpuset\)"),
    ],
)
def test_nodes_that_are_refused(node: int, why: str, tmp_path: Path) -> None:
    grace(tmp_path).status(nodes="0,2")
    with pytest.raises(LocksError, match=f"NUMA node {node}, which .*{why}.*legal: 0"):
        check(ask(1, node=node), tmp_path, PLENTY)


def test_locked_memory_is_counted_by_rank(tmp_path: Path) -> None:
    grace(tmp_path)
    check(ask(30, 30), tmp_path, memlock=32 * GIB)
    message = (
        r"40.0 GiB \(rank 1\) is more than what a process may lock, 32.0 GiB; legal: .* ulimit -l unlimited"
    )
    with pytest.raises(LocksError, match=message):
        check(ask(30, 40), tmp_path, memlock=32 * GIB)
    with pytest.raises(
        LocksError, match=r"what a process may lock, 8.0 MiB; legal: at most 8.0 MiB a rank"
    ):
        check(ask(1), tmp_path, memlock=8 << 20)


def test_a_capability_lifts_the_limit_of_locked_memory(tmp_path: Path) -> None:
    grace(tmp_path).status(capabilities=ALL_CAPABILITIES)
    check(ask(40), tmp_path, memlock=8 << 20)


def test_the_limit_of_this_process_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grace(tmp_path)
    monkeypatch.setattr("resource.getrlimit", lambda kind: (16 << 20, -1))
    with pytest.raises(LocksError, match=r"what a process may lock, 16.0 MiB"):
        check(ask(1), tmp_path)
    monkeypatch.setattr("resource.getrlimit", lambda kind: (-1, -1))
    check(ask(1), tmp_path)


def test_cgroup_2(tmp_path: Path) -> None:
    machine = grace(tmp_path)
    machine.write("proc/self/cgroup", "0::/kube/pod one/server")
    assert cgroup_room(tmp_path) is None
    machine.cgroup2("/kube/pod one/server", "max", used=10)
    assert cgroup_room(tmp_path) is None
    # The tightest of those above counts; what only caches files can go.
    machine.cgroup2("/kube", 300, used=20)
    machine.cgroup2("/kube/pod one", 200, used=60, cached=10)
    assert cgroup_room(tmp_path) == 150 * GIB
    machine.cgroup2("/kube", 160, used=30)
    assert cgroup_room(tmp_path) == 130 * GIB
    machine.cgroup2("/kube", 300, used=20)
    with pytest.raises(
        LocksError, match=r"160.0 GiB \(rank 0, 1\).*memory limit of the cgroup leaves, 150.0 GiB"
    ):
        check([*ask(80), Request(1, 1, 80 * GIB)], tmp_path, PLENTY)


def test_cgroup_1(tmp_path: Path) -> None:
    machine = grace(tmp_path)
    machine.write("proc/self/cgroup", "9:cpuset:/\n4:cpu,memory:/docker/abc\n0::/")
    unlimited = 0x7FFFFFFFFFFFF000
    machine.cgroup1("/docker/abc", unlimited, used=5)
    assert cgroup_room(tmp_path) is None
    machine.cgroup1("/docker/abc", 64 * GIB, used=20, cached=4)
    assert cgroup_room(tmp_path) == 48 * GIB


def test_cgroup_1_in_a_container(tmp_path: Path) -> None:
    """The path is that of the host; what is mounted is the container's own group."""
    machine = FakeMachine(tmp_path)
    machine.write("proc/self/cgroup", "4:memory:/docker/0123")
    machine.cgroup1("/", 32 * GIB, used=2)
    assert cgroup_room(tmp_path) == 30 * GIB


def test_more_used_than_allowed_leaves_nothing(tmp_path: Path) -> None:
    machine = grace(tmp_path)
    machine.write("proc/self/cgroup", "0::/")
    machine.cgroup2("/", 10, used=12)
    with pytest.raises(LocksError, match=r"leaves, -2.0 GiB; legal: at most 0.0 MiB a rank"):
        check(ask(1), tmp_path, PLENTY)
