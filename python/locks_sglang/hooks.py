"""The hooks: where the plugin enters SGLang, declared once.

Each row names the function, how it is wrapped, in which process, and the contract that
its source must keep.  ``compat.py`` checks the contracts, ``plugin.py`` registers the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Process = Literal["every", "parent", "scheduler"]


@dataclass(frozen=True)
class Hook:
    """One hooked function of SGLang.

    Attributes:
        target: dotted path of the function.
        kind: how SGLang's hook registry wraps it.
        handler: ``module:function`` of this package.
        process: ``every`` process that loads plugins, the ``parent`` that parses the
            arguments, or the ``scheduler`` processes.
        binding: what the source must declare it as.
        parameters: the leading parameter names that the handler relies on.
        purpose: one line for ``python -m locks_sglang check``.
        seam: the seam that replaces it where SGLang has an interface for sparse decode
            (``seams.py``); empty where none does.
    """

    target: str
    kind: Literal["after", "around"]
    handler: str
    process: Process
    binding: Literal["function", "method", "staticmethod", "classmethod"]
    parameters: tuple[str, ...]
    purpose: str
    seam: str = ""


_ARGS = "sglang.srt.server_args.ServerArgs"
_GRAPHS = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"
_PARENT = "locks_sglang.parent_hooks"
_SCHEDULER = "locks_sglang.scheduler_hooks"

HOOKS = (
    Hook(
        f"{_ARGS}.add_cli_args",
        "after",
        f"{_PARENT}:add_cli_args",
        "every",
        "staticmethod",
        ("parser",),
        "flags",
        "add_cli_args",
    ),
    Hook(
        f"{_ARGS}.from_cli_args",
        "around",
        f"{_PARENT}:from_cli_args",
        "every",
        "classmethod",
        ("cls", "args"),
        "configuration from the command line",
        "config_from_cli_args",
    ),
    Hook(
        f"{_ARGS}.check_server_args",
        "after",
        f"{_PARENT}:check_server_args",
        "parent",
        "method",
        ("self",),
        "refused options",
        "check_server_args",
    ),
    Hook(
        "sglang.srt.sampling.sampling_params.SamplingParams.verify",
        "after",
        f"{_PARENT}:verify_sampling_params",
        "parent",
        "method",
        ("self", "vocab_size"),
        "per-request options (400 on bad ones)",
        "verify_request",
    ),
    Hook(
        "sglang.srt.entrypoints.engine.Engine._launch_subprocesses",
        "after",
        f"{_PARENT}:launch_subprocesses",
        "parent",
        "classmethod",
        ("cls", "server_args"),
        "handshake with the schedulers",
        "register_sparse_decode_method",
    ),
    Hook(
        "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size",
        "after",
        f"{_SCHEDULER}:compute_cell_size",
        "scheduler",
        "method",
        ("self", "kvc", "num_layers"),
        "memory: summaries in the bytes a token",
        "get_cell_size",
    ),
    Hook(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes",
        "after",
        f"{_SCHEDULER}:profile_available_bytes",
        "scheduler",
        "method",
        ("self", "pre_model_load_memory"),
        "memory: workspaces",
        "get_workspace_bytes",
    ),
    Hook(
        "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._create_buffers_normal",
        "around",
        "locks_sglang.tier.pool:create_buffers",
        "scheduler",
        "method",
        ("self",),
        "KV pool in host memory (--sparse-decode-kv-tier host)",
        # No seam gives a pool of another kind yet; the host tier is refused where there are seams.
        "init_state",
    ),
    Hook(
        "sglang.srt.model_executor.model_runner.ModelRunner._init_post_memory_pool_components",
        "after",
        f"{_SCHEDULER}:init_post_memory_pool_components",
        "scheduler",
        "method",
        ("self",),
        "summaries beside the KV pool",
        "init_state",
    ),
    Hook(
        "sglang.srt.model_executor.model_runner_components.attention_backend_setup"
        "._build_full_attention_backend_from_str",
        "after",
        f"{_SCHEDULER}:build_attention_backend",
        "scheduler",
        "function",
        ("model_runner", "backend_str", "init_new_workspace"),
        "sparse decode over the user's attention backend",
        "decode",
    ),
    Hook(
        f"{_GRAPHS}.capture_one_shape",
        "around",
        f"{_SCHEDULER}:capture_one_shape",
        "scheduler",
        "method",
        ("self", "size", "forward", "stream_idx", "variant_label"),
        "a dense graph beside each sparse one",
        "init_cuda_graph_state",
    ),
    Hook(
        f"{_GRAPHS}._resolve_lora_variant",
        "after",
        f"{_SCHEDULER}:resolve_graph_variant",
        "scheduler",
        "method",
        ("self", "forward_batch"),
        "the graph that a step replays",
        "init_forward_metadata",
    ),
    Hook(
        "sglang.srt.model_executor.model_runner.ModelRunner.forward",
        "after",
        f"{_SCHEDULER}:model_runner_forward",
        "scheduler",
        "method",
        ("self", "forward_batch"),
        "summaries of completed pages",
        "on_pages_completed",
    ),
    Hook(
        "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.alloc",
        "after",
        f"{_SCHEDULER}:alloc_requests",
        "scheduler",
        "method",
        ("self", "reqs"),
        "per-request policy",
        "on_requests_allocated",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.get_init_info",
        "after",
        f"{_SCHEDULER}:get_init_info",
        "scheduler",
        "method",
        ("self",),
        "status for the handshake and /server_info",
        "register_sparse_decode_method",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.get_internal_state",
        "after",
        f"{_SCHEDULER}:get_internal_state",
        "scheduler",
        "method",
        ("self", "recv_req"),
        "counters for /server_info",
        "get_internal_state",
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.metrics_reporter"
        ".SchedulerMetricsReporter.report_decode_stats",
        "after",
        f"{_SCHEDULER}:report_decode_stats",
        "scheduler",
        "method",
        ("self",),
        "decode log line",
        "report_decode_stats",
    ),
    Hook(
        "sglang.srt.observability.metrics_collector.SchedulerMetricsCollector.__init__",
        "after",
        f"{_SCHEDULER}:init_metrics_collector",
        "scheduler",
        "method",
        ("self", "labels"),
        "Prometheus metrics",
        "init_metrics",
    ),
)


def hooks_for(process: Process, has_seams: bool = False) -> tuple[Hook, ...]:
    """The hooks of a kind of process, without those that SGLang's seams replace."""
    return tuple(hook for hook in needed(has_seams) if hook.process == process)


def needed(has_seams: bool) -> tuple[Hook, ...]:
    """The table, without the rows that SGLang's seams replace where it has them."""
    return tuple(hook for hook in HOOKS if not (has_seams and hook.seam))
