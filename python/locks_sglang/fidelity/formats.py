"""The keys that a summary stands for, for the formats that are served and for the paper's controls.

Every function takes a scene and returns ``[H, T', d]``, T' the tokens of complete pages;
:meth:`Scene.scores` turns them into page scores (Eq. 2 is the log-sum-exp over just these keys).
"""

from __future__ import annotations

import torch
from locks_kernels import SummaryLayout
from locks_kernels.reference import quantize, reconstruct, summarize_pages

from .capture import rotate
from .measure import Scene


def stored(scene: Scene, name: str) -> torch.Tensor:
    """A format of ``locks_kernels``, through its very records."""
    layout = SummaryLayout.parse(name, scene.keys.shape[-1], scene.page)
    return _tokens(reconstruct(summarize_pages(scene.pages(), layout)))


def stored_before_rope(scene: Scene, name: str) -> torch.Tensor:
    """The same fitted to keys before RoPE, and rotated afterwards (C.17)."""
    layout = SummaryLayout.parse(name, scene.keys.shape[-1], scene.page)
    plain = rotate(scene.keys, scene.cos, scene.sin, inverse=True)
    tokens = _tokens(reconstruct(summarize_pages(scene.pages(plain), layout)))
    count = tokens.shape[1]
    return rotate(tokens, scene.cos[:count], scene.sin[:count])


def fitted(scene: Scene, rank: int, basis_max: int) -> torch.Tensor:
    """Page-local basis with codes up to ``basis_max`` (0: not quantised), int8 C and mu."""
    centroid, centred = _centred(scene)
    basis = scene.page_bases[..., :rank]
    return _tokens(_assemble(centroid, basis, centred @ basis, basis_max))


def centroid_only(scene: Scene) -> torch.Tensor:
    """One key a page, in int8."""
    centroid, centred = _centred(scene)
    return _tokens(_int8(centroid).expand_as(centred))


def shared_basis(scene: Scene, basis: torch.Tensor) -> torch.Tensor:
    """Page centroids with a basis ``[H, d, r]`` shared by all pages (B.6's hybrid controls)."""
    centroid, centred = _centred(scene)
    return _tokens(_assemble(centroid, basis, centred @ basis, 7))


def shared_both(scene: Scene, centroid: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """One centroid ``[H, d]`` and one basis ``[H, d, r]`` for all pages (B.6's fully shared controls)."""
    pages = scene.pages().transpose(1, 2)
    shared = centroid.unsqueeze(-2)
    return _tokens(_assemble(shared, basis, (pages - shared) @ basis, 7))


def within_pages_basis(scene: Scene, rank: int) -> torch.Tensor:
    """Top eigenvectors of the sum of the pages' scatter matrices, ``[H, d, r]``."""
    centred = _centred(scene)[1].transpose(0, 1).flatten(1, 2)
    return _top_directions(centred, rank)


def whole_text_fit(scene: Scene, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean ``[H, d]`` and principal basis ``[H, d, r]`` of all keys of a text."""
    centroid = scene.keys.mean(1)
    return centroid, _top_directions(scene.keys - centroid.unsqueeze(1), rank)


def equal_rank(scene: Scene, page_rank: int, own_centroid: bool, pages: int) -> int:
    """Largest rank of a shared basis that needs no more bytes a page than the local ``r{page_rank}i4``.

    A page keeps its int8 coefficients, their row scales and perhaps its centroid; the basis and
    the shared centroid are spread over ``pages``.
    """
    dim, size = scene.keys.shape[-1], scene.page
    limit = SummaryLayout(page_rank, "i4", dim, size).bytes_per_page

    def cost(rank: int) -> float:
        centroid = dim + 2
        shared = dim * rank / 2 + 2 * rank + (0 if own_centroid else centroid)
        return size * rank + 2 * size + (centroid if own_centroid else 0) + shared / pages

    return max(rank for rank in range(1, dim + 1) if cost(rank) <= limit)


def _top_directions(rows: torch.Tensor, rank: int) -> torch.Tensor:
    return torch.linalg.eigh(rows.transpose(-1, -2) @ rows)[1].flip(-1)[..., :rank]


def _centred(scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
    """Centroids ``[pages, H, 1, d]`` and centred keys ``[pages, H, B, d]``."""
    pages = scene.pages().transpose(1, 2)
    centroid = pages.mean(-2, keepdim=True)
    return centroid, pages - centroid


def _assemble(
    centroid: torch.Tensor, basis: torch.Tensor, coefficients: torch.Tensor, basis_max: int
) -> torch.Tensor:
    """``mu + V c_i`` after quantisation: int8 mu and rows of C, V by columns."""
    if basis_max:
        codes, scale = quantize(basis, -2, basis_max)
        basis = codes * scale.float()
    codes, scale = quantize(coefficients, -1, 127)
    return _int8(centroid) + (codes * scale.float()) @ basis.transpose(-1, -2)


def _int8(values: torch.Tensor) -> torch.Tensor:
    codes, scale = quantize(values, -1, 127)
    return codes * scale.float()


def _tokens(pages: torch.Tensor) -> torch.Tensor:
    """``[pages, H, B, d]`` -> ``[H, pages * B, d]``."""
    return pages.transpose(0, 1).flatten(1, 2)
