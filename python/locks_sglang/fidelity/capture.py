"""Capture real queries, keys and values, after RoPE, from a Hugging Face model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from locks_sglang import cpu_stand_ins

ATTENTION = "locks_capture"


@dataclass
class Capture:
    """What one text made of a model's attention.

    Attributes:
        queries: fp32 ``[layers, q_heads, n, d]``, after RoPE, of the captured positions.
        keys: fp32 ``[layers, kv_heads, T, d]``, after RoPE, of the whole text.
        values: fp32 ``[layers, kv_heads, T, d]``.
        positions: int64 ``[n]``, ascending; query i sees keys ``0 .. positions[i]``.
        cos, sin: fp32 ``[T, rotated]``, the rotation of every position.
        sm_scale: the model's softmax scale.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    sm_scale: float

    @property
    def layers(self) -> int:
        return self.keys.shape[0]

    @property
    def tokens(self) -> int:
        return self.keys.shape[2]


def load_model(
    folder: str | Path, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Any, Any]:
    """Model and tokenizer of a Hugging Face folder, with attention that can be captured.

    Any decoder works whose attention goes through transformers' attention interface and whose
    KV heads all have one head_dim; MLA models do not.
    """
    if not torch.cuda.is_available():
        cpu_stand_ins.activate()
    from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

    AttentionInterface.register(ATTENTION, _Attention.call)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=ATTENTION)
    return model.to(device).eval(), tokenizer


def capture(model: Any, token_ids: list[int], queries: int = 32, stride: int = 8) -> Capture:
    """Run a text through a model of :func:`load_model` and keep keys and some queries.

    Args:
        token_ids: the text; it must be longer than ``queries * stride`` tokens.
        queries: how many positions to keep the queries of: the last ones, as in decoding.
        stride: distance between those positions, so that neighbours do not count many times.

    Raises:
        ValueError: the text is too short, or the model's rotary embedding is out of reach.
    """
    if len(token_ids) <= queries * stride:
        raise ValueError(f"{len(token_ids)} tokens of text; legal: more than {queries} x {stride}")
    if getattr(model.base_model, "rotary_emb", None) is None:
        raise ValueError(f"{type(model).__name__} has no base_model.rotary_emb; legal: RoPE decoders")
    positions = torch.arange(queries).flip(0) * -stride + len(token_ids) - 1
    recorder = _Recorder(positions)
    with attention_through(recorder), _rotation(model) as rotation, torch.inference_mode():
        ids = torch.tensor([token_ids], device=model.device)
        model.base_model(input_ids=ids, use_cache=False)
    cos, sin = (part[0].float().cpu() for part in rotation)
    order = sorted(recorder.keys)
    return Capture(
        torch.stack([recorder.queries[layer] for layer in order]),
        torch.stack([recorder.keys[layer] for layer in order]),
        torch.stack([recorder.values[layer] for layer in order]),
        positions,
        cos,
        sin,
        recorder.sm_scale,
    )


# (layer, query [1, q_heads, T, d], key and value [1, kv_heads, T, d], scale) -> [1, q_heads, T, d]
Attention = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


def causal(
    _layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """Dense attention, every token to itself and those before it."""
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=query.shape[2] > 1, scale=scale, enable_gqa=True
    )


@contextmanager
def attention_through(function: Attention) -> Iterator[None]:
    """Let every layer of a model of :func:`load_model` attend by ``function``; else by :func:`causal`."""
    _Attention.active = function
    try:
        yield
    finally:
        _Attention.active = causal


class _Attention:
    """What transformers calls, once registered for good; what it does changes."""

    active: ClassVar[Attention] = causal

    @staticmethod
    def call(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention in transformers' signature: ``[1, heads, T, d]`` -> ``[1, T, heads, d]``."""
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        output = _Attention.active(int(module.layer_idx), query, key, value, scale)
        return output.transpose(1, 2), None


class _Recorder:
    """Dense attention that keeps what passes through it."""

    def __init__(self, positions: torch.Tensor) -> None:
        self.positions = positions
        self.queries: dict[int, torch.Tensor] = {}
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self.sm_scale = 0.0

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        self.queries[layer] = query[0, :, self.positions.to(query.device)].float().cpu()
        self.keys[layer] = key[0].float().cpu()
        self.values[layer] = value[0].float().cpu()
        self.sm_scale = scale
        return causal(layer, query, key, value, scale)


@contextmanager
def _rotation(model: Any) -> Iterator[list[torch.Tensor]]:
    """Collect cos and sin from the model's rotary embedding."""
    seen: list[torch.Tensor] = []

    def keep(_module: Any, _arguments: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        seen[:] = output

    handle = model.base_model.rotary_emb.register_forward_hook(keep)
    try:
        yield seen
    finally:
        handle.remove()


def rotate(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """Apply RoPE in the half-split form (Llama, Qwen, Mistral), or take it away again.

    ``keys [..., T, d]``, ``cos`` and ``sin [T, rotated]``; dimensions past ``rotated`` stay.
    """
    width = cos.shape[-1]
    turning, fixed = keys[..., :width], keys[..., width:]
    first, second = turning.chunk(2, dim=-1)
    swapped = torch.cat([-second, first], dim=-1)
    turned = turning * cos + swapped * (-sin if inverse else sin)
    return torch.cat([turned, fixed], dim=-1)
