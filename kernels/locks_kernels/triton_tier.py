"""The tier ops in Triton.  What they compute is in ``torch_tier``; here is how they share the work.

``resolve`` is three launches, since each needs all of the one before: look up and claim, give slots, name
the sources and copy.  Blocks agree through two atomics only.  A missing tile is claimed by exchanging its
table entry with a number that belongs to the call: who finds another number there was first.  The claimed
tiles are dealt to windows of slots that do not overlap, so that no block asks another which victims it
takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from . import hot_cache
from .hot_cache import HotCache
from .pointers import pointer_table

BLOCK = 128
"""Entries of a list that a program takes."""
COPY_PROGRAMS = 1024
"""Most programs that copy tiles: one a tile at usual hit rates, few enough to be cheap where all hit."""

CLOCK = tl.constexpr(hot_cache.CLOCK)
HAND = tl.constexpr(hot_cache.HAND)
CALLS = tl.constexpr(hot_cache.CALLS)
MISSING = tl.constexpr(hot_cache.MISSING)
COPIES = tl.constexpr(hot_cache.COPIES)
LOOK = tl.constexpr(hot_cache.LOOK)
YOUNG = tl.constexpr(hot_cache.YOUNG)
OLDEST = tl.constexpr(hot_cache.OLDEST)
WRAP = tl.constexpr(hot_cache.WRAP)
HITS, MISSES, FILLS, HOST_READS = (tl.constexpr(number) for number in range(4))


def begin_step(
    cache: HotCache,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    requests: torch.Tensor,
) -> None:
    """See :func:`locks_kernels.tier.begin_step`."""
    rows, tiles = len(seq_lens), cache.layers * cache.kv_heads
    tables = (page_table, page_table.stride(0), seq_lens, requests)
    stamps = (cache.generation, cache.open_page, cache.open_stamp)
    if rows and cache.open_rows:
        _load_open_kernel[(tiles, rows)](
            cache.keys, cache.values, cache.capacity,
            pointer_table(keys), *keys[0].stride()[:3], pointer_table(values), *values[0].stride()[:3],
            *tables, *stamps, cache.layers, cache.kv_heads, B=cache.page_size, D=cache.head_dim,
        )  # fmt: skip
    _begin_kernel[(max(rows, 1),)](
        *tables, *stamps, cache.state, rows, B=cache.page_size, OPEN=cache.open_rows > 0
    )


def invalidate(cache: HotCache, slots: torch.Tensor) -> None:
    """See :func:`locks_kernels.tier.invalidate`."""
    if len(slots):
        grid = (triton.cdiv(len(slots), BLOCK),)
        _invalidate_kernel[grid](slots, len(slots), cache.generation, B=cache.page_size, BLOCK=BLOCK)


def write_open(
    cache: HotCache,
    layer: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    seq_lens: torch.Tensor,
    requests: torch.Tensor,
) -> None:
    """See :func:`locks_kernels.tier.write_open`."""
    if len(keys):
        _write_open_kernel[(cache.kv_heads, len(keys))](
            cache.keys, cache.values, cache.capacity, keys, *keys.stride(), values, *values.stride(),
            seq_lens, requests, layer, cache.layers, cache.kv_heads, B=cache.page_size, D=cache.head_dim,
        )  # fmt: skip


def resolve(
    cache: HotCache,
    layer: int,
    pages: torch.Tensor,
    counts: torch.Tensor,
    requests: torch.Tensor | None,
    pool: tuple[torch.Tensor, torch.Tensor] | None,
    out: torch.Tensor,
) -> None:
    """See :func:`locks_kernels.tier.resolve`."""
    rows, heads, width = pages.shape
    if not rows:
        return
    lists = (pages, width, counts)
    tables = (cache.slot_of, cache.generation, cache.filled, cache.used, cache.state, cache.counters)
    blocks = triton.cdiv(width, BLOCK)
    first = layer * cache.pages * heads
    _look_up_kernel[(rows * heads, blocks)](*lists, *tables, cache.missing, first, heads, BLOCK=BLOCK)
    windows = min(cache.windows, triton.cdiv(pages.numel() * hot_cache.LOOK, cache.window))
    if windows:
        _take_in_kernel[(windows,)](
            *tables, cache.owner, cache.missing, cache.targets, cache.capacity, cache.windows,
            cache.pages, heads, WINDOW=cache.window,
        )  # fmt: skip
    copiers = 0
    if windows and pool is not None:
        # One program alone under the interpreter, which runs them one after the other.
        copiers = 2 if pages.device.type == "cpu" else min(COPY_PROGRAMS, pages.numel())
    keys, values = pool or (cache.keys, cache.values)
    _finish_kernel[(copiers + rows * heads * blocks,)](
        *lists, cache.slot_of, cache.state, cache.counters, counts if requests is None else requests, out,
        layer, cache.layers, cache.pages, heads, cache.capacity, cache.windows, copiers, blocks,
        cache.keys, cache.values, keys, *keys.stride()[:3], values, *values.stride()[:3],
        cache.missing, cache.targets,
        OPEN=requests is not None, BLOCK=BLOCK, WINDOW=cache.window, B=cache.page_size, D=cache.head_dim,
    )  # fmt: skip


# ---- the decode step ----------------------------------------------------------------------------------


@triton.jit
def _copy_tile(
    hot_keys, hot_values, slot, keys, k_page, k_slot, k_head, values, v_page, v_slot, v_head, page, head,
    B: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """A tile of the host pool to a slot; ``slot`` and ``page`` are int64."""
    token = tl.arange(0, B)[:, None]
    dims = tl.arange(0, D)[None, :]
    to = (slot * B + token) * D + dims
    k = tl.load(keys + page * k_page + head * k_head + token * k_slot + dims)
    v = tl.load(values + page * v_page + head * v_head + token * v_slot + dims)
    tl.store(hot_keys + to, k)
    tl.store(hot_values + to, v)


@triton.jit
def _load_open_kernel(
    hot_keys, hot_values, capacity,
    keys, k_page, k_slot, k_head, values, v_page, v_slot, v_head,
    page_table, table_row, seq_lens, requests, generation, open_page, open_stamp, layers, kv_heads,
    B: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """One tile of a row's open page, unless the request slot has it."""
    row = tl.program_id(1).to(tl.int64)
    layer = tl.program_id(0) // kv_heads
    head = tl.program_id(0) % kv_heads
    before = tl.load(seq_lens + row).to(tl.int64) - 1
    page = tl.load(page_table + row * table_row + before // B).to(tl.int64)
    request = tl.load(requests + row).to(tl.int64)
    here = (tl.load(open_page + request) == page) & (
        tl.load(open_stamp + request) == tl.load(generation + page)
    )
    if (before % B > 0) & (here == 0):
        slot = capacity + (request * layers + layer) * kv_heads + head
        element: tl.constexpr = hot_keys.dtype.element_ty
        _copy_tile(
            hot_keys, hot_values, slot,
            tl.load(keys + layer).to(tl.pointer_type(element)), k_page, k_slot, k_head,
            tl.load(values + layer).to(tl.pointer_type(element)), v_page, v_slot, v_head, page, head, B, D,
        )  # fmt: skip


@triton.jit
def _begin_kernel(
    page_table, table_row, seq_lens, requests, generation, open_page, open_stamp, state, rows,
    B: tl.constexpr, OPEN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if row == 0:
        tl.store(state + CLOCK, (tl.load(state + CLOCK) + 1) & WRAP)
    if row < rows:
        before = tl.load(seq_lens + row).to(tl.int64) - 1
        page = tl.load(page_table + row * table_row + before // B).to(tl.int64)
        # Rows never share an open page, but for those that pad a batch.
        stamp = tl.load(generation + page) + 1
        tl.store(generation + page, stamp)
        if OPEN:
            request = tl.load(requests + row).to(tl.int64)
            tl.store(open_page + request, page.to(tl.int32))
            tl.store(open_stamp + request, stamp)


@triton.jit
def _invalidate_kernel(slots, count, generation, B: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    page = tl.load(slots + at, mask=inside, other=0).to(tl.int64) // B
    tl.atomic_add(generation + page, 1, mask=inside)


@triton.jit(do_not_specialize=["layer"])
def _write_open_kernel(
    hot_keys, hot_values, capacity, keys, k_row, k_head, k_dim, values, v_row, v_head, v_dim,
    seq_lens, requests, layer, layers, kv_heads, B: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    token = (tl.load(seq_lens + row).to(tl.int64) - 1) % B
    slot = capacity + (tl.load(requests + row).to(tl.int64) * layers + layer) * kv_heads + head
    dims = tl.arange(0, D)
    to = (slot * B + token) * D + dims
    k = tl.load(keys + row * k_row + head * k_head + dims * k_dim)
    v = tl.load(values + row * v_row + head * v_head + dims * v_dim)
    tl.store(hot_keys + to, k.to(hot_keys.dtype.element_ty))
    tl.store(hot_values + to, v.to(hot_values.dtype.element_ty))


# ---- a layer ------------------------------------------------------------------------------------------


@triton.jit
def _entries(row_head, block, pages, width, counts, first, kv_heads, BLOCK: tl.constexpr):
    """Entries of a block, which of them are complete pages of a list, their pages, and their tiles."""
    count = tl.load(counts + row_head // kv_heads).to(tl.int32)
    entry = block * BLOCK + tl.arange(0, BLOCK)
    complete = (entry < count - 1) & (count <= width)
    page = tl.load(pages + row_head.to(tl.int64) * width + entry, mask=complete, other=0)
    return entry, count, complete, page, first + page * kv_heads + row_head % kv_heads


@triton.jit(do_not_specialize=["first"])
def _look_up_kernel(
    pages, width, counts, slot_of, generation, filled, used, state, counters, missing, first, kv_heads,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Mark the tiles that are there; claim and list the others."""
    row_head, block = tl.program_id(0), tl.program_id(1)
    _, count, complete, page, tile = _entries(row_head, block, pages, width, counts, first, kv_heads, BLOCK)
    slot = tl.load(slot_of + tile, mask=complete, other=-1)
    held = slot >= 0
    stamp = tl.load(generation + page, mask=complete, other=0)
    hit = held & (tl.load(filled + slot, mask=held, other=0) == stamp)
    tl.store(used + slot, tl.load(state + CLOCK), mask=hit)

    absent = complete & (hit == 0)
    # Not -1, which says that no call has claimed the tile.
    claim = -2 - (tl.load(state + CALLS) & (WRAP >> 1))
    before = tl.atomic_xchg(slot_of + tile, claim, mask=absent)
    won = (absent & (before != claim)).to(tl.int32)
    place = tl.atomic_add(state + MISSING, tl.sum(won)) + tl.cumsum(won, 0) - 1
    tl.store(missing + place, tile, mask=won == 1)

    misses = tl.sum(absent.to(tl.int64))
    if (count > width) & (block == 0):
        misses += count - 1
    tl.atomic_add(counters + HITS, tl.sum(hit.to(tl.int64)))
    tl.atomic_add(counters + MISSES, misses)


@triton.jit
def _plan(missing, windows, WINDOW: tl.constexpr):
    """As ``torch_tier.plan``."""
    used = tl.minimum(windows, (missing * LOOK + WINDOW - 1) // WINDOW)
    return used, tl.minimum(WINDOW, (missing + tl.maximum(used, 1) - 1) // tl.maximum(used, 1))


@triton.jit
def _take_in_kernel(
    slot_of, generation, filled, used, state, counters, owner, missing, targets, capacity, windows,
    pages, kv_heads, WINDOW: tl.constexpr,
):  # fmt: skip
    """The oldest slots of a window for its share of the missing tiles."""
    count = tl.load(state + MISSING)
    in_use, share = _plan(count, windows, WINDOW)
    number = tl.program_id(0)
    first = number * share
    wanted = tl.minimum(share, count - first)
    if number == 0:
        tl.store(state + COPIES, tl.minimum(count, in_use * share))
    if (number < in_use) & (wanted > 0):
        lane = tl.arange(0, WINDOW)
        inside = lane < capacity
        slot = (tl.load(state + HAND) + number * WINDOW + lane) % capacity
        clock = tl.load(state + CLOCK)
        before = tl.load(owner + slot, mask=inside, other=-1)
        owned = before >= 0
        mapped = owned & (tl.load(slot_of + before, mask=owned, other=-1) == slot)
        stamp = tl.load(generation + before // kv_heads % pages, mask=owned, other=0)
        here = mapped & (tl.load(filled + slot, mask=inside, other=0) == stamp)
        age = tl.where(here, (clock - tl.load(used + slot, mask=inside, other=0)) & WRAP, OLDEST)
        age = tl.where(inside, tl.minimum(age, OLDEST), -1)
        # The oldest first, of equal ones those that come first.  Ranking each against each is shorter to
        # write and three times the code, which is fetched anew in every layer.
        order = tl.sort((age * WINDOW + WINDOW - 1 - lane) * 2 + mapped.to(tl.int32), descending=True)
        taken = (order >= YOUNG * WINDOW * 2) & (lane < wanted)
        found = tl.sum(taken.to(tl.int32))

        seen = WINDOW - 1 - ((order >> 1) & (WINDOW - 1))
        slot = (tl.load(state + HAND) + number * WINDOW + seen) % capacity
        before = tl.load(owner + slot, mask=taken, other=-1)
        tl.store(slot_of + before, -1, mask=taken & ((order & 1) == 1))
        at = first + lane
        tile = tl.load(missing + at, mask=taken, other=0)
        tl.store(slot_of + tile, slot, mask=taken)
        tl.store(owner + slot, tile, mask=taken)
        fresh = tl.load(generation + tile // kv_heads % pages, mask=taken, other=0)
        tl.store(filled + slot, fresh, mask=taken)
        tl.store(used + slot, clock, mask=taken)
        tl.store(targets + at, slot, mask=taken)
        tl.store(targets + first + lane, -1, mask=(lane >= found) & (lane < wanted))
        tl.atomic_add(counters + FILLS, found.to(tl.int64))


@triton.jit(do_not_specialize=["layer", "copiers", "blocks"])
def _finish_kernel(
    pages, width, counts, slot_of, state, counters, requests, sources, layer, layers, pool_pages, kv_heads,
    capacity, windows, copiers, blocks,
    hot_keys, hot_values, keys, k_page, k_slot, k_head, values, v_page, v_slot, v_head, missing, targets,
    OPEN: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, B: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """The first programs copy, since the link is what takes long; the others name sources meanwhile."""
    number = tl.program_id(0)
    if number < copiers:
        copies = tl.load(state + COPIES)
        for at in range(number, copies, copiers):
            _fill(
                at, hot_keys, hot_values, keys, k_page, k_slot, k_head, values, v_page, v_slot, v_head,
                missing, targets, layer * pool_pages, kv_heads, B, D,
            )  # fmt: skip
    else:
        number -= copiers
        _name_sources(
            number // blocks, number % blocks, pages, width, counts, slot_of, counters, requests, sources,
            layer, layers, layer * pool_pages * kv_heads, kv_heads, capacity, OPEN, BLOCK,
        )  # fmt: skip
        if number == 0:
            # Nobody else of this launch reads these.
            in_use, _ = _plan(tl.load(state + MISSING), windows, WINDOW)
            tl.store(state + HAND, (tl.load(state + HAND) + in_use * WINDOW) % tl.maximum(capacity, 1))
            tl.store(state + CALLS, (tl.load(state + CALLS) + 1) & WRAP)
            tl.store(state + MISSING, 0)


@triton.jit
def _name_sources(
    row_head, block, pages, width, counts, slot_of, counters, requests, sources, layer, layers, first,
    kv_heads, capacity, OPEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Where each entry of a block is read from."""
    entry, count, complete, page, tile = _entries(
        row_head, block, pages, width, counts, first, kv_heads, BLOCK
    )
    # What has a slot by now is fresh: a stale one was claimed.
    slot = tl.load(slot_of + tile, mask=complete, other=-1)
    source = tl.where(slot >= 0, -1 - slot, page)
    last = (entry == count - 1) & (count <= width)
    if OPEN:
        request = tl.load(requests + row_head // kv_heads).to(tl.int32)
        open_slot = capacity + (request * layers + layer) * kv_heads + row_head % kv_heads
        source = tl.where(last, -1 - open_slot, source)
    else:
        page = tl.load(pages + row_head.to(tl.int64) * width + entry, mask=last, other=0)
        source = tl.where(last, page, source)
    at = row_head.to(tl.int64) * width + entry
    tl.store(sources + at, source, mask=complete | last)

    reads = tl.sum((complete & (slot < 0)).to(tl.int64))
    if (count > width) & (block == 0):
        reads += count - 1
    tl.atomic_add(counters + HOST_READS, reads)


@triton.jit
def _fill(
    at, hot_keys, hot_values, keys, k_page, k_slot, k_head, values, v_page, v_slot, v_head,
    missing, targets, first_page, kv_heads, B: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """One of the missing tiles from the host pool to its slot, if it got one."""
    slot = tl.load(targets + at).to(tl.int64)
    if slot >= 0:
        tile = tl.load(missing + at)
        page = (tile // kv_heads - first_page).to(tl.int64)
        _copy_tile(
            hot_keys, hot_values, slot, keys, k_page, k_slot, k_head,
            values, v_page, v_slot, v_head, page, tile % kv_heads, B, D,
        )  # fmt: skip
