"""The CPU path computes what the reference says, on the records of every format and geometry."""

import pytest
import torch
from cases import make_cache
from locks_kernels import reference, torch_path
from locks_kernels.layout import pack_int4, unpack_int4


@pytest.mark.parametrize(
    "name", ["r8i4", "r4i4", "r1i4", "r8h", "r6h", "r4h", "r8i8", "r8bf16", "r16h", "quest"]
)
@pytest.mark.parametrize(
    ("head_dim", "page_size", "order"), [(64, 16, "nhd"), (128, 32, "hnd"), (256, 64, "nhd")]
)
@pytest.mark.parametrize("group", [1, 3, 16])
def test_scores(name, head_dim, page_size, order, group):
    cache = make_cache([7 * page_size], group, 3, head_dim, page_size, order)
    records = cache.records(name)
    pages = cache.page_table[0, :6].long()
    query = cache.queries[0]
    want = reference.score_pages(query, records.gather(pages), cache.sm_scale)
    got = torch_path.score_pages(query, records, pages, cache.sm_scale)
    assert got.shape == (3 * group, 6)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("last_tokens", [1, 7, 16])
def test_attention(dtype, last_tokens):
    cache = make_cache([160], 3, 2)
    keys, values = cache.keys.to(dtype), cache.values.to(dtype)
    pages = torch.stack([torch.randperm(10)[:4] for _ in range(2)])
    arguments = (cache.queries[0], keys, values, pages, last_tokens, cache.sm_scale)
    for got, want in zip(
        torch_path.attend_pages(*arguments), reference.attend_pages(*arguments), strict=True
    ):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_every_byte_unpacks_to_its_two_codes():
    low, high = torch.meshgrid(torch.arange(-8, 8), torch.arange(-8, 8), indexing="ij")
    codes = torch.stack([low, high], dim=-1).to(torch.int8)
    packed = pack_int4(codes)
    assert packed.unique().numel() == 256
    assert torch.equal(unpack_int4(packed), codes)
    # a slice whose bytes are not neighbours in memory
    assert torch.equal(unpack_int4(packed.expand(16, 16, 2)[..., :1]), codes)
