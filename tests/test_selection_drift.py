"""What a trace says of the pages that a selection keeps."""

import json
from pathlib import Path

import selection_drift


def test_kept_and_hot_share(tmp_path: Path) -> None:
    """One layer, one head: three old pages stay, one goes back and forth between two."""
    lines = [
        {"rid": "a", "seq_len": 200 + step, "layer": 0, "pages": [[0, 3, 5, 6 + step % 2, 12]]}
        for step in range(40)
    ]
    lines.append({"rid": "a", "seq_len": 400, "layer": 0, "pages": None})
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (steps,) = selection_drift.read(trace).values()
    assert len(steps) == 40
    assert selection_drift.kept(steps) == 0.75
    assert selection_drift.hot_share(steps, 0) == 0
    assert selection_drift.hot_share(steps, 2) == 1  # room for both
    # The one of the two that came first stays: what was read a step ago is not evicted.
    assert selection_drift.hot_share(steps, 1) == 0.875
