"""Keys and values as a quantised KV cache gives them back: KIVI at 4 and 2 bits, fp8, bf16.

KIVI (Liu et al., 2024), from the paper and its code: asymmetric rounding between a group's minimum
and maximum; a key group is one channel of 32 consecutive tokens, a value group is 32 channels of one
token; the newest tokens stay as they are: of the keys those past the last multiple of 128, of the
values the newest 128.  KIVI keeps minimum and step in the model's type; here they are fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

GROUP = 32
RESIDUAL = 128
KV_CACHES = ("bf16", "fp8", "kivi4", "kivi2")


@dataclass(frozen=True)
class KVCache:
    """One layer's cache; every query has its own border between quantised and recent tokens.

    Attributes:
        keys, values: fp32 ``[H, T, d]``, as read back after quantisation.
        recent_keys, recent_values: fp32 ``[H, T, d]``, what recent tokens are read as.
        key_border, value_border: int64 ``[n]``; tokens before it are read quantised.
    """

    keys: torch.Tensor
    values: torch.Tensor
    recent_keys: torch.Tensor
    recent_values: torch.Tensor
    key_border: torch.Tensor
    value_border: torch.Tensor

    @classmethod
    def of(cls, name: str, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor) -> KVCache:
        """The cache ``name`` of ``keys`` and ``values [H, T, d]``, read by queries at ``positions [n]``.

        Raises:
            ValueError: the name is unknown, or head_dim is no multiple of KIVI's group.
        """
        recent = keys.bfloat16().float(), values.bfloat16().float()
        if name == "bf16":
            none = torch.zeros_like(positions)
            return cls(*recent, *recent, none, none)
        if name == "fp8":
            everything = torch.full_like(positions, keys.shape[1])
            return cls(fp8(keys), fp8(values), *recent, everything, everything)
        if name not in KV_CACHES:
            raise ValueError(f"unknown KV cache {name!r}; legal: {', '.join(KV_CACHES)}")
        bits = int(name.removeprefix("kivi"))
        return cls(
            kivi_keys(recent[0], bits),
            kivi_values(recent[1], bits),
            *recent,
            positions - positions % RESIDUAL,
            (positions - RESIDUAL).clamp_min(0),
        )


def asymmetric(values: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Round to ``2**bits`` even steps from the minimum to the maximum along ``dim``, and read back."""
    low, high = values.amin(dim, keepdim=True), values.amax(dim, keepdim=True)
    step = (high - low) / (2**bits - 1)
    return low + (values - low).div(step.where(step > 0, 1.0)).round() * step


def kivi_keys(keys: torch.Tensor, bits: int) -> torch.Tensor:
    """Per channel in groups of tokens: ``[H, T, d]``; tokens of an incomplete group stay."""
    whole = keys.shape[1] // GROUP * GROUP
    groups = keys[:, :whole].unflatten(1, (-1, GROUP))
    return torch.cat([asymmetric(groups, bits, 2).flatten(1, 2), keys[:, whole:]], dim=1)


def kivi_values(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Per token in groups of channels: ``[H, T, d]``. ValueError if groups do not fill d."""
    if values.shape[-1] % GROUP:
        raise ValueError(f"head_dim {values.shape[-1]}; legal: a multiple of {GROUP}")
    return asymmetric(values.unflatten(-1, (-1, GROUP)), bits, -1).flatten(-2)


def fp8(values: torch.Tensor) -> torch.Tensor:
    """A cast to e4m3 without a scale, as in a pool of that type for a model that brings no scales."""
    return values.to(torch.float8_e4m3fn).float()
