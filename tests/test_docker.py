"""The container's files: linters, and the install steps in a fresh environment.

No container engine is used, so what the base image holds and does is not tested here. What compose passes
to the server is tested in tests/plugin/test_compose.py.
"""

import fnmatch
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from locks_kernels import build, precompile
from locks_sglang import compat, cpu_stand_ins
from locks_sglang.config import LocksConfig

ROOT = Path(__file__).parents[1]
DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
SCRIPTS = (DOCKER / "install.sh", ROOT / "tools" / "env.sh", ROOT / ".ci" / "run")

USE = """
import sys
from pathlib import Path
import torch
import locks_kernels, locks_sglang
from locks_kernels import Summaries, SummaryLayout, attend, build, page_view, score_select, summarize
from locks_sglang import cli

folder = Path(sys.argv[1])
for package in (locks_kernels, locks_sglang):
    assert folder in Path(package.__file__).parents, package.__file__
assert SummaryLayout.parse("r8i4", 128).bytes_per_page == 818
assert build.variants("score") and sorted(build.CSRC.glob("*.cuh"))

pool = torch.randn(64, 1, 64)
keys = page_view(pool, 16)
records = Summaries.allocate(SummaryLayout.parse("r6h", 64), (1, 4, 1))
summarize([keys], torch.arange(64), records)
table, lengths = torch.arange(4, dtype=torch.int32)[None], torch.tensor([61])
selection = score_select(torch.randn(1, 2, 64), keys, records.layer(0), table, lengths,
                         torch.tensor([3], dtype=torch.int32), 0.125, width=4)
output, _ = attend(torch.randn(1, 2, 64), keys, keys, selection, table, lengths, 0.125)
assert output.shape == (1, 2, 64) and output.isfinite().all()
assert selection.counts.tolist() == [3]
print("works")
"""


def linter(name: str) -> str:
    """A linter from requirements/test.txt; hadolint is published for x86-64 alone."""
    found = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def argument(name: str) -> str:
    """Default of a build argument."""
    match = re.search(rf'^ARG {name}="?([^"\n]*)"?$', DOCKERFILE, re.M)
    assert match, f"no ARG {name}"
    return match[1]


