"""Every combination that sparse decode does not work with is refused before anything starts."""

import re
from argparse import ArgumentParser
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from locks_sglang import flashinfer_attend
from locks_sglang.activation import config_of
from locks_sglang.config import LocksConfig, LocksError
from locks_sglang.refusals import REFUSALS, REFUSED_VARIABLES, Refusal, check_server_args, resolved
from plugin_process import AtLoad, change, changeable, resolve

# What a user would type, through SGLang's own parser.
COMMAND_LINES = {
    "enable_hierarchical_cache": ["--enable-hierarchical-cache"],
    "enable_lmcache": ["--enable-lmcache"],
    "enable_flexkv": ["--enable-flexkv"],
    "enable_hisparse": ["--enable-hisparse"],
    "disaggregation_mode": ["--disaggregation-mode", "decode"],
    "is_embedding": ["--is-embedding"],
    "enable_torch_compile": ["--enable-torch-compile"],
    "enable_mixed_chunk": ["--enable-mixed-chunk"],
    "enable_two_batch_overlap": ["--enable-two-batch-overlap"],
    "enable_pdmux": ["--enable-pdmux"],
    "kv_cache_dtype": ["--kv-cache-dtype", "fp8_e5m2"],
    "tokenizer_worker_num": ["--tokenizer-worker-num", "2"],
    "smg_grpc_mode": ["--smg-grpc-mode"],
    "use_ray": ["--use-ray"],
    "dcp_size": ["--dcp-size", "2"],
    "dp_size": ["--dp-size", "2"],
    "prefill_attention_backend": ["--prefill-attention-backend", "triton"],
    "decode_attention_backend": ["--decode-attention-backend", "triton"],
    "pp_size": ["--pp-size", "2"],
    "nnodes": ["--nnodes", "2", "--dist-init-addr", "127.0.0.1:5000"],
}
# Options that SGLang refuses by itself on this machine or with this model, or does not have yet.
VALUES: dict[str, Any] = {
    "speculative_algorithm": "EAGLE",
    "radix_cache_backend": "flexkv",
    "enable_unified_cache_external_linker": True,
    "enable_unified_memory": True,
    "enable_page_major_kv_layout": True,
    "encoder_only": True,
    "enable_mis": True,
    "dllm_algorithm": "LowConfidence",
    "enable_nvidia_megakernel": True,
    "enable_amd_monokernel": True,
    "enable_deterministic_inference": True,
    "rl_on_policy_target": "fsdp",
    "attn_cp_size": 2,
    "enable_kv_cache_sharding": True,
    "enable_dp_attention": True,
    "attn_dp_size": 2,
}


@pytest.fixture
def dense_args(at_load: AtLoad) -> SimpleNamespace:
    return changeable(at_load.dense_args)


def check_refused(error: BaseException, row: Refusal) -> None:
    text = str(error)
    assert text.startswith((row.option, f"error: {row.option}"))
    assert "--sparse-decode locks" in text
    assert row.reason in text
    assert f"Legal: {row.legal}" in text
    assert ("--sparse-decode-allow-untested" in text) == row.untested


def test_every_row_has_a_test() -> None:
    fields = [row.field for row in REFUSALS]
    assert sorted(fields) == sorted({*COMMAND_LINES, *VALUES})
    assert not set(COMMAND_LINES) & set(VALUES)


@pytest.mark.parametrize("row", [r for r in REFUSALS if r.field in COMMAND_LINES], ids=lambda r: r.field)
def test_refused_on_the_command_line(prepare: Callable[..., Any], row: Refusal) -> None:
    flags = COMMAND_LINES[row.field]
    prepare(*flags)  # SGLang itself accepts it
    with pytest.raises(SystemExit) as stopped:
        prepare("--sparse-decode", "locks", *flags)
    check_refused(stopped.value, row)
    if row.untested:
        args = prepare("--sparse-decode", "locks", "--sparse-decode-allow-untested", *flags)
        assert config_of(args).enabled


@pytest.mark.parametrize("row", [r for r in REFUSALS if r.field in VALUES], ids=lambda r: r.field)
def test_refused_value(dense_args: SimpleNamespace, row: Refusal) -> None:
    config = LocksConfig(selector="locks")
    check_server_args(dense_args, config)
    setattr(dense_args, row.field, VALUES[row.field])
    with pytest.raises(LocksError) as error:
        check_server_args(dense_args, config)
    check_refused(error.value, row)


