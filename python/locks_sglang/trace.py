"""The trace: the pages of every decode row and layer as JSON lines, for debugging and tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from locks_kernels import StepTables

from .taps import LayerTap


class Trace:
    """Writes ``{"rid", "seq_len", "layer", "pages"}`` lines to a file.

    ``pages`` are the logical pages of each KV head of this rank, null for a row that attends everything.
    Ranks after the first write to files of their own, ``path.rank1`` and so on.
    """

    def __init__(self, path: str, page_size: int, rank: int = 0) -> None:
        self.path = Path(f"{path}.rank{rank}" if rank else path)
        self._file = self.path.open("w")
        self._page_size = page_size

    def after_step(
        self, step: StepTables, taps: dict[int, LayerTap], rows: int, rids: Sequence[str] | None
    ) -> None:
        """Write the first ``rows`` rows of the step that ran last; waits for the device."""
        lengths = step.seq_lens[:rows].tolist()
        for layer, tap in taps.items():
            counts = tap.counts[:rows].tolist()
            for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
                restricted = count < -(-length // self._page_size)
                pages = tap.logical[row, :, :count].tolist() if restricted else None
                rid = rids[row] if rids else None
                line = {"rid": rid, "seq_len": length, "layer": layer, "pages": pages}
                self._file.write(json.dumps(line) + "\n")
        self._file.flush()
