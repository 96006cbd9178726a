"""The plugin as a method of an SGLang that has an interface for sparse decode (``patches/``).

A translation only: every member calls what the hooks of another SGLang call.  Imported where the
interface is there; what needs torch is imported in the scheduler alone.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from sglang.srt.sparse_decode import SparseDecodeMethod, register_sparse_decode_method

from . import parent_hooks
from .activation import attach, enable_process
from .config import (
    DEFAULT_PAGE_SIZE,
    SELECTORS,
    LocksConfig,
    LocksError,
    add_arguments,
    argument_name,
    options,
)
from .refusals import check_server_args as check_refusals
from .refusals import resolved

if TYPE_CHECKING:
    import torch

    from .runtime import SparseDecode

logger = logging.getLogger(__name__)


class LocksMethod(SparseDecodeMethod):
    """The selectors of this package; ``--sparse-decode`` says which."""

    default_page_size = DEFAULT_PAGE_SIZE

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> None:
        add_arguments(parser, selector=False)

    @classmethod
    def config_from_cli_args(cls, args: argparse.Namespace) -> dict[str, Any]:
        return _own_options(LocksConfig.from_namespace(args))

    @classmethod
    def check_server_args(cls, server_args: Any) -> None:
        config = config_of_fields(server_args)
        config.validate()
        if config.kv_tier == "host":
            raise LocksError(
                "--sparse-decode-kv-tier host needs more than the seams of patches/ give; legal: gpu, "
                "or an SGLang without the patches"
            )
        enable_process(config, "parent")
        attach(server_args, config)
        check_refusals(server_args, config)

    @classmethod
    def verify_request(cls, sampling_params: Any, server_args: Any) -> None:
        parent_hooks.verify_sampling_params(None, sampling_params, vocab_size=0)

    def __init__(self, server_args: Any, model_config: Any) -> None:
        super().__init__(server_args, model_config)
        config = config_of_fields(server_args)
        enable_process(config, "scheduler")
        attach(server_args, config)

    def get_cell_size(self, kvc: Any, num_layers: int) -> int:
        from .scheduler_hooks import compute_cell_size

        return compute_cell_size(0, None, kvc, num_layers)

    def get_workspace_bytes(self, kvc: Any) -> int:
        from .scheduler_hooks import profile_available_bytes

        return -profile_available_bytes(0, kvc, 0)

    def init_state(self, model_runner: Any) -> None:
        from .scheduler_hooks import create_state

        super().init_state(model_runner)
        self._state: SparseDecode = create_state(model_runner, dense_graphs=False)

    def init_attention_backend(self, attn_backend: Any) -> None:
        from .backend import adapt

        adapt(attn_backend)

    def supports_layer(self, layer: Any) -> bool:
        return layer.layer_id not in self._state.dense_layers

    @property
    def needs_dense_metadata(self) -> bool:
        return bool(self._state.dense_layers)

    def init_cuda_graph_state(self, max_bs: int) -> None:
        self._state.allocate_graph_buffers(max_bs)

    def init_forward_metadata(self, forward_batch: Any, in_capture: bool = False) -> None:
        self._state.begin_step(forward_batch)

    def decode(self, q: torch.Tensor, layer: Any, forward_batch: Any) -> torch.Tensor:
        return self._state.decode(q, layer)

    def on_pages_completed(self, out_cache_loc: torch.Tensor) -> None:
        self._state.finish_forward(out_cache_loc)

    def on_forward_end(self, forward_batch: Any, can_run_graph: bool) -> None:
        super().on_forward_end(forward_batch, can_run_graph)
        if forward_batch.forward_mode.is_decode():
            self._state.finish_step(forward_batch)

    def on_requests_allocated(self, reqs: Sequence[Any], req_pool_indices: Sequence[int]) -> None:
        self._state.policy.write(req_pool_indices, reqs)

    def get_internal_state(self) -> dict[str, Any]:
        from .scheduler_hooks import get_internal_state

        result = SimpleNamespace(internal_state={})
        get_internal_state(result, None, None)
        return result.internal_state

    def init_metrics(self, labels: dict[str, str]) -> None:
        from .scheduler_hooks import init_metrics_collector

        init_metrics_collector(None, None, labels)

    def report_decode_stats(self, log: bool) -> None:
        from .scheduler_hooks import report_decode_stats

        due = SimpleNamespace(forward_ct_decode=0, decode_log_interval=1, is_stats_logging_rank=log)
        report_decode_stats(None, due)


def register_methods() -> None:
    """Make our selectors legal values of SGLang's ``--sparse-decode``."""
    for selector in SELECTORS:
        if selector != "off":
            register_sparse_decode_method(selector)(LocksMethod)


def config_of_fields(server_args: Any) -> LocksConfig:
    """Configuration in SGLang's own fields ``sparse_decode`` and ``sparse_decode_config``.

    Raises:
        LocksError: ``sparse_decode_config`` has an unknown key.
    """
    given: Mapping[str, Any] = server_args.sparse_decode_config or {}
    legal = _own_options(LocksConfig())
    unknown = sorted(set(given) - set(legal))
    if unknown:
        raise LocksError(f"sparse_decode_config has unknown keys {unknown}; legal: {', '.join(legal)}")
    page_size = resolved(server_args).page_size or DEFAULT_PAGE_SIZE
    return LocksConfig(**given, selector=server_args.sparse_decode, page_size=page_size)


def engine_server_args_class(original: Callable) -> staticmethod:
    """Stand in for ``Engine.server_args_class``: takes ``sparse_decode_budget`` and so on as well."""

    def build(**kwargs: Any) -> Any:
        own = {argument_name(option.name): option.name for option in options() if option.name != "selector"}
        taken = {own[key]: kwargs.pop(key) for key in list(kwargs) if key in own}
        if taken:
            kwargs["sparse_decode_config"] = {**taken, **(kwargs.get("sparse_decode_config") or {})}
        return original(**kwargs)

    return staticmethod(build)


def _own_options(config: LocksConfig) -> dict[str, Any]:
    """The options besides the selector, which has a field of SGLang's own."""
    return {option.name: getattr(config, option.name) for option in options() if option.name != "selector"}
