"""Budgets by estimated mass against fixed budgets, at an equal mean number of attended pages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

import torch

from . import formats
from .capture import Capture
from .measure import Scene, combine, shares
from .page_counts import RULES, Bounds, Counts, fixed, order_of, rule

PAGE = 16
FORMATS = ("oracle", "r8i4", "r6h")
TARGETS = (0.8, 0.85, 0.9, 0.95, 0.97, 0.98, 0.99)
CAPS = (None, 128)
PERCENTILES = (1, 5, 25)


@dataclass
class Curves:
    """What every further page adds, ``[H, n, pages]`` a layer, in the order of selection.

    ``estimated`` cumulates the shares by the records' scores, ``retained`` the true ones; both are
    means over the query heads of a KV head.
    """

    estimated: list[torch.Tensor] = field(default_factory=list)
    retained: list[torch.Tensor] = field(default_factory=list)

    def add(self, scene: Scene, name: str) -> None:
        scores = scene.exact if name == "oracle" else scene.scores(formats.stored(scene, name))
        estimated = combine(scores, "share-average").squeeze(1)
        order = order_of(estimated, scene.current)
        self.estimated.append(estimated.gather(-1, order).cumsum(-1))
        self.retained.append(shares(scene.exact).mean(1).gather(-1, order).cumsum(-1))


@dataclass(frozen=True)
class Outcome:
    """Masses in per cent of all rows, heads and layers, and the pages that they took."""

    pages: float
    most_pages: int
    mass: float
    p1: float
    p5: float
    p25: float


def outcome(counts: Counts, curves: Curves) -> Outcome:
    taken = [
        counts(layer, shares).clamp_max(shares.shape[-1]) for layer, shares in enumerate(curves.estimated)
    ]
    masses = [
        retained.gather(-1, (pages - 1).unsqueeze(-1)).squeeze(-1)
        for retained, pages in zip(curves.retained, taken, strict=True)
    ]
    pages, mass = torch.stack(taken), torch.stack(masses).flatten()
    low = mass.quantile(torch.tensor(PERCENTILES) / 100).tolist()
    return Outcome(float(pages.float().mean()), int(pages.max()), float(mass.mean()), *low)


def fixed_outcome(pages: float, curves: Curves) -> Outcome:
    """Fixed budgets of ``pages``, interpolated between the two whole numbers of pages beside it."""
    below = int(pages)
    pair = [outcome(fixed(whole), curves) for whole in (below, below + 1)]
    mixed = [
        a + (pages - below) * (b - a) for a, b in zip(*(asdict(p).values() for p in pair), strict=True)
    ]
    return Outcome(pages, pair[1].most_pages, *mixed[2:])


class AutoStudy:
    """Curves of the texts, layer by layer; rows compare every rule with fixed budgets."""

    def __init__(self, names: Iterable[str] = FORMATS) -> None:
        self.names = tuple(names)
        self.calibration = {name: Curves() for name in self.names}
        self._texts: dict[str, dict[str, Curves]] = {}

    def calibrate(self, capture: Capture) -> None:
        for layer in range(capture.layers):
            self._add(self.calibration, capture, layer)

    def add_layer(self, capture: Capture, layer: int, text: str) -> None:
        self._add(self._texts.setdefault(text, {name: Curves() for name in self.names}), capture, layer)

    def rows(self) -> list[dict]:
        """One row a text, format, rule, target and cap; the fixed budget of as many pages beside it."""
        rows = []
        for name in self.names:
            calibration = self.calibration[name].estimated
            for cap in CAPS:
                for target in TARGETS:
                    for rule_name in RULES:
                        counts = rule(rule_name, target, Bounds(cap=cap), calibration)
                        case = {"format": name, "rule": rule_name, "target": target, "cap": cap}
                        rows += [
                            {"table": "mass", **case, "text": text, **_compare(counts, curves[name])}
                            for text, curves in self._texts.items()
                        ]
        return rows

    def _add(self, by_name: dict[str, Curves], capture: Capture, layer: int) -> None:
        scene = Scene.of(capture, layer, PAGE)
        for name, curves in by_name.items():
            curves.add(scene, name)


def _compare(counts: Counts, curves: Curves) -> dict[str, float]:
    found = outcome(counts, curves)
    fixed = asdict(fixed_outcome(found.pages, curves))
    figures = asdict(found) | {f"fixed_{name}": fixed[name] for name in ("mass", "p1", "p5", "p25")}
    return {name: round(value, 5) for name, value in figures.items()}
