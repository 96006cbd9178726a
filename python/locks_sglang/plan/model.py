"""What a plan needs of a model: attention geometry and bytes, from its configuration alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import LocksError

# Models with a gated MLP (three matrices), whose weights can be counted.
COUNTED = (
    "chatglm", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "granite", "internlm2", "llama",
    "ministral", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3",
)  # fmt: skip
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_GIB = 2**30


@dataclass(frozen=True)
class PlanModel:
    """A model on one of ``tp`` ranks.

    Attributes:
        name: folder or file that it was read from.
        layers, q_heads, kv_heads, head_dim: of the rank.
        context: longest context of the model.
        weight_bytes: weights on the rank's GPU.
        step_weight_bytes: those that a decode step reads; a table of embeddings is only looked up.
    """

    name: str
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    context: int
    weight_bytes: int
    step_weight_bytes: int

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V of a token, all layers of the rank, in 16 bits."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


def read(path: Path, tp: int = 1, weights_gib: float | None = None) -> PlanModel:
    """Read ``config.json``, given as a file or by its folder.

    Weights are the ``*.safetensors`` of the folder, or counted from the configuration in 16 bits, or
    ``weights_gib`` (of the whole model).  Norms and biases are not counted.

    Raises:
        LocksError: there is no such file, or the model cannot be planned for; the message says why.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise LocksError(
            f"--model {path} cannot be read ({error}); legal: a folder with config.json, or such a file"
        ) from None
    config = config.get("text_config", config)
    _check(config, path)
    q_heads = _first(config, "num_attention_heads")
    kv_heads = _first(config, "multi_query_group_num", "num_key_value_heads", "num_attention_heads")
    if tp < 1 or q_heads % tp or (kv_heads % tp and tp % kv_heads):
        raise LocksError(
            f"--tp is {tp}; legal: a divisor of {q_heads} query heads that divides the {kv_heads} KV heads "
            "or is a multiple of them"
        )
    total, embedding = _weights(config, file.parent, weights_gib)
    # A tied table is read as the output layer.
    looked_up = 0 if config.get("tie_word_embeddings") else embedding
    return PlanModel(
        name=str(path),
        layers=_first(config, "num_hidden_layers", "num_layers"),
        q_heads=q_heads // tp,
        kv_heads=max(1, kv_heads // tp),
        head_dim=_head_dim(config),
        context=_first(config, "max_position_embeddings", "seq_length"),
        weight_bytes=-(-total // tp),
        step_weight_bytes=-(-(total - looked_up) // tp),
    )


def _check(config: dict[str, Any], path: Path) -> None:
    if any(config.get(name) for name in _EXPERTS):
        raise LocksError(
            f"--model {path} has experts: which weights a step reads depends on the batch, and that is not "
            "modelled; legal: models without experts"
        )
    if config.get("kv_lora_rank"):
        raise LocksError(f"--model {path} has MLA, which sparse decode refuses; legal: MHA, MQA and GQA")


def _first(config: dict[str, Any], *names: str) -> int:
    for name in names:
        if config.get(name) is not None:
            return int(config[name])
    raise LocksError(f"the model's configuration has none of {', '.join(names)}")


def _head_dim(config: dict[str, Any]) -> int:
    given = config.get("head_dim") or config.get("kv_channels")
    return given or _first(config, "hidden_size") // _first(config, "num_attention_heads")


def _weights(config: dict[str, Any], folder: Path, gib: float | None) -> tuple[int, int]:
    """Bytes of all weights, and of the table of embeddings among them."""
    hidden = _first(config, "hidden_size")
    embedding = 2 * _first(config, "padded_vocab_size", "vocab_size") * hidden
    files = list(folder.glob("*.safetensors"))
    if gib is not None:
        return int(gib * _GIB), embedding
    if files:
        return sum(file.stat().st_size for file in files), embedding
    kind = config.get("model_type")
    if kind not in COUNTED or config.get("quantization_config"):
        what = "quantised weights" if config.get("quantization_config") else f"weights of {kind!r}"
        raise LocksError(
            f"{what} cannot be counted from a configuration; legal: --weights-gib, a folder with "
            f"*.safetensors, or a model of the kinds {', '.join(COUNTED)}"
        )
    q_heads = _first(config, "num_attention_heads")
    kv_heads = _first(config, "multi_query_group_num", "num_key_value_heads", "num_attention_heads")
    attention = hidden * _head_dim(config) * 2 * (q_heads + kv_heads)
    mlp = 3 * hidden * _first(config, "ffn_hidden_size", "intermediate_size")
    layers = 2 * _first(config, "num_hidden_layers", "num_layers") * (attention + mlp)
    return layers + (1 if config.get("tie_word_embeddings") else 2) * embedding, embedding
