"""Allocating, touching and registering host memory, with a registration that is not the GPU's."""

import ctypes
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_machine import grace
from locks_sglang.config import LocksError
from locks_sglang.tier import host_memory, numa, topology
from locks_sglang.tier.host_memory import HostMemory, Registration, check_place, touch, with_cuda

MIB = 1 << 20
GIB = 1 << 30
NODE = topology.host_nodes(topology.nodes())[0]


class FakeGpu:
    """Remembers what is registered; fails where it is told to."""

    def __init__(self, fail_at: int | None = None, stuck: bool = False) -> None:
        self.held: dict[int, int] = {}
        self.log: list[tuple[str, int]] = []
        self.fail_at, self.stuck = fail_at, stuck

    @property
    def registration(self) -> Registration:
        return Registration(self.register, self.unregister)

    def register(self, address: int, nbytes: int) -> str | None:
        if self.fail_at is not None and len(self.held) == self.fail_at:
            return "out of memory (2)"
        if any(address < start + size and start < address + nbytes for start, size in self.held.items()):
            return "already mapped (712)"
        # A GPU pins pages: they must be there.
        assert ctypes.string_at(address, 1) == ctypes.string_at(address + nbytes - 1, 1) == b"\0"
        self.held[address] = nbytes
        self.log.append(("register", address))
        return None

    def unregister(self, address: int) -> str | None:
        assert mapped(address), "it is still there"
        del self.held[address]
        self.log.append(("unregister", address))
        return "unknown address (1)" if self.stuck else None


class FakeRuntime:
    """Answers as torch's binding of the CUDA runtime does, with an error from the second chunk on."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append(("register", nbytes, flags))
        return 2 if len(self.calls) > 1 else 0

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", 0, 0))
        return 0

    def cudaGetErrorString(self, code: int) -> str:
        return {2: "out of memory"}[code]


def test_the_cuda_runtime_is_asked_and_its_error_told(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    message = r"chunk 2 of 2 .*: cudaHostRegister failed with CUDA error 2 \(out of memory\)"
    with pytest.raises(LocksError, match=message):
        HostMemory(4 * MIB, node=NODE, registration=with_cuda(), chunk=2 * MIB)
    mapped_portable = 3
    assert runtime.calls == [
        ("register", 2 * MIB, mapped_portable), ("register", 2 * MIB, mapped_portable), ("unregister", 0, 0)
    ]  # fmt: skip


def mapped(address: int) -> bool:
    """Whether anything of this process lies at the address."""
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(first, 16) <= address < int(last, 16) for first, last in ranges)


def test_chunks_cover_it_and_are_given_back() -> None:
    gpu = FakeGpu()
    memory = HostMemory(21 * MIB - 5, node=NODE, registration=gpu.registration, chunk=8 * MIB)
    start = memory.address
    assert memory.nbytes == 22 * MIB, "huge pages of 2 MiB"
    assert gpu.held == {start: 8 * MIB, start + 8 * MIB: 8 * MIB, start + 16 * MIB: 6 * MIB}
    # Memory of another test beside it, of the same kind, is one mapping with it to the system.
    if (placed := numa.placed(start, memory.nbytes)) is not None:
        assert set(placed) == {NODE} and placed[NODE] >= memory.nbytes
    memory.close()
    assert not gpu.held and not mapped(start)
    order = [address for what, address in gpu.log if what == "unregister"]
    assert order == sorted(order, reverse=True)
    memory.close()
    assert len(gpu.log) == 6


def test_it_holds_what_is_written() -> None:
    gpu = FakeGpu()
    memory = HostMemory(4 * MIB, node=NODE, registration=gpu.registration)
    view = memory.tensor().view(torch.int64)
    assert view.data_ptr() == memory.address and not view.any()
    view.copy_(torch.arange(len(view)))
    assert torch.equal(memory.tensor().view(torch.int64), torch.arange(4 * MIB // 8))
    with pytest.raises(BufferError):
        memory.close()
    del view
    memory.close()


def test_memory_that_was_not_closed_is_registered_as_long_as_a_tensor_of_it_lives() -> None:
    """Then it is unregistered, so that what comes to lie at its address can be registered."""
    gpu = FakeGpu()
    memory = HostMemory(8 * MIB, node=NODE, registration=gpu.registration, chunk=2 * MIB)
    start, view = memory.address, memory.tensor()[6:].view(2, -1)
    del memory
    assert len(gpu.held) == 4 and mapped(start)
    assert not view.any()
    del view
    assert not gpu.held and not mapped(start)
    for _ in range(3):  # the system gives the same address again
        HostMemory(8 * MIB, node=NODE, registration=gpu.registration, chunk=2 * MIB)


def test_an_error_of_memory_that_nothing_uses_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    gpu = FakeGpu(stuck=True)
    with caplog.at_level(logging.ERROR):
        HostMemory(4 * MIB, node=NODE, registration=gpu.registration, chunk=2 * MIB)
    assert caplog.text.count("nothing uses any more: unknown address (1)") == 2


def test_a_tensor_of_the_gpu_holds_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch keeps the object that it makes such a tensor from."""
    gpu = FakeGpu()
    kept: list[Any] = []

    def as_tensor(shown: Any, device: str) -> Any:
        kept.append(shown)
        address, _ = shown.__cuda_array_interface__["data"]
        same = SimpleNamespace(data_ptr=lambda: address)
        same.view = lambda _: same
        return same

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    memory = HostMemory(4 * MIB, node=NODE, registration=gpu.registration)
    start = memory.address
    assert host_memory.on_gpu(memory.tensor()).data_ptr() == start
    del memory
    assert gpu.held and mapped(start)
    kept.clear()
    assert not gpu.held and not mapped(start)


