"""What the Triton kernels share: the byte order of a record, and rounding.

The order is not written here a second time: it is read off ``layout.unpack_*`` as a table of
positions, so a change of order in ``layout.py`` reaches the Triton kernels by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import triton
import triton.language as tl

from .layout import SummaryLayout, hadamard, unpack_basis, unpack_coefficients


@cache
def basis_positions(layout: SummaryLayout, device: torch.device) -> torch.Tensor:
    """int32 ``[r, d]``: where element (column, dimension) lies in the basis plane.

    The unit is what one element takes: a nibble (low one first), a byte or a bf16.
    """
    bits = basis_bits(layout)
    order = _positions(lambda raw: unpack_basis(layout, raw), layout.basis_bytes, bits)
    return order.transpose(0, 1).contiguous().to(device)


@cache
def coefficient_positions(layout: SummaryLayout, device: torch.device) -> torch.Tensor:
    """int32 ``[r, B]``: where element (column, row) lies in the coefficient plane."""
    bits = coefficient_bits(layout)
    order = _positions(lambda raw: unpack_coefficients(layout, raw), layout.coefficient_bytes, bits)
    return order.transpose(0, 1).contiguous().to(device)


@cache
def elements_at(layout: SummaryLayout, plane: str, device: torch.device) -> torch.Tensor:
    """Inverse order, int32: the element (column-major number) at every position of a plane."""
    positions = basis_positions if plane == "basis" else coefficient_positions
    return positions(layout, device).flatten().argsort().to(torch.int32)


@cache
def hadamard_on(head_dim: int, device: torch.device) -> torch.Tensor:
    return hadamard(head_dim, device)


def basis_bits(layout: SummaryLayout) -> int:
    return {"i4": 4, "h": 4, "i8": 8, "bf16": 16}[layout.suffix]


def coefficient_bits(layout: SummaryLayout) -> int:
    return 4 if layout.rotated else 8


def basis_plane(basis: torch.Tensor, layout: SummaryLayout) -> torch.Tensor:
    """The basis plane with the dtype that the kernels read: uint8 for nibbles, int8 or bf16."""
    return basis.view({4: torch.uint8, 8: torch.int8, 16: torch.bfloat16}[basis_bits(layout)])


def coefficient_plane(coefficients: torch.Tensor, layout: SummaryLayout) -> torch.Tensor:
    return coefficients if layout.rotated else coefficients.view(torch.int8)


def _positions(unpack: Callable[[torch.Tensor], torch.Tensor], size: int, bits: int) -> torch.Tensor:
    """Unpack planes that hold the digits of their own positions, and read the positions back."""
    count = size * 8 // bits
    base = {4: 15, 8: 255, 16: 256}[bits]
    number = torch.arange(count)
    found: torch.Tensor | int = 0
    weight = 1
    while weight < count:
        digits = number // weight % base
        if bits == 4:
            nibbles = (digits + 1).to(torch.uint8)  # codes -7 to 7 are stored as 1 to 15
            raw = nibbles[0::2] | (nibbles[1::2] << 4)
        elif bits == 8:
            raw = (digits - 127).to(torch.int8).view(torch.uint8)
        else:
            raw = digits.to(torch.bfloat16).view(torch.uint8)
        offset = {4: 7, 8: 127, 16: 0}[bits]
        found = found + (unpack(raw).long() + offset) * weight
        weight *= base
    assert isinstance(found, torch.Tensor)
    if not torch.equal(found.flatten().sort().values, number):
        raise AssertionError("layout.unpack_* is not a permutation of the plane's elements")
    return found.to(torch.int32)


@triton.jit
def load_codes(plane, positions, mask, BITS: tl.constexpr):
    """Codes (fp32) at some positions of a plane."""
    if BITS == 4:
        packed = tl.load(plane + (positions >> 1), mask=mask, other=0x88).to(tl.int32)
        return (((packed >> ((positions & 1) * 4)) & 15) - 8).to(tl.float32)
    return tl.load(plane + positions, mask=mask, other=0).to(tl.float32)


@triton.jit
def round_even(x):
    """Nearest integer, halves to even (|x| < 2^22), as torch rounds."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def bf16_bits(x):
    """Bits of the nearest bf16 (int32 in 0..65535) and its value as fp32, for finite x."""
    bits = x.to(tl.int32, bitcast=True)
    bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    return bits, (bits << 16).to(tl.float32, bitcast=True)
