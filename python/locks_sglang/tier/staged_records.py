"""StagedRecords: records of the pages that a prefill completes, from its keys on the GPU.

From the host pool those keys would cross the link once more, a few bytes at a time.
"""

from __future__ import annotations

from locks_kernels import Records, page_view, summarize

from .staging import PrefillStaging

LEAST = 32
"""Fewer pages cross the link sooner than the launches of this way, some for each layer, are made."""


class StagedRecords:
    """Builds the records of one layer after the other, while its keys are staged.

    Args:
        records: of the pool, with a leading layer dimension.
        staging: of its prefills.
        least: pages that a forward must complete; fewer are left to others.
    """

    def __init__(self, records: Records, staging: PrefillStaging, least: int = LEAST) -> None:
        self._records, self._staging, self._least = records, staging, least
        self._layers, _, kv_heads = records.planes[0].shape[:3]
        # By staged page, since an op finds the record of a page where it finds its keys.
        self._scratch = type(records).allocate(
            records.layout,  # type: ignore[arg-type]
            (1, staging.pages, kv_heads),
            records.planes[0].device,
        )
        self._forward = 0
        self._built: set[int] = set()
        self.pages_built = 0
        """Pages of forwards whose records were all built here."""

    def build(self, index: int) -> None:
        """Records of a layer, whose buffer holds the forward's own tokens by now."""
        staging = self._staging
        staged, pages = staging.completed
        if len(staged) < self._least:
            return
        if self._forward != staging.forwards:
            self._forward, self._built = staging.forwards, set()
        keys = page_view(staging.buffers(index)[0], staging.page_size)
        summarize([keys], staging.slots, self._scratch)
        found = self._scratch.layer(0).gather(staged)
        self._records.layer(index).store(pages, found)  # type: ignore[arg-type]
        self._built.add(index)

    def take(self) -> bool:
        """Whether the forward that just ended has all its records; to be asked once."""
        done = self._staging.active and self._forward == self._staging.forwards
        done = done and len(self._built) == self._layers
        self._built = set()
        if done:
            self.pages_built += len(self._staging.completed[0])
        return done
