"""`python -m locks_sglang check`: the screen and the exit status, of this machine and of others."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import source_tree
from locks_kernels import build
from locks_sglang import check, cli, compat, machine, model_facts
from locks_sglang.config import LocksConfig, LocksError
from locks_sglang.hooks import HOOKS
from locks_sglang.machine import Gpu, Machine
from locks_sglang.tier.topology import Node

MODEL_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
NOTHING = Machine(
    processor="x86_64",
    python="3.11.7",
    packages={"torch": "2.13.0+cpu", "flashinfer": None},
    gpus=(),
    torch_sees_gpu=False,
    nvcc=None,
    nvcc_version=None,
    kernels_missing="no CUDA compiler (nvcc)",
    numa=(),
    memlock=8 << 20,
)
GRACE = replace(
    NOTHING,
    processor="aarch64",
    gpus=(Gpu("NVIDIA GH200 480GB", "580.65.06", (9, 0), 97871),),
    torch_sees_gpu=True,
    nvcc="/usr/local/cuda/bin/nvcc",
    nvcc_version="13.0",
    kernels_missing=None,
    numa=(Node(0, "0-71", 480 << 30, 0, {}), Node(1, "", 95 << 30, 0, {})),
    memlock=None,
)
HOLDING = [compat.Check("a.B.c", "purpose", True)]


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[..., str]:
    """`make_model(**changes)`: a folder with the configuration of Llama-3.1-8B, changed."""

    def make(**changes: Any) -> str:
        (tmp_path / "config.json").write_text(json.dumps({**MODEL_CONFIG, **changes}))
        return str(tmp_path)

    return make


def screen(result: check.Result) -> str:
    """The text with its lines joined, so that a test does not depend on where they are broken."""
    return " ".join(check.render(result).split())


def of(described: Machine, **more: Any) -> check.Result:
    return check.Result("0.5.17", HOLDING, LocksConfig(), machine=described, **more)


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check"]) == check.HOLDS
    shown = capsys.readouterr().out
    for word in (
        "SGLang 0.5.",
        "(tested)",
        "torch ",
        "flashinfer ",
        "GPU ",
        "NUMA node 0",
        "locked memory",
    ):
        assert word in " ".join(shown.split()) + " "  # long lines wrap at the terminal's width
    lines = shown.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 120
    assert re.search(r"contracts +(\d+) of \1 hold", shown) and "FAIL" not in shown
    assert lines[-1] == "sparse decode starts on this SGLang"


def test_every_contract_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--contracts"]) == check.HOLDS
    shown = capsys.readouterr().out
    assert all(f"pass  {check.short_name(hook.target)} " in shown for hook in HOOKS)


def test_model_that_works(make_model: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--model", make_model()]) == check.HOLDS
    shown = " ".join(capsys.readouterr().out.split())
    assert "32 layers, 32 query and 8 KV heads, head_dim 128, bfloat16, context 131,072" in shown
    # r6h of d = 128 is 574 bytes a page of 16 tokens; K and V are 4 bytes a value.
    summaries = 574 * 8 * 32 // 16
    assert f"r6h, page 16: {summaries:,} bytes a token beside {4 * 8 * 128 * 32:,} of KV (7.0 %)" in shown
    assert f"{summaries * 1e6 / 2**30:.2f} GiB per million tokens" in shown
    assert shown.endswith("starts with this model on this SGLang")


@pytest.mark.parametrize(
    ("flags", "summaries"),
    [
        ({"summary": "r8i4"}, 818 * 8 * 32 // 16),
        ({"summary": "r8i4", "page_size": 64}, -(-(512 + 512 + 128 + 2 * 73) * 8 * 32 // 64)),
        ({"selector": "quest"}, 512 * 8 * 32 // 16),
        ({"selector": "oracle"}, 0),
    ],
    ids=str,
)
def test_bytes_follow_the_flags(
    make_model: Callable[..., str], flags: dict[str, Any], summaries: int
) -> None:
    assert model_facts.read_model(make_model(), LocksConfig(**flags)).summary_bytes == summaries


def test_heads_of_a_rank(make_model: Callable[..., str]) -> None:
    whole = model_facts.read_model(make_model(), LocksConfig())
    half = model_facts.read_model(make_model(), LocksConfig(), tp_size=2)
    assert (half.q_heads, half.kv_heads) == (16, 4)
    assert (2 * half.kv_bytes, 2 * half.summary_bytes) == (whole.kv_bytes, whole.summary_bytes)
    with pytest.raises(LocksError, match="--tp-size is 3; legal: a divisor"):
        model_facts.read_model(make_model(), LocksConfig(), tp_size=3)


def test_model_that_is_refused(make_model: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--model", make_model(head_dim=96)]) == check.BROKEN
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "does not start with this model: --sparse-decode does not work with head_dim 96; legal: 64" in shown
    )


def test_sliding_window_layers_are_mentioned(make_model: Callable[..., str]) -> None:
    hybrid = make_model(is_hybrid_swa=True, hybrid_layer_pattern=[0, 1] * 16)
    found = model_facts.read_model(hybrid, LocksConfig())
    assert found.refusal is None
    assert found.note is not None and "--disable-hybrid-swa-memory" in found.note


def test_no_such_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--model", "/no/such/model"]) == check.BROKEN
    error = capsys.readouterr().err
    assert "cannot read the configuration of --model /no/such/model" in error and "legal" in error


def test_wrong_format(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--sparse-decode-summary", "r3i4"]) == check.BROKEN
    assert "'r3i4' is unknown; legal" in capsys.readouterr().err


def test_machine_with_nothing() -> None:
    shown = screen(of(NOTHING))
    assert "GPU none" in shown
    assert "flashinfer none" in shown
    assert "torch on the CPU; CUDA kernels cannot be compiled here: no CUDA compiler (nvcc)" in shown
    assert "locked memory: at most 8 MiB" in shown


def test_grace_hopper() -> None:
    shown = screen(of(GRACE))
    assert "NVIDIA GH200 480GB, sm_90, 96 GiB, driver 580.65.06" in shown
    assert "CUDA, compiled at first use; nvcc 13.0" in shown
    assert "NUMA node 0: 480 GiB, CPUs 0-71; NUMA node 1: 95 GiB, no CPUs; locked memory: no limit" in shown
    assert of(GRACE).status == check.HOLDS


@pytest.mark.parametrize(
    ("described", "said"),
    [
        (replace(GRACE, torch_sees_gpu=False), "but this torch cannot use it"),
        (replace(GRACE, gpus=(Gpu("NVIDIA A100", "580.65", (8, 0), 81920),)), "were run on sm_90 only"),
        (
            replace(GRACE, gpus=2 * (Gpu("NVIDIA H200", "580.65", (9, 0), 143771),)),
            "2 x NVIDIA H200, sm_90",
        ),
        (replace(GRACE, gpus=(Gpu("NVIDIA GB10", "580.65", (12, 1), 0),)), "memory unknown"),
        (replace(GRACE, kernels_missing="no nvcc"), "Triton, slower than CUDA: no nvcc"),
    ],
)
def test_what_is_not_as_it_should_be(described: Machine, said: str) -> None:
    assert said in screen(of(described))


def test_a_gpu_that_torch_cannot_use_is_no_success() -> None:
    unusable = of(replace(GRACE, torch_sees_gpu=False))
    assert unusable.status == check.BROKEN
    assert screen(unusable).endswith("does not start on this GPU: this torch cannot use it (see GPU above)")
    assert of(NOTHING).status == check.HOLDS, "without a GPU it runs on the CPU"


def test_compiled_kernels_are_counted(
    make_model: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def is_compiled(library: build.Library, arch: str) -> bool:
        asked.append((library[0], arch))
        return library[0] == "select"

    monkeypatch.setattr(build, "is_compiled", is_compiled)
    model = model_facts.read_model(make_model(), LocksConfig())
    shown = screen(of(GRACE, model=model))
    assert "1 of 4 libraries compiled for sm_90a, the rest at the first start" in shown
    assert sorted(asked) == [(name, "90a") for name in ("attend", "score", "select", "summarize")]


def test_gpus_as_the_driver_lists_them() -> None:
    answer = "NVIDIA H200, 580.65.06, 9.0, 143771\nNVIDIA GB10, 580.95, 12.1, [N/A]\nunknown error\n"
    found = machine.find_gpus(lambda command: answer if command[0] == "nvidia-smi" else "")
    assert found == (
        Gpu("NVIDIA H200", "580.65.06", (9, 0), 143771),
        Gpu("NVIDIA GB10", "580.95", (12, 1), 0),
    )
    assert machine.find_gpus(lambda command: "NVIDIA-SMI has failed because it could not ...\n") == ()


def test_commands_that_are_not_there_or_fail() -> None:
    assert machine.run(["/no/such/program"]) == ""
    assert machine.run(["false"]) == ""
    assert machine.run(["echo", "there"]) == "there\n"


def test_compiler_release() -> None:
    said = "Cuda compilation tools, release 13.0, V13.0.88\nBuild cuda_13.0.r13.0/compiler.36424714_0\n"
    assert machine.compiler_release("nvcc", lambda command: said) == "13.0"
    assert machine.compiler_release("nvcc", lambda command: "") is None


def test_numa_nodes(tmp_path: Path) -> None:
    for number, cpus, memory in ((10, "", 98566144), (0, "0-71", 497025920), (2, "72-143", 7), (3, "", 0)):
        node = tmp_path / f"sys/devices/system/node/node{number}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(f"{cpus}\n")
        (node / "meminfo").write_text(
            f"Node {number} MemTotal:       {memory} kB\nNode {number} MemFree: 1 kB\n"
        )
    (tmp_path / "sys/devices/system/node/node4").mkdir()  # a sandbox's, with nothing in it
    found = [(node.number, node.cpu_list, node.total >> 10) for node in machine.numa_nodes(tmp_path)]
    assert found == [(0, "0-71", 497025920), (2, "72-143", 7), (10, "", 98566144)]
    assert machine.numa_nodes(tmp_path / "none") == ()


def test_newest_sglang(newest_sources: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--sources", str(newest_sources)]) == check.HOLDS
    shown = capsys.readouterr().out
    assert "SGLang 0.5.23 (tested)" in shown
    assert "NUMA" not in shown, "of other sources, this machine's facts say nothing"


def test_broken_sglang(broken: source_tree.Break, capsys: pytest.CaptureFixture[str]) -> None:
    target = "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.alloc"
    root = broken(target, lambda source: source.replace("def alloc(self, reqs", "def alloc(self, requests"))
    assert cli.main(["check", "--sources", str(root)]) == check.BROKEN
    shown = capsys.readouterr().out
    assert re.search(r"^FAIL  ReqToTokenPool\.alloc ", shown, re.M)
    assert "parameters (self, requests" in shown and target in shown
    assert "pass  " not in shown and "does not start" in shown


def test_untested_version(broken: source_tree.Break, capsys: pytest.CaptureFixture[str]) -> None:
    root = broken("sglang._version.x", lambda source: re.sub(r"'0\.5\.\d+'", "'0.5.18'", source))
    assert cli.main(["check", "--sources", str(root)]) == check.UNTESTED
    shown = capsys.readouterr().out
    assert "0.5.18 (NOT tested)" in shown and shown.rstrip().endswith("with --sparse-decode-allow-untested")


def test_no_sglang(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--sources", str(tmp_path)]) == check.BROKEN
    assert "legal" in capsys.readouterr().err
