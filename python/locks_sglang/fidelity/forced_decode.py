"""Next-token distributions of a text whose last tokens attend selected pages, against dense attention."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from locks_kernels import SummaryLayout, page_view
from locks_kernels.reference import reconstruct, summarize_pages

from .auto_budget import Curves
from .capture import Capture, attention_through
from .measure import combine, ranks
from .page_counts import Bounds, Counts, fixed, order_of, rule

PAGE = 16
FORMAT = "r6h"
FIXED = (8, 16, 24, 32, 48, 64, 96, 128)
RULES = ("head", "calibrated", "threshold")
TARGETS = (0.8, 0.9, 0.95, 0.98)
CAP = 128


@dataclass(frozen=True)
class Divergence:
    """Means over the fed tokens: ``kl`` of dense to sparse in nats, ``agree`` the share of equal most
    likely tokens, ``pages`` over all rows, heads and layers."""

    pages: float
    kl: float
    agree: float


def decode_rows(
    model: Any, token_ids: list[int], capture: Capture, tokens: int, text: str, calibration: Curves
) -> list[dict]:
    """One row a fixed budget, and one a rule and target.

    Args:
        tokens: how many of the text's last tokens are fed.
        calibration: what the calibrated rules are fitted to, with the shares of `FORMAT`.
    """
    decode = ForcedDecode(model, token_ids, capture, tokens, FORMAT)
    cases: list[tuple[str, float | None, int | None, Counts]] = [
        ("fixed", None, None, fixed(pages)) for pages in FIXED
    ]
    for name in RULES:
        cases += [
            (name, target, CAP, rule(name, target, Bounds(cap=CAP), calibration.estimated))
            for target in TARGETS
        ]
    from tqdm import tqdm

    rows = []
    for name, target, cap, counts in tqdm(cases, desc=f"{text}: decode", unit="case", leave=False):
        figures = {key: round(value, 6) for key, value in asdict(decode.run(counts)).items()}
        case = {"format": FORMAT, "rule": name, "target": target, "cap": cap}
        rows.append({"table": "decode", **case, "text": text, **figures})
    return rows


class ForcedDecode:
    """Feeds a text's last tokens with the text's own tokens as history, all layers sparse.

    Keys and values of the tokens before come from a dense pass (the capture), as after a prefill;
    those of the fed tokens are the sparse pass's own, so errors add up over layers and steps.
    """

    def __init__(self, model: Any, token_ids: list[int], capture: Capture, tokens: int, name: str) -> None:
        self.model = model
        self.ids = torch.tensor([token_ids[-tokens:]])
        self.positions = torch.arange(len(token_ids) - tokens, len(token_ids))
        first = len(token_ids) - tokens
        self.keys, self.values = capture.keys[:, :, :first], capture.values[:, :, :first]
        self.layout = SummaryLayout.parse(name, self.keys.shape[-1], PAGE)
        self.whole = first // PAGE * PAGE
        self.stored = [self._stored(keys[:, : self.whole]) for keys in self.keys]
        self.dense = self._log_probabilities(fixed(len(token_ids)))[0]

    def run(self, counts: Counts) -> Divergence:
        log_probabilities, pages = self._log_probabilities(counts)
        kl = (self.dense.exp() * (self.dense - log_probabilities)).sum(-1)
        agree = (self.dense.argmax(-1) == log_probabilities.argmax(-1)).float()
        return Divergence(pages, float(kl.mean()), float(agree.mean()))

    @torch.inference_mode()
    def _log_probabilities(self, counts: Counts) -> tuple[torch.Tensor, float]:
        taken: list[float] = []

        def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float):
            keys = torch.cat([self.keys[layer], key[0]], dim=1)
            values = torch.cat([self.values[layer], value[0]], dim=1)
            queries = query[0].unflatten(0, (keys.shape[0], -1))  # [H, G, n, d]
            logits = self._logits(queries, keys, scale)
            chosen, pages = self._choose(layer, queries, keys, logits, counts, scale)
            taken.append(pages)
            tokens = chosen.repeat_interleave(PAGE, dim=-1)[..., : keys.shape[1]].unsqueeze(1)
            weights = logits.masked_fill(~tokens, float("-inf")).softmax(-1)
            return (weights.flatten(1, 2) @ values).reshape(query.shape)

        with attention_through(attend):
            output = self.model(input_ids=self.ids, position_ids=self.positions[None], use_cache=False)
        return output.logits[0].float().log_softmax(-1), sum(taken) / len(taken)

    def _choose(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        logits: torch.Tensor,
        counts: Counts,
        scale: float,
    ) -> tuple[torch.Tensor, float]:
        """Chosen pages ``[H, n, pages]`` and their mean number."""
        current = self.positions // PAGE
        complete = keys.shape[1] // PAGE * PAGE
        stored = torch.cat([self.stored[layer], self._stored(keys[:, self.whole : complete])], dim=1)
        estimated = self._page_masses(self._logits(queries, stored, scale), keys.shape[1])
        numbers = torch.arange(estimated.shape[-1])
        own = (torch.arange(keys.shape[1]) // PAGE == current.unsqueeze(-1)).expand_as(logits)
        exact = logits.masked_fill(~own, float("-inf")).logsumexp(-1, keepdim=True)
        scores = torch.where(numbers == current.unsqueeze(-1), exact, estimated)
        share = combine(scores, "share-average").squeeze(1)
        order = order_of(share, current)
        pages = counts(layer, share.gather(-1, order).cumsum(-1)).minimum(current + 1)
        places = ranks(share.unsqueeze(1), current).squeeze(1)
        return places < pages.unsqueeze(-1), float(pages.float().mean())

    def _logits(self, queries: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
        """``[H, G, n, T]``, -inf past each query."""
        logits = queries @ keys.transpose(1, 2).unsqueeze(1) * scale
        return logits.masked_fill(torch.arange(keys.shape[1]) > self.positions.unsqueeze(-1), float("-inf"))

    @staticmethod
    def _page_masses(logits: torch.Tensor, tokens: int) -> torch.Tensor:
        pages = -(-tokens // PAGE)
        padded = torch.nn.functional.pad(logits, (0, pages * PAGE - logits.shape[-1]), value=float("-inf"))
        return padded.unflatten(-1, (pages, PAGE)).logsumexp(-1)

    def _stored(self, keys: torch.Tensor) -> torch.Tensor:
        """What the records of whole pages ``[H, T, d]`` stand for."""
        pages = page_view(keys.transpose(0, 1), PAGE)
        return reconstruct(summarize_pages(pages, self.layout)).transpose(0, 1).flatten(1, 2)
