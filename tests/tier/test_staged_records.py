"""Records built while a prefill's keys are staged are, bit for bit, those that the pool's keys give."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from locks_kernels import EnvelopeLayout, Envelopes, Records, Summaries, SummaryLayout, page_view, summarize
from locks_sglang.tier.staged_records import LEAST, StagedRecords
from test_staging import DIM, HEADS, LAYERS, PAGE, PAGES, REQUESTS, Prefill


def records(kind: str) -> Records:
    lead = (LAYERS, PAGES, HEADS)
    if kind == "quest":
        return Envelopes.allocate(EnvelopeLayout(DIM, PAGE), lead)
    return Summaries.allocate(SummaryLayout.parse(kind, DIM, PAGE), lead)


def build(prefill: Prefill, staged: StagedRecords, layers: int = LAYERS) -> None:
    assert prefill.begin()
    for layer in range(layers):
        prefill.staging.enter(layer)
        prefill.write(layer)
        prefill.staging.store(layer, *prefill.own[layer])
        staged.build(layer)
        prefill.staging.leave(layer)


@pytest.mark.parametrize("kind", ["r4h", "quest"])
@settings(deadline=None, max_examples=15)
@given(sizes=REQUESTS, seed=st.integers(0, 99))
def test_records_of_the_pool(kind: str, sizes: list[tuple[int, int]], seed: int) -> None:
    prefill, found, expected = Prefill(sizes, seed), records(kind), records(kind)
    staged = StagedRecords(found, prefill.staging, least=1)
    build(prefill, staged)
    slots = torch.cat([prefill.slots(row)[prefix:] for row, prefix in enumerate(prefill.prefixes)])
    keys = [page_view(prefill.pool[layer, 0], PAGE) for layer in range(LAYERS)]
    summarize(keys, slots, expected)
    for mine, other in zip(found.planes, expected.planes, strict=True):
        assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8))
    completed = sum((prefix + new) // PAGE - prefix // PAGE for prefix, new in sizes)
    assert staged.take() == (completed > 0) and staged.pages_built == completed
    assert not staged.take()


def test_forwards_that_others_build() -> None:
    """Few pages; not all layers; a forward that is not staged, after one that broke off at its end."""
    prefill = Prefill([(40, 70)])
    staged = StagedRecords(records("r4h"), prefill.staging)
    build(prefill, staged)
    assert LEAST > 4 and not staged.take()
    staged = StagedRecords(records("r4h"), prefill.staging, least=4)
    build(prefill, staged, LAYERS - 1)
    assert not staged.take()
    build(prefill, staged)
    prefill.staging.end()
    assert not staged.take() and staged.pages_built == 0
    build(prefill, staged)
    prefill.begin()
    assert not staged.take()
    build(prefill, staged)
    assert staged.take() and staged.pages_built == 4
