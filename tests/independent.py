"""LOCKS once more, from the paper alone: float64 numpy, one page and one query at a time.

Nothing of ``locks_kernels`` is used here, so that an error there cannot hide behind itself:
its own singular value decomposition, its own rounding to bf16, no packed bytes.  Equations
are those of arXiv 2607.24555: sections 2 and 4, appendices A.4, B.6 and C.7.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

FORMATS = {  # name: (rank, largest code of the basis, Hadamard coordinates)
    "r8i4": (8, 7, False),
    "r4i4": (4, 7, False),
    "r2i4": (2, 7, False),
    "r8h": (8, 7, True),
    "r6h": (6, 7, True),
    "r4h": (4, 7, True),
}


def log_sum_exp(values: np.ndarray) -> float:
    top = values.max()
    return float(top + np.log(np.exp(values - top).sum()))


def page_mass(query: np.ndarray, keys: np.ndarray, scale: float) -> float:
    """Equation 1: log of the attention mass of a page, ``query [d]`` and ``keys [tokens, d]``."""
    return log_sum_exp(keys.astype(np.float64) @ query.astype(np.float64) * scale)


def envelope_bound(query: np.ndarray, keys: np.ndarray, scale: float) -> float:
    """Quest: the largest logit that any key inside the page's bounding box could have."""
    low, high = to_bf16(keys.min(0)), to_bf16(keys.max(0))
    query = query.astype(np.float64)
    return float(np.maximum(query * low, query * high).sum() * scale)


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Round to the nearest bf16, ties to even, and return float64."""
    bits = np.asarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)


def codes(vector: np.ndarray, largest: int) -> tuple[np.ndarray, float]:
    """Symmetric integer codes in [-largest, largest] of a vector and their one bf16 scale."""
    scale = to_bf16(np.abs(vector).max() / largest).item()
    if scale == 0.0:
        return np.zeros_like(vector), 0.0
    return np.clip(np.rint(vector / scale), -largest, largest), scale


def quantised(vector: np.ndarray, largest: int) -> np.ndarray:
    """A vector after a trip through its codes."""
    code, scale = codes(vector, largest)
    return code * scale


@dataclass
class Record:
    """What is stored of a page, read back: ``mu [d]``, ``basis [d, r]``, ``coefficients [B, r]``."""

    mu: np.ndarray
    basis: np.ndarray
    coefficients: np.ndarray

    def mass(self, query: np.ndarray, scale: float) -> float:
        """Equation 2: ``q.mu`` and the log-sum-exp of ``(V^T q).c_i``."""
        query = query.astype(np.float64)
        return query @ self.mu * scale + log_sum_exp(self.coefficients @ (self.basis.T @ query) * scale)


def record(keys: np.ndarray, name: str) -> Record:
    """Section 4's summary of one page, ``keys [B, d]``."""
    rank, largest, rotated = FORMATS[name]
    turn = hadamard(keys.shape[1]) if rotated else np.eye(keys.shape[1])
    keys = keys.astype(np.float64) @ turn
    centroid = keys.mean(0)
    deviations = keys - centroid
    exact_basis = np.linalg.svd(deviations, full_matrices=False)[2][:rank].T
    mu = quantised(centroid, 127)
    if rotated:  # the codes are the basis; C is the best fit to it and to mu, and holds the scale
        basis = np.stack([codes(column, largest)[0] for column in exact_basis.T], axis=1)
        fit = np.linalg.lstsq(basis, (keys - mu).T, rcond=None)[0].T
        coefficients = np.stack([quantised(column, largest) for column in fit.T], axis=1)
    else:
        basis = np.stack([quantised(column, largest) for column in exact_basis.T], axis=1)
        coefficients = np.stack([quantised(row, 127) for row in deviations @ exact_basis])
    return Record(turn @ mu, turn @ basis, coefficients)


def hadamard(size: int) -> np.ndarray:
    signs = [[(-1.0) ** (row & column).bit_count() for column in range(size)] for row in range(size)]
    return np.array(signs) / np.sqrt(size)


def records(keys: np.ndarray, page_size: int, name: str) -> list[Record]:
    """Records of all complete pages of ``keys [T, d]``."""
    complete = len(keys) // page_size
    return [record(keys[page * page_size : (page + 1) * page_size], name) for page in range(complete)]


def head_scores(
    query: np.ndarray, keys: np.ndarray, page_size: int, scale: float, selector: str | list[Record]
) -> np.ndarray:
    """Scores of all pages of one query head; ``keys [T, d]`` of its KV head up to its own token.

    ``selector`` is ``oracle``, ``quest``, or the records of the complete pages.  The page of the
    query's own token has no record and is scored exactly.
    """
    scores = []
    current = (len(keys) - 1) // page_size
    for number in range(current + 1):
        page = keys[number * page_size : (number + 1) * page_size]
        if selector == "quest":
            scores.append(envelope_bound(query, page, scale))
        elif isinstance(selector, str) or number == current:
            scores.append(page_mass(query, page, scale))
        else:
            scores.append(selector[number].mass(query, scale))
    return np.array(scores)


def group_share(scores: np.ndarray) -> np.ndarray:
    """Appendix A.4: mean over the group of each head's page shares, ``scores [G, pages]``."""
    return np.stack([np.exp(row - log_sum_exp(row)) for row in scores]).mean(0)


def chosen_pages(share: np.ndarray, slots: int) -> list[int]:
    """Section 4: sink and current page, then the largest shares; ties to the lower page."""
    pages = len(share)
    if pages <= slots:
        return list(range(pages))
    inner = sorted(range(1, pages - 1), key=lambda page: (-share[page], page))
    return sorted([0, *inner[: slots - 2], pages - 1])


def attention(query: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float):
    """Softmax attention of one query over ``keys [tokens, d]``: output and log-sum-exp."""
    logits = keys.astype(np.float64) @ query.astype(np.float64) * scale
    total = log_sum_exp(logits)
    return np.exp(logits - total) @ values.astype(np.float64), total
