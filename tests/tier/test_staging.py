"""The staged copy of a prefill's keys and values holds what the pool holds, at the places that are told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from locks_kernels import page_view
from locks_sglang.tier.staged_forward import attending, can_stage, planning
from locks_sglang.tier.staging import PrefillStaging

LAYERS, HEADS, DIM, PAGE, PAGES, CONTEXT = 4, 2, 64, 16, 60, 160
REQUESTS = st.lists(st.tuples(st.integers(0, 70), st.integers(1, 70)), min_size=1, max_size=4)


class Prefill:
    """Requests with some tokens in a pool of random keys, and some that a forward writes."""

    def __init__(self, sizes: list[tuple[int, int]], seed: int = 0) -> None:
        noise = torch.Generator().manual_seed(seed)
        shape = (LAYERS, 2, PAGES * PAGE, HEADS, DIM)
        self.pool = torch.randn(shape, generator=noise)
        self.prefixes, self.new = map(list, zip(*sizes, strict=True))
        self.lengths = [prefix + new for prefix, new in sizes]
        order = 1 + torch.randperm(PAGES - 1, generator=noise)
        per_request = CONTEXT // PAGE
        self.table = torch.zeros(len(sizes) + 2, CONTEXT, dtype=torch.int32)
        self.requests = 1 + torch.randperm(len(sizes), generator=noise)
        for row, request in enumerate(self.requests):
            pages = order[row * per_request : (row + 1) * per_request]
            self.table[request] = (pages.unsqueeze(1) * PAGE + torch.arange(PAGE)).flatten()
        self.own = torch.randn(LAYERS, 2, sum(self.new), HEADS, DIM, generator=noise)
        views = [[page_view(self.pool[layer, which], PAGE) for layer in range(LAYERS)] for which in (0, 1)]
        self.staging = PrefillStaging(
            views[0], views[1], tokens=4 * (CONTEXT + PAGE), device=torch.device("cpu")
        )

    def slots(self, row: int) -> torch.Tensor:
        return self.table[self.requests[row], : self.lengths[row]].long()

    def begin(self) -> bool:
        return self.staging.begin(self.table, self.requests, self.prefixes, self.lengths)

    def write(self, layer: int) -> None:
        """As a backend does, into the pool; the staged copy is written by ``store``."""
        done = 0
        for row, (prefix, new) in enumerate(zip(self.prefixes, self.new, strict=True)):
            slots = self.slots(row)[prefix:]
            self.pool[layer][:, slots] = self.own[layer][:, done : done + new]
            done += new


@settings(deadline=None, max_examples=60)
@given(sizes=REQUESTS, seed=st.integers(0, 99))
def test_staged_tokens_are_those_of_the_pool(sizes: list[tuple[int, int]], seed: int) -> None:
    """Through the page table as FlashAttention reads it, and the token table as FlashInfer lists it."""
    prefill = Prefill(sizes, seed)
    staging = prefill.staging
    assert prefill.begin() and staging.active
    width = -(-max(prefill.lengths) // PAGE)
    pages = staging.page_table(len(sizes), width)
    tokens = staging.token_table()
    for layer in range(LAYERS):
        staging.enter(layer)
        prefill.write(layer)
        staging.store(layer, *prefill.own[layer])
        for row, length in enumerate(prefill.lengths):
            expected = prefill.pool[layer][:, prefill.slots(row)]
            listed = tokens.flatten()[staging.firsts[row] * tokens.shape[1] :][:length].long()
            for which, buffer in enumerate(staging.buffers(layer)):
                by_page = buffer.view(-1, PAGE, HEADS, DIM)[pages[row].long()].flatten(0, 1)[:length]
                assert torch.equal(by_page, expected[which])
                assert torch.equal(buffer[listed], expected[which])
        staging.leave(layer)
    assert staging.pages_copied == LAYERS * sum(-(-prefix // PAGE) for prefix, _ in sizes)


def test_the_next_layer_is_copied_while_one_attends() -> None:
    prefill = Prefill([(40, 9)])
    staging = prefill.staging
    prefill.begin()
    copied: list[int] = []
    gather = staging._gather
    staging._gather = lambda index: (copied.append(index), gather(index))[1]  # type: ignore[method-assign]
    seen = []
    for layer in range(LAYERS):
        staging.enter(layer)
        staging.enter(layer)  # a layer that attends twice
        seen.append(list(copied))
        staging.leave(layer)
    assert seen == [[0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3]]


def test_more_than_there_is_room_for() -> None:
    prefill = Prefill([(40, 9)])
    staging = prefill.staging
    assert not staging.begin(prefill.table, prefill.requests, [0], [100_000])
    assert not staging.active and (staging.forwards, staging.forwards_unstaged) == (0, 1)
    assert prefill.begin() and (staging.forwards, staging.forwards_unstaged) == (1, 1)
    with pytest.raises(ValueError, match="3 rows; legal: 1"):
        staging.page_table(3, 2)


def test_price() -> None:
    staging = Prefill([(1, 1)]).staging
    price = PrefillStaging.price(4 * (CONTEXT + PAGE), PAGE, HEADS, DIM, torch.float32)
    assert price == staging._buffers.nbytes


class Backend:
    """What this package replaces of SGLang's attention backends."""

    def __init__(self, prefill: Prefill) -> None:
        self.prefill = prefill
        self.token_to_kv_pool = SimpleNamespace(set_kv_buffer=self.write, name="pool")
        self.req_to_token_pool = SimpleNamespace(req_to_token=prefill.table)
        self.forward_metadata: Any = None
        self.written: list[int] = []

    def write(self, layer: Any, location: Any, k: Any, v: Any, *scales: Any) -> None:
        self.written.append(layer)
        self.prefill.write(layer)


