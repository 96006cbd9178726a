"""Does sparse decode support this model's geometry?"""

from __future__ import annotations

from typing import Any

from locks_kernels.layout import HEAD_DIMS

from .config import LocksConfig, LocksError

MAX_GROUP = 16


def check_model(model_config: Any, config: LocksConfig) -> None:
    """Raise LocksError where the model's attention is not one that sparse decode computes."""
    attention = getattr(model_config, "attention_arch", None)
    if getattr(attention, "name", None) == "MLA":
        raise LocksError(
            "--sparse-decode does not work with MLA models; legal: models with ordinary (MHA, MQA, GQA) "
            "attention"
        )
    if getattr(model_config, "is_encoder_decoder", False):
        raise LocksError("--sparse-decode does not work with encoder-decoder models; legal: decoders")
    if not getattr(model_config, "is_generation", True):
        raise LocksError(
            "--sparse-decode does not work with embedding and reward models, which never decode; "
            "legal: generation models"
        )
    head_dim = model_config.head_dim
    if head_dim not in HEAD_DIMS:
        raise LocksError(
            f"--sparse-decode does not work with head_dim {head_dim}; "
            f"legal: {', '.join(map(str, HEAD_DIMS))}"
        )
    group = model_config.num_attention_heads // model_config.get_total_num_kv_heads()
    if group > MAX_GROUP:
        raise LocksError(
            f"--sparse-decode does not work with {group} query heads per KV head; legal: 1 to {MAX_GROUP}"
        )
