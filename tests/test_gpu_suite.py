"""The tools of the GPU tests, which run without one: comparisons that must fail, and the result's rows."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import test_gpu as command
from greedy import Greedy, assert_same_tokens
from traced import assert_same_pages

ROOT = Path(__file__).parents[1]

EXPECTED = Greedy([7, 8, 9, 10], [2.0, 1.5, 0.1, 3.0])


def test_same_tokens() -> None:
    assert assert_same_tokens(EXPECTED, EXPECTED, 0.3) == 4
    assert assert_same_tokens(EXPECTED.until(2), EXPECTED.until(2), 0.0) == 2
    assert assert_same_tokens(EXPECTED.since(1), Greedy([8, 9, 10], [1.5, 0.1, 3.0]), 0.0) == 3


def test_a_near_tie_ends_the_comparison() -> None:
    assert assert_same_tokens(Greedy([7, 8, 5, 6], [2.0, 1.5, 0.1, 3.0]), EXPECTED, 0.3) == 2


@pytest.mark.parametrize(
    ("tokens", "message"),
    [([7, 5, 9, 10], "token 1 is 5, expected 8, which was better by 1.5"), ([7, 8, 9], "3 == 4")],
)
def test_other_tokens(tokens: list[int], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_same_tokens(Greedy(tokens, [1.0] * len(tokens)), EXPECTED, 0.3)


def test_a_near_tie_at_once_shows_nothing() -> None:
    with pytest.raises(AssertionError, match="near tie at token 1"):
        assert_same_tokens(Greedy([7, 5], [2.0, 2.0]), Greedy([7, 8], [2.0, 0.1]), 0.3)


def test_pages_that_move() -> None:
    rows = {(100, layer): [[0, 2, 5, 6]] for layer in range(50)}
    other = {**rows, (100, 3): [[0, 3, 5, 6]]}
    assert assert_same_pages(other, rows, 0.005) == (1, 200)
    with pytest.raises(AssertionError, match=r"1 of 200 page slots differ, in rows \[\(100, 3\)\]"):
        assert_same_pages(other, rows, 0.004)
    with pytest.raises(AssertionError, match="sparse in one run alone"):
        assert_same_pages({**rows, (100, 3): None}, rows)


TESTS = """
import pytest
def test_good(record_property): record_property("slots", 4)
def test_bad(): assert False
@pytest.mark.skip("why")
def test_skipped(): pass
@pytest.fixture
def broken(): raise OSError
def test_error(broken): pass
"""


def run_pytest(folder: Path, code: str) -> list[command.Row]:
    """The rows of a part that ran this code."""
    (folder / "test_it.py").write_text(code)
    arguments = ["-q", "-p", "no:cacheprovider", "--junit-xml=it.xml", "test_it.py"]
    run = subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=folder, capture_output=True)
    return command.read("server", run.returncode, folder / "it.xml")


def test_rows_of_a_part(tmp_path: Path) -> None:
    file, measured, whole = run_pytest(tmp_path, TESTS)
    counts = {"passed": 1, "failed": 2, "skipped": 1}
    assert {name: file[name] for name in counts} == {name: whole[name] for name in counts} == counts
    assert file["failures"] == ["test_bad", "test_error"]
    assert measured["test"] == "test_good" and measured["slots"] == 4
    assert whole["status"] == 1


def test_what_was_not_tested_is_said(tmp_path: Path) -> None:
    assert command.not_run(run_pytest(tmp_path, TESTS), ["tensor_parallel"]) == [
        "NOT RUN: tests/server/test_tensor_parallel.py: needs two NVIDIA GPUs",
        "NOT RUN: 1 of test_it: why",
    ]
    whole = run_pytest(tmp_path, 'import pytest\npytest.skip("why not", allow_module_level=True)\n')
    assert command.not_run(whole, []) == ["NOT RUN: all of test_it: why not (test_it.py:2)"]


def test_files_of_servers_that_are_not_with_the_others_are_elsewhere() -> None:
    server, *others = (command.PARTS[part] for part in ("server", *(set(command.PARTS) - {"server"})))
    ignored = {option.removeprefix("--ignore=") for option in server} - {"tests/server"}
    assert ignored == {path for part in others for path in part if path.startswith("tests/server/")}
    assert all((ROOT / path).exists() for path in ignored)


def test_a_part_without_a_report_failed(tmp_path: Path) -> None:
    (whole,) = command.read("server", 2, tmp_path / "it.xml")
    assert whole["failed"] == 1


def test_a_part_is_ended_at_the_deadline(tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    assert command.wait(process, time.monotonic() + 0.2) != 0
    assert process.poll() is not None


def test_every_gpu_file_of_the_kernels_is_in_the_suite() -> None:
    """Its tests are skipped without a GPU and would never be missed with one, were the mark forgotten."""
    files = sorted((Path(__file__).parent / "kernels").glob("*_gpu.py"))
    assert files
    assert [file.name for file in files if "pytest.mark.gpu" not in file.read_text()] == []


def test_sanitizer_has_a_case_of_every_kernel() -> None:
    """Names of tests in the Makefile, which would be missed by nobody were a test renamed."""
    found = re.search(r"^SANITIZED := ((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found
    names = found[1].replace("\\\n", "").split(" or ")
    files = [f"tests/kernels/test_{op}_gpu.py" for op in ("score", "select", "attend", "summarize")]
    options = ["-q", "-p", "no:cacheprovider", "--collect-only", "-k", " or ".join(names)]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files], cwd=ROOT, capture_output=True, text=True
    )
    cases = [line for line in run.stdout.splitlines() if "::" in line]
    assert {case.split("::")[0] for case in cases} == set(files)
    assert len(cases) == len(names) and all(any(name.strip() in case for case in cases) for name in names)
