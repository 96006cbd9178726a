"""Record formats: what is stored for a page, where, and in how many bytes.

A record is split over four planes (basis, coefficients, centroid, scales) instead of
one packed struct, so that every plane is aligned for 16-byte loads while the bytes per
page stay exactly the paper's.  ``pack_*`` and ``unpack_*`` are the only definition of
the byte order: a kernel that wants another order changes it here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch

PAGE_SIZES = (16, 32, 64)
HEAD_DIMS = (64, 128, 256)
RANKS = (1, 2, 4, 6, 8, 16)
SUFFIXES = ("i4", "i8", "bf16", "h")
PAPER_FORMATS = ("r8i4", "r4i4", "r2i4")
ROTATED_FORMATS = ("r8h", "r6h", "r4h")

INT4_MAX = 7
INT8_MAX = 127

_FORMAT = re.compile(r"r(\d+)(i4|i8|bf16|h)")


def legal_formats() -> str:
    """Describe every accepted format name, for error messages and help texts."""
    ranks = ",".join(map(str, RANKS))
    return f"r{{{ranks}}}{{{','.join(SUFFIXES)}}}, for example r8i4, r4i4, r2i4, r8h, r6h, r4h"


@dataclass(frozen=True)
class SummaryLayout:
    """Format of the record of one complete page of one KV head.

    The record holds (paper section 4, appendix C.7) the centroid ``mu [d]`` in int8, the
    basis ``V [d, r]`` and the coefficients ``C [B, r]``, so that key i of the page is
    about ``mu + V c_i``.

    ===========  ==========  ============  =========  ==============================
    suffix       basis       coefficients  rotated    bf16 scales
    ===========  ==========  ============  =========  ==============================
    ``i4``       int4        int8          no         mu, B rows of C, r columns of V
    ``i8``       int8        int8          no         mu, B rows of C, r columns of V
    ``bf16``     bf16        int8          no         mu, B rows of C
    ``h``        int4        int4          Hadamard   mu, r columns (of V and C together)
    ===========  ==========  ============  =========  ==============================

    In the ``h`` formats the head dimension is rotated by a normalised Hadamard matrix
    before quantising, C is refitted to the quantised V, and one scale a column serves V
    and C together, since only their product is ever used.
    """

    rank: int
    suffix: str
    head_dim: int
    page_size: int = 16

    def __post_init__(self) -> None:
        if self.suffix not in SUFFIXES or self.rank not in RANKS:
            raise ValueError(f"unknown summary format {self.name!r}; legal formats: {legal_formats()}")
        if self.head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim {self.head_dim} is not supported; legal: {HEAD_DIMS}")
        if self.page_size not in PAGE_SIZES:
            raise ValueError(f"page size {self.page_size} is not supported; legal: {PAGE_SIZES}")

    @classmethod
    def parse(cls, name: str, head_dim: int, page_size: int = 16) -> SummaryLayout:
        """Make the layout of a format name such as ``r4i4``; ValueError names the legal ones."""
        match = _FORMAT.fullmatch(name)
        if match is None:
            raise ValueError(f"unknown summary format {name!r}; legal formats: {legal_formats()}")
        return cls(int(match[1]), match[2], head_dim, page_size)

    @property
    def name(self) -> str:
        return f"r{self.rank}{self.suffix}"

    @property
    def rotated(self) -> bool:
        return self.suffix == "h"

    @property
    def basis_max(self) -> int:
        """Largest code of the basis; 0 where the basis is not quantised."""
        return {"i4": INT4_MAX, "h": INT4_MAX, "i8": INT8_MAX, "bf16": 0}[self.suffix]

    @property
    def coefficient_max(self) -> int:
        return INT4_MAX if self.rotated else INT8_MAX

    @property
    def basis_bytes(self) -> int:
        values = self.head_dim * self.rank
        return {"i4": values // 2, "h": values // 2, "i8": values, "bf16": 2 * values}[self.suffix]

    @property
    def coefficient_bytes(self) -> int:
        values = self.page_size * self.rank
        return values // 2 if self.rotated else values

    @property
    def centroid_bytes(self) -> int:
        return self.head_dim

    @property
    def scale_count(self) -> int:
        """Scales in order: mu, then rows of C (absent in ``h``), then columns (absent in bf16)."""
        rows = 0 if self.rotated else self.page_size
        columns = 0 if self.suffix == "bf16" else self.rank
        return 1 + rows + columns

    @property
    def bytes_per_page(self) -> int:
        """Bytes of the record of one page and KV head, scales included."""
        return self.basis_bytes + self.coefficient_bytes + self.centroid_bytes + 2 * self.scale_count


@dataclass(frozen=True)
class EnvelopeLayout:
    """Record of the ``quest`` selector: per-dimension minimum and maximum of the page, bf16."""

    head_dim: int
    page_size: int = 16

    @property
    def name(self) -> str:
        return "minmax"

    @property
    def bytes_per_page(self) -> int:
        return 4 * self.head_dim


@dataclass
class Summaries:
    """Records of many pages, shaped ``[..., pages, kv_heads, bytes]`` (uint8 planes).

    ``scales`` is bf16 ``[..., pages, kv_heads, scale_count]``.  A leading layer dimension
    is present in a pool and absent after :meth:`layer`.
    """

    layout: SummaryLayout
    basis: torch.Tensor
    coefficients: torch.Tensor
    centroid: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def allocate(
        cls, layout: SummaryLayout, lead: tuple[int, ...], device: torch.device | str = "cpu"
    ) -> Summaries:
        """Zeroed records; ``lead`` is ``(pages, kv_heads)`` or ``(layers, pages, kv_heads)``."""

        def plane(count: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
            return torch.zeros(*lead, count, dtype=dtype, device=device)

        return cls(
            layout,
            plane(layout.basis_bytes),
            plane(layout.coefficient_bytes),
            plane(layout.centroid_bytes),
            plane(layout.scale_count, torch.bfloat16),
        )

    @property
    def planes(self) -> tuple[torch.Tensor, ...]:
        return (self.basis, self.coefficients, self.centroid, self.scales)

    @property
    def nbytes(self) -> int:
        return sum(plane.nbytes for plane in self.planes)

    def layer(self, index: int) -> Summaries:
        """Records of one layer (views)."""
        return replace(
            self,
            basis=self.basis[index],
            coefficients=self.coefficients[index],
            centroid=self.centroid[index],
            scales=self.scales[index],
        )

    def gather(self, pages: torch.Tensor) -> Summaries:
        """Copies of the records of some physical pages of one layer."""
        return replace(
            self,
            basis=self.basis[pages],
            coefficients=self.coefficients[pages],
            centroid=self.centroid[pages],
            scales=self.scales[pages],
        )

    def store(self, pages: torch.Tensor, records: Summaries) -> None:
        """Write records at some physical pages of one layer."""
        for target, source in zip(self.planes, records.planes, strict=True):
            target[pages] = source


@dataclass
class Envelopes:
    """Page envelopes of the ``quest`` selector, ``low`` and ``high`` bf16 ``[..., pages, kv_heads, d]``."""

    layout: EnvelopeLayout
    low: torch.Tensor
    high: torch.Tensor

    @classmethod
    def allocate(
        cls, layout: EnvelopeLayout, lead: tuple[int, ...], device: torch.device | str = "cpu"
    ) -> Envelopes:
        def plane() -> torch.Tensor:
            return torch.zeros(*lead, layout.head_dim, dtype=torch.bfloat16, device=device)

        return cls(layout, plane(), plane())

    @property
    def planes(self) -> tuple[torch.Tensor, ...]:
        return (self.low, self.high)

    @property
    def nbytes(self) -> int:
        return self.low.nbytes + self.high.nbytes

    def layer(self, index: int) -> Envelopes:
        return replace(self, low=self.low[index], high=self.high[index])

    def gather(self, pages: torch.Tensor) -> Envelopes:
        return replace(self, low=self.low[pages], high=self.high[pages])

    def store(self, pages: torch.Tensor, records: Envelopes) -> None:
        self.low[pages] = records.low
        self.high[pages] = records.high


Records = Summaries | Envelopes


def page_view(pool: torch.Tensor, page_size: int, order: str = "nhd") -> torch.Tensor:
    """View a KV pool as ``[pages, page_size, kv_heads, head_dim]`` without a copy.

    ``nhd`` pools are ``[slots, kv_heads, head_dim]`` (SGLang's default), ``hnd`` pools
    ``[pages, kv_heads, page_size, head_dim]``.  Every op takes this view and reads its
    strides, so both orders run through the same code.
    """
    if order == "nhd":
        pages = pool.shape[0] // page_size
        return pool[: pages * page_size].unflatten(0, (pages, page_size))
    if order == "hnd":
        return pool.permute(0, 2, 1, 3)
    raise ValueError(f"unknown KV pool order {order!r}; legal: 'nhd', 'hnd'")


def hadamard(head_dim: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Normalised Hadamard matrix ``[d, d]`` fp32 (Sylvester order; symmetric and orthogonal)."""
    matrix = torch.ones(1, 1, device=device)
    while matrix.shape[0] < head_dim:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / head_dim**0.5


def pack_int4(codes: torch.Tensor) -> torch.Tensor:
    """Pack signed codes in [-7, 7] along the last dimension: ``[..., n]`` -> uint8 ``[..., n/2]``.

    Nibbles are stored with an offset of 8; the even element is the low nibble.
    """
    nibbles = (codes + 8).to(torch.uint8)
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of :func:`pack_int4`; int8 ``[..., 2n]``."""
    wide = packed.contiguous().to(torch.int16)
    # On a little-endian machine the low byte comes first, so the two nibbles land in order.
    return (((wide << 4) | wide) & 0x0F0F).view(torch.int8) - 8


def pack_basis(layout: SummaryLayout, codes: torch.Tensor) -> torch.Tensor:
    """Basis codes ``[..., d, r]`` (int8, or bf16 values) -> bytes ``[..., basis_bytes]``.

    Columns are contiguous: byte order is (column, dimension).
    """
    columns = codes.transpose(-1, -2).contiguous()
    if layout.suffix == "bf16":
        return columns.to(torch.bfloat16).flatten(-2).view(torch.uint8)
    if layout.basis_max == INT8_MAX:
        return columns.to(torch.int8).flatten(-2).view(torch.uint8)
    return pack_int4(columns).flatten(-2)


def unpack_basis(layout: SummaryLayout, packed: torch.Tensor) -> torch.Tensor:
    """Inverse of :func:`pack_basis`: fp32 codes (or bf16 values) ``[..., d, r]``."""
    shape = (layout.rank, layout.head_dim)
    if layout.suffix == "bf16":
        columns = packed.view(torch.bfloat16).unflatten(-1, shape)
    elif layout.basis_max == INT8_MAX:
        columns = packed.view(torch.int8).unflatten(-1, shape)
    else:
        columns = unpack_int4(packed.unflatten(-1, (layout.rank, layout.head_dim // 2)))
    return columns.transpose(-1, -2).float()


def pack_coefficients(layout: SummaryLayout, codes: torch.Tensor) -> torch.Tensor:
    """Coefficient codes ``[..., B, r]`` -> bytes; int8 by (row, column), int4 by (column, row)."""
    if layout.rotated:
        return pack_int4(codes.transpose(-1, -2).contiguous()).flatten(-2)
    return codes.to(torch.int8).contiguous().flatten(-2).view(torch.uint8)


def unpack_coefficients(layout: SummaryLayout, packed: torch.Tensor) -> torch.Tensor:
    """Inverse of :func:`pack_coefficients`: fp32 codes ``[..., B, r]``."""
    if layout.rotated:
        columns = unpack_int4(packed.unflatten(-1, (layout.rank, layout.page_size // 2)))
        return columns.transpose(-1, -2).float()
    return packed.view(torch.int8).unflatten(-1, (layout.page_size, layout.rank)).float()
