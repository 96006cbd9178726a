"""SGLang with the series of patches/ applied serves as the unpatched one with the plugin's hooks does."""

from collections.abc import Iterator
from pathlib import Path

import make_patches
import pytest
from locks_sglang import compat
from server import launch
from traced import BUDGET, LOCKS, PAGE, SMALL_POOL, Traced, assert_all_rows, assert_same, assert_selects

NEW = 16


@pytest.fixture(scope="module")
def patched_sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sources = compat.sglang_root()
    version = compat.version_of_sources(sources)
    return make_patches.patched_copy(version, tmp_path_factory.mktemp("patched"), sources)


@pytest.fixture(scope="module")
def behind_seams(
    demo_model: Path,
    patched_sources: Path,
    backend: tuple[str, ...],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Traced]:
    """A server on the patched SGLang with the flags of the fixture ``locks``."""
    folder = tmp_path_factory.mktemp("behind_seams")
    trace = folder / "trace.jsonl"
    flags = (*SMALL_POOL, *LOCKS, *backend, "--sparse-decode-trace-file", str(trace))
    with launch(demo_model, *flags, log_dir=folder, env={"PYTHONPATH": str(patched_sources)}) as server:
        yield Traced(server, trace, {})


def test_same_pages_and_tokens(behind_seams: Traced, locks: Traced, words: list[int]) -> None:
    prompt = words[:480]
    expected = locks.alone(prompt, NEW)
    cold = behind_seams.run(prompt, NEW)
    assert_all_rows(cold, layers=30)
    assert_selects(cold, BUDGET // PAGE)
    assert_same(cold, expected)
    hit = behind_seams.run(prompt, NEW)  # its summaries came from another request
    assert hit.cached_tokens == 480 - PAGE
    assert_same(hit, expected)


def test_policy_of_requests(behind_seams: Traced, locks: Traced, words: list[int]) -> None:
    prompt = words[:480]
    for options in ({"mode": "dense"}, {"budget": 64}):
        assert_same(behind_seams.alone(prompt, NEW, options), locks.alone(prompt, NEW, options))
    bad = {"sampling_params": {"custom_params": {"locks": {"budget": 7}}}}
    answer = behind_seams.server.post("/generate", {"text": "x", **bad})
    assert answer.status_code == 400
    assert "custom_params.locks.budget is 7" in answer.text


def test_it_is_seen(behind_seams: Traced, locks: Traced) -> None:
    info, there = behind_seams.server.locks_info(), locks.server.locks_info()
    assert info.keys() == there.keys()
    for fixed in ("selector", "format", "bytes_per_token", "summary_bytes", "sparse_layers"):
        assert info[fixed] == there[fixed]
    assert info["rows_sparse"] > 0 and info["rows_dense"] > 0 and info["summaries_built"] > 0
    assert info["audited_rows"] > 0
    assert behind_seams.server.metrics()["locks:rows_sparse_total"] > 0
    assert "Sparse decode, #sparse-row:" in behind_seams.server.log
    # A field of the patched SGLang's own: the method was chosen there, not by a hook.
    assert behind_seams.server.server_info()["sparse_decode"] == "locks"
