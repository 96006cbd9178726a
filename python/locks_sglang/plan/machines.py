"""The machines that can be planned for: memory and rates, each with where it comes from."""

from __future__ import annotations

from dataclasses import dataclass

_GIB = 2**30
# The share of the peak that the H200 was measured to reach (4.26 of 4.8 TB/s, copying).
_SHARE_OF_PEAK = 4.26 / 4.8


@dataclass(frozen=True)
class Machine:
    """One GPU and the host memory that belongs to it.

    Attributes:
        gpu_bytes: memory of the GPU as its driver reports it.
        hbm: bytes a second that a step reads of the GPU's memory.
        to_gpu, to_host: bytes a second over the link, pages of 4 KiB and more in place.
        host_bytes: memory of the host for this GPU.
        measured: whether the rates were measured by us.
        assumptions: one line each: what is taken for true, and its source.
    """

    name: str
    gpu_bytes: int
    hbm: float
    to_gpu: float
    to_host: float
    host_bytes: int
    measured: bool
    assumptions: tuple[str, ...]


_C2C = (
    "NVLink-C2C carries 375 GB/s to the GPU and 297 GB/s back: copies, published by Schieffer et al. "
    "(arXiv 2407.07850); gathered pages are taken to be as fast"
)
_GRACE = "480 GB of LPDDR5X a GPU (NVIDIA's product page); --host-gib for another board"

MACHINES = {
    machine.name: machine
    for machine in (
        Machine(
            "gh200-96",
            gpu_bytes=97871 * 2**20,
            hbm=4.0e12 * _SHARE_OF_PEAK,
            to_gpu=375e9,
            to_host=297e9,
            host_bytes=480 * 10**9,
            measured=False,
            assumptions=(
                f"HBM3 reaches {4.0 * _SHARE_OF_PEAK:.2f} TB/s: the share of the 4.0 TB/s peak (NVIDIA's "
                "product page) that the H200 reaches of its own, 89 %",
                _C2C,
                _GRACE,
            ),
        ),
        Machine(
            "gh200-144",
            gpu_bytes=143 * _GIB,
            hbm=4.9e12 * _SHARE_OF_PEAK,
            to_gpu=375e9,
            to_host=297e9,
            host_bytes=480 * 10**9,
            measured=False,
            assumptions=(
                f"HBM3e reaches {4.9 * _SHARE_OF_PEAK:.2f} TB/s: the share of the 4.9 TB/s peak (NVIDIA's "
                "product page) that the H200 reaches of its own, 89 %; its driver reports 143 GiB",
                _C2C,
                _GRACE,
            ),
        ),
        Machine(
            "h200",
            gpu_bytes=143771 * 2**20,
            hbm=4.26e12,
            to_gpu=50e9,
            to_host=55e9,
            host_bytes=256 * _GIB,
            measured=True,
            assumptions=(
                "measured on an NVIDIA H200: copies in HBM at 4.26 TB/s; 50 GB/s of 4 and 8 KiB pages "
                "gathered from pinned host memory over PCIe, 55 GB/s of plain copies",
                "256 GiB of host memory a GPU; --host-gib for another machine",
            ),
        ),
    )
}
