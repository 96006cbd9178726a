"""Host memory as a GPU sees it: SGLang's store into it, and prefixes staged on a side stream."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from locks_kernels import Summaries, SummaryLayout, page_view, summarize
from locks_sglang.config import LocksConfig
from locks_sglang.tier import capacity, host_memory, pool, ranks
from locks_sglang.tier.host_memory import HostMemory, Registration
from locks_sglang.tier.staged_records import StagedRecords
from locks_sglang.tier.staging import PrefillStaging

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
LAYERS, HEADS, DIM, PAGE, PAGES = 4, 4, 128, 16, 4096
GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "rank", lambda: 0)
    monkeypatch.setattr(ranks, "gather", lambda mine: [mine])


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """Addresses that are registered with the GPU; of what a test made none may stay so after it."""
    held: set[int] = set()
    cuda = host_memory.with_cuda()

    def register(address: int, nbytes: int) -> str | None:
        said = cuda.register(address, nbytes)
        held.update(() if said else (address,))
        return said

    def unregister(address: int) -> str | None:
        held.discard(address)
        return cuda.unregister(address)

    monkeypatch.setattr(pool, "with_cuda", lambda: Registration(register, unregister))
    monkeypatch.setattr(pool, "_held", of_the_pool := [])
    yield held
    of_the_pool.clear()
    gc.collect()
    assert not held


@pytest.fixture
def sglang_pools() -> Any:
    """SGLang's module of KV pools, with all imported that a pool and a store import.

    SGLang keeps the errors of imports that failed, and these the frames of all that were importing, with
    their variables, until the process ends: a test that is the first to import never lets go of its pool.
    """
    from sglang.srt.mem_cache import memory_pool

    made = sglang_pool(memory_pool, pages=2)
    token = torch.zeros(1, HEADS, DIM, dtype=torch.bfloat16, device=GPU)
    store(memory_pool, made, torch.tensor([PAGE], device=GPU), token, token)
    return memory_pool


def sglang_pool(pools: Any, pages: int) -> Any:
    return pools.MHATokenToKVPool(
        (pages - 1) * PAGE, PAGE, torch.bfloat16, head_num=HEADS, head_dim=DIM, layer_num=2,
        device=GPU.type, enable_memory_saver=False,
    )  # fmt: skip


def store(pools: Any, made: Any, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    made.set_kv_buffer(SimpleNamespace(layer_id=1), pools.KVWriteLoc(slots, None), k, v)


def host_pool() -> Any:
    made = SimpleNamespace(layer_num=LAYERS, store_dtype=torch.bfloat16, device="cuda")
    made.memory = pool.hold(made, [(PAGES * PAGE, HEADS, DIM)] * 2)
    return made


def test_the_gpu_and_the_cpu_see_the_same_bytes() -> None:
    made = host_pool()
    buffer = made.v_buffer[LAYERS - 1]
    assert buffer.device.type == "cuda" and not bool(buffer.any())
    buffer.copy_(torch.arange(buffer.numel(), device=GPU).view(buffer.shape) % 251)
    torch.cuda.synchronize()
    seen = made.memory.tensor()[-buffer.nbytes - (made.memory.nbytes - 2 * LAYERS * buffer.nbytes) :]
    seen = seen[: buffer.nbytes].view(torch.bfloat16)
    assert torch.equal(seen, (torch.arange(buffer.numel()) % 251).bfloat16())


def test_memory_that_nothing_uses_can_be_had_again(registered: set[int]) -> None:
    """Mapped where it lay, without having been closed (CUDA error 712 while it stays registered)."""
    registration = pool.with_cuda()
    node = capacity.node_of(GPU)
    for _ in range(3):
        memory = HostMemory(64 << 20, node=node, registration=registration, chunk=16 << 20)
        tensor = host_memory.on_gpu(memory.tensor())
        del memory
        gc.collect()
        assert len(registered) == 4 and not bool(tensor.any())
        del tensor
        assert not registered


def test_sglang_stores_into_it(sglang_pools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its own pool class and its own store kernel."""
    changed, name = sglang_pools.MHATokenToKVPool, "_create_buffers_normal"
    original = getattr(changed, name)
    monkeypatch.setattr(pool, "inherited_config", lambda: LocksConfig(selector="locks", kv_tier="host"))
    monkeypatch.setattr(changed, name, lambda self: pool.create_buffers(original, self))
    made = sglang_pool(sglang_pools, PAGES)
    assert made.k_buffer[1].data_ptr() - made.k_buffer[0].data_ptr() == 2 * made.k_buffer[0].nbytes
    slots = torch.randperm(PAGES * PAGE, device=GPU)[:700]
    k, v = (torch.randn(700, HEADS, DIM, device=GPU).bfloat16() for _ in range(2))
    store(sglang_pools, made, slots, k, v)
    assert torch.equal(made.get_key_buffer(1)[slots], k) and torch.equal(made.get_value_buffer(1)[slots], v)
    assert not bool(made.k_buffer[0].any())


