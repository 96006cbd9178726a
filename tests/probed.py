"""What a server selected against what it should have: the queries and keys of a step, computed once more.

The probe (`probe/locks_test_probe.py`) writes them in the server; `independent` computes in float64.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import independent
import numpy as np
import torch
from traced import BUDGET, PAGE, Pages


@dataclass(frozen=True)
class Sample:
    """One row of one layer: fp32 ``queries [q_heads, d]`` and ``keys [T, kv_heads, d]``, from the pool."""

    rid: str
    seq_len: int
    layer: int
    queries: np.ndarray
    keys: np.ndarray
    sm_scale: float


@dataclass
class Agreement:
    """Of page slots: how many hold the page that they should, and what the others cost."""

    slots: int = 0
    same: int = 0
    worst: float = 0.0
    """Most attention share that a row of a head lost by pages that it should not have taken."""

    @property
    def rate(self) -> float:
        return self.same / self.slots

    def add(self, found: list[int], share: np.ndarray) -> None:
        wanted = independent.chosen_pages(share, BUDGET // PAGE)
        self.slots += len(wanted)
        self.same += len(set(wanted) & set(found))
        self.worst = max(self.worst, float(share[wanted].sum() - share[found].sum()))


def samples(folder: Path, rids: set[str]) -> Iterator[Sample]:
    """What the probe kept of these requests."""
    for path in sorted(folder.glob("*.pt")):
        kept = torch.load(path)
        if kept["rid"] in rids:
            kept["queries"], kept["keys"] = kept["queries"].numpy(), kept["keys"].numpy()
            yield Sample(**kept)


def compare(sample: Sample, found: Pages, name: str, agreement: Agreement) -> None:
    """Add a sample whose selection was ``found``; ``name`` is the record format."""
    assert found is not None, f"layer {sample.layer} attends everything at {sample.seq_len} tokens"
    group = len(sample.queries) // len(found)
    for head, pages in enumerate(found):
        keys = sample.keys[:, head]
        records = independent.records(keys, PAGE, name)
        scores = [
            independent.head_scores(query, keys, PAGE, sample.sm_scale, records)
            for query in sample.queries[head * group : (head + 1) * group]
        ]
        agreement.add(pages, independent.group_share(np.stack(scores)))
