"""What sparse decode makes of a model: its attention geometry and the memory of its summaries."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from locks_kernels.precompile import DTYPES, ORACLE, QUEST, Geometry

from .config import LocksConfig, LocksError
from .model_checks import check_model
from .summaries import bytes_per_token


@dataclass(frozen=True)
class ModelFacts:
    """A model on one of ``tp_size`` ranks; bytes are a token's, over all layers of the rank.

    ``refusal`` says why sparse decode does not work with the model, ``note`` what the server has to
    be told; both None where nothing is to be said.
    """

    name: str
    tp_size: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    context: int
    dtype: str
    kv_bytes: int
    summary_bytes: int
    refusal: str | None
    note: str | None

    def geometry(self, config: LocksConfig) -> Geometry:
        """What decides the kernels that a rank loads; a GPU serves the model in 16 bits."""
        records = {"quest": QUEST, "oracle": ORACLE}.get(config.selector, config.summary)
        dtype = DTYPES.get(self.dtype, DTYPES["bfloat16"])
        return Geometry(self.q_heads, self.kv_heads, self.head_dim, config.page_size, records, dtype)


def read_model(path: str, config: LocksConfig, tp_size: int = 1) -> ModelFacts:
    """Read a model's configuration as SGLang's server does; no weights are read.

    Args:
        path: folder with ``config.json``, or a name on a model hub that SGLang can reach.
        config: record format, page size and selector.
        tp_size: ranks that the KV heads are spread over.

    Raises:
        LocksError: SGLang cannot read the configuration, or the heads cannot be spread so.
    """
    model = _model_config(path)
    if tp_size < 1 or model.num_attention_heads % tp_size:
        raise LocksError(
            f"--tp-size is {tp_size}; legal: a divisor of the model's query heads, "
            f"{model.num_attention_heads}"
        )
    try:
        check_model(model, config)
        refusal = None
    except LocksError as error:
        refusal = str(error)
    kv_heads, layers = model.get_num_kv_heads(tp_size), model.num_attention_layers
    values = 2 * kv_heads * model.head_dim * layers
    return ModelFacts(
        name=path,
        tp_size=tp_size,
        layers=layers,
        q_heads=model.num_attention_heads // tp_size,
        kv_heads=kv_heads,
        head_dim=model.head_dim,
        context=model.context_len,
        dtype=str(model.dtype).removeprefix("torch."),
        kv_bytes=values * model.dtype.itemsize,
        summary_bytes=0 if refusal else bytes_per_token(config, model.head_dim, kv_heads, layers),
        refusal=refusal,
        note=_note(model),
    )


def _model_config(path: str) -> Any:
    with warnings.catch_warnings():
        # Of what SGLang misses without a GPU.
        warnings.simplefilter("ignore", UserWarning)
        from sglang.srt.configs.model_config import ModelConfig

    try:
        return ModelConfig(model_path=path)
    # Whatever SGLang or transformers raise, the user's question is why this model cannot be read.
    except Exception as error:
        raise LocksError(
            f"SGLang cannot read the configuration of --model {path}: {error}; legal: a folder with "
            "config.json, or a name on a model hub that can be reached"
        ) from error


def _note(model: Any) -> str | None:
    if getattr(model, "is_hybrid_swa", False):
        return "sliding-window layers: start with --disable-hybrid-swa-memory; they keep dense attention"
    return None
