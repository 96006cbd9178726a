"""snapshot: page tables, budgets and counters, torch and Triton against a plain loop."""

import os

import pytest
import torch
from locks_kernels.select import ATTEND_ALL
from locks_kernels.snapshot import StepTables, snapshot

LENGTHS = [1, 15, 16, 17, 31, 32, 33, 511, 2049]


def implementations():
    gpu = torch.cuda.is_available()
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    triton = pytest.param(
        "triton",
        marks=pytest.mark.skipif(not (gpu or interpreted), reason="needs a GPU or TRITON_INTERPRET=1"),
    )
    return ["torch", triton]


@pytest.mark.parametrize("impl", implementations())
@pytest.mark.parametrize("page_size", [16, 64])
def test_tables_and_counters_equal_a_plain_loop(impl, page_size):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(3)
    context, pool_pages, max_pages = 4096, 700, 4096 // page_size
    slots = torch.randperm(20, generator=generator)[: len(LENGTHS)] + 1
    slots = torch.cat([slots, torch.tensor([0])])  # a padding row, as graphs have them
    lengths = torch.tensor([*LENGTHS, 1])
    token_table = torch.zeros(21, context, dtype=torch.int32)
    for slot in range(1, 21):
        pages = torch.randperm(pool_pages, generator=generator)[:max_pages] + 1
        tokens = pages.unsqueeze(-1) * page_size + torch.arange(page_size)
        token_table[slot, : tokens.numel()] = tokens.flatten()[:context].to(torch.int32)
    policy = torch.full((21,), 4, dtype=torch.int32)
    policy[int(slots[3])] = ATTEND_ALL
    counters = torch.tensor([100, 0, 0, 7], dtype=torch.int64, device=device)

    out = StepTables.allocate(16, max_pages, device).rows(len(slots))
    arguments = [value.to(device) for value in (token_table, slots, lengths, policy)]
    snapshot(*arguments, out, counters, page_size=page_size, min_len=20, impl=impl)

    expected = [100, 0, 0, 7]
    for row, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
        present = (length + page_size - 1) // page_size
        wanted = [int(token_table[slot, page * page_size]) // page_size for page in range(present)]
        assert out.page_table[row, :present].tolist() == wanted
        assert int(out.seq_lens[row]) == length
        budget = ATTEND_ALL if length < 20 else int(policy[slot])
        assert int(out.budgets[row]) == budget
        if slot:
            attended = min(present, budget)
            expected[0 if attended < present else 1] += 1
            expected[2] += attended
            expected[3] += present
    assert counters.tolist() == expected


def test_another_number_of_rows_is_refused():
    out = StepTables.allocate(3, 4, "cpu")
    rows = torch.ones(2, dtype=torch.int64)
    table = torch.zeros(3, 64, dtype=torch.int32)
    with pytest.raises(ValueError, match="tables for 3 rows, batch of 2"):
        snapshot(table, rows, rows, table[:, 0], out, torch.zeros(4, dtype=torch.int64), page_size=16)
