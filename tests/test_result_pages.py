"""Pages and figures from result files: of several models, with cases that did not run, of profiles."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import make_results
import pytest

GLM, KV2, LLAMA = "glm4-9b-1m-kv4", "glm4-9b-1m", "llama31-8b-1m"
Rows = list[dict[str, Any]]
Write = Callable[[str, Rows], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a result file to where the pages look for one."""

    def write(name: str, rows: Rows) -> None:
        machine = {"gpu": "a GPU", "cpu": "x86_64"}
        result = {"machine": machine, "date": "2026-11-30", "commit": "c", "command": "python x"}
        (tmp_path / f"{name}-2026-11-30.json").write_text(json.dumps({**result, "rows": rows}))

    monkeypatch.setattr(make_results, "RESULTS", tmp_path)
    return write


def step(variant: str, ms: float, model: str = GLM, context: int = 65536, **more: Any) -> dict[str, Any]:
    dense = variant.startswith("dense")
    return {
        "variant": variant, "backend": "fa3" if dense else "locks", "format": None, "budget": None,
        "model": model, "context": context, "batch": 1, "tp": 1, "step_ms": ms + 1, "graph_ms": ms - 1,
        "pipelined_ms": ms, **more,
    }  # fmt: skip


def pair(model: str, dense: float, sparse: float, context: int = 65536) -> Rows:
    return [step("dense:fa3", dense, model, context), step("locks:r4i4", sparse, model, context)]


def test_every_model_has_its_table_of_steps(write: Write) -> None:
    write("decode_step-h200", pair(LLAMA, 12.0, 6.0) + pair(GLM, 9.0, 3.0))
    page = make_results.decode_step()
    assert "| 1 x 65,536 | 9.00 | 3.00 (3.00x) | 1.08x |" in page
    assert "| 1 x 65,536 | 12.00 | 6.00 (2.00x) |\n" in page  # the paper's column is of the other model
    assert page.index("GLM-4-9B-Chat-1M geometry") < page.index("32 layers, 32 query heads, 8 KV heads")


def test_gains_are_of_one_geometry_and_have_the_default_format(write: Write) -> None:
    rows = pair(GLM, 9.0, 3.0) + pair(KV2, 8.0, 8.0)
    write("decode_step-h200", rows)
    page = make_results.gains()
    assert "| 1 x 65,536 | 9.00 | 3.00 | 3.00x |" in page and "8.00" not in page
    assert "`r6h`, was not in this run" in page
    write("decode_step-h200", [*rows, step("locks:r6h", 4.5)])
    page = make_results.gains()
    assert "| 1 x 65,536 | 9.00 | 3.00 | 3.00x | 4.50 | 2.00x |" in page and "not in this run" not in page


def test_a_case_that_a_variant_lacks_is_a_dash(write: Write) -> None:
    rows = [*pair(GLM, 9.0, 3.0), step("dense:fa3", 20.0, context=1000000)]
    write("decode_step-h200", [*rows, step("locks:r4i4", 5.0, context=500000)])
    page = make_results.decode_step()
    assert "| 1 x 1,000,000 | 20.00 | - | 2.02x |" in page
    assert "| 1 x 500,000 | - | 5.00 (-) | - |" in page
    assert "| 1 x 1,000,000 | 20.00 | - | - |" in make_results.gains()


def test_a_row_takes_no_other_ones_place(write: Write) -> None:
    write("decode_step-h200", [*pair(GLM, 9.0, 3.0), step("locks:r4i4", 4.0)])
    with pytest.raises(ValueError, match=r"two rows of locks:r4i4, 1 x 65536"):
        make_results.decode_step()


def test_runs_beside_that_of_the_table(write: Write) -> None:
    write("decode_step-h200", pair(LLAMA, 9.0, 8.0) + pair(GLM, 9.0, 5.0))
    write("decode_step_prefilled-h200", pair(GLM, 9.0, 4.0) + pair(GLM, 9.0, 4.0, context=131072))
    page = make_results.prefilled()
    assert "| 1 x 65,536 | locks r4i4 | 3.00 | 4.00 | -25.0% |" in page
    assert "| 1 x 131,072 | locks r4i4 | 3.00 | - | - |" in page and "dense fa3" not in page
    write("decode_step_before-h200", pair(GLM, 9.0, 4.0))
    assert "| 1 x 65,536 | locks r4i4 | 3.00 | 3.00 | +0.0% |" in make_results.prefilled()


