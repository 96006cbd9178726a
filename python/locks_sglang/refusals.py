"""What sparse decode does not work with: one table, from which the documentation is made too.

Every row is checked when the server arguments are complete and once more in the scheduler
process, where SGLang has resolved them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
    """

    option: str
    field: str
    applies: Callable[[Any], bool]
    legal: str
    reason: str
    untested: bool = False


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
        "--enable-unified-memory",
        "enable_unified_memory",
        bool,
        "leave it out",
        "the unified pool compacts KV pages behind the summaries' back",
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
        "--enable-deterministic-inference",
        "enable_deterministic_inference",
        bool,
        "leave it out",
        "batch-invariant sums are not proven for the sparse path",
    ),
    Refusal(
        "--kv-cache-dtype",
        "kv_cache_dtype",
        lambda value: value not in ("auto", "bfloat16", "bf16", "float16"),
        "auto, bfloat16, float16",
        "summaries of quantised keys are not proven yet",
    ),
    Refusal(
        "--tokenizer-worker-num",
        "tokenizer_worker_num",
        _more_than_one,
        "1",
        "SGLang loads no plugins in further tokenizer workers, so per-request options would go unchecked",
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
        "--pp-size",
        "pp_size",
        _more_than_one,
        "1",
        "pipeline parallelism was not tested",
        untested=True,
    ),
    Refusal(
        "--enable-dp-attention",
        "enable_dp_attention",
        bool,
        "leave it out",
        "data-parallel attention was not tested",
        untested=True,
    ),
)


def check_server_args(server_args: Any, config: LocksConfig) -> None:
    """Raise LocksError for the first refused option of ``server_args``."""
    for refusal in REFUSALS:
        value = getattr(server_args, refusal.field, None)
        if not refusal.applies(value) or (refusal.untested and config.allow_untested):
            continue
        hint = " (--sparse-decode-allow-untested starts it all the same)" if refusal.untested else ""
        raise LocksError(
            f"{refusal.option} ({value}) does not work with --sparse-decode {config.selector}: "
            f"{refusal.reason}. Legal: {refusal.legal}{hint}."
        )
