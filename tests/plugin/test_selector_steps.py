"""Quest and the oracle in the decode step that all selectors share, on a CPU (servers: tests/server)."""

import pytest
import torch
from locks_sglang.config import LocksConfig
from rig import PAGE, SCALE, Rig

LENGTHS = [300, 47, 211]  # the second attends everything
SLOTS = 4
EVERYTHING = [[*range(3)]] * 2


def make_rig(selector: str, seed: int = 0) -> Rig:
    # Audits keep what was selected; the plan needs no more.
    config = LocksConfig(selector=selector, budget=SLOTS * PAGE, audit_interval=1, audit_layers=2)
    return Rig(config, LENGTHS, layers=2, seed=seed)


def selections(rig: Rig, queries: list[torch.Tensor]) -> dict[tuple[int, int], list[list[int]]]:
    """Pages by (layer, row), after a step whose outputs are attention over them."""
    outputs = rig.step(LENGTHS, queries)
    found = {}
    for layer in range(rig.layers):
        for row, length in enumerate(LENGTHS):
            pages = found[layer, row] = rig.chosen(layer, row)
            expected, _ = rig.attention(layer, row, length, queries[layer][row], pages)
            torch.testing.assert_close(outputs[layer][row].double(), expected, atol=1e-5, rtol=1e-5)
    return found


def exact_choice(rig: Rig, layer: int, row: int, query: torch.Tensor, head: int) -> set[int]:
    """First and current page, and those with most of a KV head's exact attention mass (mean share)."""
    length, group = LENGTHS[row], rig.q_heads // rig.kv_heads
    slots = rig.token_table[row + 1, :length].long()
    keys = rig.keys[layer][slots, head].double()
    shares = (query[head * group :][:group].double() @ keys.T * SCALE).softmax(-1).mean(0)
    pages = torch.zeros(-(-length // PAGE), dtype=torch.float64)
    pages.index_add_(0, torch.arange(length) // PAGE, shares)
    pages[[0, -1]] = torch.inf
    return set(pages.topk(SLOTS).indices.tolist())


@pytest.mark.parametrize("selector", ["quest", "oracle"])
def test_steps_and_short_requests(selector: str) -> None:
    rig = make_rig(selector)
    found = selections(rig, rig.queries(len(LENGTHS)))
    for (_, row), pages in found.items():
        if row == 1:
            assert pages == EVERYTHING
            continue
        for chosen in pages:
            assert len(set(chosen)) == SLOTS
            assert {0, (LENGTHS[row] - 1) // PAGE} <= set(chosen)
    assert len({str(pages) for (_, row), pages in found.items() if row == 0}) > 1


def test_the_oracle_takes_the_pages_of_most_mass() -> None:
    rig = make_rig("oracle")
    queries = rig.queries(len(LENGTHS))
    found = selections(rig, queries)
    for (layer, row), pages in found.items():
        if row != 1:
            for head, chosen in enumerate(pages):
                assert set(chosen) == exact_choice(rig, layer, row, queries[layer][row], head)


@pytest.mark.parametrize("selector", ["quest", "oracle"])
def test_pages_that_are_written_again(selector: str) -> None:
    """What lay in a page before does not count: a used rig with another's keys selects as that one does."""
    used, fresh = make_rig(selector), make_rig(selector, seed=1)
    queries = fresh.queries(len(LENGTHS))
    before = selections(used, queries)
    for pools in ("keys", "values"):
        for old, new in zip(getattr(used, pools), getattr(fresh, pools), strict=True):
            old.copy_(new)
    used.token_table.copy_(fresh.token_table)
    used.state.finish_forward(torch.arange(len(used.keys[0])))
    after = selections(used, queries)
    assert after == selections(fresh, queries)
    assert after != before
