"""What a benchmark's run writes, refuses and says; nothing is measured here."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import decode_step
import grid
import kernel_floor
import plan_report
import pytest
import results_file
import step_profile
import torch
from kernel_case import Case, row

TODAY = results_file.date.today().isoformat()
GLM = {"model": "glm4-9b-1m-kv4", "tp": 1, "fill": "synthetic", "batch": 1, "context": 8}


def content(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ([], "decode_step"),
        (["--name", "llama31"], "decode_step_llama31"),
        (["--prefill"], "decode_step_prefilled"),
        (["--profile"], "decode_step_profile"),
        (["--profile", "--name", "profile_kv2"], "decode_step_profile_kv2"),
    ],
)
def test_runs_of_a_day_have_files_of_their_own(flags: list[str], name: str) -> None:
    assert decode_step.parse_arguments(flags)[0].benchmark == name


@pytest.mark.parametrize("name", ["a-b", "Llama", "decode_step_llama31", "../x"])
def test_names_that_no_page_would_find(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        decode_step.parse_arguments(["--name", name])
    assert f"--name is '{name}'; legal: lower-case letters" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags", [["--tp-size", "2"], ["--tp=2"], ["--tensor-parallel-size", "4"]], ids=lambda flags: flags[0]
)
def test_one_gpu_alone(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        decode_step.parse_arguments(["--model-path", "m", *flags])
    said = capsys.readouterr().err
    assert f"--tp-size is {flags[-1][-1]}; legal: 1" in said and "benchmark/throughput.py" in said
    assert decode_step.parse_arguments(["--tp", "1", "--dtype", "float32"])[1] == ["--dtype", "float32"]


def step(variant: str, ms: float, **more: Any) -> dict[str, Any]:
    return {**GLM, "variant": variant, "step_ms": ms, **more}


def test_rows_of_an_earlier_run_of_steps_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = step("locks:r4i4", 6.0, model="llama31-8b-1m")
    old = {"rows": [step("dense:fa3", 9.0), step("locks:r4i4", 5.0), other], "commit": "b", "command": "x"}
    (tmp_path / "old.json").write_text(json.dumps(old))
    flags = ["--variants", "locks:r4i4,locks:r6h", "--append", str(tmp_path / "old.json")]
    monkeypatch.setattr("sys.argv", ["decode_step.py", *flags, "--out", str(tmp_path), "--name", "all"])
    monkeypatch.setattr(decode_step, "run_variant", lambda variant, checks: [step(variant, 3.0)])
    assert decode_step.main() == 0
    written = content(tmp_path / f"decode_step_all-h200-{TODAY}.json")
    assert written["benchmark"] == "decode_step_all" and written["commands"][0] == "x # commit b"
    assert [(row["variant"], row["step_ms"]) for row in written["rows"]] == [
        ("dense:fa3", 9.0),
        ("locks:r4i4", 6.0),
        ("locks:r4i4", 3.0),
        ("locks:r6h", 3.0),
    ]
    assert capsys.readouterr().out.count("3.000 ms 3.00x") == 2  # against dense steps of the same model


def test_a_grid_of_which_nothing_fits_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = SimpleNamespace(
        max_total_num_tokens=1000, server_args=SimpleNamespace(model_path="m", tp_size=1)
    )
    monkeypatch.setattr(decode_step, "start_runner", lambda flags, batches: runner)
    monkeypatch.setattr(decode_step, "fill_pool", lambda runner: None)
    arguments, flags = decode_step.parse_arguments(["--child", "dense:fa3", "--grid", "1x1000,2x500"])
    assert decode_step.run_child(arguments, flags) == 1
    said = capsys.readouterr().out
    assert "2 x 500 does not fit into 1000 tokens" in said and "nothing of 1x1000,2x500 fits" in said
    monkeypatch.setattr("sys.argv", ["decode_step.py", "--grid", "1x1000", "--out", str(tmp_path)])
    monkeypatch.setattr(decode_step, "run_variant", lambda variant, checks: [])
    assert decode_step.main() == 1
    assert "no case of 1x1000 ran in any variant" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_grid_that_is_none() -> None:
    assert grid.parse(grid.named([(1, 16_384), (32, 8)])) == [(1, 16_384), (32, 8)]
    for text, wrong in (("1x1000,4", "'4'"), ("0x16", "'0x16'"), ("", "''"), ("1x16x8", "'1x16x8'")):
        with pytest.raises(argparse.ArgumentTypeError, match=f"{wrong} is no case; legal: BATCHxCONTEXT"):
            grid.parse(text)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases of kernel_floor.py whose ops take a microsecond; the run is cut at 32K tokens."""

    def measure(case: Case, ops: list[str], repeats: int) -> Iterator[dict]:
        if case.context == 32_768:
            raise KeyboardInterrupt
        yield row(case, "score", "cuda", 1000, (1.0, 1.0, 1.0))

    monkeypatch.setattr(kernel_floor.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(results_file, "machine", dict)
    monkeypatch.setattr(results_file, "copy_rate_tb_s", lambda gigabytes: 4.0)
    monkeypatch.setattr(kernel_floor, "measure", measure)
    monkeypatch.setattr(kernel_floor.author_runs, "measure", lambda *_: iter(()))


def floor(folder: Path, *flags: str) -> None:
    kernel_floor.main(["--models", "llama31-8b", "--formats", "r4i4", "--out", str(folder), *flags])


def test_kernel_times_of_a_cut_run_are_written(timed: None, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        floor(tmp_path, "--grid", "1x16384,1x32768", "--name", "heads")
    rows = content(tmp_path / f"kernel_floor_heads-h200-{TODAY}.json")["rows"]
    assert [(row["model"], row["context"]) for row in rows] == [("llama31-8b", 16_384)]


def test_kernel_times_of_an_earlier_run_are_kept(timed: None, tmp_path: Path) -> None:
    case = Case("llama31-8b", 8, 4, 128, 16_384, 1, "r4i4", 128)
    other = row(Case("glm4-9b-1m", 4, 8, 128, 16_384, 1, "r4i4", 128), "score", "cuda", 1, (5.0, 5.0, 5.0))
    old = {"commit": "b", "command": "x", "rows": [row(case, "score", "cuda", 1, (9.0, 9.0, 9.0)), other]}
    (tmp_path / "old.json").write_text(json.dumps(old))
    floor(tmp_path / "new", "--grid", "1x16384", "--append", str(tmp_path / "old.json"))
    rows = content(tmp_path / "new" / f"kernel_floor-h200-{TODAY}.json")["rows"]
    assert [(row["model"], row["us"]) for row in rows] == [("glm4-9b-1m", 5.0), ("llama31-8b", 1.0)]


def test_a_layer_is_from_one_attention_to_the_next() -> None:
    """Not from one norm to the next, though FlashInfer's are named after it."""
    norm, flash = "void flashinfer::norm::RMSNormKernel<8>", "void flash::FlashAttnFwdSm90<128>"
    names = [norm, "qkv", flash, "out", norm, "mlp"] * 4
    events = [
        SimpleNamespace(name=name, time_range=SimpleNamespace(start=3 * n, end=3 * n + 2))
        for n, name in enumerate(names)
    ]
    layer = step_profile._one_layer(events)
    assert [kernel["kernel"] for kernel in layer] == ["out", norm, "mlp", norm, "qkv", flash]
    assert {(kernel["us"], kernel["gap_us"]) for kernel in layer} == {(2, 1)}


def test_ranges_that_the_host_named_are_no_kernels() -> None:
    """SGLang names every step, and the GPU's track has that range from the first to the last kernel."""
    cpu, gpu = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA
    events = [
        SimpleNamespace(name=name, device_type=device, time_range=SimpleNamespace(start=start))
        for device, name, start in (
            (cpu, step_profile.MARK, 0), (cpu, "step[DECODE bs=1]", 1), (cpu, "cudaGraphLaunch", 2),
            (gpu, step_profile.MARK, 5), (gpu, "step[DECODE bs=1]", 5),
            (gpu, "attend", 7), (gpu, "score", 5), (gpu, "Memcpy DtoH (Device -> Pinned)", 9),
        )
    ]  # fmt: skip
    names = [event.name for event in step_profile._kernels(events)]
    assert names == ["score", "attend", "Memcpy DtoH (Device -> Pinned)"]


def test_costs_and_gains_of_the_plan_are_of_one_model() -> None:
    rows = [
        step("dense:fa3", 9.0, backend="fa3"),
        step("dense:fa3", 6.0, backend="fa3", model="glm4-9b-1m"),
    ]
    assert plan_report.usable(rows) == rows[:1]
    common = {"context": 65536, "tp": 1, "batch": 2, "itl_ms": 10.0, "tier": "resident", "format": None}
    served = [
        {**common, "model": model, "variant": variant, "budget": budget, "tokens_per_s": speed}
        for model, speeds in (("glm4-9b-1m-kv4", (100.0, 200.0)), ("llama31-8b-1m", (300.0, 450.0)))
        for variant, budget, speed in zip(("dense:fa3", "locks:r4i4"), (None, 2048), speeds, strict=True)
    ]
    page = plan_report.host_points({"rows": served}, lambda _: "")
    assert page.count("1.00x") == 2 and page.count("2.00x") == 1 and page.count("1.50x") == 1


def test_the_planner_knows_every_geometry_that_is_measured() -> None:
    found = {name: plan_report.model_of(name) for name in ("glm4-9b-1m-kv4", "glm4-9b-1m", "llama31-8b-1m")}
    shapes = [(plan.layers, plan.q_heads, plan.kv_heads, plan.head_dim) for plan in found.values()]
    assert shapes == [(40, 32, 4, 128), (40, 32, 2, 128), (32, 32, 8, 128)]
