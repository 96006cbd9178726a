"""Retained mass and recall of a page selection, for many queries of one layer at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from locks_kernels import EnvelopeLayout, page_view
from locks_kernels.reference import envelope_pages, principal_basis, score_pages

from .capture import Capture


@dataclass
class Scene:
    """One layer of a capture cut into pages; shapes use H KV heads, G query heads a KV head.

    Attributes:
        queries: ``[H, G, n, d]``.
        keys: ``[H, T, d]``, after RoPE.
        current: ``[n]``, page of each query's own token; pages before it are complete.
        exact: fp32 ``[H, G, n, pages]``, Eq. 1's log-mass of every page, -inf past the query.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    positions: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    sm_scale: float
    page: int
    current: torch.Tensor = field(init=False)
    exact: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.current = self.positions // self.page
        self.exact = self.page_masses(self.keys)

    @classmethod
    def of(cls, capture: Capture, layer: int, page: int) -> Scene:
        heads = capture.keys.shape[1]
        return cls(
            capture.queries[layer].unflatten(0, (heads, -1)),
            capture.keys[layer],
            capture.positions,
            capture.cos,
            capture.sin,
            capture.sm_scale,
            page,
        )

    @property
    def complete(self) -> int:
        """Complete pages of the text."""
        return self.keys.shape[1] // self.page

    def pages(self, keys: torch.Tensor | None = None) -> torch.Tensor:
        """Complete pages as ``[pages, B, H, d]``, of the text's keys or of others of their shape."""
        return page_view((self.keys if keys is None else keys).transpose(0, 1), self.page)

    @cached_property
    def page_bases(self) -> torch.Tensor:
        """Principal directions of every complete page, unquantised, ``[pages, H, d, 8]``."""
        pages = self.pages().transpose(1, 2)
        return principal_basis(pages - pages.mean(-2, keepdim=True), 8)

    def page_masses(self, keys: torch.Tensor) -> torch.Tensor:
        """Log-mass of every page if the keys were ``keys [H, T, d]``, -inf past each query."""
        logits = self.queries.flatten(1, 2) @ keys.transpose(1, 2) * self.sm_scale
        logits = logits.unflatten(1, self.queries.shape[1:3])
        future = torch.arange(keys.shape[1]) > self.positions.unsqueeze(-1)
        logits = logits.masked_fill(future, float("-inf"))
        ragged = -keys.shape[1] % self.page
        logits = torch.nn.functional.pad(logits, (0, ragged), value=float("-inf"))
        return logits.unflatten(-1, (-1, self.page)).logsumexp(-1)

    def scores(self, reconstructed: torch.Tensor) -> torch.Tensor:
        """Eq. 2: scores from the keys ``[H, T', d]`` that the records of complete pages stand for.

        The current page has no record and is scored from its own keys.
        """
        keys = torch.cat([reconstructed, self.keys[:, reconstructed.shape[1] :]], dim=1)
        estimated = self.page_masses(keys)
        return torch.where(self._is_current(), self.exact, estimated)

    def quest_scores(self) -> torch.Tensor:
        """Quest's bound for every page, the current one included."""
        layout = EnvelopeLayout(self.keys.shape[-1], self.page)
        flat = self.queries.flatten(0, 2)
        shape = self.queries.shape[:3]
        scores = torch.full_like(self.exact, float("-inf"))
        closed = score_pages(flat, envelope_pages(self.pages(), layout), self.sm_scale).unflatten(0, shape)
        past = torch.arange(self.complete) < self.current.unsqueeze(-1)
        scores[..., : self.complete] = closed.masked_fill(~past, float("-inf"))
        for index, (position, page) in enumerate(zip(self.positions, self.current, strict=True)):
            open_keys = self.keys[:, page * self.page : position + 1].transpose(0, 1).unsqueeze(0)
            one = self.queries[:, :, index].flatten(0, 1)
            bound = score_pages(one, envelope_pages(open_keys, layout), self.sm_scale)
            scores[:, :, index, page] = bound.unflatten(0, shape[:2]).squeeze(-1)
        return scores

    def _is_current(self) -> torch.Tensor:
        return torch.arange(self.exact.shape[-1]) == self.current.unsqueeze(-1)


def shares(scores: torch.Tensor) -> torch.Tensor:
    """Share of each page in its query's attention, ``[..., pages]``."""
    return scores.softmax(-1)


def combine(scores: torch.Tensor, rule: str) -> torch.Tensor:
    """One value a page and KV head from the scores ``[H, G, n, pages]`` of its query heads.

    ``share-average`` is LOCKS's rule.  ``share-max`` takes the largest share, ``group-max`` the
    largest log-mass, ``group-mass`` the sum of the masses (both without normalising per head),
    ``per-head`` keeps the heads apart.
    """
    if rule == "share-average":
        return shares(scores).mean(1, keepdim=True)
    if rule == "share-max":
        return shares(scores).amax(1, keepdim=True)
    if rule == "group-max":
        return scores.amax(1, keepdim=True)
    if rule == "group-mass":
        return scores.logsumexp(1, keepdim=True)
    if rule == "per-head":
        return scores
    raise ValueError(f"unknown combine rule {rule!r}; legal: {', '.join(COMBINE_RULES)}")


COMBINE_RULES = ("share-average", "share-max", "group-max", "group-mass", "per-head")


def ranks(values: torch.Tensor, current: torch.Tensor) -> torch.Tensor:
    """Place of every page in its query's order: ``values [H, 1 or G, n, pages]`` -> the same shape.

    Sink and current page come first, then by value, ties to the lower index; a page past the
    query's own gets a place past the last.
    """
    numbers = torch.arange(values.shape[-1])
    own = current.unsqueeze(-1)
    values = values.masked_fill((numbers == 0) | (numbers == own), float("inf"))
    order = values.argsort(dim=-1, descending=True, stable=True)
    places = torch.empty_like(order).scatter_(-1, order, numbers.expand_as(order).contiguous())
    return places.masked_fill(numbers > own, values.shape[-1])


@dataclass
class Fidelity:
    """Means over layers, KV heads and queries, at one budget.

    ``mass`` is the attention mass that the selected pages hold, averaged over query heads;
    ``worst_head`` the smallest in each group; ``recall`` the part of the exact selection's free
    slots (all but sink and current page) that were found.
    """

    mass: float
    worst_head: float
    recall: float


def fidelity(scene: Scene, places: torch.Tensor, ideal: torch.Tensor, slots: int) -> Fidelity:
    """Judge ``slots`` pages taken by ``places``, against the places of the exact scores."""
    chosen, wanted = places < slots, ideal < slots
    mass = (shares(scene.exact) * chosen).sum(-1)  # [H, G, n]
    free = (wanted.sum(-1) - 2).clamp_min(1)
    found = ((chosen & wanted).sum(-1) - 2).clamp_min(0)
    has_free = wanted.sum(-1) > 2
    recall = torch.where(has_free, found / free, 1.0)
    return Fidelity(float(mass.mean()), float(mass.amin(1).mean()), float(recall.mean()))