def test_parts_whose_file_is_missing_say_so(write: Write) -> None:
    parts = {**make_results.PAGES[make_results.ROOT / "docs/results.md"]}
    parts |= make_results.PAGES[make_results.ROOT / "docs/kernels.md"]
    files = {
        "prefilled": "decode_step_prefilled",
        "flashinfer_attend": "decode_step_flashinfer_attend",
        "decode_step_llama31": "decode_step_llama31",
        "decode_step_glm4_kv2": "decode_step_glm4_kv2",
        "step_profile": "decode_step_profile",
        "kernel_times_heads": "kernel_floor_heads",
    }
    write("decode_step-h200", pair(GLM, 9.0, 3.0))
    for part, file in files.items():
        assert parts[part]() == "Not run yet."
        write(f"{file}-h200", [layer(LLAMA, 7.0)] if "kernel" in part else [profiled("dense:fa3", [])])
        assert "commit `c`" in parts[part](), part


def layer(
    model: str, us: float, op: str = "layer", impl: str = "cuda", form: str = "r4i4"
) -> dict[str, Any]:
    heads, group = {"glm4-9b-1m": (4, 8), "glm4-9b": (2, 16)}.get(model, (8, 4))
    return {
        "op": op, "impl": impl, "model": model, "kv_heads": heads, "group": group, "head_dim": 128,
        "context": 524288, "batch": 1, "format": form, "page": 16, "us": us, "floor_us": 1.0,
    }  # fmt: skip


def kernels(model: str, us: float) -> Rows:
    return [layer(model, us), layer(model, 2 * us, "dense", "flashinfer")]


def test_every_geometry_has_its_tables_of_kernels(write: Write) -> None:
    write("kernel_floor-h200", [*kernels("llama31-8b", 50.0), *kernels("glm4-9b-1m", 40.0)])
    page = make_results.kernel_times()
    assert "| the whole layer, r4i4 | 40.0 | 35 |" in page and "| FlashInfer, dense | 80.0 |  |" in page
    # What is aimed at is of the other geometry.
    assert "| the whole layer, r4i4 | 50.0 |\n" in page and "| FlashInfer, dense | 100.0 |\n" in page
    assert page.index("4 KV heads, 8 query heads each") < page.index("8 KV heads, 4 query heads each")
    write("kernel_floor-h200", kernels("glm4-9b-1m", 40.0)[:1])
    assert "| FlashInfer, dense | - |  |" in make_results.kernel_times()


