"""Hooks of the scheduler processes: memory, summaries, decode backend, policy, telemetry."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from . import dense_steps, memory, runtime
from .activation import config_of, inherited_config
from .backend import upgrade, why_dense, why_owner_is_dense
from .buffers import EAGER_ROWS, Geometry
from .config import LocksConfig, LocksError
from .dense_steps import DenseSteps
from .model_checks import check_model
from .refusals import check_server_args
from .runtime import SparseDecode
from .summaries import FP8, bytes_per_page, bytes_per_token
from .telemetry import PrometheusMetrics
from .tier import capacity
from .tier.decode import HostTier
from .tier.pool import is_held

logger = logging.getLogger(__name__)

POOL_DTYPES = (torch.bfloat16, torch.float16, FP8, torch.float32)
GPU_DTYPES = (torch.bfloat16, torch.float16, FP8)


def compute_cell_size(result: int, configurator: Any, kvc: Any, num_layers: int) -> int:
    """Charge the summaries to the bytes a token, so that SGLang sizes the pool for both."""
    config = inherited_config()
    if not config.enabled or kvc.is_draft_worker:
        return result
    check_model(kvc.model_config, config)
    if config.kv_tier == "host":
        # Of the host's memory, that is; profile_available_bytes knows what the summaries leave there.
        return result
    return result + bytes_per_token(config, kvc.model_config.head_dim, _local_kv_heads(kvc), num_layers)


def profile_available_bytes(result: int, kvc: Any, pre_model_load_memory: int) -> int:
    """Keep the buffers of the decode step out of the KV pool's budget."""
    config = inherited_config()
    if not config.enabled or kvc.is_draft_worker:
        return result
    if config.kv_tier == "host":
        return _host_pool_bytes(result, kvc, config)
    if str(kvc.device) == "cpu":
        return result
    return result - _step_bytes(kvc, config)


