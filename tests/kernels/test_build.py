"""The CUDA build: sources compile without a GPU, and what is missing is said."""

import pytest
import torch
from locks_kernels import build, dispatch

has_compiler = pytest.mark.skipif(build.missing() is not None, reason=f"cannot compile: {build.missing()}")


@has_compiler
@pytest.mark.parametrize("name", sorted(path.stem for path in build.CSRC.glob("*.cu")))
def test_source_compiles_for_hopper(name):
    """Every variant that the source declares, for sm_90a; no GPU is needed."""
    libraries = build.compile_all(names=[name])
    assert len(libraries) == len(build.variants(name))
    assert all(path.stat().st_size > 0 for path in libraries.values())


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