def test_staged_layers_are_those_of_the_pool() -> None:
    """With a stream that is late in every way: each layer's buffer holds its prefix and the own tokens."""
    made = host_pool()
    for buffer in (*made.k_buffer, *made.v_buffer):
        buffer.copy_(torch.randn(buffer.shape, device=GPU))  # by a kernel, as all that writes there
    views = [[page_view(buffer, PAGE) for buffer in side] for side in (made.k_buffer, made.v_buffer)]
    staging = PrefillStaging(views[0], views[1], tokens=60_000, device=GPU)
    sizes = [(20_000, 700), (0, 1000), (9_013, 300), (16, 16)]
    prefixes, lengths = [prefix for prefix, _ in sizes], [prefix + new for prefix, new in sizes]
    order = 1 + torch.randperm(PAGES - 1)
    table, done = torch.zeros(6, 22_000, dtype=torch.int32), 0
    requests = torch.tensor([3, 1, 5, 2])
    for request, length in zip(requests.tolist(), lengths, strict=True):
        pages = order[done : done + -(-length // PAGE)]
        slots = (pages.unsqueeze(1) * PAGE + torch.arange(PAGE)).flatten()
        table[request, : len(slots)] = slots
        done += len(pages)
    table, on_gpu = table.cuda(), requests.cuda()
    for _ in range(3):
        torch.cuda._sleep(5_000_000)
        assert staging.begin(table, on_gpu, prefixes, lengths)
        found = []
        for layer in range(LAYERS):
            own = torch.randn(2, sum(lengths) - sum(prefixes), HEADS, DIM, device=GPU).bfloat16()
            staging.enter(layer)
            torch.cuda._sleep(3_000_000)
            staging.store(layer, *own)
            found.append((own, [buffer.clone() for buffer in staging.buffers(layer)]))
            staging.leave(layer)
        for layer, (own, buffers) in enumerate(found):
            check(layer, own, buffers, made, staging, table, requests.tolist(), prefixes, lengths)


def check(
    layer: int, own: torch.Tensor, buffers: list[torch.Tensor], made: Any, staging: PrefillStaging,
    table: torch.Tensor, requests: list[int], prefixes: list[int], lengths: list[int],
) -> None:  # fmt: skip
    done = 0
    pages = staging.page_table(len(lengths), 1400)
    for row, (prefix, length) in enumerate(zip(prefixes, lengths, strict=True)):
        slots = table[requests[row], :prefix].long()
        for which, side in enumerate((made.k_buffer, made.v_buffer)):
            staged = buffers[which].view(-1, PAGE, HEADS, DIM)[pages[row, : -(-length // PAGE)].long()]
            staged = staged.flatten(0, 1)
            assert torch.equal(staged[:prefix], side[layer][slots]), (layer, row)
            assert torch.equal(staged[prefix:length], own[which, done : done + length - prefix]), (
                layer,
                row,
            )
        done += length - prefix


def test_records_of_staged_keys_are_those_of_the_pool() -> None:
    made, prefix, length = host_pool(), 1000, 3005
    for buffer in made.k_buffer:
        buffer.copy_(torch.randn(buffer.shape, device=GPU))
    keys, values = ([page_view(buffer, PAGE) for buffer in side] for side in (made.k_buffer, made.v_buffer))
    found, expected = (
        Summaries.allocate(SummaryLayout.parse("r6h", DIM, PAGE), (LAYERS, PAGES, HEADS), GPU)
        for _ in range(2)
    )
    staging = PrefillStaging(keys, values, tokens=4000, device=GPU)
    staged = StagedRecords(found, staging)
    pages = 1 + torch.randperm(PAGES - 1, device=GPU)[: -(-length // PAGE)]
    slots = (pages.unsqueeze(1) * PAGE + torch.arange(PAGE, device=GPU)).flatten()[:length]
    assert staging.begin(slots.int().unsqueeze(0), torch.zeros(1, device=GPU).int(), [prefix], [length])
    for layer in range(LAYERS):
        own = torch.randn(2, length - prefix, HEADS, DIM, device=GPU).bfloat16()
        staging.enter(layer)
        made.k_buffer[layer][slots[prefix:]] = own[0]
        staging.store(layer, *own)
        staged.build(layer)
        staging.leave(layer)
    summarize(keys, slots[prefix:], expected)
    assert staged.take() and staged.pages_built == 3005 // PAGE - 1000 // PAGE
    for mine, other in zip(found.planes, expected.planes, strict=True):
        assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8)) and bool(mine.any())


def test_flashinfer_lists_the_staged_tokens() -> None:
    """SGLang's own kernel over the table that counts up."""
    from sglang.kernels.ops.attention.utils import create_flashinfer_kv_indices_triton

    views = [page_view(torch.zeros(64 * PAGE, HEADS, DIM, device=GPU).bfloat16(), PAGE)]
    staging = PrefillStaging(views, views, tokens=800, device=GPU)
    table = torch.zeros(4, 400, dtype=torch.int32, device=GPU)
    prefixes, lengths = [37, 0, 300], [40, 9, 333]
    assert staging.begin(table, torch.tensor([1, 2, 3], device=GPU), prefixes, lengths)
    tokens, firsts = staging.token_table(), torch.tensor(staging.firsts, device=GPU)
    counts = torch.tensor(lengths, device=GPU)
    starts = torch.tensor([0, 40, 49, 382], dtype=torch.int32, device=GPU)
    listed = torch.zeros(382, dtype=torch.int32, device=GPU)
    create_flashinfer_kv_indices_triton[(3,)](tokens, firsts, counts, starts, None, listed, tokens.shape[1])
    expected = [
        first * PAGE + i for first, n in zip(staging.firsts, lengths, strict=True) for i in range(n)
    ]
    assert listed.tolist() == expected
