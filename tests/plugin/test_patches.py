"""The series in patches/ applies, and the plugin uses its seams in place of hooks."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import make_patches
import pytest
import source_tree
from locks_sglang import compat, cpu_stand_ins
from locks_sglang.config import LocksError
from locks_sglang.hooks import HOOKS, needed
from locks_sglang.seams import INTERFACE, SEAMS, Seam

ROOT = Path(__file__).parents[2]

VERSIONS = ("0.5.17", "0.5.23")


@pytest.fixture(scope="session", params=VERSIONS)
def wheel(request: pytest.FixtureRequest) -> Path:
    """Folder with the sources of an SGLang that there is a series for."""
    fixture = "newest_sources" if request.param == VERSIONS[-1] else "installed_sources"
    sources = request.getfixturevalue(fixture)
    if compat.version_of_sources(sources) != request.param:
        pytest.skip(f"SGLang {request.param} is not the one that is installed here")
    return sources


@pytest.fixture(scope="session")
def patched_sources(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with the series applied."""
    version = compat.version_of_sources(wheel)
    return make_patches.patched_copy(version, tmp_path_factory.mktemp(f"sglang-{version}"), wheel)


def test_series_does_not_apply_to_other_sources(wheel: Path, tmp_path: Path) -> None:
    version = compat.version_of_sources(wheel)
    copy_touched(version, wheel, tmp_path)
    changed = tmp_path / "python/sglang/srt/layers/attention/base_attn_backend.py"
    changed.write_text(changed.read_text().replace("is_decode()", "is_decoding()"))
    with pytest.raises(RuntimeError, match=r"git apply failed: .*base_attn_backend"):
        make_patches.apply(version, tmp_path)


def test_series_is_what_its_tree_gives(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version, tree = compat.version_of_sources(wheel), tmp_path / "tree"
    monkeypatch.setattr(
        make_patches, "copy_sources", lambda sources, tree: copy_touched(version, sources, tree)
    )
    make_patches.checkout(version, tree, wheel)
    written = make_patches.export(tree, tmp_path / "series")
    kept = make_patches.series(version)
    assert [path.name for path in written] == [path.name for path in kept]
    assert [path.read_text() for path in written] == [path.read_text() for path in kept]


def copy_touched(version: str, sources: Path, tree: Path) -> None:
    """As `make_patches.copy_sources`, but only what the series touches: the whole takes ten seconds."""
    text = "".join(path.read_text() for path in make_patches.series(version))
    touched = {Path(name) for name in re.findall(r"^--- a/python/sglang/(.+)$", text, re.M)}
    for relative in touched | {Path("_version.py")}:
        if (sources / "sglang" / relative).is_file():  # others are made by the series itself
            target = tree / "python/sglang" / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(sources / "sglang" / relative, target)


def test_seams_replace_every_hook(wheel: Path, patched_sources: Path) -> None:
    assert compat.has_seams(patched_sources) and not compat.has_seams(wheel)
    checks = compat.run_checks(patched_sources)
    assert [check for check in checks if not check.ok] == []
    found = {check.name for check in checks}
    assert {seam.target for seam in SEAMS} <= found
    assert found.isdisjoint(hook.target for hook in HOOKS)
    assert {hook.target for hook in HOOKS} <= {check.name for check in compat.run_checks(wheel)}


def test_table_of_hooks_names_seams() -> None:
    assert {hook.seam for hook in HOOKS} <= {seam.name for seam in SEAMS}
    assert needed(has_seams=False) == HOOKS
    assert needed(has_seams=True) == ()


def test_plugin_implements_every_seam() -> None:
    tree = ast.parse((ROOT / "python/locks_sglang/method.py").read_text())
    (method,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "LocksMethod")
    own = {node.name for node in method.body if isinstance(node, ast.FunctionDef)}
    members = {seam.name for seam in SEAMS if seam.target.startswith(INTERFACE)}
    assert own == members | {"needs_dense_metadata"}  # an attribute there, a property here


@pytest.mark.parametrize("how", ["name", "parameter"])
@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.name)
def test_lost_seam(patched_sources: Path, tmp_path: Path, seam: Seam, how: str) -> None:
    owner = None if seam.binding == "function" else INTERFACE.rpartition(".")[2]

    def change(source: str) -> str:
        function = source_tree.find(source, seam.name, owner)
        if how == "name":
            return source_tree.rename_function(source, function)
        return source_tree.rename_parameter(source, function, seam.parameters[-1])

    relative = source_tree.file_of(patched_sources, seam.target)
    root = source_tree.with_changed_file(patched_sources, tmp_path, relative, change)
    (broken,) = (check for check in compat.run_checks(root) if not check.ok)
    assert broken.name == seam.target
    with pytest.raises(LocksError, match=re.escape(seam.target)):
        compat.require(compat.check_seams(root))


@pytest.fixture
def run_tests(patched_sources: Path) -> Callable[..., str]:
    """`run_tests(*files)`: pytest on the patched SGLang, in a process of its own; its closing lines."""

    def run(*files: Path) -> str:
        env = cpu_stand_ins.environment({**os.environ, "PYTHONPATH": str(patched_sources)})
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--color=no"]
        ran = subprocess.run(
            [*command, *map(str, files)], env=env, capture_output=True, text=True, timeout=600, check=False
        )
        assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
        return ran.stdout[-300:]

    return run


def test_on_the_patched_sglang(patched_sources: Path, run_tests: Callable[..., str]) -> None:
    """The patches' own tests and those of the plugin as a method, in one process: the import is slow."""
    summary = run_tests(patched_sources.parent / "test", ROOT / "tests/plugin/on_patched_sglang.py")
    passed = re.search(r"(\d+) passed", summary)
    assert passed and int(passed[1]) > 30 and "skipped" not in summary
