"""How tests are spread over workers; that the lists there name files which exist."""

from pathlib import Path

import parallel
import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", [*parallel.OWN_SERVERS, *parallel.SLOW])
def test_named_file_exists(name: str) -> None:
    assert len(list(HERE.rglob(f"{name}.py"))) == 1


def test_files_that_share_servers_stay_together() -> None:
    assert parallel.unit_of("tests/server/test_dense.py") == parallel.unit_of("tests/server/test_new.py")
    for file in ("tests/server/test_serve_demo.py", "tests/test_dense.py", "tests/kernels/test_build.py"):
        assert parallel.unit_of(file) == file


def test_servers_come_first_and_quick_files_last() -> None:
    files = [
        "server/test_dense",
        "server/test_serve_demo",
        "kernels/test_build",
        "test_needles",
        "test_new",
    ]
    places = [parallel.place_of(f"tests/{file}.py") for file in files]
    assert places == sorted(set(places))


def test_no_two_files_have_one_name() -> None:
    """pytest imports test files by their name alone."""
    names = [path.name for path in HERE.rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names)