def drawn(draw: Callable[..., None], rows: Rows, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    """Heights of the lines that a figure has, by their label."""
    import plots

    figures: list[Any] = []
    monkeypatch.setattr(plots, "save", lambda figure, panels, path: figures.append(figure))
    draw(rows, Path("unused"))
    lines = figures[0].axes[0].get_lines()
    plots.pyplot.close(figures[0])
    return {line.get_label(): list(line.get_ydata()) for line in lines}


def test_figures_are_of_one_geometry(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="needs pip install '.[bench]'")
    import plots

    rows = pair(LLAMA, 12.0, 6.0) + pair(GLM, 9.0, 3.0) + pair(GLM, 8.0, 2.0, context=16384)
    lines = drawn(plots.step_time, rows, monkeypatch)
    assert lines == {"dense:fa3": [8.0, 9.0], "locks:r4i4": [2.0, 3.0]}
    del rows[-1]["pipelined_ms"]  # then no line has it
    assert drawn(plots.step_time, rows, monkeypatch)["locks:r4i4"] == [3.0, 4.0]
    both = [*kernels("llama31-8b", 50.0), *kernels("glm4-9b-1m", 40.0)]
    both.append(layer("glm4-9b-1m", 81.0, "dense", "flashinfer", "r6h"))
    lines = drawn(plots.layer_time, both, monkeypatch)
    assert lines["FlashInfer, dense"] == [80.0] and lines["ours, r4i4"] == [40.0]


def test_tokens_a_second_of_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the contexts that ran at more than one batch; dense is the faster backend."""
    pytest.importorskip("matplotlib", reason="needs pip install '.[bench]'")
    import plots

    rows = [step("dense:fa3", 10.0), step("dense:flashinfer", 8.0), step("locks:r6h", 5.0)]
    rows += [{**row, "batch": 4, "pipelined_ms": 2 * row["pipelined_ms"]} for row in rows]
    rows += pair(GLM, 9.0, 3.0, context=16384)
    lines = drawn(lambda steps, path: plots.batches(steps, [], path), rows, monkeypatch)
    assert lines == {"64K, dense": [125.0, 250.0], "64K, sparse r6h": [200.0, 400.0]}


def test_quality_of_two_lengths(write: Write) -> None:
    row = {"model": "m", "prompts": 5, "length": 1024, "format": None, "budget": None, "score": 90.0}
    tasks = ("niah_single_1", "ruler_vt")
    rows = [{**row, "selector": "FullKV", "task": task} for task in tasks]
    rows += [{**row, "selector": "quest", "task": task, "budget": 64, "score": 40.0} for task in tasks]
    write("quality-ruler-synthetic-cpu", rows)
    assert make_results.quality().count("### ruler-synthetic") == 1
    longer = [{**row, "length": 4096} for row in rows if row["task"] == tasks[0]]
    write("quality-ruler-synthetic-4096-cpu", longer)
    page = make_results.quality()
    assert "(m, 5 prompts a task of 1,024 tokens)" in page and "of 4,096 tokens)" in page
    means = make_results.quality_means()
    assert "| 64 | 90.0 (100.0) | 40.0 (79.8) |" in means and "4,096" not in means
    assert "task_quality.py ruler-synthetic" in make_results.quality_not_run()  # another model's
    write("quality-ruler-synthetic-h200", [{**row, "model": "Llama-3.1-8B-Instruct"} for row in rows])
    assert "task_quality.py ruler-synthetic" not in make_results.quality_not_run()


def profiled(variant: str, kernels: list[tuple[str, float]], **waits: int) -> dict[str, Any]:
    """A row as ``decode_step.py --profile`` writes it."""
    layer = [{"kernel": name, "us": us, "gap_us": 0.5} for name, us in kernels]
    totals = {"gpu_busy_ms": 6.0, "gpu_span_ms": 6.5, "host_ms": 3.0, "launches": 40 * len(layer) + 7}
    return step(variant, 7.0) | {
        **totals, "profiled_steps": 3, "host_waits": waits, "kernels": [], "layer": layer,
    }  # fmt: skip


def test_kernels_of_a_layer_dense_beside_sparse(write: Write) -> None:
    dense = [("void gemm<8|4>", 11.0), ("norm", 2.0), ("gemm", 7.0), ("flash", 9.0)]
    sparse = [*dense[:3], ("score", 6.0), ("select", 10.0), ("attend", 8.0)]
    rows = [profiled("locks:r4i4", sparse, cudaStreamSynchronize=3), profiled("dense:fa3", dense)]
    write("decode_step_profile-h200", rows)
    page = make_results.step_profile()
    assert "| dense fa3 | 167 | 4 | - | 29.0 | 2.0 | 6.00 | 6.50 | none |" in page
    assert "| locks r4i4 | 247 | 6 | +2 | 44.0 | 3.0 | 6.00 | 6.50 | cudaStreamSynchronize 1 |" in page
    lines = page[page.index("| kernel |") :].splitlines()
    assert lines[0] == "| kernel | dense fa3, us | locks r4i4, us |"
    assert lines[2:9] == [
        "| `gemm<8\\|4>` | 11.0 | 11.0 |",
        "| `norm` | 2.0 | 2.0 |",
        "| `gemm` | 7.0 | 7.0 |",
        "| `flash` | 9.0 | - |",
        "| `score` | - | 6.0 |",
        "| `select` | - | 10.0 |",
        "| `attend` | - | 8.0 |",
    ]


def test_throughput_is_compared_within_a_model(write: Write) -> None:
    common = {
        "tp": 1, "workload": "random", "concurrency": 1, "context": 8, "output": 2, "ttft_ms": 1.0,
        "itl_p99_ms": 1.0, "cached_share": 0.0, "kv_tokens": 9, "batch": 1,
    }  # fmt: skip
    rows = [
        {
            **common,
            "model": model,
            "variant": variant,
            "budget": budget,
            "itl_ms": ms,
            "tokens_per_s": 9 / ms,
        }
        for model, dense, sparse in ((LLAMA, 12.0, 6.0), (GLM, 9.0, 3.0))
        for variant, budget, ms in (("dense:fa3", None, dense), ("locks:r4i4", 64, sparse))
    ]
    write("throughput-h200", rows)
    page = make_results.throughput("h200")
    assert page.count("2.00x") == 2 and page.count("3.00x") == 2 and page.count("layers") == 2
