"""How many pages each KV head attends: rules that read the estimated shares, and those that do not.

A rule maps a layer's cumulated shares ``[H, n, pages]`` (of the pages in the order in which a
selection takes them, sink and current page first) to page counts ``[H, n]``.  None of them sees
true masses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .measure import ranks

Counts = Callable[[int, torch.Tensor], torch.Tensor]

RULES = ("head", "layer", "calibrated", "threshold")


@dataclass(frozen=True)
class Bounds:
    """Fewest and most pages of a head; a cap of None stands for the whole context."""

    floor: int = 4
    cap: int | None = None

    def apply(self, counts: torch.Tensor) -> torch.Tensor:
        return counts.clamp(self.floor, self.cap)


def order_of(shares: torch.Tensor, current: torch.Tensor) -> torch.Tensor:
    """Pages in the order of selection: ``shares [H, n, pages]`` -> indices, future pages last."""
    places = ranks(shares.unsqueeze(1), current).squeeze(1)
    return places.argsort(dim=-1, stable=True)


def fixed(pages: int) -> Counts:
    """The same count for all."""
    return lambda _layer, shares: torch.full(shares.shape[:2], pages)


def per_head(target: float, bounds: Bounds) -> Counts:
    """The fewest pages whose estimated shares reach the target, for every row and KV head."""
    return lambda _layer, shares: bounds.apply(_reaching(shares, target))


def per_layer(target: float, bounds: Bounds) -> Counts:
    """One count for a row's KV heads: the fewest pages with which their mean reaches the target."""

    def counts(_layer: int, shares: torch.Tensor) -> torch.Tensor:
        return bounds.apply(_reaching(shares.mean(0, keepdim=True), target)).expand(shares.shape[:2])

    return counts


def threshold(share: float, bounds: Bounds) -> Counts:
    """Every page with at least this estimated share."""

    def counts(_layer: int, shares: torch.Tensor) -> torch.Tensor:
        return bounds.apply((shares.diff(dim=-1)[..., 1:] >= share).sum(-1) + 2)

    return counts


def calibrated(target: float, bounds: Bounds, calibration: Sequence[torch.Tensor]) -> Counts:
    """A constant for every layer and head, with which the calibration text's rows reach the target."""
    by_layer = [bounds.apply(_reaching(shares.mean(1, keepdim=True), target)) for shares in calibration]
    return lambda layer, shares: by_layer[layer].expand(shares.shape[:2])


def equal_threshold(target: float, bounds: Bounds, calibration: Sequence[torch.Tensor]) -> Counts:
    """The threshold with which the calibration text takes as many pages as by `per_head`."""
    wanted = mean_pages(per_head(target, bounds), calibration)
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if mean_pages(threshold(middle, bounds), calibration) > wanted:
            low = middle
        else:
            high = middle
    return threshold(high, bounds)


def mean_pages(counts: Counts, curves: Sequence[torch.Tensor]) -> float:
    """Mean over rows, heads and layers."""
    taken = [counts(layer, shares).float().mean() for layer, shares in enumerate(curves)]
    return float(torch.stack(taken).mean())


def rule(name: str, target: float, bounds: Bounds, calibration: Sequence[torch.Tensor]) -> Counts:
    """One of `RULES` for a target; `calibrated` and `threshold` are fitted to the calibration text."""
    if name == "head":
        return per_head(target, bounds)
    if name == "layer":
        return per_layer(target, bounds)
    if name == "calibrated":
        return calibrated(target, bounds, calibration)
    if name == "threshold":
        return equal_threshold(target, bounds, calibration)
    raise ValueError(f"unknown rule {name!r}; legal: {', '.join(RULES)}")


def _reaching(shares: torch.Tensor, target: float) -> torch.Tensor:
    """Fewest pages with a cumulated share of at least the target, at most all."""
    return ((shares < target).sum(-1) + 1).clamp_max(shares.shape[-1])
