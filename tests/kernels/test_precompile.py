"""Compiling ahead of time: the libraries are those that the ops load, and nothing needs a GPU."""

from pathlib import Path

import pytest
import torch
from gpu_cases import cuda, make_pair
from locks_kernels import attend, build, precompile, score_select, summarize

FORMATS = ("r6h", "r8i4", precompile.QUEST, precompile.ORACLE)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What was compiled, as (label, architecture); nothing really is."""
    found = []

    def compile_library(name: str, constants: build.Constants, arch: str) -> Path:
        found.append((build.label((name, constants)), arch))
        return Path(f"{name}.so")

    monkeypatch.setattr(build, "_compile", compile_library)
    return found


def test_libraries_of_a_geometry() -> None:
    geometry = precompile.Geometry.parse("32x8x128", 16, "r6h", torch.bfloat16)
    assert [build.label(library) for library in precompile.libraries(geometry)] == [
        "summarize BASIS_BITS=4 HEAD_DIM=128 KEY_TYPE=0 PAGE=16 RANK=6 ROTATED=1",
        "score BASIS_BITS=4 BLOCKS=1 HEADS_TOGETHER=4 HEAD_DIM=128 KEY_FP8=0 PAGE=16 QUERY_HALF=0 RANK=6 "
        "ROTATED=1",
        "select GROUP=4",
        "attend HEAD_DIM=128 HEAD_TILES=1 KV_TYPE=0 PAGE=16 Q_TYPE=0",
    ]


def test_libraries_of_a_host_tier() -> None:
    resident, host = (
        precompile.libraries(precompile.Geometry(32, 8, 128, host_tier=tier)) for tier in (False, True)
    )
    extra = [
        set(build.label(b).split()) - set(build.label(a).split())
        for a, b in zip(resident, host, strict=True)
    ]
    assert extra == [set(), {"OPEN_PAGES=1"}, set(), {"HOT=1"}]


def test_libraries_of_an_fp8_pool() -> None:
    geometry = precompile.Geometry.parse("32x8x128", 16, "r6h", torch.float16, torch.float8_e4m3fn)
    summarize_, score, _, attend_ = (dict(constants) for _, constants in precompile.libraries(geometry))
    assert summarize_["KEY_TYPE"] == attend_["KV_TYPE"] == 3
    assert (score["KEY_FP8"], score["QUERY_HALF"], attend_["Q_TYPE"]) == (1, 1, 1)


@pytest.mark.parametrize(
    ("records", "names"),
    [
        ("r8i4", ["summarize", "score", "select", "attend"]),
        (precompile.QUEST, ["envelope", "page_scores", "select", "attend"]),
        (precompile.ORACLE, ["page_scores", "select", "attend"]),
    ],
)
def test_sources_of_a_selector(records: str, names: list[str]) -> None:
    geometry = precompile.Geometry.parse("9x3x64", 32, records, torch.float16)
    assert [name for name, _ in precompile.libraries(geometry)] == names


def test_naming_ends_where_its_block_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with build.naming() as named:
        assert build.load("select", GROUP=4) is None
    assert named == [("select", (("GROUP", 4),))]
    monkeypatch.setattr(build, "_load", lambda *library: library)
    assert build.load("select", GROUP=8) == ("select", (("GROUP", 8),))
    assert len(named) == 1


def test_command_line(compiled: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--geometry", "32x4x128", "--geometry", "32x8x128", "--format", "r6h", "--format", "r8i4"]
    assert precompile.main([*flags, "--arch", "100a"]) == 0
    # Two formats share select and attend; two group sizes differ in select alone.
    names = sorted(label.split()[0] for label, _ in compiled)
    assert names == ["attend", "score", "score", "select", "select", "summarize", "summarize"]
    assert {arch for _, arch in compiled} == {"100a"}
    assert "7 libraries for sm_100a" in capsys.readouterr().out


def test_command_line_of_an_fp8_pool(compiled: list[tuple[str, str]]) -> None:
    assert precompile.main(["--geometry", "32x8x128", "--kv-dtype", "fp8_e4m3"]) == 0
    assert any("KV_TYPE=3" in label for label, _ in compiled)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--geometry", "32x8"], "geometry '32x8'; legal: QxKxD"),
        (["--geometry", "32x0x128"], "legal: QxKxD"),
        (["--geometry", "32x5x128"], "legal: QxKxD"),
        (["--geometry", "34x2x128"], "1 to 16 query heads a KV head"),
        (["--geometry", "32x8x96"], "head_dim 96 is not supported; legal"),
        (["--geometry", "32x8x128", "--format", "r3i4"], "'r3i4'; legal formats"),
        (["--geometry", "32x8x128", "--page-size", "8"], "page size 8 is not supported; legal"),
    ],
)
def test_wrong_arguments(
    compiled: list[tuple[str, str]], capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    assert precompile.main(flags) == 1
    assert said in capsys.readouterr().err
    assert compiled == []


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    assert precompile.main(["--geometry", "32x8x128"]) == 1
    assert "no CUDA compiler (nvcc)" in capsys.readouterr().err
    assert not build.is_compiled(("select", (("GROUP", 4),)))


@pytest.mark.skipif(build.missing() is not None, reason=f"cannot compile: {build.missing()}")
def test_a_compiled_library_is_found_again() -> None:
    library = ("select", (("GROUP", 8),))
    (path,) = build.compile_libraries([library]).values()
    assert path.exists() and build.is_compiled(library)
    assert not build.is_compiled(library, arch="1000a")


@pytest.mark.gpu
@cuda
@pytest.mark.parametrize("records", FORMATS)
def test_ops_load_what_was_named(monkeypatch: pytest.MonkeyPatch, records: str) -> None:
    loaded = []
    load = build._load

    def noted(*library: object) -> object:
        loaded.append(library)
        return load(*library)

    monkeypatch.setattr(build, "_load", noted)
    selector = {precompile.QUEST: "quest", precompile.ORACLE: "oracle"}.get(records, records)
    _, _, cache, summaries = make_pair([2000], selector, head_dim=128, page_size=16, group=8)
    kv_heads = cache.keys.shape[2]
    if summaries is not None:
        slots = torch.arange(32, device="cuda")
        summarize([cache.keys], slots, _with_layers(summaries), impl="cuda")
    rows = (cache.page_table, cache.seq_lens)
    budgets = torch.full((1,), 8, dtype=torch.int32, device="cuda")
    arguments = (cache.queries, cache.keys, summaries, *rows, budgets, cache.sm_scale)
    selection = score_select(*arguments, width=8, impl="cuda")
    attend(cache.queries, cache.keys, cache.values, selection, *rows, cache.sm_scale, impl="cuda")
    geometry = precompile.Geometry(8 * kv_heads, kv_heads, 128, 16, records)
    assert set(loaded) == set(precompile.libraries(geometry))


def _with_layers(records: object) -> object:
    return type(records)(records.layout, *(plane[None] for plane in records.planes))
