"""Apply the series in patches/ to SGLang, or make it anew from a tree where it was changed.

    python tools/make_patches.py copy 0.5.17 TREE        # to run: PYTHONPATH=TREE/python
    python tools/make_patches.py checkout 0.5.17 TREE    # a git repository: its sources, one commit a patch
    python tools/make_patches.py export 0.5.17 TREE      # its later commits -> patches/sglang-0.5.17

`copy` and `checkout` take the SGLang that this Python imports; for another version give the folder of its
unpacked wheel with `--sources`. TREE is laid out as SGLang's repository is (`python/sglang`,
`test/registered`). Work in a checkout with git (`git rebase -i`, `git commit --amend`), then export.
"""

import argparse
import os
import shutil
import subprocess
from pathlib import Path

from locks_sglang import compat

PATCHES = Path(__file__).resolve().parents[1] / "patches"
# Nothing of the committer reaches the patches; the dates keep two checkouts of a series identical.
COMMITTER = {
    "GIT_COMMITTER_NAME": "locks-sglang",
    "GIT_COMMITTER_EMAIL": "locks-sglang@users.noreply.example",
    "GIT_COMMITTER_DATE": "2026-11-30T00:00:00Z",
}
AUTHOR = {name.replace("COMMITTER", "AUTHOR"): value for name, value in COMMITTER.items()}


def series(version: str) -> list[Path]:
    """The patches for an SGLang version, in order; FileNotFoundError if there are none."""
    found = sorted((PATCHES / f"sglang-{version}").glob("*.patch"))
    if not found:
        raise FileNotFoundError(f"no patches for SGLang {version} in {PATCHES}")
    return found


def patched_copy(version: str, tree: Path, sources: Path) -> Path:
    """Make `tree`: a copy of `sources/sglang` with the series applied, that can be run.

    Returns the folder that holds the package; the tests of the patches are in `tree/test`.

    Raises:
        RuntimeError: a patch does not apply.
    """
    package = tree / "python"
    # With the bytecode: what is not patched need not be compiled again.
    shutil.copytree(sources / "sglang", package / "sglang")
    apply(version, tree)
    return package


def copy_sources(sources: Path, tree: Path) -> None:
    """Copy the Python sources of `sources/sglang` to `tree/python/sglang`."""
    ignore = shutil.ignore_patterns("__pycache__", "*.so", "*.cu", "*.cuh", "*.json", "*.png")
    shutil.copytree(sources / "sglang", tree / "python" / "sglang", ignore=ignore)


def apply(version: str, tree: Path) -> None:
    """Apply the series to the sources in `tree`, which need not be under git.

    Raises:
        RuntimeError: a patch does not apply.
    """
    for patch in series(version):
        git(tree, "apply", "--check", patch)
        git(tree, "apply", patch)


def git(tree: Path, *arguments: str | Path) -> str:
    """Run git in `tree`, independent of the user's settings and of a repository around it."""
    settings = ("-c", "core.autocrlf=false", "-c", "commit.gpgsign=false", "-c", "gc.auto=0")
    own = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CEILING_DIRECTORIES": str(tree.resolve().parent)}
    ran = subprocess.run(
        ["git", *settings, *arguments],
        cwd=tree,
        env={**os.environ, **COMMITTER, **AUTHOR, **own},
        text=True,
        capture_output=True,
        check=False,
    )
    if ran.returncode:
        raise RuntimeError(f"git {arguments[0]} failed: {ran.stderr.strip()}")
    return ran.stdout


def checkout(version: str, tree: Path, sources: Path) -> None:
    """Make `tree`: a commit of SGLang's sources, and one for each patch that there is."""
    copy_sources(sources, tree)
    git(tree, "init", "-q", "-b", "sparse-decode")
    git(tree, "add", "-A")
    git(tree, "commit", "-q", "-m", f"SGLang {version}")
    if (PATCHES / f"sglang-{version}").is_dir():
        git(tree, "am", "-q", *series(version))


def export(tree: Path, out: Path) -> list[Path]:
    """Write the commits of `tree` after the first as patches to `out`, in place of those there."""
    first = git(tree, "rev-list", "--max-parents=0", "HEAD").strip()
    for old in out.glob("*.patch"):
        old.unlink()
    out.mkdir(parents=True, exist_ok=True)
    # No hashes of commits and no git version: the text depends on the content alone.
    stable = ("--zero-commit", "--no-signature", "--abbrev=12")
    git(tree, "format-patch", "-q", *stable, "-o", out.resolve(), f"{first}..HEAD")
    return sorted(out.glob("*.patch"))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["copy", "checkout", "export"])
    parser.add_argument("version", help="SGLang version, for example 0.5.17")
    parser.add_argument("tree", type=Path)
    parser.add_argument("--sources", type=Path, help="folder that holds SGLang's package")
    arguments = parser.parse_args()
    if arguments.command == "export":
        for path in export(arguments.tree, PATCHES / f"sglang-{arguments.version}"):
            print(path)
        return 0
    sources = arguments.sources or compat.sglang_root()
    found = compat.version_of_sources(sources)
    if found != arguments.version:
        parser.error(f"{sources} holds SGLang {found}, not {arguments.version}; see --sources")
    if arguments.command == "copy":
        print(patched_copy(arguments.version, arguments.tree, sources))
    else:
        checkout(arguments.version, arguments.tree, sources)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