def test_dockerfile_is_clean() -> None:
    done = subprocess.run([linter("hadolint"), str(DOCKER / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def compose_problems(path: Path) -> str:
    """What the Compose specification's schema, which comes with the linter, has against a file."""
    command = [linter("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_compose_file_keeps_the_specification(tmp_path: Path) -> None:
    assert compose_problems(DOCKER / "compose.yaml") == ""
    wrong = tmp_path / "compose.yaml"
    wrong.write_text((DOCKER / "compose.yaml").read_text().replace("stop_grace_period", "grace_period"))
    assert "'grace_period' was unexpected" in compose_problems(wrong)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_clean(script: Path) -> None:
    done = subprocess.run([linter("shellcheck"), str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_base_image_is_of_the_first_tested_version() -> None:
    assert argument("SGLANG_VERSION") == compat.TESTED_VERSIONS[0]
    assert argument("SGLANG_IMAGE") == "lmsysorg/sglang:v${SGLANG_VERSION}"


def test_kernels_of_the_image_are_those_of_the_defaults() -> None:
    assert argument("LOCKS_FORMATS") == LocksConfig().summary
    geometries = argument("LOCKS_GEOMETRIES").split()
    assert "32x4x128" in geometries and "32x8x128" in geometries
    for text in geometries:
        for host in (False, True):
            records = argument("LOCKS_FORMATS")
            geometry = precompile.Geometry.parse(text, 16, records, torch.bfloat16, host_tier=host)
            assert precompile.libraries(geometry)


@pytest.mark.parametrize(("tier", "compiled"), [([], ""), (["gpu"], ""), (["host"], " --host-tier")])
def test_kernels_are_those_of_the_tier(tier: list[str], compiled: str, tmp_path: Path) -> None:
    """With an interpreter that only writes down what it is asked."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    python.chmod(0o755)
    flags = ["--python", str(python), "--geometries", "32x4x128 32x8x128"]
    flags += ["--tier", *tier] if tier else []
    done = subprocess.run([str(DOCKER / "install.sh"), *flags], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (asked,) = re.findall(r"precompile (.*)", (tmp_path / "asked").read_text())
    assert asked == f"--arch 90a --geometry 32x4x128 --geometry 32x8x128 --format r6h{compiled}"


def test_the_image_is_built_for_the_tier_that_compose_serves() -> None:
    assert argument("LOCKS_KV_TIER") == ""
    assert '--tier "${LOCKS_KV_TIER:-gpu}"' in DOCKERFILE
    compose = (DOCKER / "compose.yaml").read_text()
    assert 'LOCKS_KV_TIER: "${SPARSE_DECODE_KV_TIER:-}"' in compose


def test_what_the_install_steps_copy_is_in_the_build_context() -> None:
    rules = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
    kept = {rule[1:] for rule in rules if rule.startswith("!")}
    script = (DOCKER / "install.sh").read_text()
    (copied,) = re.findall(r'cp -r "\$root"/\{(.*?)\}', script)
    assert kept == {*copied.split(","), "docker/install.sh"}
    assert all((ROOT / name).exists() for name in kept)
    dropped = [rule.removeprefix("**/") for rule in rules if rule.startswith("**/")]
    assert any(fnmatch.fnmatch("locks_sglang.egg-info", rule) for rule in dropped)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh virtual environment that sees this one's packages, but not the checkout's."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    # A folder on the path, not a site folder: its .pth files, so the editable install, do not count.
    (site / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder


def run(environment: Path, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    variables = cpu_stand_ins.environment({k: v for k, v in os.environ.items() if k != "PYTHONPATH"})
    return subprocess.run(
        [command[0].replace("python3", str(environment / "bin" / "python3"), 1), *command[1:]],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
    )


def test_install_steps_in_a_fresh_environment(environment: Path, tmp_path: Path) -> None:
    python = os.path.relpath(environment / "bin" / "python3", tmp_path)
    install = [str(DOCKER / "install.sh"), "--no-build-isolation", "--python", python]
    kernels = [] if build.missing() else ["--geometries", "9x3x64"]
    done = run(environment, tmp_path, *install, *kernels)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("4 libraries for sm_90a" if kernels else "none named") in done.stdout
    for said in ("1/4 SGLang", "2/4 wheel", "3/4 CUDA kernels", "4/4 check", "sparse decode starts"):
        assert said in done.stdout
    # Away from the checkout, what was installed is used, and works.
    used = run(environment, tmp_path, "python3", "-c", USE, str(environment))
    assert used.returncode == 0 and used.stdout.endswith("works\n"), used.stdout + used.stderr
    assert not (ROOT / "build").exists()


@pytest.mark.parametrize(
    ("flags", "status", "said"),
    [
        (["--geometry"], 2, "unknown option --geometry"),
        (["--python"], 2, "--python needs a value"),
        (["--tier", "disk"], 2, "--tier is 'disk'; legal: gpu, host"),
        (["--python", "/no/such/python"], 127, "No such file"),
    ],
)
def test_wrong_arguments_of_the_install_script(flags: list[str], status: int, said: str) -> None:
    done = subprocess.run([str(DOCKER / "install.sh"), *flags], capture_output=True, text=True)
    assert done.returncode == status and said in done.stderr


def test_install_steps_need_sglang(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path)], check=True)
    python = str(tmp_path / "bin" / "python3")
    done = subprocess.run(
        [str(DOCKER / "install.sh"), "--python", python],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": ""},
    )
    assert done.returncode == 1
    assert "sglang; install SGLang first, or name its interpreter with --python" in done.stderr