def test_quiet_values(prepare: Callable[..., Any]) -> None:
    flags = ["--disaggregation-mode", "null", "--kv-cache-dtype", "bfloat16", "--tokenizer-worker-num", "1"]
    assert config_of(prepare("--sparse-decode", "locks", *flags, "--pp-size", "1")).enabled


def test_kv_cache_dtypes(dense_args: SimpleNamespace) -> None:
    """Of all that SGLang offers, only what the kernels read."""
    from sglang.srt.server_args import ServerArgs

    parser = ArgumentParser()
    ServerArgs.add_cli_args(parser)
    (choices,) = (action.choices for action in parser._actions if action.dest == "kv_cache_dtype")
    config, refused = LocksConfig(selector="locks"), set()
    for dense_args.kv_cache_dtype in choices:
        try:
            check_server_args(dense_args, config)
        except LocksError as error:
            assert str(error).startswith(f"--kv-cache-dtype ({dense_args.kv_cache_dtype})")
            refused.add(dense_args.kv_cache_dtype)
    assert {"fp8_e5m2", "mxfp8", "nvfp4"} <= refused
    assert set(choices) - refused == {"auto", "bf16", "bfloat16", "fp8_e4m3"}


@pytest.mark.parametrize("row", REFUSED_VARIABLES, ids=lambda row: row.name)
@pytest.mark.parametrize("value", ["1", "true", "True"])
def test_refused_variable(
    prepare: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, row: Any, value: str
) -> None:
    monkeypatch.setenv(row.name, value)
    prepare()
    with pytest.raises(SystemExit, match=rf"{row.name}={value} .*Legal: unset it") as stopped:
        prepare("--sparse-decode", "locks")
    assert row.reason in str(stopped.value)
    monkeypatch.setenv(row.name, "0")
    prepare("--sparse-decode", "locks")


@pytest.mark.parametrize("backend", ["full", "breakable", "tc_piecewise", "disabled"])
def test_selections_can_be_looked_at_with_and_without_graphs(
    dense_args: SimpleNamespace, backend: str
) -> None:
    dense_args.cuda_graph_config = SimpleNamespace(decode=SimpleNamespace(backend=backend))
    check_server_args(
        dense_args, LocksConfig(selector="locks", trace_file="/tmp/trace.jsonl", audit_interval=8)
    )


def test_flashinfer_where_it_cannot_run(
    prepare: Callable[..., Any], dense_args: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--sparse-decode", "locks", "--sparse-decode-attend")
    monkeypatch.setattr(flashinfer_attend, "available", lambda: False)
    with pytest.raises(
        SystemExit, match=r"attend flashinfer .* not installed here\. Legal: auto, native\."
    ):
        prepare(*flags, "flashinfer")
    for legal in ("auto", "native"):
        assert config_of(prepare(*flags, legal)).attend == legal
    monkeypatch.setattr(flashinfer_attend, "available", lambda: True)
    config = LocksConfig(selector="locks", attend="flashinfer")
    with pytest.raises(LocksError, match=r"attend flashinfer .* on GPUs only\. Legal: auto, native\."):
        check_server_args(dense_args, config)
    dense_args.device = "cuda"
    check_server_args(dense_args, config)


def test_engine_raises_the_same(at_load: AtLoad, base_flags: list[str]) -> None:
    from locks_sglang.parent_hooks import engine_server_args_class
    from sglang.srt.server_args import ServerArgs

    build = engine_server_args_class(ServerArgs).__func__
    with pytest.raises(LocksError, match=r"--enable-mixed-chunk .*Legal: leave it out"):
        build(
            model_path=base_flags[1],
            device=at_load.dense_args.device,
            attention_backend=at_load.dense_args.attention_backend,
            sparse_decode="locks",
            enable_mixed_chunk=True,
        )


def test_checked_again_when_the_server_launches(prepare: Callable[..., Any]) -> None:
    """Code that embeds SGLang may change the arguments after they were parsed."""
    args = resolve(prepare("--sparse-decode", "locks"))
    args.check_server_args()
    change(args, enable_lmcache=True)
    with pytest.raises(LocksError, match="--enable-lmcache"):
        args.check_server_args()


def test_resolved_values_count() -> None:
    """0.5.23 keeps what it resolves beside the fields that the user gave."""
    plain = SimpleNamespace(enable_mixed_chunk=False)
    assert resolved(plain) is plain


def test_untested_rows_say_so() -> None:
    assert all(re.search("not tested", row.reason) for row in REFUSALS if row.untested)
