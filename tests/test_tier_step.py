"""The page lists of the host-tier benchmark drift as it says."""

import pytest
import torch
from tier_step import KV_HEADS, PAGE, WIDTH, Case, drifting_lists


@pytest.mark.parametrize("replaced", [0.0, 0.05, 0.2])
def test_lists_drift_by_the_share_that_is_told(replaced: float) -> None:
    case = Case(layers=2, batch=3, context=400 * PAGE, steps=1)
    generator = torch.Generator().manual_seed(0)
    table = (1 + torch.randperm(case.pages - 1, generator=generator)).view(3, 400).int()
    lists = drifting_lists(case, replaced, table, generator)
    before = next(lists)
    assert before.shape == (2, 3, KV_HEADS, WIDTH) and before.dtype == torch.int32
    for _ in range(3):
        after = next(lists)
        assert (after[..., -1] == table[:, -1].view(1, 3, 1)).all(), "the open page comes last"
        for place in ((0, 0, 0), (1, 2, 3)):
            old, new = set(before[place].tolist()), set(after[place].tolist())
            assert len(new) == WIDTH and new <= set(table[place[1]].tolist())
            assert len(new - old) == round(replaced * (WIDTH - 1))
        before = after
    # Other layers and heads read other pages.
    assert not torch.equal(before[0, 0, 0], before[1, 0, 0])
    assert case.tiles_a_step == 2 * 3 * KV_HEADS * (WIDTH - 1)
