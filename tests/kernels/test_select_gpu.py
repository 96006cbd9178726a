"""select and score_select on a GPU: the reference's sets, ties, budgets, CUDA graphs."""

import pytest
import torch
from gpu_cases import cuda, make_pair
from locks_kernels import ATTEND_ALL, PageScores, cuda_select, score_select, select
from locks_kernels.select import Selection
from locks_kernels.workspace import Workspace

pytestmark = [pytest.mark.gpu, cuda]

PAGE = 16


def make_scores(rows, kv_heads, group, max_pages, lengths, spread=6.0, step=None, seed=0, page=PAGE):
    """Dense scores with -inf past the pages of a row; `step` rounds them, which makes ties."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    scores = spread * torch.randn(rows, kv_heads * group, max_pages, generator=generator, device="cuda")
    if step is not None:
        scores = (scores / step).round() * step
    pages = (lengths + page - 1) // page
    past = torch.arange(max_pages, device="cuda") >= pages[:, None]
    scores.masked_fill_(past[:, None], -torch.inf)
    return PageScores(scores, scores.logsumexp(-1))


def make_table(rows, max_pages, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    shuffled = torch.randperm(rows * max_pages, generator=generator, device="cuda")
    return shuffled.view(rows, max_pages).int()


def same(got, want, width):
    assert torch.equal(got.counts, want.counts)
    for row, count in enumerate(want.counts.tolist()):
        if count <= width:
            assert torch.equal(got.logical[row, :, :count], want.logical[row, :, :count])
            assert torch.equal(got.pages[row, :, :count], want.pages[row, :, :count])


def check(lengths, budgets, width, kv_heads=2, group=3, page=PAGE, **options):
    lengths = torch.tensor(lengths, device="cuda")
    budgets = torch.tensor(budgets, dtype=torch.int32, device="cuda")
    max_pages = int((lengths.max() + page - 1) // page)
    scores = make_scores(len(lengths), kv_heads, group, max_pages, lengths, page=page, **options)
    compare(scores, lengths, budgets, width, kv_heads, page)


def compare(scores, lengths, budgets, width, kv_heads, page=PAGE):
    """CUDA's selection from these scores against the torch implementation's."""
    table = make_table(len(lengths), scores.scores.shape[-1])
    arguments = {"kv_heads": kv_heads, "page_size": page, "width": width}
    want = select(scores, table, lengths, budgets, **arguments, impl="torch")
    got = select(scores, table, lengths, budgets, **arguments, impl="cuda")
    same(got, want, width)


def compare_one_row(values):
    """``values [1, 2 * group, pages]``: scores of a request of 2 KV heads with a budget of 130 pages."""
    lengths = torch.tensor([values.shape[-1] * PAGE - 3], device="cuda")
    budgets = torch.tensor([130], dtype=torch.int32, device="cuda")
    compare(PageScores(values, values.logsumexp(-1)), lengths, budgets, 130, kv_heads=2)


@pytest.mark.parametrize("group", [1, 3, 5, 6, 8, 11, 13, 16])
def test_group_sizes(group):
    check([1, 15, 16, 17, 33, 511, 5000], [4] * 7, 4, group=group)


@pytest.mark.parametrize("page", [32, 64])
def test_larger_pages(page):
    check([1, page - 1, page, page + 1, 10 * page + 1, 200_000], [4] * 6, 4, page=page)


@pytest.mark.parametrize("rows", [1, 3, 17, 256])
def test_rows(rows):
    check([1 + 97 * row % 3000 for row in range(rows)], [2 + row % 15 for row in range(rows)], 16)


@pytest.mark.parametrize("pages", [1023, 1024, 1025, 2047, 4097, 32_768, 65_537])
def test_one_long_row(pages):
    check([pages * PAGE - 5], [128], 128, kv_heads=4, group=8)


@pytest.mark.parametrize(
    ("rows", "pages", "kv_heads", "group"),
    [
        (8, 8192, 4, 8),
        (4, 16_384, 4, 8),
        (9, 8192, 4, 8),
        (40, 4096, 4, 8),
        (5, 40_000, 4, 8),
        (17, 8192, 2, 16),
    ],
)
def test_batches_whose_blocks_share_multiprocessors(rows, pages, kv_heads, group):
    """More clusters than fit one block a multiprocessor, and more than fit at all."""
    lengths = [(pages - 3 * row) * PAGE - 5 for row in range(rows)]
    check(lengths, [128] * rows, 128, kv_heads=kv_heads, group=group)


def test_four_million_tokens_of_several_heads():
    """262,144 pages, in a batch with a row of a single block."""
    check([4 * 2**20 - 5, 1500], [128, 128], 128, kv_heads=4, group=8)


@pytest.mark.parametrize("group", [3, 8, 16])
@pytest.mark.parametrize("below", [0.0, 60.0, 200.0])
@pytest.mark.parametrize("pages", [[37_509, 3, 2501, 1], [70_001, 2049], [2048, 2046, 2047]], ids=str)
def test_packed_scores(pages, group, below):
    """As score leaves them, NaN where it writes none; blocks have one round of pages or several.

    With a sink so far below the other pages their exponentials relative to it are infinite.
    """
    kv_heads, width, tile = 2, 130, 8
    lengths = torch.tensor([PAGE * count - 7 for count in pages], device="cuda")
    budgets = torch.tensor([130] * len(pages), dtype=torch.int32, device="cuda")
    scores = make_scores(len(pages), kv_heads, group, max(pages), lengths).scores
    scores[:, :, 0] -= below
    dense = PageScores(scores, scores.logsumexp(-1))
    table = make_table(len(pages), max(pages))
    want = select(
        dense, table, lengths, budgets, kv_heads=kv_heads, page_size=PAGE, width=width, impl="torch"
    )
    tiles = [-(-count // tile) if count > 130 else 0 for count in pages]
    packed = torch.full((sum(tiles) * tile * kv_heads * group,), torch.nan, device="cuda")
    first = 0
    for row, (count, many) in enumerate(zip(pages, tiles, strict=True)):
        if many:
            end = first + many * tile * kv_heads * group
            packed[first:end].view(kv_heads * group, -1)[:, :count] = dense.scores[row, :, :count]
            first = end
    got = Selection(*(torch.zeros_like(part) for part in (want.pages, want.logical, want.counts)))
    lists = (got.pages, got.logical, got.counts)
    cuda_select.select(packed, None, table, lengths, budgets, kv_heads * group, PAGE, *lists)
    same(got, want, width)


def test_more_pages_than_fit_are_refused():
    with pytest.raises(ValueError, match="1000000 pages a request are more than select holds"):
        check([1_000_000 * PAGE], [128], 128, kv_heads=1, group=1)


def test_budget_of_two_is_sink_and_current_page():
    check([5000, 31, 33], [2, 2, 2], 2)


def test_rows_that_attend_everything():
    check([5000, 40, 64, 65, 1], [ATTEND_ALL, ATTEND_ALL, 4, 4, 4], 4)


@pytest.mark.parametrize("step", [0.5, 4.0, 1e9])
def test_ties_go_to_the_lower_page(step):
    """Rounded scores: many pages have the same share; with the largest step all do."""
    check([40_000, 3000, 700], [64, 40, 17], 64, group=2, step=step)


@pytest.mark.parametrize(("pages", "group"), [(700, 1), (1800, 3), (9000, 8)])
def test_many_shares_within_one_bin(pages, group):
    """Flat attention: far more pages in the bin of the last chosen one than are ranked at a time."""
    generator = torch.Generator(device="cuda").manual_seed(pages)
    order = torch.randperm(pages, generator=generator, device="cuda")
    # Further apart than rounding, so that there is one right order.
    compare_one_row((5e-6 * order).expand(1, 2 * group, pages).contiguous())


@pytest.mark.parametrize("apart", [0.0, 2e-5, 0.4])
@pytest.mark.parametrize(("pages", "group"), [(700, 1), (9000, 8), (40_000, 2)])
def test_equal_shares_but_a_few(pages, group, apart):
    """The range that is searched ends at the least and the largest share, wherever these are."""
    values = torch.zeros(1, 2 * group, pages, device="cuda")
    values[..., [5, 300, 301]] = apart
    values[..., [17, 400]] = -apart
    compare_one_row(values)


def test_shares_of_very_different_size():
    check([30_000, 2000], [100, 50], 100, spread=40.0)


def build(name, lengths, budgets, width, **options):
    _, _, device, device_records = make_pair(lengths, name, **options)
    rows, heads = device.queries.shape[:2]
    workspace = Workspace.allocate(
        max_rows=rows,
        q_heads=heads,
        kv_heads=device.kv_heads,
        max_pages=device.page_table.shape[1],
        width=width,
        head_dim=device.queries.shape[2],
        device="cuda",
    )
    budgets = torch.tensor(budgets, dtype=torch.int32, device="cuda")

    def call(lengths=device.seq_lens, table=device.page_table, count=rows, budgets=budgets):
        return score_select(
            device.queries[:count],
            device.keys,
            device_records,
            table[:count],
            lengths[:count],
            budgets[:count],
            device.sm_scale,
            width=width,
            workspace=workspace,
            impl="cuda",
        )

    return device, device_records, workspace, budgets, call


@pytest.mark.parametrize("name", ["r4i4", "r8h", "oracle", "quest"])
def test_fused_call_is_score_then_select(name):
    """One call against the two ops; the LSE is summed in another order, so shares may tie by rounding."""
    from locks_kernels import score

    lengths, budgets = [3000, 70, 40_000, 16, 17, 999], [20, 30, 30, 4, ATTEND_ALL, 2]
    device, records, _, limits, call = build(name, lengths, budgets, 30, group=8, head_dim=128)
    got = call()
    scores = score(
        device.queries,
        device.keys,
        records,
        device.page_table,
        device.seq_lens,
        device.sm_scale,
        impl="cuda",
    )
    want = select(
        scores,
        device.page_table,
        device.seq_lens,
        limits,
        kv_heads=2,
        page_size=PAGE,
        width=30,
        impl="torch",
    )
    same(got, want, 30)


def test_rows_that_do_not_fit_the_workspace_attend_everything():
    device, _, _, _, call = build("r4i4", [800, 800, 800], [10, 10, 10], 10, group=2)
    full = call()
    assert full.counts.tolist() == [10, 10, 10]
    small = Workspace.allocate(
        max_rows=3,
        q_heads=4,
        kv_heads=2,
        max_pages=50,
        width=10,
        head_dim=64,
        device="cuda",
        total_pages=2 * 56,
    )
    budgets = torch.full((3,), 10, dtype=torch.int32, device="cuda")
    got = score_select(
        device.queries,
        device.keys,
        make_pair([800, 800, 800], "r4i4", group=2)[3],
        device.page_table,
        device.seq_lens,
        budgets,
        device.sm_scale,
        width=10,
        workspace=small,
        impl="cuda",
    )
    assert got.counts.tolist() == [10, 10, 50]


def test_list_of_a_row_without_room_is_whole_where_other_blocks_have_left():
    """The longest row has a cluster of blocks a list, of which the one without room keeps one."""
    device, records, _, _, _ = build("r4i4", [40_000, 12_000], [10, 700], 800, group=2)
    small = Workspace.allocate(
        max_rows=2,
        q_heads=4,
        kv_heads=2,
        max_pages=2500,
        width=800,
        head_dim=64,
        device="cuda",
        total_pages=2504,
    )
    got = score_select(
        device.queries,
        device.keys,
        records,
        device.page_table,
        device.seq_lens,
        torch.tensor([10, 700], dtype=torch.int32, device="cuda"),
        device.sm_scale,
        width=800,
        workspace=small,
        impl="cuda",
    )
    assert got.counts.tolist() == [10, 750]
    for head in range(2):
        assert torch.equal(got.pages[1, head, :750], device.page_table[1, :750])


def test_one_graph_serves_changing_lengths_tables_rows_and_budgets():
    lengths = [2000, 9000, 500, 33]
    device, _, _, budgets, call = build("r4i4", lengths, [12] * 4, 12, group=4, head_dim=128)
    lens, table = device.seq_lens.clone(), device.page_table.clone()
    call(lens, table)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(lens, table)
    changes = [
        (lengths, [12, 12, 12, 12]),
        ([1999, 1, 499, 17], [12, 2, 12, 12]),
        ([17, 8999, 1, 1], [ATTEND_ALL, 12, 5, 12]),
        ([1, 1, 1, 1], [12, 12, 12, 12]),
    ]
    for step, (new_lengths, new_budgets) in enumerate(changes):
        order = torch.randperm(4, generator=torch.Generator().manual_seed(step))
        usable = [min(length, lengths[int(row)]) for length, row in zip(new_lengths, order, strict=True)]
        lens.copy_(torch.tensor(usable, device="cuda"))
        table.copy_(device.page_table[order.cuda()])
        budgets.copy_(torch.tensor(new_budgets, dtype=torch.int32, device="cuda"))
        graph.replay()
        torch.cuda.synchronize()
        replayed = [tensor.clone() for tensor in (captured.counts, captured.logical, captured.pages)]
        fresh = call(lens, table)
        assert torch.equal(replayed[0], fresh.counts)
        for row, count in enumerate(fresh.counts.tolist()):
            if count <= 12:
                assert torch.equal(replayed[1][row, :, :count], fresh.logical[row, :, :count])
                assert torch.equal(replayed[2][row, :, :count], fresh.pages[row, :, :count])


def test_no_allocation_in_the_steady_state():
    _, _, _, _, call = build("r4i4", [3000, 70], [12, 12], 12, group=4)
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(3):
        call()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_same_lists_every_time():
    _, _, _, _, call = build("r8i4", [40_000, 3000], [64, 64], 64, group=4, head_dim=128)
    first = [tensor.clone() for tensor in (call().pages, call().logical)]
    for _ in range(5):
        again = call()
        assert torch.equal(first[0], again.pages)
        assert torch.equal(first[1], again.logical)


@pytest.mark.parametrize("group", [4, 8, 16])
@pytest.mark.parametrize("lists", [2, 4, 16, 32, 64])
@pytest.mark.parametrize("tokens", [32_768, 2**19, 2**20], ids=["32K", "512K", "1M"])
def test_lists_of_a_batch_run_at_a_time(group, lists, tokens):
    """However much room the page table has: a second wave of clusters would take as long again."""
    if (lists, tokens) == (64, 2**20) and group <= 8:
        pytest.skip("64 clusters of 4 in two a multiprocessor: whether they fit depends on the GPU's GPCs")
    assert cuda_select.library(group).lists_at_a_time(tokens // PAGE, lists) >= lists
