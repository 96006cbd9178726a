"""Bytes that a decode step moves and the time that it takes."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import LocksConfig
from ..summaries import bytes_per_token
from .costs import Costs
from .machines import Machine
from .model import PlanModel

TIERS = ("dense", "resident", "host")


@dataclass(frozen=True)
class StepBytes:
    """Bytes of one step of one rank: read from the GPU's memory, and over the link to and from the host."""

    weights: int
    records: int
    kv: int
    to_gpu: int
    to_host: int

    @property
    def link(self) -> int:
        return self.to_gpu + self.to_host


def step_bytes(
    model: PlanModel, config: LocksConfig, tier: str, batch: int, context: int, hot_share: float = 1.0
) -> StepBytes:
    """What a step moves for ``batch`` requests of ``context`` tokens each.

    ``hot_share`` is the share of the selected pages that the cache of the host tier holds; the others
    come over the link once.  Every request sends a new token's KV to the host, a page at a time.
    """
    if tier not in TIERS:
        raise ValueError(f"unknown tier {tier!r}; legal: {', '.join(TIERS)}")
    attended = batch * context * model.kv_bytes
    if tier == "dense":
        return StepBytes(model.step_weight_bytes, 0, attended, 0, 0)
    attended = min(attended, batch * config.budget * model.kv_bytes)
    scored = context if context > config.budget else 0
    records = batch * scored * bytes_per_token(config, model.head_dim, model.kv_heads, model.layers)
    if tier == "resident":
        return StepBytes(model.step_weight_bytes, records, attended, 0, 0)
    missed = round(attended * (1 - hot_share))
    return StepBytes(model.step_weight_bytes, records, attended - missed, missed, batch * model.kv_bytes)


def step_ms(
    model: PlanModel, machine: Machine, costs: Costs, moved: StepBytes, tier: str, batch: int
) -> float:
    """Milliseconds of a step: fixed costs, then every byte at the rate of the way that it takes.

    Nothing overlaps: that is what the measured steps show of weights, records and KV, and for the link
    it is the cautious guess.
    """
    layer_us = costs.dense_layer_us
    if tier != "dense":
        layer_us = costs.sparse_layer_us + batch**0.5 * costs.sparse_root_us
    fixed = costs.step_ms + model.layers * layer_us / 1e3
    hbm = (moved.weights + moved.records + moved.kv) / machine.hbm
    return fixed + 1e3 * (hbm + moved.to_gpu / machine.to_gpu + moved.to_host / machine.to_host)
