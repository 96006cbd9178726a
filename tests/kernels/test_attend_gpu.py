"""attend on a GPU against fp32 arithmetic on the same tensors, CUDA and Triton alike."""

from __future__ import annotations

import pytest
import torch
from locks_kernels import ATTEND_ALL, Selection, attend, page_view
from locks_kernels.reference import attend_pages
from locks_kernels.workspace import Workspace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

LENGTHS = [1, 15, 16, 17, 31, 33, 500, 1000, 3000, 9001]
WIDTH = 24


def make_batch(
    lengths, *, head_dim=128, page_size=16, kv_heads=4, group=8, dtype=torch.bfloat16, order="nhd",
    query_dtype=torch.bfloat16, seed=0,
):  # fmt: skip
    """Pools whose unused slots hold NaN, random lists of pages, and rows that attend everything."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def noise(*shape):
        return torch.randn(*shape, generator=generator, device="cuda")

    counts = [-(-length // page_size) for length in lengths]
    pages = sum(counts) + 3
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32, device="cuda")
    shuffled = (torch.randperm(pages - 1, generator=generator, device="cuda") + 1).int()
    start = 0
    for row, count in enumerate(counts):
        table[row, :count] = shuffled[start : start + count]
        start += count

    def pool():
        page = torch.full((pages, page_size, kv_heads, head_dim), float("nan"), device="cuda")
        for row, length in enumerate(lengths):
            for index in range(counts[row]):
                used = min(page_size, length - index * page_size)
                page[table[row, index].long(), :used] = noise(used, kv_heads, head_dim)
        page = page.to(dtype)
        if order == "hnd":
            return page_view(page.permute(0, 2, 1, 3).contiguous(), page_size, "hnd")
        return page_view(page.flatten(0, 1), page_size)

    keys, values = pool(), pool()
    queries = (2 * noise(len(lengths), kv_heads * group, head_dim)).to(query_dtype)
    lists = torch.zeros(len(lengths), kv_heads, WIDTH, dtype=torch.int32, device="cuda")
    chosen = []
    for row, count in enumerate(counts):
        wanted = min(count, ATTEND_ALL if row % 3 == 2 else WIDTH)
        chosen.append(wanted)
        if wanted > WIDTH:
            continue
        for head in range(kv_heads):
            inner = torch.randperm(max(count - 2, 0), generator=generator, device="cuda")[
                : max(wanted - 2, 0)
            ]
            logical = torch.tensor([0] if count > 1 else [], device="cuda", dtype=torch.long)
            logical = torch.cat(
                [logical, inner.sort().values + 1, torch.tensor([count - 1], device="cuda")]
            )
            lists[row, head, :wanted] = table[row, logical]
    counts_tensor = torch.tensor(chosen, dtype=torch.int32, device="cuda")
    selection = Selection(lists, lists, counts_tensor)
    return queries, keys, values, selection, table, torch.tensor(lengths, device="cuda")


def expected(queries, keys, values, selection, table, lengths, scale):
    outputs, sums = [], []
    page_size, kv_heads = keys.shape[1:3]
    for row, length in enumerate(lengths.tolist()):
        count = int(selection.counts[row])
        pages = selection.pages[row, :, :count]
        if count > selection.pages.shape[-1]:
            pages = table[row, :count].expand(kv_heads, count)
        out, lse = attend_pages(
            queries[row], keys, values, pages.long(), (length - 1) % page_size + 1, scale
        )
        outputs.append(out)
        sums.append(lse)
    return torch.stack(outputs), torch.stack(sums)


def relative(out, reference):
    return ((out.float() - reference).norm() / reference.norm()).item()


CASES = {
    "glm": {},
    "glm-2-heads": {"kv_heads": 2, "group": 16},
    "llama-hnd": {"kv_heads": 8, "group": 4, "order": "hnd"},
    "odd-group": {"kv_heads": 3, "group": 7},
    "group-of-one": {"kv_heads": 2, "group": 1},
    "group-of-eleven": {"kv_heads": 1, "group": 11, "order": "hnd"},
    "d64-page32-fp16": {
        "head_dim": 64, "page_size": 32, "dtype": torch.float16, "query_dtype": torch.float16,
    },
    "page64": {"page_size": 64},
    "d256-page64": {"head_dim": 256, "page_size": 64, "group": 4},
    "d256-two-tiles": {"head_dim": 256, "group": 9, "kv_heads": 2},
    "fp8": {"dtype": torch.float8_e4m3fn},
    "fp8-d64-hnd": {"dtype": torch.float8_e4m3fn, "head_dim": 64, "order": "hnd"},
    "fp16-queries-fp8": {"query_dtype": torch.float16, "dtype": torch.float8_e4m3fn},
}  # fmt: skip


@pytest.mark.parametrize("impl", ["cuda", "triton"])
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_fp32(name, impl):
    batch = make_batch(LENGTHS, **CASES[name])
    scale = batch[0].shape[-1] ** -0.5
    reference, reference_lse = expected(*batch, scale)
    out = torch.full_like(batch[0], float("nan"))
    lse = torch.full(batch[0].shape[:2], float("nan"), device="cuda")
    attend(*batch, scale, 0.5, out=(out, lse), impl=impl)
    # bf16 weights and a bf16 output round by 2^-9 each.
    assert relative(out, 0.5 * reference) < 4e-3
    assert (lse - reference_lse).abs().max() < 2e-3


@pytest.mark.parametrize("group", range(1, 17))
def test_every_group(group):
    batch = make_batch([1, 17, 500, 1000], kv_heads=3, group=group)
    reference, reference_lse = expected(*batch, 0.1)
    out, lse = attend(*batch, 0.1, impl="cuda")
    assert relative(out, reference) < 4e-3
    assert (lse - reference_lse).abs().max() < 2e-3


@pytest.mark.parametrize("impl", ["cuda", "triton"])
def test_a_batch_equals_its_rows_alone(impl):
    queries, keys, values, selection, table, lengths = make_batch(LENGTHS)
    whole, whole_lse = attend(queries, keys, values, selection, table, lengths, 0.1, impl=impl)
    for row in range(len(LENGTHS)):
        part = slice(row, row + 1)
        alone = Selection(selection.pages[part], selection.logical[part], selection.counts[part])
        out, lse = attend(queries[part], keys, values, alone, table[part], lengths[part], 0.1, impl=impl)
        assert relative(out, whole[part].float()) < 3e-3
        assert (lse - whole_lse[part]).abs().max() < 1e-3


@pytest.mark.parametrize("impl", ["cuda", "triton"])
def test_same_bits_every_time(impl):
    batch = make_batch([40_000, 8_000])
    first = attend(*batch, 0.1, impl=impl)
    for _ in range(20):
        again = attend(*batch, 0.1, impl=impl)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


@pytest.mark.parametrize("impl", ["cuda", "triton"])
def test_graph_replays_with_other_lengths_pages_and_rows(impl):
    first, second = make_batch([3000, 17, 500], seed=1), make_batch([33, 2500, 1], seed=2)
    pages = max(first[1].shape[0], second[1].shape[0])
    columns = max(first[4].shape[1], second[4].shape[1])

    def pooled(pool):
        return torch.cat([pool, pool.new_zeros(pages - pool.shape[0], *pool.shape[1:])])

    def widened(table):
        return torch.cat([table, table.new_zeros(len(table), columns - table.shape[1])], 1)

    batches = [
        (q, pooled(k), pooled(v), s.pages, s.counts, widened(t), n) for q, k, v, s, t, n in (first, second)
    ]
    static = [tensor.clone() for tensor in batches[0]]
    queries, keys, values, lists, counts, table, lengths = static
    selection = Selection(lists, lists, counts)
    workspace = Workspace.allocate(
        max_rows=8, q_heads=32, kv_heads=4, max_pages=columns, width=WIDTH, head_dim=128, device="cuda"
    )
    out = (torch.empty_like(queries), torch.empty(3, 32, device="cuda"))

    def step():
        attend(
            queries, keys, values, selection, table, lengths, 0.1, workspace=workspace, out=out, impl=impl
        )

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for index in (1, 0, 1):
        for target, source in zip(static, batches[index], strict=True):
            target.copy_(source)
        out[0].fill_(float("nan"))
        torch.cuda.set_sync_debug_mode("error")
        graph.replay()
        torch.cuda.set_sync_debug_mode("default")
        reference, reference_lse = expected(queries, keys, values, selection, table, lengths, 0.1)
        assert relative(out[0], reference) < 4e-3
        assert (out[1] - reference_lse).abs().max() < 2e-3
    assert not workspace.attend.arrivals.any()


@pytest.mark.parametrize("impl", ["cuda", "triton"])
@pytest.mark.parametrize("rows", [5, 40, 256])
def test_every_way_of_splitting(rows, impl):
    lengths = [1 + 97 * row % 1900 for row in range(rows)]
    batch = make_batch(lengths, head_dim=64)
    reference, _ = expected(*batch, 0.125)
    out, _ = attend(*batch, 0.125, impl=impl)
    assert relative(out, reference) < 4e-3


@pytest.mark.parametrize("impl", ["cuda", "triton"])
def test_pool_of_more_than_2_31_elements(impl):
    pages, shape = 2**31 // (16 * 4 * 128) + 64, (16, 4, 128)
    if torch.cuda.mem_get_info()[0] < 12e9:
        pytest.skip("needs 12 GB of free GPU memory")
    keys, values = (torch.empty(pages, *shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    keys[-40:], values[-40:] = torch.randn(40, *shape), torch.randn(40, *shape)
    table = torch.arange(pages - 40, pages, dtype=torch.int32, device="cuda").unsqueeze(0)
    queries = torch.randn(1, 32, 128, device="cuda").to(torch.bfloat16)
    counts = torch.tensor([40], dtype=torch.int32, device="cuda")
    lists = table[:, :WIDTH].unsqueeze(1).repeat(1, 4, 1)
    lengths = torch.tensor([640], device="cuda")
    for count in (40, WIDTH):
        counts.fill_(count)
        selection = Selection(lists, lists, counts)
        reference, _ = expected(queries, keys, values, selection, table, lengths, 0.1)
        out, _ = attend(queries, keys, values, selection, table, lengths, 0.1, impl=impl)
        assert relative(out, reference) < 4e-3


def test_four_million_tokens_of_several_heads():
    """A list from the first page of a request to its last, the pool's last too; then all 262,144 pages."""
    if torch.cuda.mem_get_info()[0] < 8e9:
        pytest.skip("needs 8 GB of free GPU memory")
    heads, pages = 2, 4 * 2**20 // 16
    noise = {"generator": torch.Generator("cuda").manual_seed(0), "device": "cuda"}
    keys, values = (torch.randn(pages, 16, heads, 128, dtype=torch.bfloat16, **noise) for _ in range(2))
    queries = (2 * torch.randn(1, 16 * heads, 128, **noise)).bfloat16()
    table = torch.arange(pages, dtype=torch.int32, device="cuda").unsqueeze(0)
    table[0, :-1] = torch.randperm(pages - 1, **noise)
    lengths = torch.tensor([16 * pages - 5], device="cuda")

    spaced = torch.arange(WIDTH, device="cuda") * (pages - 1) // (WIDTH - 1)
    inner = (spaced > 0) & (spaced < pages - 1)
    lists = torch.stack([table[0, spaced + head * inner] for head in range(heads)]).unsqueeze(0)
    selection = Selection(lists, lists, torch.tensor([WIDTH], dtype=torch.int32, device="cuda"))
    tensors = (queries, keys, values, selection, table, lengths)
    reference, reference_lse = expected(*tensors, 0.1)
    out, lse = attend(*tensors, 0.1, impl="cuda")
    assert relative(out, reference) < 4e-3
    assert (lse - reference_lse).abs().max() < 2e-3

    selection.counts.fill_(pages)
    outputs, sums = [], []
    for part in table[0].long().split(2**14):
        last = 11 if part[-1] == pages - 1 else 16
        found = attend_pages(queries[0], keys, values, part.expand(heads, -1), last, 0.1)
        outputs.append(found[0])
        sums.append(found[1])
    shares = torch.stack(sums).softmax(0).unsqueeze(-1)
    out, lse = attend(*tensors, 0.1, impl="cuda")
    assert relative(out[0], (shares * torch.stack(outputs)).sum(0)) < 4e-3
    assert (lse[0] - torch.stack(sums).logsumexp(0)).abs().max() < 2e-3


def test_errors_name_what_is_legal():
    queries, keys, values, selection, table, lengths = make_batch([40])
    with pytest.raises(ValueError, match="bfloat16, float16, float8_e4m3fn"):
        attend(queries, keys.float(), values.float(), selection, table, lengths, 0.1, impl="cuda")
    with pytest.raises(ValueError, match="multiple"):
        attend(queries[:, :30], keys, values, selection, table, lengths, 0.1)
