"""What sparse decode does not work with: two tables, from which the documentation is made too.

Every row is checked when the server arguments are complete and once more in the scheduler
process, where SGLang has resolved them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import flashinfer_attend
from .config import LocksConfig, LocksError


@dataclass(frozen=True)
class Refusal:
    """One refused option.

    Attributes:
        option: the flag as the user writes it.
        field: its field in SGLang's ServerArgs; a contract check asserts that it exists.
        applies: tells from the field's value whether the option is on.
        legal: what to use instead.
        reason: why.
        untested: True where it may work but was not tested, so that
            ``--sparse-decode-allow-untested`` lets it pass.
        since: the first tested SGLang that has the option.
    """

    option: str
    field: str
    applies: Callable[[Any], bool]
    legal: str
    reason: str
    untested: bool = False
    since: str = "0.5.17"


@dataclass(frozen=True)
class RefusedVariable:
    """One refused environment variable of SGLang, a boolean; ``since`` as in :class:`Refusal`."""

    name: str
    reason: str
    since: str = "0.5.17"


def _more_than_one(value: Any) -> bool:
    return value is not None and int(value) > 1


REFUSALS = (
    Refusal(
        "--speculative-algorithm",
        "speculative_algorithm",
        bool,
        "leave it out",
        "verification steps do not run through the decode path, so they would be dense",
    ),
    Refusal(
        "--enable-hierarchical-cache",
        "enable_hierarchical_cache",
        bool,
        "leave it out",
        "HiCache moves KV pages behind the summaries' back",
    ),
    Refusal(
        "--enable-lmcache",
        "enable_lmcache",
        bool,
        "leave it out",
        "LMCache moves KV pages behind the summaries' back",
    ),
    Refusal(
        "--enable-flexkv",
        "enable_flexkv",
        bool,
        "leave it out",
        "FlexKV moves KV pages behind the summaries' back",
    ),
    Refusal(
        "--radix-cache-backend",
        "radix_cache_backend",
        bool,
        "leave it out",
        "a registered cache may load KV pages that have no summaries, as FlexKV's does",
    ),
    Refusal(
        "--enable-unified-cache-external-linker",
        "enable_unified_cache_external_linker",
        bool,
        "leave it out",
        "pages that are loaded from an external store have no summaries",
        since="0.5.23",
    ),
    Refusal(
        "--enable-unified-memory",
        "enable_unified_memory",
        bool,
        "leave it out",
        "the unified pool compacts KV pages behind the summaries' back",
    ),
    Refusal(
        "--enable-page-major-kv-layout",
        "enable_page_major_kv_layout",
        bool,
        "leave it out",
        "pages of all layers lie together in another KV pool than the one that is read here",
    ),
    Refusal(
        "--enable-hisparse",
        "enable_hisparse",
        bool,
        "leave it out",
        "HiSparse is another sparse decode, for MLA models",
    ),
    Refusal(
        "--disaggregation-mode",
        "disaggregation_mode",
        lambda value: value not in (None, "null"),
        "null",
        "KV that arrives from another server has no summaries",
    ),
    Refusal(
        "--is-embedding",
        "is_embedding",
        bool,
        "leave it out",
        "an embedding model never decodes",
    ),
    Refusal(
        "--encoder-only",
        "encoder_only",
        bool,
        "leave it out",
        "an encoder server never decodes",
    ),
    Refusal(
        "--enable-mis",
        "enable_mis",
        bool,
        "leave it out",
        "multi-item scoring never decodes",
    ),
    Refusal(
        "--dllm-algorithm",
        "dllm_algorithm",
        bool,
        "leave it out",
        "a diffusion model has no decode steps of one token a request",
    ),
    Refusal(
        "--enable-torch-compile",
        "enable_torch_compile",
        bool,
        "leave it out",
        "torch.compile would trace the selection",
    ),
    Refusal(
        "--enable-mixed-chunk",
        "enable_mixed_chunk",
        bool,
        "leave it out",
        "decode rows of a mixed batch would be served dense, so a request's tokens would depend "
        "on its neighbours",
    ),
    Refusal(
        "--enable-two-batch-overlap",
        "enable_two_batch_overlap",
        bool,
        "leave it out",
        "it builds its own attention backends",
    ),
    Refusal(
        "--enable-pdmux",
        "enable_pdmux",
        bool,
        "leave it out",
        "it builds its own attention backends",
    ),
    Refusal(
        "--enable-nvidia-megakernel",
        "enable_nvidia_megakernel",
        bool,
        "leave it out",
        "the megakernel computes the decode attention itself",
        since="0.5.23",
    ),
    Refusal(
        "--enable-amd-monokernel",
        "enable_amd_monokernel",
        bool,
        "leave it out",
        "the monokernel computes the decode attention itself",
        since="0.5.23",
    ),
    Refusal(
        "--enable-deterministic-inference",
        "enable_deterministic_inference",
        bool,
        "leave it out",
        "batch-invariant sums are not proven for the sparse path",
    ),
    Refusal(
        "--rl-on-policy-target",
        "rl_on_policy_target",
        bool,
        "leave it out",
        "sparse decode cannot match a trainer's dense attention bit by bit",
    ),
    Refusal(
        "--kv-cache-dtype",
        "kv_cache_dtype",
        lambda value: value not in ("auto", "bfloat16", "bf16", "float16", "fp8_e4m3"),
        "auto, bfloat16, float16, fp8_e4m3",
        "the kernels do not read KV of this format",
    ),
    Refusal(
        "--tokenizer-worker-num",
        "tokenizer_worker_num",
        _more_than_one,
        "1",
        "SGLang loads no plugins in further tokenizer workers, so per-request options would go unchecked",
    ),
    Refusal(
        "--smg-grpc-mode",
        "smg_grpc_mode",
        bool,
        "leave it out",
        "the gRPC server starts the schedulers without the check that they decode sparse",
    ),
    Refusal(
        "--use-ray",
        "use_ray",
        bool,
        "leave it out",
        "Ray actors do not inherit the configuration of sparse decode",
    ),
    Refusal(
        "--dcp-size",
        "dcp_size",
        _more_than_one,
        "1",
        "decode context parallelism shards a request's pages",
    ),
    Refusal(
        "--attn-cp-size",
        "attn_cp_size",
        _more_than_one,
        "1",
        "context parallelism shards a request's pages",
    ),
    Refusal(
        "--enable-kv-cache-sharding",
        "enable_kv_cache_sharding",
        bool,
        "leave it out",
        "it spreads the pages of a request over ranks",
        since="0.5.23",
    ),
    Refusal(
        "--dp-size",
        "dp_size",
        _more_than_one,
        "1, with one server per replica behind a router",
        "the data-parallel controller does not pass on the schedulers' report that they decode sparse",
    ),
    Refusal(
        "--enable-dp-attention",
        "enable_dp_attention",
        bool,
        "leave it out",
        "the data-parallel controller does not pass on the schedulers' report that they decode sparse",
    ),
    Refusal(
        "--attn-dp-size",
        "attn_dp_size",
        _more_than_one,
        "1",
        "the data-parallel controller does not pass on the schedulers' report that they decode sparse",
        since="0.5.23",
    ),
    Refusal(
        "--prefill-attention-backend",
        "prefill_attention_backend",
        bool,
        "leave it out; --attention-backend is that of prefill and decode",
        "another attention backend for prefill than for decode was not tested",
        untested=True,
    ),
    Refusal(
        "--decode-attention-backend",
        "decode_attention_backend",
        bool,
        "leave it out; --attention-backend is that of prefill and decode",
        "another attention backend for decode than for prefill was not tested",
        untested=True,
    ),
    Refusal(
        "--pp-size",
        "pp_size",
        _more_than_one,
        "1",
        "pipeline parallelism was not tested",
        untested=True,
    ),
    Refusal(
        "--nnodes",
        "nnodes",
        _more_than_one,
        "1",
        "servers of several nodes were not tested",
        untested=True,
    ),
)

REFUSED_VARIABLES = (
    RefusedVariable(
        "SGLANG_USE_HND_KVCACHE",
        "the KV pool is read in SGLang's default order, token before head (NHD)",
    ),
    RefusedVariable(
        "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING",
        "it resizes the KV pool after the summaries beside it were allocated",
    ),
    RefusedVariable(
        "SGLANG_ENABLE_METADATA_GLUE_GRAPH",
        "it captures the preparation of a decode step, which was not made for that",
        since="0.5.23",
    ),
)

# As SGLang reads its own boolean variables.
_TRUE = ("true", "1", "yes", "y")


def check_server_args(server_args: Any, config: LocksConfig) -> None:
    """Raise LocksError for the first refused option or environment variable."""
    view = resolved(server_args)
    for refusal in REFUSALS:
        value = getattr(view, refusal.field, None)
        if not refusal.applies(value) or (refusal.untested and config.allow_untested):
            continue
        hint = " (--sparse-decode-allow-untested starts it all the same)" if refusal.untested else ""
        raise LocksError(
            f"{refusal.option} ({value}) does not work with --sparse-decode {config.selector}: "
            f"{refusal.reason}. Legal: {refusal.legal}{hint}."
        )
    for variable in REFUSED_VARIABLES:
        value = os.environ.get(variable.name, "")
        if value.lower() in _TRUE:
            raise LocksError(
                f"{variable.name}={value} does not work with --sparse-decode {config.selector}: "
                f"{variable.reason}. Legal: unset it."
            )
    if config.attend == "flashinfer":
        _check_flashinfer(view)


def _check_flashinfer(view: Any) -> None:
    why = None
    if not flashinfer_attend.available():
        why = "the package flashinfer is not installed here"
    elif getattr(view, "device", None) == "cpu":
        why = "FlashInfer runs on GPUs only"
    if why is not None:
        raise LocksError(f"--sparse-decode-attend flashinfer does not work: {why}. Legal: auto, native.")


def resolved(server_args: Any) -> Any:
    """Server arguments as SGLang has resolved them so far.

    0.5.17 writes what it resolves into the fields; 0.5.23 keeps it beside them.
    """
    if not hasattr(server_args, "resolve_once"):
        return server_args
    from sglang.srt.arg_groups.model_override_base import resolving_view

    return resolving_view(server_args)
