"""Parts of the throughput and quality benchmarks that need no server; tests/server runs the first."""

import argparse
import json
import random
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import author_kernels
import author_runs
import kernel_case
import kernel_report
import pytest
import quality_report
import results_file
import task_quality
import throughput
import torch
from locks_sglang import cpu_stand_ins, demo_model
from quality.recipes import RECIPES
from serving import word_tokenizer
from serving.load import Case
from serving.server import Server
from serving.variants import Variant

ROOT = Path(__file__).parents[1]


def test_every_word_is_one_token_and_every_token_one_word(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    (tmp_path / "config.json").write_text(json.dumps({"padded_vocab_size": 5000}))
    folder = word_tokenizer.write(tmp_path, tmp_path / "words")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [random.Random(0).randrange(5000) for _ in range(300)] + [0, 4999]
    assert tokenizer.encode(tokenizer.decode(ids)).ids == ids
    assert tokenizer.encode("t17\n\nt4999 ").ids == [17, 4999]
    assert all(tokenizer.decode([token]) for token in range(5000))


def test_variants() -> None:
    assert Variant.parse("dense:fa3", "flashinfer").flags(2048) == ["--attention-backend", "fa3"]
    sparse = Variant.parse("locks:r4i4", "fa3").flags(512)
    assert sparse[:2] == ["--attention-backend", "fa3"] and sparse[-2:] == [
        "--sparse-decode-summary",
        "r4i4",
    ]
    assert Variant.parse("quest::flashinfer", "fa3").backend == "flashinfer"
    assert "--sparse-decode-summary" not in Variant.parse("oracle", "fa3").flags(512)
    shipped = ["--attention-backend", "fa3", "--sparse-decode", "locks"]
    assert Variant.parse("locks", "fa3").flags() == shipped
    assert Variant.parse("host", "fa3").flags() == [*shipped, "--sparse-decode-kv-tier", "host"]
    assert "--sparse-decode-dense-below" not in sparse
    assert Variant.parse("locks", "fa3").flags(512, always_sparse=True)[-2:] == [
        "--sparse-decode-dense-below",
        "0",
    ]
    host = Variant.parse("host:r4i4", "fa3")
    assert (host.selector, host.tier, sparse) == (
        "locks",
        "host",
        Variant.parse("locks:r4i4", "fa3").flags(512),
    )
    assert host.flags(512, 9.5)[-6:] == [
        *("--sparse-decode-kv-tier", "host", "--sparse-decode-host-gib", "9.5"),
        *("--sparse-decode-summary", "r4i4"),
    ]
    for wrong in ("dense", "dense:a:b", "snapkv", "locks:r4i4:fa3:x"):
        with pytest.raises(ValueError, match="neither dense:BACKEND nor"):
            Variant.parse(wrong, "fa3")


def test_prompts_of_a_conversation_grow_to_the_context() -> None:
    case = Case("multi-turn", 2, 1000, 32, 2)
    assert case.first_prompt + 3 * (64 + 32) == 1000
    flags = case.flags()
    assert int(flags[flags.index("--gsp-system-prompt-len") + 1]) + 64 == case.first_prompt
    with pytest.raises(ValueError, match="too short"):
        Case("multi-turn", 2, 300, 32, 2).check()
    with pytest.raises(ValueError, match="legal: random, shared-prefix, multi-turn"):
        Case("sharegpt", 2, 300, 32, 2).check()


def test_rows_of_an_earlier_run_are_kept_unless_measured_again(tmp_path: Path) -> None:
    row = {
        "variant": "dense:fa3",
        "model": "m",
        "tp": 1,
        "workload": "random",
        "concurrency": 1,
        "context": 8,
        "output": 2,
        "x": 1,
    }
    other = {**row, "model": "n"}
    earlier = {"rows": [row, other], "commit": "b", "command": "python old"}
    (tmp_path / "old.json").write_text(json.dumps(earlier))
    arguments = argparse.Namespace(machine_name="test", out=tmp_path, commit="c")

    def write(x: int, append: Path) -> Path:
        return throughput.write([{**row, "x": x}], arguments, results_file.read(append), copy_rate=None)

    written = write(2, tmp_path / "old.json")
    content = json.loads(written.read_text())
    assert content["rows"] == [other, {**row, "x": 2}]
    assert content["commands"] == ["python old # commit b", content["command"]]
    # Written again after the next case, or appended to itself: a command is there once.
    again = json.loads(write(3, written).read_text())
    assert again["commands"] == content["commands"]


def test_every_task_has_its_row_in_the_paper() -> None:
    tables = quality_report.paper()
    for name, recipe in RECIPES.items():
        table = tables[recipe.paper or name]
        assert list(table) == ["64", "128", "256", "512", "1024", "2048"]
        for rows in table.values():
            assert set(recipe.tasks.values()) <= set(rows), name
            assert all("FullKV" in rows[row] and "r4i4" in rows[row] for row in recipe.tasks.values()) or (
                name == "infinitebench"
            )
    # The paper's own means over tasks, which its tables print.
    for name in ("longbench", "ruler-16k", "ruler-32k", "infinitebench"):
        for budget in ("64", "2048"):
            printed = tables[name][budget]["Avg"]["r8i4"]
            assert float(quality_report.paper_means(RECIPES[name], name, "r8i4", budget)) == pytest.approx(
                printed, abs=0.11
            )


def scored(name: str, points: float) -> list[dict]:
    return [
        {"selector": "FullKV", "task": task, "score": points, "prompts_sha256": "p"}
        for task in RECIPES[name].tasks
    ]


def test_sparse_arms_wait_for_fullkv() -> None:
    recipe = RECIPES["ruler-16k"]
    arguments = argparse.Namespace(
        recipe="ruler-16k", model_path="models/Llama-3.1-8B-Instruct", any_fullkv=False
    )
    task_quality.check_fullkv(scored("ruler-16k", 94.0), recipe, arguments)
    with pytest.raises(task_quality.HarnessDiffers, match=r"-4\.3 points"):
        task_quality.check_fullkv(scored("ruler-16k", 90.0), recipe, arguments)
    task_quality.check_fullkv(scored("ruler-16k", 90.0), replace(recipe, limit=5), arguments)
    arguments.model_path = "models/other"
    task_quality.check_fullkv(scored("ruler-16k", 90.0), recipe, arguments)


def test_other_prompts_are_noticed() -> None:
    rows = scored("ruler-16k", 94.0)
    sparse = [{**rows[0], "selector": "locks"}]
    task_quality.check_same_prompts(rows, sparse)
    with pytest.raises(task_quality.HarnessDiffers, match="other prompts"):
        task_quality.check_same_prompts(rows, [{**sparse[0], "prompts_sha256": "q"}])


def test_scores_stand_beside_the_papers() -> None:
    row = {"task": "niah_single_1", "format": None, "budget": None}
    rows = [
        {**row, "selector": "FullKV", "score": 90.0},
        {**row, "selector": "locks", "format": "r4i4", "budget": 64, "score": 80.0},
        {**row, "selector": "locks", "format": "r6h", "budget": 64, "score": 85.0},
    ]
    lines = quality_report.scores("ruler-16k", rows).splitlines()
    assert lines[0] == "| budget | task | FullKV | r6h | r4i4 |"
    assert lines[2] == "| 64 | NIAH-S1 | 90.0 (100.0) | 85.0 | 80.0 (100.0) |"
    assert lines[3] == "| 64 | **mean** | 90.0 (100.0) | 85.0 | 80.0 (100.0) |"
    # A task that an arm was not given leaves its mean open; one of FullKV alone is no line of the table.
    vt = {**row, "task": "ruler_vt"}
    rows += [{**vt, "selector": "FullKV", "score": 10.0}]
    rows += [{**vt, "selector": "locks", "format": "r6h", "budget": 64, "score": 5.0}]
    rows += [{**row, "task": "ruler_cwe", "selector": "FullKV", "score": 2.0}]
    lines = quality_report.scores("ruler-16k", rows).splitlines()
    assert lines[4].startswith("| 64 | **mean** | 50.0 (") and lines[4].endswith(" | 45.0 | - |")
    assert lines[6] == "FullKV alone: CWE 2.0."
    assert quality_report.means("ruler-16k", rows).splitlines() == [
        "| budget | FullKV | r6h | r4i4 |",
        "| --- | --- | --- | --- |",
        "| 64 | 50.0 (100.0) | 45.0 | - |",
    ]


def test_what_was_not_run_has_the_papers_scores_of_every_selector_and_budget() -> None:
    lines = quality_report.not_run({name for name in RECIPES if name not in ("math500", "infinitebench")})
    assert "python benchmark/task_quality.py math500 " in lines and "ruler" not in lines
    assert "| math500 | 94.0 | r8i4 | 54.5 | 80.5 | 91.0 | 92.0 | 94.0 | 93.5 |" in lines
    selectors = [line.split(" | ")[2] for line in lines.splitlines() if line.startswith("| math500 |")]
    assert selectors == ["Oracle", "r8i4", "r4i4", "r2i4", "Quest"]
    # The paper has no other rank there.
    selectors = [
        line.split(" | ")[2] for line in lines.splitlines() if line.startswith("| infinitebench |")
    ]
    assert selectors == ["Oracle", "r8i4", "Quest"]


def test_answers_of_a_reasoning_model() -> None:
    pytest.importorskip("lm_eval", reason="needs pip install '.[bench]'")
    from quality.served import Served

    model = Served.__new__(Served)
    model.think_end, model.finish_reasons, model.prompt_tokens = "</think>", [], []
    choices = [
        {"index": 1, "text": "<think> still", "finish_reason": "length"},
        {"index": 0, "text": "<think> so</think>7", "finish_reason": "stop"},
    ]
    assert model.parse_generations({"choices": choices, "usage": {"prompt_tokens": 40}}) == [
        "7",
        "<think> still",
    ]
    assert model.account() == {"cut_share": 0.5, "prompt_tokens": 40, "prompt_tokens_max": 40}


class Answers(BaseHTTPRequestHandler):
    """A completions API that answers every prompt with " 7", and keeps what it was asked."""

    asked: ClassVar[list[dict]] = []

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(request)
        prompts = request["prompt"] if isinstance(request["prompt"][0], list) else [request["prompt"]]
        choices = [{"index": n, "text": " 7", "finish_reason": "stop"} for n in range(len(prompts))]
        body = json.dumps({"choices": choices, "usage": {"prompt_tokens": sum(map(len, prompts))}}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_a_task_is_asked_and_scored() -> None:
    """Through the harness: the budget of every request, the templated prompt, the harness's score."""
    pytest.importorskip("lm_eval", reason="needs pip install '.[bench]'")
    cpu_stand_ins.activate()
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask
    from quality.served import PromptTooLong

    docs = Dataset.from_list(
        [{"question": f"What is {n} + {n + 1}?", "answer": f" {2 * n + 1}"} for n in (3, 4, 5)]
    )
    task = ConfigurableTask(
        config={
            "task": "sums",
            "custom_dataset": lambda **_: {"test": docs},
            "test_split": "test",
            "doc_to_text": "{{question}}",
            "doc_to_target": "{{answer}}",
            "output_type": "generate_until",
            "num_fewshot": 0,
            "generation_kwargs": {"until": [], "max_gen_toks": 4},
            "metric_list": [{"metric": "exact_match"}],
        }
    )
    recipe = replace(RECIPES["ruler-synthetic"], metric="exact_match", limit=2)
    arguments = argparse.Namespace(model_path=str(demo_model.ensure(demo_model.DEFAULT_OUT)), concurrent=2)
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        found = [
            task_quality.run_task(Server(url), budget, recipe, "sums", task, 100, arguments)
            for budget in (None, 64)
        ]
        with pytest.raises(PromptTooLong):
            task_quality.run_task(Server(url), 64, recipe, "sums", task, 30, arguments)
        server.shutdown()
    assert [run["score"] for run in found] == [0.5, 0.5]
    assert found[0]["prompts"] == 2 and found[0]["answers"] == [[[" 7"]], [[" 7"]]]
    assert found[0]["prompts_sha256"] == found[1]["prompts_sha256"]
    assert len(Answers.asked) == 4
    assert ["custom_params" in request for request in Answers.asked] == [False, False, True, True]
    assert Answers.asked[2]["custom_params"] == {"locks": {"mode": "sparse", "budget": 64}}
    assert found[0]["prompt_tokens_max"] == max(len(request["prompt"][0]) for request in Answers.asked)


def test_results_name_no_folder_of_the_machine() -> None:
    given = ["benchmark/x.py", "--model-path", "/models/a b", "--out", "out/c"]
    assert results_file.command(given) == "python benchmark/x.py --model-path 'a b' --out out/c"


def test_bytes_of_the_kernel_cases_are_those_of_the_committed_results() -> None:
    files = sorted((ROOT / "benchmark" / "results").glob("kernel_floor*.json"))
    rows = [row for path in files for row in json.loads(path.read_text())["rows"]]
    assert rows
    for row in rows:
        fields = {
            name: row[name]
            for name in ("model", "kv_heads", "group", "head_dim", "context", "batch", "format")
        }
        assert kernel_case.Case(**fields, budget_pages=128).moved(row["op"]) == row["bytes"]
    case = kernel_case_of(8, 524_288)
    assert case.moved("dense") == 2**30
    assert case.moved("attend") == 4 * 2**20  # 2,048 tokens of 4 heads
    assert case.moved("layer") == case.moved("path") + case.moved("attend")
    assert case.moved("summarize") == case.record_bytes + 2**29


def kernel_case_of(group: int, context: int, batch: int = 1) -> kernel_case.Case:
    return kernel_case.Case("m", 32 // group, group, 128, context, batch, "r4i4", 128)


def test_switches_of_the_author_kernels() -> None:
    def names(*case: int) -> list[str]:
        return [switches.name for _, switches in author_runs.runs([kernel_case_of(*case)])]

    assert names(8, 16_384) == ["six slabs", "six slabs, maxima handed over", "records"]
    assert names(8, 524_288) == ["six slabs", "records", "records, flat scores"]
    assert names(8, 131_072, 8) == ["six slabs", "six slabs, maxima handed over", "records"]
    assert names(4, 524_288) == ["six slabs", "records, any group"]
    libraries = {switches.library: switches for switches in author_runs.SETS}
    assert len(libraries) == 4  # sets with the same compiler flags share one
    variables = author_runs.environment("r8i4", libraries["records"])
    assert variables["LOCKS_RKI4_RANK"] == "8" and variables["RKI4_MMA_AOS"] == "1"


def test_the_fastest_switches_count_for_every_op() -> None:
    case = kernel_case_of(8, 16_384)
    rows = [
        kernel_case.row(case, op, "locks-kv", case.moved(op), (us, us, us), note)
        for note, op, us in (
            ("a", "score", 9.0),
            ("a", "path", 20.0),
            ("b", "score", 8.0),
            ("b", "path", 21.0),
        )
    ]
    assert [(row["op"], row["us"], row["note"]) for row in author_runs.fastest(rows)] == [
        ("score", 8.0, "b"),
        ("path", 20.0, "a"),
    ]


def test_author_kernels_that_fail_cost_a_line_and_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A process that ends in an error keeps the rows before it; every message is printed once."""
    script = tmp_path / "worker.py"
    script.write_text(
        """
import json, sys
if sys.argv[1] == "--build":
    sys.exit()
case, ops = json.loads(sys.argv[1])["cases"][0], json.loads(sys.argv[1])["ops"]
with open(sys.argv[2], "a") as events:
    row = {key: case[key] for key in ("format", "model", "batch", "context")} | {"op": ops[0], "us": 5.0}
    print(json.dumps({"row": row}), file=events)
raise RuntimeError("CUDA error: an illegal memory access")
"""
    )
    monkeypatch.setattr(author_runs, "WORKER", script)
    monkeypatch.setattr(author_runs, "installed", lambda: "0")
    cases = [kernel_case_of(8, 16_384), kernel_case_of(8, 32_768), kernel_case_of(16, 16_384)]
    rows = list(author_runs.measure(cases, ["path", "dense"], 3))
    assert [(row["op"], row["context"]) for row in rows] == [("path", 16_384)]
    printed = capsys.readouterr().out
    assert printed.count("an illegal memory access") == 1
    assert "at most 8 query heads a KV head" in printed
    monkeypatch.setattr(author_runs, "installed", lambda: None)
    assert list(author_runs.measure(cases, ["path"], 3)) == []


def test_share_of_common_pages() -> None:
    theirs = torch.tensor([[[0, 3, 5, 9], [0, 1, 2, 9]]])
    assert author_kernels.overlap(theirs, torch.tensor([[[0, 4, 5, 9], [0, 6, 7, 9]]])) == 5 / 8


def test_ops_that_no_cuda_graph_takes_are_timed_in_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(author_kernels, "graph_us", refused)
    monkeypatch.setattr(author_kernels, "loop_us", lambda calls, repeats: (3.0, 2.0, 4.0))
    monkeypatch.setattr(author_kernels.torch.cuda, "synchronize", lambda: None)
    row = author_kernels.timed_row(kernel_case_of(8, 16_384), "score", [], "locks-kv 0", 3)
    assert (row["us"], row["us_min"], row["us_max"]) == (3.0, 2.0, 4.0)
    reason = "operation not permitted when stream is capturing"
    assert row["note"] == f"locks-kv 0; not capturable ({reason}); events around a loop"


def test_table_of_kernels_pairs_ours_with_the_authors() -> None:
    common = {"batch": 1, "context": 524_288, "format": "r4i4"}
    rows = [
        {**common, "op": "score", "impl": "cuda", "us": 22.41},
        {**common, "op": "score", "impl": "locks-kv", "us": 54.0},
        {**common, "op": "attend", "impl": "auto", "us": 8.2},
        {**common, "op": "dense", "impl": "flashinfer", "us": 258.0},
        {**common, "op": "score", "impl": "cuda", "us": 1.0, "format": "r8i4"},
    ]
    table = kernel_report.times(rows, "r4i4")
    assert "| score, r4i4 | 22.4 / 54.0 | 20 |" in table
    assert "| attend, r4i4 | 8.2 | 8 |" in table and "| select, r4i4 | - | 10 |" in table
    assert "| FlashInfer, dense | 258.0 |" in kernel_report.dense(rows)
