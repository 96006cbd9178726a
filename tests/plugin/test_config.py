"""What the options themselves must be, and which models and KV pools can be served."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from locks_kernels.layout import RANKS, SUFFIXES
from locks_sglang import scheduler_hooks
from locks_sglang.config import LocksConfig, LocksError, check_budget
from locks_sglang.model_checks import check_model
from plugin_process import AtLoad

LOCKS = LocksConfig(selector="locks")

# Changed fields, and what the message must say: the option, and the legal values.
WRONG = [
    ({"selector": "magic"}, "--sparse-decode 'magic'", "off, locks, quest, oracle"),
    ({"page_size": 1}, "--page-size 1 ", "legal: 16, 32, 64"),
    ({"page_size": 8}, "--page-size 8 ", "legal: 16, 32, 64"),
    ({"page_size": 128}, "--page-size 128 ", "legal: 16, 32, 64"),
    ({"summary": "r3i4"}, "--sparse-decode-summary 'r3i4'", "r{1,2,4,6,8,16}{i4,i8,bf16,h}"),
    ({"summary": "r8"}, "--sparse-decode-summary 'r8'", "for example r8i4"),
    ({"summary": "R8I4"}, "--sparse-decode-summary 'R8I4'", "for example r8i4"),
    ({"summary": ""}, "--sparse-decode-summary ''", "for example r8i4"),
    ({"budget": 0}, "--sparse-decode-budget is 0", "at least two pages (32 tokens)"),
    ({"budget": 16}, "--sparse-decode-budget is 16", "at least two pages (32 tokens)"),
    ({"budget": -2048}, "--sparse-decode-budget is -2048", "at least two pages (32 tokens)"),
    ({"budget": 100}, "--sparse-decode-budget is 100", "a multiple of the page size (16)"),
    ({"budget": 96, "page_size": 64}, "--sparse-decode-budget is 96", "at least two pages (128 tokens)"),
    ({"max_budget": 1024}, "--sparse-decode-max-budget is 1024", "at least the budget (2048)"),
    ({"max_budget": 4097}, "--sparse-decode-max-budget is 4097", "a multiple of the page size (16)"),
    ({"min_len": -1}, "--sparse-decode-min-len is -1", "legal: 0 or more"),
    ({"attend": "fa3"}, "--sparse-decode-attend 'fa3'", "legal: auto, flashinfer, native"),
    (
        {"attend": "flashinfer", "min_len": 8194},
        "--sparse-decode-min-len is 8194",
        "at most one token more than --sparse-decode-max-budget (8192)",
    ),
    ({"audit_layers": 0}, "--sparse-decode-audit-layers is 0", "legal: 1 or more"),
    ({"audit_interval": -1}, "--sparse-decode-audit-interval is -1", "legal: 0 or more"),
]


@pytest.mark.parametrize(("changes", "option", "legal"), WRONG, ids=str)
def test_wrong_option(changes: dict[str, Any], option: str, legal: str) -> None:
    with pytest.raises(LocksError) as error:
        replace(LOCKS, **changes).validate()
    assert option in str(error.value)
    assert legal in str(error.value)


@pytest.mark.parametrize(
    "flags",
    [("--page-size", "8"), ("--sparse-decode-budget", "100"), ("--sparse-decode-summary", "r3i4")],
    ids=str,
)
def test_wrong_option_stops_the_command_line(prepare: Callable[..., Any], flags: tuple[str, str]) -> None:
    with pytest.raises(SystemExit, match=f"^error: {flags[0]} .*legal: "):
        prepare("--sparse-decode", "locks", *flags)
    prepare(*flags)  # without sparse decode nothing of it matters


@pytest.mark.parametrize("summary", [f"r{rank}{suffix}" for rank in RANKS for suffix in SUFFIXES])
def test_every_format_is_accepted(summary: str) -> None:
    replace(LOCKS, summary=summary).validate()


@given(budget=st.integers(-4096, 4096), page_size=st.sampled_from([16, 32, 64]))
def test_legal_budgets(budget: int, page_size: int) -> None:
    legal = budget >= 2 * page_size and budget % page_size == 0
    if legal:
        check_budget("--sparse-decode-budget", budget, page_size)
    else:
        with pytest.raises(LocksError):
            check_budget("--sparse-decode-budget", budget, page_size)


def test_max_budget_defaults_to_four_budgets() -> None:
    assert replace(LOCKS, budget=512).largest_budget == 2048
    assert replace(LOCKS, budget=512, max_budget=512).largest_budget == 512
    replace(LOCKS, budget=512, max_budget=512).validate()


def fake_model(**changes: Any) -> SimpleNamespace:
    values = {"head_dim": 128, "num_attention_heads": 32, "kv_heads": 8, "is_generation": True}
    values |= {"is_encoder_decoder": False, "attention_arch": SimpleNamespace(name="MHA"), **changes}
    return SimpleNamespace(**values, get_total_num_kv_heads=lambda: values["kv_heads"])


def test_real_model_passes(at_load: AtLoad) -> None:
    from sglang.srt.configs.model_config import ModelConfig

    check_model(ModelConfig.from_server_args(at_load.dense_args), LOCKS)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 16])
def test_supported_models(head_dim: int, group: int) -> None:
    check_model(fake_model(head_dim=head_dim, num_attention_heads=2 * group, kv_heads=2), LOCKS)


def test_mla_model(at_load: AtLoad) -> None:
    from sglang.srt.configs.model_config import AttentionArch

    check_model(fake_model(attention_arch=AttentionArch.MHA), LOCKS)
    with pytest.raises(LocksError, match=r"MLA models; legal: .*MHA, MQA, GQA"):
        check_model(fake_model(attention_arch=AttentionArch.MLA), LOCKS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_encoder_decoder": True}, "encoder-decoder models; legal: decoders"),
        ({"is_generation": False}, "embedding and reward models.*legal: generation models"),
        ({"head_dim": 96}, "head_dim 96; legal: 64, 128, 256"),
        ({"num_attention_heads": 34, "kv_heads": 2}, "17 query heads per KV head; legal: 1 to 16"),
    ],
    ids=str,
)
def test_models_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LocksError, match=message):
        check_model(fake_model(**changes), LOCKS)


def fake_runner(
    pool_class: str = "MHATokenToKVPool",
    allocator: str = "PagedTokenToKVPoolAllocator",
    requests: str = "ReqToTokenPool",
    dtype: torch.dtype = torch.bfloat16,
    page_size: int = 16,
    shape: tuple[int, ...] = (80, 2, 64),
    device: str = "cpu",
) -> Any:
    """A model runner with a pool of 64 slots and the dummy page, 2 KV heads of 64 dimensions."""
    pool = type(pool_class, (), {})()
    pool.dtype, pool.start_layer, pool.page_size, pool.device = dtype, 0, 16, device
    pool.size, pool.head_num, pool.head_dim = 64, 2, 64
    pool._get_key_buffer = lambda layer: torch.zeros(shape)
    return SimpleNamespace(
        token_to_kv_pool=pool,
        token_to_kv_pool_allocator=type(allocator, (), {})(),
        req_to_token_pool=type(requests, (), {})(),
        page_size=page_size,
        model_config=SimpleNamespace(dtype=torch.float16 if dtype == torch.float16 else torch.bfloat16),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn])
def test_supported_pool(dtype: torch.dtype) -> None:
    runner = fake_runner(dtype=dtype)
    scheduler_hooks._check_pool(runner.token_to_kv_pool, runner, LOCKS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pool_class": "MLATokenToKVPool"}, "KV pool MLATokenToKVPool.*legal: .*MHATokenToKVPool"),
        ({"pool_class": "SWAKVPool"}, "KV pool SWAKVPool"),
        ({"pool_class": "HybridLinearKVPool"}, "KV pool HybridLinearKVPool"),
        ({"pool_class": "PageMajorMHATokenToKVPool"}, "KV pool PageMajorMHATokenToKVPool"),
        ({"allocator": "TokenToKVPoolAllocator"}, "legal: PagedTokenToKVPoolAllocator"),
        ({"allocator": "PageInterleavePoolAllocator"}, "legal: PagedTokenToKVPoolAllocator"),
        ({"requests": "HybridReqToTokenPool"}, "legal: ReqToTokenPool"),
        (
            {"dtype": torch.float8_e5m2},
            "torch.float8_e5m2.*legal: torch.bfloat16, torch.float16, torch.float8_e4m3fn",
        ),
        ({"page_size": 32}, "page size 32, sparse decode with 16"),
        ({"shape": (5, 2, 16, 64)}, "NHD order.*unset SGLANG_USE_HND_KVCACHE"),
    ],
    ids=str,
)
def test_pools_that_are_refused(changes: dict[str, Any], message: str) -> None:
    runner = fake_runner(**changes)
    with pytest.raises(LocksError, match=message):
        scheduler_hooks._check_pool(runner.token_to_kv_pool, runner, LOCKS)


def test_what_the_gpu_kernels_do_not_take() -> None:
    for dtype in scheduler_hooks.GPU_DTYPES:
        runner = fake_runner(dtype=dtype, device="cuda:0")
        scheduler_hooks._check_pool(runner.token_to_kv_pool, runner, LOCKS)
    runner = fake_runner(dtype=torch.float16, device="cuda:0")
    runner.model_config.dtype = torch.bfloat16
    with pytest.raises(
        LocksError, match=r"KV pool of torch.float16, but .* in torch.bfloat16; legal .*: auto, .*fp8_e4m3"
    ):
        scheduler_hooks._check_pool(runner.token_to_kv_pool, runner, LOCKS)
    runner.token_to_kv_pool.device = "cpu"
    scheduler_hooks._check_pool(runner.token_to_kv_pool, runner, LOCKS)
    comparison = replace(LOCKS, summary="r8bf16")
    runner = fake_runner(device="cuda:0")
    with pytest.raises(
        LocksError, match=r"--sparse-decode-summary r8bf16 is .*legal on a GPU: .* i4, i8 or h"
    ):
        scheduler_hooks._check_pool(runner.token_to_kv_pool, runner, comparison)
    scheduler_hooks._check_pool(runner.token_to_kv_pool, runner, replace(comparison, selector="oracle"))
    runner = fake_runner(dtype=torch.float32, device="cuda:0")
    with pytest.raises(
        LocksError, match=r"torch.float32 .*legal: torch.bfloat16, torch.float16, torch.float8_e4m3fn$"
    ):
        scheduler_hooks._check_pool(runner.token_to_kv_pool, runner, LOCKS)
    runner = fake_runner(dtype=torch.bfloat16)
    scheduler_hooks._check_pool(runner.token_to_kv_pool, runner, comparison)
