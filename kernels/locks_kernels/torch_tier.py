"""The tier ops in torch: the CPU path, and the specification of their kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .hot_cache import CALLS, CLOCK, COPIES, HAND, LOOK, NOBODY, OLDEST, WRAP, YOUNG, HotCache


def begin_step(
    cache: HotCache,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    requests: torch.Tensor,
) -> None:
    """See :func:`locks_kernels.tier.begin_step`."""
    cache.state[CLOCK] = (cache.state[CLOCK] + 1) & WRAP
    before = (seq_lens.long() - 1) % cache.page_size
    pages = page_table.gather(1, ((seq_lens.long() - 1) // cache.page_size).unsqueeze(1)).squeeze(1).long()
    if cache.open_rows:
        request = requests.long()
        stamp = cache.generation[pages]
        here = (cache.open_page[request] == pages) & (cache.open_stamp[request] == stamp)
        for row in (~here & (before > 0)).nonzero().flatten().tolist():
            for layer in range(cache.layers):
                slots = _open_slots(cache, layer, request[row : row + 1])[0]
                cache.keys[slots] = keys[layer][pages[row]].transpose(0, 1)
                cache.values[slots] = values[layer][pages[row]].transpose(0, 1)
        cache.open_page[request] = pages.int()
        cache.open_stamp[request] = stamp + 1
    cache.generation[pages] += 1


def invalidate(cache: HotCache, slots: torch.Tensor) -> None:
    """See :func:`locks_kernels.tier.invalidate`."""
    once = torch.ones_like(slots, dtype=torch.int32)
    cache.generation.index_add_(0, slots.long() // cache.page_size, once)


def write_open(
    cache: HotCache,
    layer: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    seq_lens: torch.Tensor,
    requests: torch.Tensor,
) -> None:
    """See :func:`locks_kernels.tier.write_open`."""
    token = ((seq_lens.long() - 1) % cache.page_size).unsqueeze(1)
    slots = _open_slots(cache, layer, requests.long())
    cache.keys[slots, token] = keys.to(cache.keys.dtype)
    cache.values[slots, token] = values.to(cache.values.dtype)


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
    _, heads, width = pages.shape
    entry = torch.arange(width, device=pages.device)
    last = counts.view(-1, 1, 1) - 1
    listed = last < width
    complete = ((entry < last) & listed).expand_as(pages)
    tiles = (layer * cache.pages + pages.long()) * heads
    tiles += torch.arange(heads, device=pages.device).view(1, -1, 1)
    tiles = torch.where(complete, tiles, 0)

    slots = torch.where(complete, _look_up(cache, tiles), NOBODY)
    hits = slots != NOBODY
    cache.used[slots[hits]] = cache.state[CLOCK]
    missing = list(dict.fromkeys(tiles[complete & ~hits].tolist()))
    fills = _take_in(cache, missing)
    if pool is not None:
        _fill(cache, layer, *pool)

    slots = torch.where(complete, _look_up(cache, tiles), NOBODY)
    sources = torch.where(slots != NOBODY, ~slots, pages.long())
    if requests is not None:
        open_slots = _open_slots(cache, layer, requests.long()).unsqueeze(2)
        sources = torch.where(entry == last, ~open_slots, sources)
    out.copy_(torch.where((entry <= last) & listed, sources, out.long()))
    cache.state[CALLS] = (cache.state[CALLS] + 1) & WRAP
    unlisted = int(((counts.long() - 1) * (counts > width)).sum()) * heads
    counts_of = (hits, complete & ~hits, complete & (slots == NOBODY))
    found, missed, read = (int(tensor.sum()) for tensor in counts_of)
    added = [found, missed + unlisted, fills, read + unlisted]
    cache.counters.add_(torch.tensor(added, device=pages.device))


def _fill(cache: HotCache, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Copy the tiles that were given slots from the host pool of their layer."""
    copies = int(cache.state[COPIES])
    slots, tiles = cache.targets[:copies].long(), cache.missing[:copies].long()
    tiles, slots = tiles[slots != NOBODY], slots[slots != NOBODY]
    page, head = tiles // cache.kv_heads - layer * cache.pages, tiles % cache.kv_heads
    cache.keys[slots] = keys[page, :, head]
    cache.values[slots] = values[page, :, head]


def plan(cache: HotCache, missing: int) -> tuple[int, int]:
    """Windows that are looked at for so many missing tiles, and tiles that each gives slots to at most."""
    windows = min(cache.windows, -(-missing * LOOK // cache.window))
    return windows, min(cache.window, -(-missing // max(windows, 1)))


def _look_up(cache: HotCache, tiles: torch.Tensor) -> torch.Tensor:
    """Slots of tiles, -1 for those that are not in the cache or stale."""
    slots = cache.slot_of.flatten()[tiles].long().clamp(min=NOBODY)
    if not cache.capacity:
        return slots
    fresh = cache.filled[slots] == cache.generation[_page_of(cache, tiles)]
    return torch.where(fresh, slots, NOBODY)


def _take_in(cache: HotCache, missing: list[int]) -> int:
    """Give slots to missing tiles and tell ``_fill``; how many got one."""
    windows, share = plan(cache, len(missing))
    copies = min(len(missing), windows * share)
    table = cache.slot_of.view(-1)
    tiles = torch.tensor(missing, dtype=torch.int64, device=table.device)
    cache.missing[: len(missing)] = tiles.int()
    cache.targets[:copies] = NOBODY
    table[tiles] = NOBODY
    hand, fills = int(cache.state[HAND]), 0
    for window in range(windows):
        wanted = tiles[window * share : (window + 1) * share]
        victims = _victims(cache, hand + window * cache.window, len(wanted))
        wanted = wanted[: len(victims)]
        before = cache.owner[victims].long()
        evicted = before[(before != NOBODY) & (table[before] == victims)]
        table[evicted] = NOBODY
        table[wanted] = victims.int()
        cache.owner[victims] = wanted.int()
        cache.filled[victims] = cache.generation[_page_of(cache, wanted)]
        cache.used[victims] = cache.state[CLOCK]
        cache.targets[window * share : window * share + len(victims)] = victims.int()
        fills += len(victims)
    cache.state[HAND] = (hand + windows * cache.window) % max(cache.capacity, 1)
    cache.state[COPIES] = copies
    return fills


def _victims(cache: HotCache, first: int, wanted: int) -> torch.Tensor:
    """The slots of a window that were not read for longest, stale and empty ones before all: int64."""
    device = cache.owner.device
    seen = (first + torch.arange(min(cache.window, cache.capacity), device=device)) % cache.capacity
    owner = cache.owner[seen].long()
    here = (owner != NOBODY) & (cache.slot_of.view(-1)[owner] == seen)
    here &= cache.filled[seen] == cache.generation[_page_of(cache, owner)]
    age = torch.where(here, (cache.state[CLOCK] - cache.used[seen]) & WRAP, OLDEST).clamp(max=OLDEST)
    oldest = age.argsort(descending=True, stable=True)[:wanted]
    return seen[oldest[age[oldest] >= YOUNG]]


def _page_of(cache: HotCache, tiles: torch.Tensor) -> torch.Tensor:
    return tiles // cache.kv_heads % cache.pages


def _open_slots(cache: HotCache, layer: int, requests: torch.Tensor) -> torch.Tensor:
    """Slots of open tiles, int64 ``[rows, kv_heads]``."""
    first = cache.capacity + (requests * cache.layers + layer) * cache.kv_heads
    return first.unsqueeze(1) + torch.arange(cache.kv_heads, device=requests.device)
