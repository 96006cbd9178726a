"""Section 5.4: page selection over a quantised KV cache, from summaries made before or after quantising."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace

import torch

from . import formats
from .capture import Capture
from .kv_cache import KV_CACHES, KVCache
from .measure import Scene, combine, fidelity, ranks

PAGE = 16
FORMATS = ("r8i4", "r6h", "r4i4", "r2i4")
FIGURES = ("mass", "stored_mass", "recall", "error")


@dataclass(frozen=True)
class Row:
    """One measurement, as it is written to the results file.

    ``summaries`` tells the keys that the records are made of: those of a ``bf16`` cache (the paper's
    "post") or the ``stored`` ones ("pre"); the oracle's exact scores likewise.  ``mass`` and ``recall``
    are against full attention over the unquantised keys, ``stored_mass`` against full attention over
    the cache; ``error`` is the relative error of the output, ``|o - o_full| / |o_full|``, against full
    attention over unquantised keys and values.  The selector ``dense`` attends the whole cache: its
    error is the quantiser's own.
    """

    kv: str
    selector: str
    format: str
    summaries: str
    budget: int | None
    text: str
    mass: float = 1.0
    stored_mass: float = 1.0
    recall: float = 1.0
    error: float = 0.0


class KVStudy:
    """Means over all layers of every text, built up layer by layer."""

    def __init__(self, budgets: Iterable[int], caches: Iterable[str] = KV_CACHES) -> None:
        self.budgets = tuple(budgets)
        self.caches = tuple(caches)
        self._sums: dict[Row, torch.Tensor] = defaultdict(lambda: torch.zeros(len(FIGURES) + 1))

    def add_layer(self, capture: Capture, layer: int, text: str) -> None:
        scene = Scene.of(capture, layer, PAGE)
        values = capture.values[layer]
        plain = KVCache(scene.keys, values, scene.keys, values, *[torch.zeros_like(scene.positions)] * 2)
        truth = CacheAttention(scene, plain)
        ideal = ranks(combine(truth.exact, "share-average"), scene.current)
        everything = torch.ones_like(ideal, dtype=torch.bool)
        full = truth.output(everything)
        unquantised = _scores(replace(scene, keys=scene.keys.bfloat16().float()))
        for name in self.caches:
            cache = KVCache.of(name, scene.keys, values, scene.positions)
            attention = CacheAttention(scene, cache)
            error = _error(attention.output(everything), full)
            self._count(Row(name, "dense", "keys", "", None, text), (1.0, 1.0, 1.0, error))
            for row, scores in _selections(scene, cache, unquantised):
                row = replace(row, kv=name, text=text)
                places = ranks(combine(scores, "share-average"), scene.current)
                for budget in self.budgets:
                    figures = fidelity(scene, places, ideal, budget // PAGE)
                    chosen = places < budget // PAGE
                    stored = float((attention.shares * chosen).sum(-1).mean())
                    error = _error(attention.output(chosen), full)
                    self._count(replace(row, budget=budget), (figures.mass, stored, figures.recall, error))

    def rows(self) -> list[dict]:
        """Finished rows, one a case, budget and text."""
        finished = []
        for row, sums in self._sums.items():
            means = (sums[:-1] / sums[-1]).tolist()
            figures = zip(FIGURES, means, strict=True)
            finished.append(asdict(row) | {name: round(value, 5) for name, value in figures})
        return finished

    def _count(self, row: Row, figures: tuple[float, ...]) -> None:
        self._sums[row] += torch.tensor([*figures, 1.0])


class CacheAttention:
    """Full attention of a scene's queries over a cache, cut into pages.

    Attributes:
        exact: fp32 ``[H, G, n, pages]``, log-mass of every page over the cache's keys.
        shares: fp32 ``[H, G, n, pages]``, their softmax.
    """

    def __init__(self, scene: Scene, cache: KVCache) -> None:
        keys = [part.transpose(1, 2).unsqueeze(1) for part in (cache.keys, cache.recent_keys)]
        numbers = torch.arange(scene.keys.shape[1])
        old, new = (scene.queries @ part * scene.sm_scale for part in keys)
        logits = torch.where(numbers < cache.key_border.unsqueeze(-1), old, new)
        logits = logits.masked_fill(numbers > scene.positions.unsqueeze(-1), float("-inf"))
        self.exact = _paged(logits, scene.page, float("-inf")).logsumexp(-1)
        self.shares = self.exact.softmax(-1)
        weights = logits.softmax(-1)
        is_old = numbers < cache.value_border.unsqueeze(-1)
        self._outputs = sum(
            _page_outputs(weights * part_is_read, values, scene.page)
            for part_is_read, values in ((is_old, cache.values), (~is_old, cache.recent_values))
        )

    def output(self, chosen: torch.Tensor) -> torch.Tensor:
        """Attention over the ``chosen [H, 1 or G, n, pages]`` pages alone, ``[H, G, n, d]``."""
        mask = chosen.expand_as(self.shares).to(self.shares.dtype)
        total = (mask.unsqueeze(-2) @ self._outputs).squeeze(-2)
        return total / (self.shares * mask).sum(-1, keepdim=True)


def _scores(scene: Scene) -> dict[str, torch.Tensor]:
    """Scores ``[H, G, n, pages]`` of the oracle and of every format, from the scene's keys."""
    return {"keys": scene.exact} | {name: scene.scores(formats.stored(scene, name)) for name in FORMATS}


def _selections(
    scene: Scene, cache: KVCache, unquantised: dict[str, torch.Tensor]
) -> Iterator[tuple[Row, torch.Tensor]]:
    """Scores of every selector, by the keys that it is made of."""
    for name, early in unquantised.items():
        yield _row(name, "bf16"), early
    # A page has been quantised or is recent as a whole: the border is at a multiple of pages.
    first_token = torch.arange(scene.exact.shape[-1]) * scene.page
    quantised = first_token < cache.key_border.unsqueeze(-1)
    if quantised.any():
        for name, late in _scores(replace(scene, keys=cache.keys)).items():
            yield _row(name, "stored"), torch.where(quantised, late, unquantised[name])


def _row(name: str, summaries: str) -> Row:
    return Row("", "oracle" if name == "keys" else "locks", name, summaries, None, "")


def _page_outputs(weights: torch.Tensor, values: torch.Tensor, page: int) -> torch.Tensor:
    """``[H, G, n, T]`` and ``[H, T, d]`` -> ``[H, G, n, pages, d]``, each page's part of the output."""
    group, queries = weights.shape[1:3]
    by_page = _paged(weights, page, 0.0).flatten(1, 2).transpose(1, 2)  # [H, pages, G n, B]
    ragged = torch.nn.functional.pad(values, (0, 0, 0, -values.shape[1] % page))
    parts = by_page @ ragged.unflatten(1, (-1, page))
    return parts.transpose(1, 2).unflatten(1, (group, queries)).contiguous()


def _paged(tokens: torch.Tensor, page: int, fill: float) -> torch.Tensor:
    """``[..., T]`` -> ``[..., pages, B]``, the last page filled up."""
    return torch.nn.functional.pad(tokens, (0, -tokens.shape[-1] % page), value=fill).unflatten(
        -1, (-1, page)
    )


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).mean())
