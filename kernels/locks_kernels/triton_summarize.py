"""Triton implementation of ``summarize``: one launch builds the records of all layers.

The principal directions come out one at a time: the page's Gram matrix is squared until one
column dominates, the keys are projected off that direction, and so on.  That costs more
arithmetic than the CUDA path's Jacobi rotations but uses nothing but small matrix products.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .layout import Envelopes, Records
from .pointers import pointer_table
from .reference import RANK_TOLERANCE
from .triton_order import (
    basis_bits,
    basis_plane,
    bf16_bits,
    coefficient_bits,
    coefficient_plane,
    elements_at,
    hadamard_on,
    round_even,
)

POINTER_TYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float8_e4m3fn: tl.float8e4nv,
}


def summarize(keys: Sequence[torch.Tensor], slots: torch.Tensor, records: Records) -> None:
    """See :func:`locks_kernels.summarize.summarize`; all layers have equal strides and dtype."""
    view = keys[0]
    _, page_size, kv_heads, head_dim = view.shape
    grid = (slots.shape[0], len(keys), kv_heads)
    common = (
        pointer_table(keys),
        slots,
        view.stride(0),
        view.stride(1),
        view.stride(2),
        records.planes[0].shape[1],
        kv_heads,
    )
    key_type = POINTER_TYPES[view.dtype]
    if isinstance(records, Envelopes):
        low, high = records.low.view(torch.int16), records.high.view(torch.int16)
        _envelope_kernel[grid](*common, low, high, KEY=key_type, B=page_size, D=head_dim)
        return
    layout = records.layout
    device = slots.device
    _summary_kernel[grid](
        *common,
        basis_plane(records.basis, layout).view(torch.int16 if basis_bits(layout) == 16 else torch.int8),
        coefficient_plane(records.coefficients, layout).view(torch.int8),
        records.centroid.view(torch.int8),
        records.scales.view(torch.int16),
        elements_at(layout, "basis", device),
        elements_at(layout, "coefficients", device),
        hadamard_on(head_dim, device),
        KEY=key_type,
        B=page_size,
        D=head_dim,
        R=layout.rank,
        RP=max(16, triton.next_power_of_2(layout.rank)),
        BASIS_BITS=basis_bits(layout),
        COEFFICIENT_BITS=coefficient_bits(layout),
        BASIS_SPAN=_span(layout.rank * head_dim, basis_bits(layout)),
        COEFFICIENT_SPAN=_span(layout.rank * page_size, coefficient_bits(layout)),
        SCALES=layout.scale_count,
        TOLERANCE=RANK_TOLERANCE,
        num_warps=4,
        num_stages=1,
    )


def _span(elements: int, bits: int) -> int:
    """Words of a plane, rounded up to what Triton can range over; two 4-bit elements share a byte."""
    return triton.next_power_of_2(elements // 2 if bits == 4 else elements)


@triton.jit
def _load_page(
    keys, slot, first, k_page, k_slot, k_head, KEY: tl.constexpr, B: tl.constexpr, D: tl.constexpr
):
    """Keys of the page that ``slot`` completes, dimensions ``first`` to ``first + D``: fp32 ``[B, D]``.

    A non-finite element is 0.
    """
    layer = tl.program_id(1)
    head = tl.program_id(2).to(tl.int64)
    base = tl.load(keys + layer).to(tl.pointer_type(KEY)) + (slot // B) * k_page + head * k_head + first
    page = tl.load(base + tl.arange(0, B)[:, None] * k_slot + tl.arange(0, D)[None, :]).to(tl.float32)
    return tl.where(tl.abs(page) < float("inf"), page, 0.0)


@triton.jit
def _rotated_page(
    keys, slot, hadamard, k_page, k_slot, k_head, KEY: tl.constexpr, B: tl.constexpr, D: tl.constexpr
):
    """The page times the Hadamard matrix, 64 of its rows at a time to spare shared memory."""
    page = tl.zeros([B, D], tl.float32)
    for first in range(0, D, 64):
        part = _load_page(keys, slot, first, k_page, k_slot, k_head, KEY, B, 64)
        rows = hadamard + (first + tl.arange(0, 64)[:, None]) * D + tl.arange(0, D)[None, :]
        page += tl.dot(part, tl.load(rows), input_precision="ieee")
    return page


@triton.jit
def _envelope_kernel(
    keys,
    slots,
    k_page,
    k_slot,
    k_head,
    pages,
    kv_heads,
    low,
    high,
    KEY: tl.constexpr,
    B: tl.constexpr,
    D: tl.constexpr,
):
    slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
    if slot % B == B - 1:
        page = _load_page(keys, slot, 0, k_page, k_slot, k_head, KEY, B, D)
        record = (tl.program_id(1).to(tl.int64) * pages + slot // B) * kv_heads + tl.program_id(2)
        at = record * D + tl.arange(0, D)
        tl.store(low + at, bf16_bits(tl.min(page, 0))[0].to(tl.int16))
        tl.store(high + at, bf16_bits(tl.max(page, 0))[0].to(tl.int16))


@triton.jit
def _summary_kernel(
    keys,
    slots,
    k_page,
    k_slot,
    k_head,
    pages,
    kv_heads,
    basis,
    coefficients,
    centroid,
    scales,
    basis_elements,
    coefficient_elements,
    hadamard,
    KEY: tl.constexpr,
    B: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    BASIS_BITS: tl.constexpr,
    COEFFICIENT_BITS: tl.constexpr,
    BASIS_SPAN: tl.constexpr,
    COEFFICIENT_SPAN: tl.constexpr,
    SCALES: tl.constexpr,
    TOLERANCE: tl.constexpr,
):
    """Record of one (completed page, layer, KV head)."""
    slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
    if slot % B == B - 1:
        rotated: tl.constexpr = COEFFICIENT_BITS == 4
        record = (tl.program_id(1).to(tl.int64) * pages + slot // B) * kv_heads + tl.program_id(2)
        dims = tl.arange(0, D)
        tokens = tl.arange(0, B)
        columns = tl.arange(0, RP)
        scale_at = scales + record * SCALES

        if rotated:
            page = _rotated_page(keys, slot, hadamard, k_page, k_slot, k_head, KEY, B, D)
        else:
            page = _load_page(keys, slot, 0, k_page, k_slot, k_head, KEY, B, D)
        mu = tl.sum(page, 0) / B
        centred = page - mu[None, :]

        mu_bits, mu_step = bf16_bits(tl.max(tl.abs(mu), 0) / 127)
        mu_codes = _codes(mu, mu_step, 127)
        tl.store(centroid + record * D + dims, mu_codes.to(tl.int8))
        tl.store(scale_at, mu_bits.to(tl.int16))

        v = _principal_basis(centred, B, D, R, RP, TOLERANCE)  # [RP, D], rows past R are zero
        v_codes = v
        if BASIS_BITS != 16:
            top: tl.constexpr = 7 if BASIS_BITS == 4 else 127
            v_bits, v_step = bf16_bits(tl.max(tl.abs(v), 1) / top)
            v_codes = _codes(v, v_step[:, None], top)
            if not rotated:
                tl.store(scale_at + 1 + B + columns, v_bits.to(tl.int16), mask=columns < R)

        if rotated:
            shifted = page - (mu_codes * mu_step)[None, :]
            c = _refit(shifted, v_codes, R, RP, B)  # [RP, B]
            c_bits, c_step = bf16_bits(tl.max(tl.abs(c), 1) / 7)
            c_codes = _codes(c, c_step[:, None], 7)
            tl.store(scale_at + 1 + columns, c_bits.to(tl.int16), mask=columns < R)
        else:
            c = tl.dot(v, tl.trans(centred), input_precision="ieee")
            c_bits, c_step = bf16_bits(tl.max(tl.abs(c), 0) / 127)
            c_codes = _codes(c, c_step[None, :], 127)
            tl.store(scale_at + 1 + tokens, c_bits.to(tl.int16))

        if BASIS_BITS == 16:
            _store(basis + record * (D * R), bf16_bits(v)[0], basis_elements, R * D, BASIS_SPAN, 16)
        else:
            size: tl.constexpr = R * D * BASIS_BITS // 8
            at = basis + record * size
            _store(at, v_codes.to(tl.int32), basis_elements, R * D, BASIS_SPAN, BASIS_BITS)
        c_size: tl.constexpr = R * B * COEFFICIENT_BITS // 8
        at = coefficients + record * c_size
        codes = c_codes.to(tl.int32)
        _store(at, codes, coefficient_elements, R * B, COEFFICIENT_SPAN, COEFFICIENT_BITS)


@triton.jit
def _principal_basis(
    centred, B: tl.constexpr, D: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, TOLERANCE: tl.constexpr
):
    """Top right singular vectors of ``centred [B, D]``, zero where there are none: ``[RP, D]``."""
    peak = tl.max(tl.max(tl.abs(centred), 1), 0)
    rest = centred / tl.maximum(peak, 1.0e-37)
    tokens = tl.arange(0, B)
    columns = tl.arange(0, RP)
    v = tl.zeros([RP, D], tl.float32)
    largest = tl.zeros([], tl.float32)
    for column in range(R):
        gram = tl.dot(rest, tl.trans(rest), input_precision="ieee")
        diagonal = tokens[:, None] == tokens[None, :]
        power = gram
        for _ in range(8):  # to the 256th power: only the leading direction is left
            trace = tl.sum(tl.sum(tl.where(diagonal, power, 0.0), 1), 0)
            power = power / tl.maximum(trace, 1.0e-37)
            power = tl.dot(power, power, input_precision="ieee")
        weight = tl.sum(tl.where(diagonal, power, 0.0), 1)
        pivot = tl.argmax(weight, 0)
        u = tl.sum(tl.where(tokens[None, :] == pivot, power, 0.0), 1)
        u = u / tl.maximum(tl.sqrt(tl.sum(u * u, 0)), 1.0e-37)
        direction = tl.sum(u[:, None] * rest, 0)
        value = tl.sum(direction * direction, 0)  # the eigenvalue of the Gram matrix
        largest = tl.where(column == 0, value, largest)
        present = (value > TOLERANCE * largest) & (value > 0)
        direction = tl.where(present, direction / tl.sqrt(tl.maximum(value, 1.0e-37)), 0.0)
        # Not orthogonal to the earlier ones beyond rounding; one correction makes it so.
        overlap = tl.sum(v * direction[None, :], 1)
        direction = direction - tl.sum(v * overlap[:, None], 0)
        rest = rest - tl.sum(rest * direction[None, :], 1)[:, None] * direction[None, :]
        v = tl.where((columns == column)[:, None], direction[None, :], v)
    return v


@triton.jit
def _refit(shifted, v_codes, R: tl.constexpr, RP: tl.constexpr, B: tl.constexpr):
    """Least-squares coefficients ``[RP, B]`` of ``shifted [B, D]`` in the rows of ``v_codes [RP, D]``."""
    rows = tl.arange(0, RP)
    gram = tl.dot(v_codes, tl.trans(v_codes), input_precision="ieee")
    x = tl.dot(v_codes, tl.trans(shifted), input_precision="ieee")
    diagonal = rows[:, None] == rows[None, :]
    largest = tl.max(tl.max(tl.where(diagonal, gram, 0.0), 1), 0)
    gram += tl.where(diagonal, 1.0e-6 * tl.maximum(largest, 1.0), 0.0)
    for k in range(R):  # Gauss-Jordan; positive definite, so no pivoting
        at_row = (rows == k)[:, None]
        gram_row = tl.sum(tl.where(at_row, gram, 0.0), 0)
        pivot = tl.sum(tl.where(rows == k, gram_row, 0.0), 0)
        gram_row = gram_row / pivot
        x_row = tl.sum(tl.where(at_row, x, 0.0), 0) / pivot
        factor = tl.sum(tl.where((rows == k)[None, :], gram, 0.0), 1)
        gram = tl.where(at_row, gram_row[None, :], gram - factor[:, None] * gram_row[None, :])
        x = tl.where(at_row, x_row[None, :], x - factor[:, None] * x_row[None, :])
    return tl.where((rows < R)[:, None], x, 0.0)


@triton.jit
def _codes(values, step, top: tl.constexpr):
    codes = round_even(tl.where(step > 0, values / tl.where(step > 0, step, 1.0), 0.0))
    return tl.minimum(tl.maximum(codes, -top), top)


@triton.jit
def _store(plane, codes, elements, count: tl.constexpr, SPAN: tl.constexpr, BITS: tl.constexpr):
    """Write ``codes`` (int32, column-major elements) to a plane in the layout's order.

    ``SPAN`` is :func:`_span` of the plane.
    """
    flat = tl.reshape(codes, [codes.shape[0] * codes.shape[1]])
    at = tl.arange(0, SPAN)
    if BITS == 4:
        mask = at < count // 2
        low = tl.gather(flat, tl.load(elements + 2 * at, mask=mask, other=0), 0)
        high = tl.gather(flat, tl.load(elements + 2 * at + 1, mask=mask, other=0), 0)
        tl.store(plane + at, ((low + 8) | ((high + 8) << 4)).to(tl.int8), mask=mask)
    else:
        mask = at < count
        value = tl.gather(flat, tl.load(elements + at, mask=mask, other=0), 0)
        tl.store(plane + at, value.to(plane.dtype.element_ty), mask=mask)
