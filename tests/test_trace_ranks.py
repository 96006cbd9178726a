"""The traces of several ranks as one, although the ranks write them at different times."""

import json
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest
import traced
from server import Server
from traced import Traced


def write(path: Path, seq_len: int, pages: list[list[int]] | None, rid: str = "one") -> None:
    with path.open("a") as file:
        file.write(json.dumps({"rid": rid, "seq_len": seq_len, "layer": 0, "pages": pages}) + "\n")


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    paths = tmp_path / "trace", tmp_path / "trace.rank1"
    for path in paths:
        path.touch()
    return paths


@pytest.fixture
def two(paths: tuple[Path, Path]) -> Traced:
    return Traced(cast(Server, cast(Any, None)), paths[0], {}, ranks=2)


def test_a_rank_that_writes_late(two: Traced, paths: tuple[Path, Path]) -> None:
    first, second = paths
    write(first, 17, [[0, 1]])
    write(first, 18, [[0, 2]])
    write(second, 17, [[0, 3]])

    def later() -> None:
        time.sleep(0.2)
        write(second, 18, [[0, 4]], rid="another")
        write(second, 18, [[0, 5]])

    late = threading.Thread(target=later)
    late.start()
    rows = two.rows_of("one")
    late.join()
    assert rows == {(17, 0): [[0, 1], [0, 3]], (18, 0): [[0, 2], [0, 5]]}


def test_a_step_that_is_dropped_is_not_waited_for(two: Traced, paths: tuple[Path, Path]) -> None:
    first, second = paths
    write(first, 17, None)
    write(second, 17, None)
    write(first, 18, [[0, 2]])
    assert two.rows_of("one", last=17) == {(17, 0): None}


def test_a_rank_that_never_writes(
    two: Traced, paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traced, "WAIT_S", 0.1)
    write(paths[0], 17, [[0, 1]])
    with pytest.raises(AssertionError, match=r"rank 1 wrote no rows \[\(17, 0\)\]"):
        two.rows_of("one")
