"""Record formats: bytes of a page, byte planes, round trips, refusals."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from locks_kernels import EnvelopeLayout, Envelopes, Summaries, SummaryLayout, page_view
from locks_kernels.layout import (
    HEAD_DIMS,
    PAGE_SIZES,
    RANKS,
    SUFFIXES,
    hadamard,
    pack_basis,
    pack_coefficients,
    unpack_basis,
    unpack_coefficients,
)

layouts = st.builds(
    SummaryLayout,
    st.sampled_from(RANKS),
    st.sampled_from(SUFFIXES),
    st.sampled_from(HEAD_DIMS),
    st.sampled_from(PAGE_SIZES),
)


@pytest.mark.parametrize(
    ("name", "at_128", "at_64"),
    [
        ("r8i4", 818, 498),
        ("r4i4", 490, 298),
        ("r2i4", 326, 198),
        ("r8h", 722, 402),
        ("r6h", 574, 318),
        ("r4h", 426, 234),
        ("r8i8", 1330, 754),
        ("r8bf16", 2338, 1250),
    ],
)
def test_bytes_per_page(name, at_128, at_64):
    assert SummaryLayout.parse(name, 128).bytes_per_page == at_128
    assert SummaryLayout.parse(name, 64).bytes_per_page == at_64


@given(layouts)
def test_bytes_follow_the_papers_formula(layout):
    rank, dim, page = layout.rank, layout.head_dim, layout.page_size
    if layout.suffix == "i4":
        assert layout.bytes_per_page == dim * rank // 2 + page * rank + dim + 2 * (1 + page + rank)
    assert SummaryLayout.parse(layout.name, dim, page) == layout


@given(layouts)
def test_planes_hold_exactly_the_bytes(layout):
    records = Summaries.allocate(layout, (2, 5, 3))
    assert records.nbytes == 2 * 5 * 3 * layout.bytes_per_page
    assert all(plane.shape[:3] == (2, 5, 3) for plane in records.planes)
    assert all(plane.shape[:2] == (5, 3) for plane in records.layer(1).planes)


@settings(max_examples=60, deadline=None)
@given(layouts, st.integers(0, 2**32 - 1))
def test_pack_round_trip(layout, seed):
    generator = torch.Generator().manual_seed(seed)

    def codes(largest, *shape):
        return torch.randint(-largest, largest + 1, shape, generator=generator).float()

    basis = codes(layout.basis_max or 100, 3, 2, layout.head_dim, layout.rank)
    packed = pack_basis(layout, basis)
    assert packed.dtype == torch.uint8 and packed.shape == (3, 2, layout.basis_bytes)
    assert torch.equal(unpack_basis(layout, packed), basis)

    coefficients = codes(layout.coefficient_max, 3, 2, layout.page_size, layout.rank)
    packed = pack_coefficients(layout, coefficients)
    assert packed.dtype == torch.uint8 and packed.shape == (3, 2, layout.coefficient_bytes)
    assert torch.equal(unpack_coefficients(layout, packed), coefficients)


def test_store_and_gather_touch_only_their_pages():
    layout = SummaryLayout.parse("r4i4", 64)
    pool = Summaries.allocate(layout, (2, 6, 3))
    record = Summaries.allocate(layout, (2, 3))
    for plane in record.planes:
        plane.fill_(7)
    pool.layer(1).store(torch.tensor([4, 1]), record)
    for plane in pool.planes:
        assert (plane[1, [1, 4]] == 7).all()
        assert (plane[1, [0, 2, 3, 5]] == 0).all() and (plane[0] == 0).all()
    for got, want in zip(pool.layer(1).gather(torch.tensor([1, 4])).planes, record.planes, strict=True):
        assert torch.equal(got, want)


def test_envelopes():
    layout = EnvelopeLayout(128)
    assert layout.bytes_per_page == 512
    assert Envelopes.allocate(layout, (2, 5, 3)).nbytes == 2 * 5 * 3 * 512


@pytest.mark.parametrize(
    "name", ["", "r4", "i4", "r3i4", "r4i2", "r4fp8", "R4I4", "r4i4 ", "r32h", "minmax"]
)
def test_unknown_format_names_the_legal_ones(name):
    with pytest.raises(ValueError, match=r"legal formats: .*r8i4, r4i4, r2i4, r8h, r6h, r4h"):
        SummaryLayout.parse(name, 128)


@pytest.mark.parametrize("head_dim", [0, 32, 63, 80, 96, 192, 512])
def test_unsupported_head_dim_names_the_legal_ones(head_dim):
    with pytest.raises(ValueError, match=r"head_dim .*legal: \(64, 128, 256\)"):
        SummaryLayout.parse("r4i4", head_dim)


@pytest.mark.parametrize("page_size", [0, 1, 8, 15, 48, 128])
def test_unsupported_page_size_names_the_legal_ones(page_size):
    with pytest.raises(ValueError, match=r"page size .*legal: \(16, 32, 64\)"):
        SummaryLayout.parse("r4i4", 128, page_size)


def test_unknown_pool_order_names_the_legal_ones():
    with pytest.raises(ValueError, match="legal: 'nhd', 'hnd'"):
        page_view(torch.zeros(32, 2, 64), 16, "nbhd")


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_page_views_share_memory(page_size):
    slots = torch.zeros(4 * page_size + 3, 2, 64)
    page_view(slots, page_size)[2, 5, 1, 7] = 1.0
    assert slots[2 * page_size + 5, 1, 7] == 1.0
    pages = torch.zeros(4, 2, page_size, 64)
    page_view(pages, page_size, "hnd")[2, 5, 1, 7] = 1.0
    assert pages[2, 1, 5, 7] == 1.0


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_hadamard_is_orthogonal_and_symmetric(head_dim):
    matrix = hadamard(head_dim).double()
    assert torch.allclose(matrix @ matrix, torch.eye(head_dim, dtype=torch.double), atol=1e-6)
    assert torch.equal(matrix, matrix.T)
