"""What `pip install .` gives a user: both packages, the CUDA sources, the entry point, no dependencies."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ("python", "kernels", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    pytest.importorskip("setuptools")
    # A copy, since building leaves folders behind.
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, source / name, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__")
            )
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    done = subprocess.run([*command, "-w", str(built), str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(next(built.glob("*.whl")))


def test_every_source_file_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    expected = {
        str(path.relative_to(ROOT / folder))
        for folder, patterns in (("python", ["**/*.py"]), ("kernels", ["**/*.py", "**/*.cu", "**/*.cuh"]))
        for pattern in patterns
        for path in (ROOT / folder).glob(pattern)
    }
    assert expected - set(wheel.namelist()) == set()


def test_nothing_but_the_two_packages_is_installed(wheel: zipfile.ZipFile) -> None:
    top = {name.split("/")[0] for name in wheel.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"locks_kernels", "locks_sglang"}


def test_the_plugin_is_found_and_nothing_is_pulled_in(wheel: zipfile.ZipFile) -> None:
    entry_points = next(name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "[sglang.srt.plugins]" in wheel.read(entry_points).decode()
    metadata = wheel.read(entry_points.replace("entry_points.txt", "METADATA")).decode()
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:")]
    assert [line for line in required if "extra ==" not in line] == []
