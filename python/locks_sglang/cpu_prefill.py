"""Prefill attention on a CPU that does not compute the prefix again.

SGLang's ``torch_native`` backend pads the queries of a chunk to the whole sequence, so that a
chunk costs as much as everything before it and a prefix hit saves no attention.  The same
attention for the chunk's own queries gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention


def run_extend(
    padded: Callable[..., torch.Tensor],
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    scaling: float | None = None,
    enable_gqa: bool = False,
    **kind: Any,
) -> torch.Tensor:
    """Stand in for ``TorchNativeAttnBackend._run_sdpa_forward_extend``, with its arguments.

    ``query`` and ``output`` are ``[tokens, q_heads, d]``, the requests' new tokens one after
    another; the caches ``[slots, kv_heads, d]``.  ``padded`` is the original; it serves what is
    not plain causal self-attention.
    """
    plain = kind.get("causal") and not kind.get("is_cross_attn") and kind.get("sliding_window_size") is None
    if encoder_lens is not None or not plain:
        return padded(
            query,
            output,
            k_cache,
            v_cache,
            req_to_token,
            req_pool_indices,
            seq_lens,
            extend_prefix_lens,
            extend_seq_lens,
            encoder_lens,
            scaling=scaling,
            enable_gqa=enable_gqa,
            **kind,
        )
    start = 0
    lengths = zip(req_pool_indices.tolist(), seq_lens.tolist(), extend_seq_lens.tolist(), strict=True)
    for row, total, new in lengths:
        slots = req_to_token[row, :total]
        keys, values = (pool[slots].movedim(0, 1).to(query.dtype)[None] for pool in (k_cache, v_cache))
        visible = torch.ones(new, total, dtype=torch.bool, device=query.device).tril(total - new)
        attended = scaled_dot_product_attention(
            query[start : start + new].movedim(0, 1)[None],
            keys,
            values,
            attn_mask=visible,
            scale=scaling,
            enable_gqa=enable_gqa,
        )
        output[start : start + new] = attended[0].movedim(0, 1)
        start += new
    return output