@pytest.mark.parametrize("fail_at", [0, 1, 3])
def test_a_failed_registration_leaves_nothing(fail_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, addresses = FakeGpu(fail_at), []
    monkeypatch.setattr(numa, "prefer", lambda address, *rest: addresses.append(address))
    message = (
        rf"chunk {fail_at + 1} of 4 of the host memory \(2.0 MiB, after {2 * fail_at}.0 MiB of 8.0 MiB\): "
        r"out of memory \(2\); everything is released again; legal: "
    )
    with pytest.raises(LocksError, match=message):
        HostMemory(8 * MIB, node=NODE, registration=gpu.registration, chunk=2 * MIB)
    assert not gpu.held and len(gpu.log) == 2 * fail_at
    assert not mapped(addresses[0])


def test_the_first_error_is_told(caplog: pytest.LogCaptureFixture) -> None:
    gpu = FakeGpu(fail_at=2, stuck=True)
    with caplog.at_level(logging.ERROR), pytest.raises(LocksError, match="chunk 3 of 4"):
        HostMemory(8 * MIB, node=NODE, registration=gpu.registration, chunk=2 * MIB)
    assert caplog.text.count("unknown address (1)") == 2


def test_every_chunk_is_unregistered_whatever_others_answer() -> None:
    gpu = FakeGpu(stuck=True)
    memory = HostMemory(8 * MIB, node=NODE, registration=gpu.registration, chunk=2 * MIB)
    with pytest.raises(LocksError, match=r"4 chunks of host memory: unknown address \(1\)"):
        memory.close()
    assert not gpu.held and not mapped(memory.address)


def test_an_interrupt_leaves_nothing_either() -> None:
    gpu = FakeGpu()

    def interrupted(address: int, nbytes: int) -> str | None:
        if gpu.held:
            raise KeyboardInterrupt
        return gpu.register(address, nbytes)

    with pytest.raises(KeyboardInterrupt):
        HostMemory(
            8 * MIB, node=NODE, registration=Registration(interrupted, gpu.unregister), chunk=2 * MIB
        )
    assert not gpu.held and len(gpu.log) == 2 and not mapped(gpu.log[0][1])


@pytest.mark.parametrize("there", [{2: 4 * MIB}, {0: 3 * MIB, 10: MIB}])
def test_pages_on_the_memory_of_a_gpu_are_refused(
    there: dict[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Grace a page may come to lie in the GPU's HBM, which is a node as well."""
    grace(tmp_path)
    gpu = FakeGpu()
    monkeypatch.setattr(numa, "prefer", lambda *where: True)
    monkeypatch.setattr(numa, "placed", lambda *where: there)
    with pytest.raises(
        LocksError, match=r"NUMA node 0 lies elsewhere \(.* on node .*nodes of the host: 0, 1"
    ):
        HostMemory(4 * MIB, node=0, registration=gpu.registration, root=tmp_path)
    assert not gpu.log, "nothing is registered before its place is known"
    monkeypatch.setattr(numa, "placed", lambda *where: {0: 4 * MIB})
    HostMemory(4 * MIB, node=0, registration=gpu.registration, root=tmp_path).close()


def test_where_pages_may_lie() -> None:
    check_place(None, 0, [0, 1])
    check_place({0: 200 * GIB, 1: GIB}, 0, [0, 1])
    with pytest.raises(
        LocksError, match=r"100.0 GiB on node 0, 4.0 GiB on node 1.*legal: as much as is free"
    ):
        check_place({0: 100 * GIB, 1: 4 * GIB}, 0, [0, 1])
    with pytest.raises(LocksError, match="on node 2"):
        check_place({0: 200 * GIB, 2: 4096}, 0, [0, 1])


NUMA_MAPS = """\
55aa00000000 default file=/usr/bin/python mapped=2 N1=2 kernelpagesize_kB=4
7f0000000000 prefer:0 anon=3 dirty=3 N0=2 N1=1 kernelpagesize_kB=64
7f0000400000 prefer:0 anon=2 dirty=2 N0=2 kernelpagesize_kB=2048
7f0000800000 default anon=9 N9=9 kernelpagesize_kB=4
"""


@pytest.mark.parametrize(
    ("address", "nbytes", "expected"),
    [
        (0x7F0000000000, 0x800000, {0: 128 * 1024 + 4 * MIB, 1: 64 * 1024}),
        (0x7F0000400000, 0x400000, {0: 4 * MIB}),
        # In the middle of a line, which neighbours of the same kind share.
        (0x7F0000600000, 0x200000, {0: 4 * MIB}),
    ],
)
def test_placed(address: int, nbytes: int, expected: dict[int, int], tmp_path: Path) -> None:
    assert numa.placed(address, nbytes, tmp_path) is None
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/numa_maps").write_text(NUMA_MAPS)
    assert numa.placed(address, nbytes, tmp_path) == expected


@pytest.mark.parametrize("cpus", [frozenset(), None], ids=["any", "one"])
def test_touch_writes_everything_and_leaves_the_caller_where_it_was(cpus: frozenset[int] | None) -> None:
    before = os.sched_getaffinity(0)
    data = torch.ones(7 * MIB + 11, dtype=torch.uint8)
    touch(data.data_ptr(), len(data) - 1, frozenset(list(before)[:1]) if cpus is None else cpus)
    assert not data[:-1].any() and data[-1] == 1
    assert os.sched_getaffinity(0) == before


def test_touch_runs_on_the_cpus_of_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[frozenset[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cpus: pinned.append(cpus))
    data = torch.ones(8 * MIB, dtype=torch.uint8)
    touch(data.data_ptr(), len(data), frozenset({3, 4}))
    assert pinned == [frozenset({3, 4})] * 2, "as many threads as CPUs"


@pytest.mark.parametrize(("nbytes", "chunk"), [(0, 2 * MIB), (9, 5), (9, 0)])
def test_sizes_that_are_refused(nbytes: int, chunk: int) -> None:
    with pytest.raises(LocksError, match="legal: at least 1, in chunks that are a multiple of 2 MiB"):
        HostMemory(nbytes, node=NODE, registration=FakeGpu().registration, chunk=chunk)


def test_more_than_can_be_mapped() -> None:
    with pytest.raises(LocksError, match=r"host memory of 4194304.0 GiB cannot be mapped: .*; legal: less"):
        HostMemory(1 << 52, node=NODE, registration=FakeGpu().registration)


def test_a_chunk_is_smaller_than_what_drivers_fail_at() -> None:
    assert host_memory.CHUNK < 512 * GIB and host_memory.CHUNK % (2 * MIB) == 0
