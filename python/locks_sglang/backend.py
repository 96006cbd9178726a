"""The decode half over the user's attention backend.

The backend object is upgraded in place (its class is swapped for a subclass), since SGLang
reads dozens of attributes off it; prefill and everything else stay its own.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from .config import LocksError
from .cpu_prefill import run_extend
from .runtime import SparseDecode

# Classes of SGLang, and what `--attention-backend` calls them.
SUPPORTED_BACKENDS = {
    "FlashAttentionBackend": "fa3",
    "FlashInferAttnBackend": "flashinfer",
    "TorchNativeAttnBackend": "torch_native",
}


def make_sparse_class(base: type) -> type:
    """Subclass of an attention backend's class whose decode half is sparse.

    A factory and not a mix-in class: an object's class can only be swapped for one that has
    the old class as its single base.
    """

    class SparseBackend(base):  # type: ignore[valid-type, misc]
        locks: SparseDecode

        def init_forward_metadata(self, forward_batch: Any) -> None:
            self.locks.end_step()
            if self._plans_itself(forward_batch):
                with self.locks.staged_planning(self, forward_batch):
                    super().init_forward_metadata(forward_batch)
            # Some backends come through init_forward_metadata_out_graph, others do not.
            if not self.locks.in_step:
                self.locks.begin_step(forward_batch)

        def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
            super().init_cuda_graph_state(max_bs, max_num_tokens)
            self.locks.allocate_graph_buffers(max_bs)

        def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
            self.locks.plan_out_of_graph(forward_batch)
            if self._plans_itself(forward_batch):
                super().init_forward_metadata_out_graph(forward_batch, in_capture)
            self.locks.begin_step(forward_batch)

        def _plans_itself(self, forward_batch: Any) -> bool:
            """A decode step never runs the backend's own kernel, unless it or a layer is dense."""
            dense = self.locks.dense_steps.begin(forward_batch) or bool(self.locks.dense_layers)
            return dense or not forward_batch.forward_mode.is_decode()

        def forward_decode(
            self,
            q: Any,
            k: Any,
            v: Any,
            layer: Any,
            forward_batch: Any,
            save_kv_cache: bool = True,
            **kwargs: Any,
        ) -> Any:
            if self.locks.dense_steps.now or layer.layer_id in self.locks.dense_layers:
                return super().forward_decode(
                    q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs
                )
            _refuse_extra_terms(layer, kwargs)
            if save_kv_cache and k is not None:
                _write_kv(self, layer, forward_batch, k, v)
                self.locks.write(layer, k, v)
            else:
                self.locks.written(layer, forward_batch.out_cache_loc)
            queries = q.reshape(-1, layer.tp_q_head_num, layer.head_dim)
            return self.locks.decode(queries, layer).view(len(queries), -1)

    SparseBackend.__name__ = f"Locks{base.__name__}"
    return SparseBackend


def make_staged_class(base: type) -> type:
    """Subclass of a sparse backend whose prefill attends staged copies of a pool in host memory."""

    class StagedBackend(base):  # type: ignore[valid-type, misc]
        def forward_extend(
            self,
            q: Any,
            k: Any,
            v: Any,
            layer: Any,
            forward_batch: Any,
            save_kv_cache: bool = True,
            **kwargs: Any,
        ) -> Any:
            written = None if save_kv_cache and k is not None else forward_batch.out_cache_loc
            with self.locks.staged_attention(self, layer, written):
                return super().forward_extend(
                    q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs
                )

    StagedBackend.__name__ = base.__name__
    return StagedBackend


def upgrade(backend: Any, state: SparseDecode) -> None:
    """Give ``backend`` sparse decode.

    Raises:
        LocksError: its class is not one that sparse decode was made for.
    """
    adapt(backend)
    sparse = make_sparse_class(type(backend))
    backend.__class__ = sparse if state.tier is None else make_staged_class(sparse)
    backend.locks = state


def adapt(backend: Any) -> None:
    """Check a backend that is to decode sparse, and spare prefill on a CPU needless work.

    Raises:
        LocksError: its class is not one that sparse decode was made for.
    """
    name = type(backend).__name__
    if getattr(backend, "fa_impl_ver", 3) == 4:
        name += " of fa4"  # the same class with other kernels, which were not tested
    if name not in SUPPORTED_BACKENDS:
        raise LocksError(
            f"--sparse-decode does not work with the attention backend {name}; legal: --attention-backend "
            f"{', '.join(SUPPORTED_BACKENDS.values())} (the last on a CPU), for prefill and decode alike"
        )
    if name == "TorchNativeAttnBackend":
        backend._run_sdpa_forward_extend = partial(run_extend, backend._run_sdpa_forward_extend)


def _refuse_extra_terms(layer: Any, kwargs: dict[str, Any]) -> None:
    """Attention sinks, biases and the like are not computed here, and dense must be said aloud."""
    unknown = sorted(name for name, value in kwargs.items() if value is not None)
    if unknown:
        raise LocksError(
            f"layer {layer.layer_id} passes {', '.join(unknown)} to its attention, which sparse "
            "decode does not compute; start without --sparse-decode"
        )


def _write_kv(backend: Any, layer: Any, forward_batch: Any, k: Any, v: Any) -> None:
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    location = KVWriteLoc(forward_batch.out_cache_loc, None)
    # The pool divides by the scales only where its type is not that of k and v.
    backend.token_to_kv_pool.set_kv_buffer(layer, location, k, v, layer.k_scale, layer.v_scale)


def why_dense(layer: Any) -> str | None:
    """Why a RadixAttention layer cannot decode sparse; None if it can."""
    if layer.is_cross_attention:
        return "cross attention"
    if layer.sliding_window_size not in (-1, None):
        return f"sliding window of {layer.sliding_window_size} tokens"
    if layer.use_irope:
        return "chunked attention (irope)"
    if layer.logit_cap:
        return f"logit cap {layer.logit_cap}"
    if layer.v_head_dim != layer.head_dim:
        return f"values of {layer.v_head_dim} dimensions, keys of {layer.head_dim}"
    if getattr(layer.attn_type, "value", layer.attn_type) != "decoder":
        return f"attention type {layer.attn_type}"
    if layer.xai_temperature_len > 0:
        return "temperature by position"
    return None


# What models name the per-head terms that their attention layers pass to ``forward``.
_SINKS = ("sinks", "attention_sink_bias")


def why_owner_is_dense(owner: Any) -> str | None:
    """Why the module that calls a RadixAttention layer keeps it dense; None if it does not."""
    if any(getattr(owner, name, None) is not None for name in _SINKS):
        return "attention sinks"
    return None