def _host_pool_bytes(gpu_bytes: int, kvc: Any, config: LocksConfig) -> int:
    """Bytes of a KV pool in host memory, whose pages need some of the GPU's too."""
    device = torch.device(kvc.device)
    if device.type != "cpu":
        gpu_bytes -= _step_bytes(kvc, config)
    model, heads = kvc.model_config, _local_kv_heads(kvc)
    shape = capacity.TierShape(
        layers=model.num_hidden_layers,
        kv_heads=heads,
        head_dim=model.head_dim,
        page_size=config.page_size,
        dtype=kvc.kv_cache_dtype,
        width=config.largest_budget // config.page_size,
        usual_width=config.budget // config.page_size,
        step_rows=_largest_graph(kvc.server_args) or EAGER_ROWS,
        request_slots=0,
        staged_tokens=_staged_tokens(model),
    )
    host_bytes = capacity.host_bytes(config, device)
    requests = kvc.resolve_max_num_reqs(host_bytes // shape.page_bytes * config.page_size)
    found = capacity.split(
        # The first slot of SGLang's token table is nobody's.
        replace(shape, request_slots=requests + 1),
        host_bytes=host_bytes,
        gpu_bytes=gpu_bytes,
        record_bytes=bytes_per_page(config, model.head_dim, heads, model.num_hidden_layers),
        hot_bytes=None if config.hot_gib is None else int(config.hot_gib * 2**30),
    )
    capacity.remember(found)
    # SGLang adds a page for padding.
    return (found.pages - 1) * shape.page_bytes


def _staged_tokens(model: Any) -> int:
    """Tokens of the longest prefill, with some for requests beside it."""
    return model.context_len + capacity.STAGED_BESIDE


def _step_bytes(kvc: Any, config: LocksConfig) -> int:
    model = kvc.model_config
    geometry = Geometry.of(
        # SGLang's token table is a few tokens wider than the context.
        tokens=model.context_len + config.page_size,
        page_size=config.page_size,
        width=config.largest_budget // config.page_size,
        q_heads=model.num_attention_heads // _attention_ranks(),
        kv_heads=_local_kv_heads(kvc),
        head_dim=model.head_dim,
        query_dtype=model.dtype,
    )
    plan = memory.largest_plan(config, model.num_hidden_layers)
    return memory.step_bytes(config, geometry, plan, _largest_graph(kvc.server_args))


def _largest_graph(server_args: Any) -> int:
    """Rows of the largest decode batch that gets a CUDA graph; 0 without graphs."""
    graphs = getattr(server_args, "cuda_graph_config", None)
    if graphs is None:
        from sglang.srt import runtime_context

        graphs = runtime_context.get_exec().graph.cuda_graph_config
    if graphs is None or graphs.decode.backend == "disabled":
        return 0
    return graphs.decode.max_bs or 0


def _attention_ranks() -> int:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().attn_tp_size


def _attention_rank() -> int:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().attn_tp_rank


def _local_kv_heads(kvc: Any) -> int:
    return kvc.model_config.get_num_kv_heads(_attention_ranks())


def init_post_memory_pool_components(_: None, model_runner: Any) -> None:
    """Allocate the state beside the KV pool, and let decode graphs end with the summaries."""
    if model_runner.is_draft_worker:
        return
    create_state(model_runner)
    model_runner.capture_tail_hooks.append(_build_in_graph)


def create_state(model_runner: Any, dense_graphs: bool = True) -> SparseDecode:
    """Allocate the state beside the KV pool, after the last checks of what was resolved.

    Without ``dense_graphs`` this SGLang cannot keep a dense graph beside each sparse one.
    """
    config = config_of(model_runner.server_args)
    if config.dense_below and not dense_graphs:
        raise LocksError(
            f"--sparse-decode-dense-below is {config.dense_below}; legal on an SGLang with patches/ "
            "applied: 0"
        )
    if config != inherited_config():
        raise LocksError("this scheduler did not get the sparse-decode options of its server")
    check_server_args(model_runner.server_args, config)
    pool = model_runner.token_to_kv_pool
    _check_pool(pool, model_runner, config)

    q_heads = model_runner.model_config.num_attention_heads // _attention_ranks()
    state = SparseDecode(
        config,
        pool,
        model_runner.req_to_token_pool,
        q_heads,
        model_runner.model_config.dtype,
        _largest_graph(model_runner.server_args),
        _attention_rank(),
    )
    if config.kv_tier == "host":
        state.tier = _host_tier(state, model_runner)
    _sort_layers(state, model_runner.model)
    _check_scales(state, model_runner.model)
    charged = bytes_per_token(config, state.summaries.head_dim, state.summaries.kv_heads, pool.layer_num)
    pages = state.summaries.keys[0].shape[0]
    if state.summaries.nbytes > charged * config.page_size * pages:
        raise LocksError(
            f"summaries take {state.summaries.nbytes} bytes, but only "
            f"{charged * config.page_size * pages} were charged to the KV pool"
        )
    kv_heads, head_dim = state.summaries.keys[0].shape[2:]
    item_bytes = state.summaries.keys[0].element_size()
    on_gpu = dense_graphs and state.device.type != "cpu"
    state.dense_steps.below = dense_steps.below(config, kv_heads, head_dim, item_bytes, on_gpu)
    runtime.activate(state)
    kv_bytes = sum(k.nbytes + v.nbytes for k, v in zip(pool.k_buffer, pool.v_buffer, strict=True))
    state.log_start(kv_bytes, pool.size)
    return state


def _host_tier(state: SparseDecode, model_runner: Any) -> HostTier:
    found = capacity.remembered()
    if found is None or not is_held(model_runner.token_to_kv_pool):
        raise LocksError("the KV pool of --sparse-decode-kv-tier host was made without being sized for it")
    return HostTier(
        state.summaries,
        hot_bytes=found.hot_bytes,
        width=state.geometry.width,
        requests=len(model_runner.req_to_token_pool.req_to_token),
        device=state.device,
        staged_tokens=_staged_tokens(model_runner.model_config),
        allocator=model_runner.token_to_kv_pool_allocator,
    )


def _check_pool(pool: Any, model_runner: Any, config: LocksConfig) -> None:
    name = type(pool).__name__
    if name != "MHATokenToKVPool":
        raise LocksError(
            f"--sparse-decode does not work with the KV pool {name} of this model (MLA, sliding-window "
            "or hybrid); legal: models whose layers all keep K and V in one MHATokenToKVPool"
        )
    _check_allocators(model_runner)
    on_gpu = torch.device(pool.device).type != "cpu"
    dtypes = GPU_DTYPES if on_gpu else POOL_DTYPES
    if pool.dtype not in dtypes:
        raise LocksError(
            f"--sparse-decode does not work with a KV pool of {pool.dtype} (resolved from --kv-cache-dtype "
            f"or the model's config); legal: {', '.join(map(str, dtypes))}"
        )
    if pool.dtype == FP8 and config.kv_tier == "host":
        raise LocksError(
            "--kv-cache-dtype fp8_e4m3 does not work with --sparse-decode-kv-tier host yet; legal: auto, "
            "bfloat16, float16"
        )
    queries = model_runner.model_config.dtype
    if on_gpu and pool.dtype not in (queries, FP8):
        raise LocksError(
            f"--kv-cache-dtype gives a KV pool of {pool.dtype}, but the model computes in {queries}; legal "
            "with --sparse-decode on a GPU: auto, which takes the model's, or fp8_e4m3"
        )
    if on_gpu and config.selector == "locks" and config.summary.endswith("bf16"):
        raise LocksError(
            f"--sparse-decode-summary {config.summary} is for comparisons on a CPU; legal on a GPU: "
            "formats with i4, i8 or h"
        )
    if model_runner.page_size != config.page_size:
        raise LocksError(
            f"SGLang runs with page size {model_runner.page_size}, sparse decode with {config.page_size}"
        )
    shape = tuple(pool._get_key_buffer(pool.start_layer).shape)
    expected = (pool.size + pool.page_size, pool.head_num, pool.head_dim)
    if shape != expected:
        raise LocksError(
            f"the K pool is {shape}, expected {expected} (NHD order); unset SGLANG_USE_HND_KVCACHE"
        )


def _check_allocators(model_runner: Any) -> None:
    """Other kinds than these number pages or hand out request slots in another way."""
    for attribute, legal in (
        ("token_to_kv_pool_allocator", "PagedTokenToKVPoolAllocator"),
        ("req_to_token_pool", "ReqToTokenPool"),
    ):
        name = type(getattr(model_runner, attribute)).__name__
        if name != legal:
            raise LocksError(f"--sparse-decode does not work with the {name} of this model; legal: {legal}")


def _attention_layers(model: Any) -> Iterator[tuple[str, Any]]:
    """Name and module of every attention layer of a model."""
    from sglang.srt.layers.radix_attention import RadixAttention

    return ((name, module) for name, module in model.named_modules() if isinstance(module, RadixAttention))


def _sort_layers(state: SparseDecode, model: Any) -> None:
    """Find out which attention layers decode sparse and why the others do not."""
    sparse: list[int] = []
    dense: dict[int, str] = {}
    for name, module in _attention_layers(model):
        owner = model.get_submodule(name.rpartition(".")[0])
        reason = why_dense(module) or why_owner_is_dense(owner)
        if reason is None:
            sparse.append(module.layer_id)
        else:
            dense[module.layer_id] = reason
    if not sparse:
        raise LocksError(f"no attention layer of this model can decode sparse: {dense}")
    state.set_layers(sparse, dense)


def _check_scales(state: SparseDecode, model: Any) -> None:
    """On a CPU the backend writes an fp8 pool without the scales that a checkpoint brings."""
    if state.device.type != "cpu":
        return
    for _, module in _attention_layers(model):
        scales = state.summaries.scales_of(module)
        if scales != (1.0, 1.0):
            raise LocksError(
                f"layer {module.layer_id} of this model brings fp8 KV scales {scales}, which SGLang's "
                "torch_native backend does not apply; legal with --sparse-decode on a CPU: "
                "--kv-cache-dtype bfloat16"
            )


def build_attention_backend(result: Any, *, model_runner: Any, **_: Any) -> None:
    """Upgrade the user's attention backend in place."""
    if model_runner.is_draft_worker:
        return
    state = runtime.active()
    if state is None:
        raise LocksError("the attention backend was built before the KV pool; sparse decode cannot start")
    upgrade(result, state)


def capture_one_shape(
    original: Callable,
    graph_runner: Any,
    size: int,
    forward: Callable,
    stream_idx: int | None = None,
    variant_label: str | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Capture a second, dense graph for the batch size; see ``dense_steps``."""
    steps = _dense_steps_of(graph_runner)
    for dense in (False, True) if steps.below else (False,):
        with steps.capture(dense):
            label = steps.label(variant_label)
            result = original(graph_runner, size, forward, stream_idx, label, *args, **kwargs)
    return result


def resolve_graph_variant(result: str | None, graph_runner: Any, *_: Any) -> str | None:
    """Name the kind of graph that this step replays; its metadata have been prepared."""
    return _dense_steps_of(graph_runner).label(result)


def _dense_steps_of(graph_runner: Any) -> DenseSteps:
    """Those of the model that decodes sparse; none for any other."""
    state = runtime.active()
    if state is None or graph_runner.model_runner.is_draft_worker:
        return DenseSteps()
    return state.dense_steps


def _build_in_graph(runner: Any, output: Any, forward_batch: Any, num_tokens: int) -> None:
    """Tail of a captured decode step: the graph builds the summaries itself at every replay.

    Not that of a dense step, which mostly completes no page: see ``finish_dense_step``.
    """
    state = runtime.active()
    assert state is not None
    if not state.dense_steps.now:
        state.finish_forward(forward_batch.out_cache_loc)


def model_runner_forward(output: Any, model_runner: Any, forward_batch: Any, *_: Any, **__: Any) -> None:
    """After a forward was launched: summaries, unless a decode graph builds them; audit and trace."""
    state = runtime.active()
    mode = forward_batch.forward_mode
    if state is None or model_runner.is_draft_worker or mode.is_idle():
        return
    if mode.is_decode() and state.dense_steps.now:
        state.finish_dense_step(forward_batch)
    elif not (mode.is_decode() and output.can_run_graph):
        state.finish_forward(forward_batch.out_cache_loc)
    if mode.is_decode():
        state.finish_step(forward_batch)
    else:
        state.wrote(forward_batch.out_cache_loc)


def alloc_requests(result: list[int] | None, pool: Any, reqs: list[Any]) -> None:
    """Write the policy of requests that just got their slots."""
    state = runtime.active()
    if state is not None and result:
        state.policy.write(result, reqs)


def get_init_info(result: dict[str, Any], scheduler: Any) -> dict[str, Any]:
    """Report to the parent that this scheduler decodes sparse."""
    state = runtime.active()
    if state is None:
        raise LocksError("sparse decode was asked for, but this scheduler has no state for it")
    result["locks"] = state.describe()
    return result


def get_internal_state(result: Any, scheduler: Any, recv_req: Any) -> None:
    """Add the counters to ``/server_info``."""
    state = runtime.active()
    if state is not None:
        result.internal_state["locks"] = state.status()
        _publish_metrics(state)


def report_decode_stats(_: None, reporter: Any, *args: Any, **kwargs: Any) -> None:
    """Decode log line and metrics, as often as SGLang's own."""
    state = runtime.active()
    if state is None or reporter.forward_ct_decode % reporter.decode_log_interval != 0:
        return
    if reporter.is_stats_logging_rank:
        logger.info(state.counters.log_line() + (state.tier.log_part() if state.tier is not None else ""))
    _publish_metrics(state)


def _publish_metrics(state: SparseDecode) -> None:
    metrics = runtime.metrics()
    if metrics is not None:
        metrics.publish(*state.totals())


def init_metrics_collector(
    _: None, collector: Any, labels: dict[str, str], *args: Any, **kwargs: Any
) -> None:
    """Create the Prometheus metrics beside SGLang's, which exist before the KV pool does."""
    runtime.set_metrics(PrometheusMetrics(labels, inherited_config().kv_tier == "host"))
