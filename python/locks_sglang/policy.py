"""Per-request mode and budget: ``custom_params: {"locks": {"mode": ..., "budget": ...}}``."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from locks_kernels import ATTEND_ALL

from .config import LocksConfig, LocksError, check_budget

logger = logging.getLogger(__name__)

KEY = "locks"
MODES = ("sparse", "dense")


@dataclass(frozen=True)
class RequestPolicy:
    """What one request asked for; ``budget`` in tokens, None for the server's."""

    mode: str = "sparse"
    budget: int | None = None

    def pages(self, config: LocksConfig, page_size: int) -> int:
        """Pages that the request may attend, ``ATTEND_ALL`` for a dense one."""
        if self.mode == "dense":
            return ATTEND_ALL
        return (self.budget or config.budget) // page_size


def parse_request(custom_params: Mapping[str, Any] | None, config: LocksConfig) -> RequestPolicy:
    """Read a request's options.

    Raises:
        LocksError: (a ValueError, answered with status 400) an unknown key or value; the
            message names the legal ones.
    """
    if not isinstance(custom_params, Mapping | None):
        raise LocksError(
            f"custom_params is {custom_params!r}; legal: an object, sparse decode's part at 'locks'"
        )
    options = (custom_params or {}).get(KEY)
    if options is None:
        return RequestPolicy()
    if not isinstance(options, Mapping):
        raise LocksError(
            f"custom_params.locks is {options!r}; legal: an object with 'mode' (sparse, dense) and "
            "'budget' (tokens)"
        )
    unknown = sorted(set(options) - {"mode", "budget"}, key=str)
    if unknown:
        raise LocksError(f"custom_params.locks has unknown keys {unknown}; legal: 'mode', 'budget'")
    mode = options.get("mode", "sparse")
    if mode not in MODES:
        raise LocksError(f"custom_params.locks.mode is {mode!r}; legal: {', '.join(MODES)}")
    if mode == "dense" and config.attend == "flashinfer":
        raise LocksError(
            "custom_params.locks.mode 'dense' does not work with --sparse-decode-attend flashinfer, whose "
            f"lists end at {config.largest_budget} tokens; legal: sparse, with a budget up to that"
        )
    budget = options.get("budget")
    if budget is not None:
        _check_request_budget(budget, mode, config)
    return RequestPolicy(mode, budget)


def _check_request_budget(budget: Any, mode: str, config: LocksConfig) -> None:
    name = "custom_params.locks.budget"
    if mode == "dense":
        raise LocksError(f"{name} has no meaning with mode 'dense'; leave one of them out")
    if not isinstance(budget, int) or isinstance(budget, bool):
        raise LocksError(f"{name} is {budget!r}; legal: a whole number of tokens")
    check_budget(name, budget, config.page_size)
    if budget > config.largest_budget:
        raise LocksError(
            f"{name} is {budget}; legal: at most {config.largest_budget} tokens "
            "(--sparse-decode-max-budget), or mode 'dense' to attend everything"
        )


class PolicyTable:
    """Budget in pages of every request slot, int32 ``[slots]`` on the device of the pool."""

    def __init__(self, config: LocksConfig, slots: int, device: torch.device | str) -> None:
        self._config = config
        default = RequestPolicy().pages(config, config.page_size)
        self.budgets = torch.full((slots,), default, dtype=torch.int32, device=device)

    def write(self, slots: Sequence[int], requests: Sequence[Any]) -> None:
        """Set the rows of requests that just got their slots."""
        pages = [self._pages(request) for request in requests]
        index = torch.tensor(slots, dtype=torch.int64)
        values = torch.tensor(pages, dtype=torch.int32)
        device = self.budgets.device
        self.budgets[index.to(device, non_blocking=True)] = values.to(device, non_blocking=True)

    def _pages(self, request: Any) -> int:
        try:
            policy = parse_request(request.sampling_params.custom_params, self._config)
        except LocksError:
            # Checked when the request came in; a way around that check must not end the server.
            logger.exception("request %s has bad sparse-decode options; the server's are used", request.rid)
            policy = RequestPolicy()
        return policy.pages(self._config, self._config.page_size)
