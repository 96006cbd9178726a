"""What `python -m build` makes: a complete sdist, and a wheel for every machine made from it."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# What docker/install.sh builds from, and what an sdist has besides.
SOURCES = ("python", "kernels", "requirements", "pyproject.toml", "README.md", "LICENSE")
BESIDES = ("MANIFEST.in", "CHANGELOG.md", "tests")
EXTRAS = ("bench", "cpu", "test")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the sdist and the wheel that was built from it."""
    # A copy, since building leaves folders behind.
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in (*SOURCES, *BESIDES):
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("*.egg-info", "__pycache__")
            shutil.copytree(ROOT / name, source / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "eprecat" not in said, said
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    (path,) = built.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith("dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


def sources() -> set[str]:
    """Files of the two packages, named as in a wheel."""
    folders = {"python": ["**/*.py", "**/*.json"], "kernels": ["**/*.py", "**/*.cu", "**/*.cuh"]}
    return {
        str(path.relative_to(ROOT / folder))
        for folder, patterns in folders.items()
        for pattern in patterns
        for path in (ROOT / folder).glob(pattern)
    }


def test_every_source_file_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    assert sources() - set(wheel.namelist()) == set()


def test_every_source_file_is_in_the_sdist(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    folders = ("python", "kernels")
    missing = {name for name in sources() if not any(f"{folder}/{name}" in names for folder in folders)}
    assert missing == set()
    assert {"LICENSE", "README.md", "CHANGELOG.md", "requirements/cpu.txt"} <= names
    assert not [name for name in names if name.startswith("tests")], "they need the checkout"


def test_nothing_but_the_two_packages_is_installed(wheel: zipfile.ZipFile) -> None:
    top = {name.split("/")[0] for name in wheel.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"locks_kernels", "locks_sglang"}


def test_one_wheel_for_every_machine(wheel: zipfile.ZipFile) -> None:
    assert Path(wheel.filename or "").name.endswith("-py3-none-any.whl")


def test_the_plugin_is_found(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "[sglang.srt.plugins]\nlocks = locks_sglang.plugin:register" in wheel.read(name).decode()


def test_nothing_is_pulled_in(metadata: Message) -> None:
    required = metadata.get_all("Requires-Dist") or []
    assert [line for line in required if "extra ==" not in line] == []


def test_metadata(metadata: Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["License-File"] == "LICENSE"
    assert metadata["Requires-Python"] == ">=3.10"
    assert sorted(metadata.get_all("Provides-Extra") or []) == list(EXTRAS)


@pytest.mark.parametrize("extra", EXTRAS)
def test_extras_are_the_requirements_files(metadata: Message, extra: str) -> None:
    def name_of(requirement: str) -> str:
        match = re.match(r"[\w.-]+", requirement)
        assert match, requirement
        return match[0].lower()

    lines = (ROOT / "requirements" / f"{extra}.txt").read_text().split("\n")
    wanted = {name_of(line) for line in lines if line.strip()}
    required = metadata.get_all("Requires-Dist") or []
    assert {name_of(line) for line in required if f'extra == "{extra}"' in line} == wanted


def test_without_torch_the_command_says_what_to_do(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    code = f"import sys; sys.path.append({str(tmp_path)!r}); from locks_sglang.__main__ import main; "
    # Without -S the site folder of this environment, which has torch, would be on the path.
    command = [sys.executable, "-I", "-S", "-c", code + "sys.exit(main())", "check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("locks-sglang needs torch, which is not installed for ")
