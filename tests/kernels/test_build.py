"""The CUDA build: sources compile without a GPU, and what is missing is said."""

import subprocess

import pytest
import torch
from locks_kernels import build, dispatch

has_compiler = pytest.mark.skipif(build.missing() is not None, reason=f"cannot compile: {build.missing()}")


# Variants that CI leaves to `--slow`; the GPU tests load such, too. What is special about each is in
# another that CI compiles, but for the largest head dimension.
SLOW = {
    "attend HEAD_DIM=128 HEAD_TILES=1 KV_TYPE=0 PAGE=16 Q_TYPE=0",
    "attend HEAD_DIM=256 HEAD_TILES=2 KV_TYPE=1 PAGE=64 Q_TYPE=1",
    "envelope HEAD_DIM=128 KEY_TYPE=0 PAGE=16",
    "score HEAD_DIM=128 RANK=4",
    "summarize BASIS_BITS=4 HEAD_DIM=128 KEY_TYPE=0 PAGE=16 RANK=4 ROTATED=0",
    "summarize BASIS_BITS=16 HEAD_DIM=256 KEY_TYPE=1 PAGE=64 RANK=16 ROTATED=0",
}
DECLARED = {
    build.label((name, constants)): (name, constants)
    for name in sorted(path.stem for path in build.CSRC.glob("*.cu"))
    for constants in build.variants(name)
}


@pytest.fixture
def quickly(monkeypatch):
    """Compile with few optimisations, which takes half the time and refuses the same sources."""
    options = subprocess.run([build.find_nvcc(), "--help"], capture_output=True, text=True).stdout
    if "--Ofast-compile" in options:  # from CUDA 12.8 on
        monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "--Ofast-compile=max"))


@has_compiler
@pytest.mark.parametrize(
    "label",
    [pytest.param(label, marks=[pytest.mark.slow] if label in SLOW else []) for label in DECLARED],
)
def test_source_compiles_for_hopper(label, quickly):
    """The variants that the sources declare, for sm_90a; no GPU is needed."""
    (library,) = build.compile_libraries([DECLARED[label]]).values()
    assert library.stat().st_size > 0


def test_slow_variants_are_declared_and_no_source_is_all_slow():
    assert set(DECLARED) >= SLOW
    assert {DECLARED[label][0] for label in set(DECLARED) - SLOW} == {name for name, _ in DECLARED.values()}


@has_compiler
def test_compiler_errors_are_shown(tmp_path, monkeypatch):
    (tmp_path / "broken.cu").write_text("int f() { return undeclared_name; }\n")
    monkeypatch.setattr(build, "CSRC", tmp_path)
    monkeypatch.setattr(build, "CACHE", tmp_path / "cache")
    with pytest.raises(build.BuildError, match="undeclared_name"):
        build.compile_all()


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    with pytest.raises(build.BuildError, match=r"no CUDA compiler \(nvcc\)"):
        build.compile_all()
    with pytest.raises(build.BuildError, match=r"no CUDA compiler \(nvcc\)"):
        build.load("select", GROUP=3)


def test_without_a_compiler_triton_runs(monkeypatch):
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    dispatch._best_on_gpu.cache_clear()
    try:
        assert dispatch.choose("auto", torch.device("cuda")) == "triton"
    finally:
        dispatch._best_on_gpu.cache_clear()


def test_a_library_is_named_by_all_that_decides_its_code(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "CSRC", tmp_path)
    monkeypatch.setattr(build, "_nvcc_version", lambda _: "release 1")
    (tmp_path / "one.cu").write_text("// first\n")
    command = ["nvcc", "-DA=1"]
    first = build._digest("one", command)
    assert first == build._digest("one", command)
    assert first != build._digest("one", ["nvcc", "-DA=2"])
    (tmp_path / "shared.cuh").write_text("// header\n")
    assert first != build._digest("one", command)


def test_variants_come_from_the_source(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "CSRC", tmp_path)
    (tmp_path / "one.cu").write_text("// variant: RANK=4 DIM=64\n// variant:\n")
    (tmp_path / "two.cu").write_text("int x;\n")
    assert build.variants("one") == [(("DIM", 64), ("RANK", 4)), ()]
    assert build.variants("two") == [()]
