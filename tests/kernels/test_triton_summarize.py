"""The Triton summarize kernels under the interpreter make records as good as the reference's."""

import interpreter
import pytest
import torch
from cases import empty_records, pool_view
from locks_kernels import summarize
from locks_kernels.reference import reconstruct

interpreter.require()

CASES = [
    # format, page, head_dim, dtype, order
    ("r4i4", 16, 64, torch.float32, "nhd"),
    ("r6h", 16, 64, torch.float16, "hnd"),
    ("r2i8", 32, 64, torch.float32, "nhd"),
    ("r8bf16", 16, 64, torch.float32, "hnd"),
    ("r1h", 64, 64, torch.float32, "nhd"),
]


def layers_of_keys(page, head_dim, dtype, order):
    generator = torch.Generator().manual_seed(3)
    spectrum = torch.linspace(0.1, 2, head_dim)
    return [
        pool_view((torch.randn(5, page, 2, head_dim, generator=generator) * spectrum).to(dtype), order)
        for _ in range(2)
    ]


@pytest.mark.parametrize(("name", "page", "head_dim", "dtype", "order"), CASES)
def test_reconstruction_as_close_as_the_references(name, page, head_dim, dtype, order):
    keys = layers_of_keys(page, head_dim, dtype, order)
    reference, records = empty_records(name, keys[0], 2), empty_records(name, keys[0], 2)
    slots = torch.tensor([3, 1, 2, 4]) * page + page - 1
    slots[0] -= 1  # page 3 is not complete
    summarize(keys, slots, reference, impl="torch")
    summarize(keys, slots, records, impl="triton")
    for layer in range(2):
        truth = keys[layer][[1, 2, 4]].float().transpose(1, 2)
        chosen = torch.tensor([1, 2, 4])
        ours = (reconstruct(records.layer(layer).gather(chosen)) - truth).norm(dim=(-1, -2))
        theirs = (reconstruct(reference.layer(layer).gather(chosen)) - truth).norm(dim=(-1, -2))
        assert (ours < 1.02 * theirs + 1e-4).all()
        untouched = records.layer(layer).gather(torch.tensor([0, 3]))
        assert all((plane == 0).all() for plane in untouched.planes)
    assert torch.equal(records.centroid, reference.centroid)


def test_envelopes_are_exact():
    keys = layers_of_keys(16, 64, torch.float32, "hnd")
    reference, records = empty_records("quest", keys[0], 2), empty_records("quest", keys[0], 2)
    slots = torch.arange(5) * 16 + 15
    summarize(keys, slots, reference, impl="torch")
    summarize(keys, slots, records, impl="triton")
    assert torch.equal(records.low, reference.low) and torch.equal(records.high, reference.high)


def test_degenerate_pages():
    keys = layers_of_keys(16, 64, torch.float32, "nhd")
    keys[0][1] = 1.5  # all keys equal
    keys[0][2] = 0
    keys[0][3, 5] = 1e4
    keys[1][1, 3, 0, 5] = float("nan")
    keys[1][2, 0, 1] = float("inf")
    reference, records = empty_records("r4i4", keys[0], 2), empty_records("r4i4", keys[0], 2)
    slots = torch.arange(5) * 16 + 15
    summarize(keys, slots, reference, impl="torch")
    summarize(keys, slots, records, impl="triton")
    truth = torch.stack([torch.nan_to_num(k, nan=0.0, posinf=0.0, neginf=0.0) for k in keys]).transpose(
        2, 3
    )
    ours = (reconstruct(records) - truth).norm(dim=(-1, -2))
    theirs = (reconstruct(reference) - truth).norm(dim=(-1, -2))
    assert (ours <= 1.02 * theirs + 1e-3).all()
    assert (records.scales[0, 1, :, 17:] == 0).all()  # no direction in a page of equal keys
