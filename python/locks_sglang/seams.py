"""The seams of an SGLang with ``patches/`` applied: its own interface for sparse decode.

Where it is there the plugin is a method behind that interface (``method.py``), and the rows of
the hook table that name one of these seams are not registered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

INTERFACE = "sglang.srt.sparse_decode.method.SparseDecodeMethod"
REGISTRY = "sglang.srt.sparse_decode.registry"


@dataclass(frozen=True)
class Seam:
    """One member of the interface that ``method.py`` implements, or a function that it calls.

    Attributes:
        target: dotted path.
        binding, parameters: its contract, as in :class:`locks_sglang.hooks.Hook`.
        purpose: one line for ``python -m locks_sglang check``.
    """

    target: str
    binding: Literal["function", "method", "classmethod"]
    parameters: tuple[str, ...]
    purpose: str

    @property
    def name(self) -> str:
        return self.target.rpartition(".")[2]


def _member(
    name: str, purpose: str, *parameters: str, binding: Literal["method", "classmethod"] = "method"
) -> Seam:
    first = "cls" if binding == "classmethod" else "self"
    return Seam(f"{INTERFACE}.{name}", binding, (first, *parameters), purpose)


SEAMS = (
    Seam(f"{REGISTRY}.register_sparse_decode_method", "function", ("name",), "names of the methods"),
    _member("add_cli_args", "flags", "parser", binding="classmethod"),
    _member("config_from_cli_args", "configuration from the command line", "args", binding="classmethod"),
    _member("check_server_args", "refused options", "server_args", binding="classmethod"),
    _member(
        "verify_request",
        "per-request options (400 on bad ones)",
        *("sampling_params", "server_args"),
        binding="classmethod",
    ),
    _member("__init__", "configuration in the scheduler", "server_args", "model_config"),
    _member("get_cell_size", "memory: summaries in the bytes a token", "kvc", "num_layers"),
    _member("get_workspace_bytes", "memory: workspaces", "kvc"),
    _member("init_state", "summaries beside the KV pool", "model_runner"),
    _member("init_attention_backend", "the user's attention backend", "attn_backend"),
    _member("supports_layer", "layers that stay dense", "layer"),
    _member("init_cuda_graph_state", "buffers of CUDA graphs", "max_bs"),
    _member("init_forward_metadata", "snapshot of a decode batch", "forward_batch", "in_capture"),
    _member("decode", "sparse decode of a layer", "q", "layer", "forward_batch"),
    _member("on_pages_completed", "summaries of completed pages", "out_cache_loc"),
    _member("on_forward_end", "what a step selected", "forward_batch", "can_run_graph"),
    _member("on_requests_allocated", "per-request policy", "reqs", "req_pool_indices"),
    _member("get_internal_state", "counters for /server_info"),
    _member("init_metrics", "Prometheus metrics", "labels"),
    _member("report_decode_stats", "decode log line", "log"),
)
