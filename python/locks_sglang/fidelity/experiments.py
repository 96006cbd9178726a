"""Which selectors are compared: one table of the paper after the other, over layers and texts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch

from . import formats
from .capture import Capture
from .measure import COMBINE_RULES, Fidelity, Scene, combine, fidelity, ranks

Scores = Callable[[Scene], torch.Tensor]

STORED = ("r8i4", "r4i4", "r2i4", "r8h", "r6h", "r4h")
SCOPE_TIERS = (4, 8)
PAGE_FORMATS = ("r8i4", "r4i4", "r8h", "r6h", "r4h")
BASIS_RANKS = (2, 4, 8)
BASIS_BITS = {"bf16": 0, "int8": 127, "int4": 7, "int2": 1}


@dataclass(frozen=True)
class Row:
    """One measurement, as it is written to the results file."""

    table: str
    selector: str
    format: str
    scope: str
    page: int
    budget: int
    text: str
    combine: str = "share-average"
    rope: str = "post"
    bytes: float = 0.0
    rank: int = 0
    mass: float = 0.0
    worst_head: float = 0.0
    recall: float = 0.0


@dataclass(frozen=True)
class Case:
    """A row without budget and figures, and how its scores are made."""

    row: Row
    scores: Scores


def bytes_per_page(name: str, scene: Scene) -> int:
    return formats.SummaryLayout.parse(name, scene.keys.shape[-1], scene.page).bytes_per_page


def selector_cases(scene: Scene, text: str) -> Iterator[Case]:
    """Every format that can be served, the quality ceiling, and the two simplest summaries."""
    dim = scene.keys.shape[-1]
    blank = Row("selectors", "locks", "", "page", scene.page, 0, text)
    yield Case(replace(blank, selector="oracle", format="keys", bytes=2.0 * scene.page * dim), _exact)
    for name in STORED:
        row = replace(blank, format=name, bytes=bytes_per_page(name, scene), rank=int(name[1]))
        yield Case(row, _stored(name))
    yield Case(
        replace(blank, selector="centroid", format="mu", bytes=dim + 2.0),
        _reconstructed(formats.centroid_only),
    )
    yield Case(replace(blank, selector="quest", format="minmax", bytes=4.0 * dim), Scene.quest_scores)


def basis_cases(scene: Scene, text: str) -> Iterator[Case]:
    """Figure 5: rank and precision of the basis, C and mu in int8."""
    for bits, largest in BASIS_BITS.items():
        for rank in BASIS_RANKS:
            row = Row("basis", "locks", f"r{rank}{bits}", "page", scene.page, 0, text, rank=rank)
            yield Case(row, _reconstructed(partial(formats.fitted, rank=rank, basis_max=largest)))


def page_cases(scene: Scene, text: str) -> Iterator[Case]:
    """Figure 5 and Table C.18: page size at a fixed number of attended tokens."""
    yield Case(Row("page", "oracle", "keys", "page", scene.page, 0, text), _exact)
    for name in PAGE_FORMATS:
        row = Row("page", "locks", name, "page", scene.page, 0, text, bytes=bytes_per_page(name, scene))
        yield Case(row, _stored(name))


def rope_cases(scene: Scene, text: str) -> Iterator[Case]:
    """Table C.17: keys fitted before and after RoPE."""
    for name in ("r8i4", "r4i4", "r8h", "r6h", "r4h"):
        blank = Row("rope", "locks", name, "page", scene.page, 0, text)
        yield Case(blank, _stored(name))
        yield Case(
            replace(blank, rope="pre"), _reconstructed(partial(formats.stored_before_rope, name=name))
        )


def scope_cases(scene: Scene, text: str, calibration: Scene) -> Iterator[Case]:
    """Table B.6: page-local against shared centroids and bases at equal bytes."""
    pages = scene.complete
    for tier in SCOPE_TIERS:
        name = f"r{tier}i4"
        blank = Row("scope", "locks", name, "page/page", scene.page, 0, text)
        blank = replace(blank, bytes=bytes_per_page(name, scene), rank=tier)
        yield Case(blank, _stored(name))
        rank = formats.equal_rank(scene, tier, own_centroid=True, pages=pages)
        for scope, source in (("page/sequence", scene), ("page/global", calibration)):
            basis = formats.within_pages_basis(source, rank)
            scores = _reconstructed(partial(formats.shared_basis, basis=basis))
            yield Case(replace(blank, scope=scope, rank=rank), scores)
        rank = formats.equal_rank(scene, tier, own_centroid=False, pages=pages)
        for scope, source in (("sequence/sequence", scene), ("global/global", calibration)):
            centroid, basis = formats.whole_text_fit(source, rank)
            scores = _reconstructed(partial(formats.shared_both, centroid=centroid, basis=basis))
            yield Case(replace(blank, scope=scope, rank=rank), scores)


def combine_cases(scene: Scene, text: str) -> Iterator[Case]:
    """Table C.16: how the query heads of a group agree on pages, with exact scores."""
    for rule in COMBINE_RULES:
        yield Case(Row("combine", "oracle", "keys", "page", scene.page, 0, text, combine=rule), _exact)


def _exact(scene: Scene) -> torch.Tensor:
    return scene.exact


def _stored(name: str) -> Scores:
    return _reconstructed(partial(formats.stored, name=name))


def _reconstructed(keys: Callable[[Scene], torch.Tensor]) -> Scores:
    return lambda scene: scene.scores(keys(scene))


TABLES = ("selectors", "basis", "page", "rope", "scope", "combine")
PAGE_SIZES = (16, 32, 64)


class Study:
    """Means over all layers of all texts, built up layer by layer."""

    def __init__(self, budgets: Iterable[int], tables: Iterable[str] = TABLES) -> None:
        self.budgets = tuple(budgets)
        self.tables = tuple(tables)
        self._sums: dict[Row, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0, 0.0])

    def add_layer(self, capture: Capture, layer: int, text: str, calibration: Capture) -> None:
        for page in PAGE_SIZES if "page" in self.tables else PAGE_SIZES[:1]:
            scene = Scene.of(capture, layer, page)
            ideal = ranks(combine(scene.exact, "share-average"), scene.current)
            for case in self._cases(scene, text, layer, calibration):
                places = ranks(combine(case.scores(scene), case.row.combine), scene.current)
                for budget in self.budgets:
                    slots = budget // page
                    if slots >= 2:
                        self._count(replace(case.row, budget=budget), fidelity(scene, places, ideal, slots))

    def rows(self) -> list[dict]:
        """Finished rows, one a case, budget and text."""
        finished = []
        for row, (mass, worst_head, recall, count) in self._sums.items():
            figures = {"mass": mass / count, "worst_head": worst_head / count, "recall": recall / count}
            finished.append(asdict(row) | {name: round(value, 5) for name, value in figures.items()})
        return finished

    def _cases(self, scene: Scene, text: str, layer: int, calibration: Capture) -> Iterator[Case]:
        if "page" in self.tables:
            yield from page_cases(scene, text)
        if scene.page != PAGE_SIZES[0]:
            return
        for table, cases in (
            ("selectors", selector_cases),
            ("basis", basis_cases),
            ("rope", rope_cases),
            ("combine", combine_cases),
        ):
            if table in self.tables:
                yield from cases(scene, text)
        if "scope" in self.tables:
            yield from scope_cases(scene, text, Scene.of(calibration, layer, scene.page))

    def _count(self, row: Row, figures: Fidelity) -> None:
        sums = self._sums[row]
        for index, value in enumerate((figures.mass, figures.worst_head, figures.recall, 1.0)):
            sums[index] += value