def batch(prefill: Prefill, **changes: Any) -> Any:
    values = {
        "extend_prefix_lens_cpu": prefill.prefixes,
        "extend_seq_lens_cpu": prefill.new,
        "batch_size": len(prefill.new),
        "req_pool_indices": prefill.requests,
    }
    return SimpleNamespace(**(values | changes))


def test_a_backend_with_a_page_table() -> None:
    prefill = Prefill([(33, 5), (0, 20)])
    backend, staging = Backend(prefill), prefill.staging
    prefill.begin()
    with planning(backend, batch(prefill), staging):
        backend.forward_metadata = SimpleNamespace(page_table=torch.zeros(2, 3, dtype=torch.int32))
    assert torch.equal(backend.forward_metadata.page_table, staging.page_table(2, 3))
    own = backend.token_to_kv_pool
    with attending(backend, staging, 2, None):
        pool = backend.token_to_kv_pool
        assert pool.name == "pool"
        pool.set_kv_buffer(2, None, *prefill.own[2], None, None)
        assert pool.get_kv_buffer(2)[0] is not None
        assert torch.equal(pool.get_key_buffer(2), staging.buffers(2)[0])
        assert torch.equal(pool.get_value_buffer(2), staging.buffers(2)[1])
    assert backend.token_to_kv_pool is own and backend.written == [2]


def test_a_model_that_writes_by_itself() -> None:
    """Rotary kernels that store the keys too: the staged copy gets the tokens from the pool."""
    prefill = Prefill([(33, 5), (0, 20)])
    staging = prefill.staging
    prefill.begin()
    slots = torch.cat([prefill.slots(row)[prefix:] for row, prefix in enumerate(prefill.prefixes)])
    for layer in (0, 1, 2, 1):  # the last is a layer that shares the keys of an earlier one
        prefill.write(layer)
        with attending(Backend(prefill), staging, layer, slots):
            tokens = staging.token_table().flatten()
            for row, length in enumerate(prefill.lengths):
                at = tokens[staging.firsts[row] * PAGE :][:length].long()
                for which, buffer in enumerate(staging.buffers(layer)):
                    assert torch.equal(buffer[at], prefill.pool[layer, which][prefill.slots(row)])


def test_a_backend_that_lists_tokens() -> None:
    prefill = Prefill([(33, 5), (0, 20)])
    backend, staging, forward = Backend(prefill), prefill.staging, batch(prefill)
    backend.indices_updater_prefill = SimpleNamespace(req_to_token=prefill.table)  # type: ignore
    prefill.begin()
    with planning(backend, forward, staging):
        table = backend.indices_updater_prefill.req_to_token  # type: ignore
        assert forward.req_pool_indices.tolist() == staging.firsts
        assert table.is_contiguous() and table.dtype == torch.int32
    assert backend.indices_updater_prefill.req_to_token is prefill.table  # type: ignore
    assert forward.req_pool_indices is prefill.requests


def test_a_backend_that_reads_the_token_table() -> None:
    prefill = Prefill([(33, 5), (0, 20)])
    backend, staging = Backend(prefill), prefill.staging
    prefill.begin()
    with planning(backend, batch(prefill), staging):
        pass
    with attending(backend, staging, 0):
        backend.token_to_kv_pool.set_kv_buffer(0, None, *prefill.own[0])
        for row, length in enumerate(prefill.lengths):
            slots = backend.req_to_token_pool.req_to_token[prefill.requests[row], :length].long()
            assert torch.equal(staging.buffers(0)[0][slots], prefill.pool[0, 0][prefill.slots(row)])
    assert backend.req_to_token_pool.req_to_token is prefill.table


@pytest.mark.parametrize(
    "changes",
    [
        {"extend_prefix_lens_cpu": None},
        {"batch_size": 5},
        {"extend_seq_lens_cpu": [0]},
        {"kv_loc_plan": object()},
    ],
    ids=["no lengths", "padded", "empty", "planned elsewhere"],
)
def test_forwards_that_are_left_alone(changes: dict[str, Any]) -> None:
    prefill = Prefill([(33, 5)])
    assert can_stage(batch(prefill))
    assert not can_stage(batch(prefill, **changes))
