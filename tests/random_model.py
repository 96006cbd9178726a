"""A small decoder with random weights, for tensor parallelism: the demo model's 3 KV heads do not divide.

Random weights attend almost everywhere alike and predict almost nothing. Wider projections of queries and
keys make some tokens matter, and a wide head makes one token clearly the best.
"""

import json
from pathlib import Path

import torch

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 4, 512, 8, 4, 64, 1024
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}
# Standard deviation of an output for an input of variance 1. Queries times keys: 1.5 * 1.5 for a logit.
SPREAD = {"q_proj": 1.5, "k_proj": 1.5, "lm_head": 8.0}


def make(folder: Path, seed: int = 0) -> Path:
    """Write configuration and weights (bf16, always the same for a seed) to ``folder`` and return it."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)

    def linear(name: str, rows: int, columns: int) -> torch.Tensor:
        spread = SPREAD.get(name, 1.0)
        weight = torch.randn(rows, columns, generator=generator) * spread / columns**0.5
        return weight.to(torch.bfloat16)

    ones = torch.ones(HIDDEN, dtype=torch.bfloat16)
    weights = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN, generator=generator).bfloat16(),
        "model.norm.weight": ones,
        "lm_head.weight": linear("lm_head", VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes = {
            "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            "mlp.gate_proj": (2 * HIDDEN, HIDDEN),
            "mlp.up_proj": (2 * HIDDEN, HIDDEN),
            "mlp.down_proj": (HIDDEN, 2 * HIDDEN),
        }
        for name, shape in shapes.items():
            weights[f"{prefix}.{name}.weight"] = linear(name.split(".")[1], *shape)
        weights[f"{prefix}.input_layernorm.weight"] = ones.clone()
        weights[f"{prefix}.post_attention_layernorm.weight"] = ones.clone()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
