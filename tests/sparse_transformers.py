"""The demo model in transformers, with decode attention through the four ops of locks_kernels.

No server and no scheduler: what remains is the model, a paged KV pool and the selection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from locks_kernels import (
    ATTEND_ALL,
    EnvelopeLayout,
    Envelopes,
    Summaries,
    SummaryLayout,
    attend,
    page_view,
    score,
    select,
    summarize,
)

PAGE = 16
ATTENTION = "locks_test_decode"


@dataclass
class Prefix:
    """Post-RoPE keys and values of a text, ``[layers, T, H, d]``."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @property
    def tokens(self) -> int:
        return self.keys[0].shape[0]


@torch.inference_mode()
def prefill(model: Any, token_ids: list[int]) -> Prefix:
    """Run a text through the model densely and keep what a KV cache would keep."""
    prefix = Prefix([], [])

    def causal(_layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float):
        prefix.keys.append(key[0].transpose(0, 1))
        prefix.values.append(value[0].transpose(0, 1))
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=True
        )

    _run(model, causal, torch.tensor([token_ids]), 0)
    return prefix


class Decoder:
    """Judges answers to several questions about one text, each question a row of one batch.

    All rows share the pages of the text, as under a prefix cache.  ``selector`` is ``dense``,
    ``oracle``, ``quest`` or a record format; ``budget`` counts tokens.
    """

    def __init__(
        self, model: Any, prefix: Prefix, rows: int, steps: int, selector: str, budget: int
    ) -> None:
        self.model, self.selector, self.slots = model, selector, budget // PAGE
        self.length = prefix.tokens
        shared, own = prefix.tokens // PAGE, -(-(prefix.tokens % PAGE + steps) // PAGE)
        own_pages = shared + torch.arange(rows * own).view(rows, own)
        self.table = torch.cat([torch.arange(shared).expand(rows, shared), own_pages], dim=1).int()
        self.pools = [
            (self._pool(keys, shared, own_pages), self._pool(values, shared, own_pages))
            for keys, values in zip(prefix.keys, prefix.values, strict=True)
        ]
        self.records = self._empty_records()
        if self.records is not None:
            summarize(self._keys(), torch.arange(shared * PAGE), self.records)

    @torch.inference_mode()
    def judge(self, questions: list[list[int]], answers: list[list[int]]) -> list[tuple[bool, float]]:
        """Whether greedy decoding gives each answer, and the answer's mean log-probability a token.

        Question and answer are fed one token a step, so all of their attention is sparse.
        """
        rows = [question + answer for question, answer in zip(questions, answers, strict=True)]
        greedy = [True] * len(rows)
        total = [0.0] * len(rows)
        for step in range(max(map(len, rows)) - 1):
            tokens = torch.tensor([[row[min(step, len(row) - 1)]] for row in rows])
            logits = _run(self.model, self._decode, tokens, self.length)[:, -1].log_softmax(-1)
            self.length += 1
            self._close_pages()
            for index, row in enumerate(rows):
                if len(questions[index]) <= step + 1 < len(row):
                    wanted = row[step + 1]
                    greedy[index] &= int(logits[index].argmax()) == wanted
                    total[index] += float(logits[index, wanted])
        return [
            (exact, loss / len(answer)) for exact, loss, answer in zip(greedy, total, answers, strict=True)
        ]

    def _decode(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        keys, values = self.pools[layer]
        here = self.table[:, self.length // PAGE].long(), self.length % PAGE
        keys[here], values[here] = key[:, :, 0], value[:, :, 0]
        query = query[:, :, 0]
        lengths = torch.full((len(query),), self.length + 1)
        budget = ATTEND_ALL if self.selector == "dense" else self.slots
        budgets = torch.full((len(query),), budget, dtype=torch.int32)
        heads = keys.shape[2]
        records = None if self.records is None else self.records.layer(layer)
        if self.selector == "dense":
            # scores of no account: a row that attends all its pages is not ranked
            scores = score(query, keys, None, self.table[:, -1:], torch.ones_like(lengths), scale)
        else:
            scores = score(query, keys, records, self.table, lengths, scale)
        pages = select(
            scores, self.table, lengths, budgets, kv_heads=heads, page_size=PAGE, width=self.slots
        )
        return attend(query, keys, values, pages, self.table, lengths, scale)[0].unsqueeze(2)

    def _close_pages(self) -> None:
        if self.records is not None and self.length % PAGE == 0:
            page = self.table[:, self.length // PAGE - 1].long()
            summarize(self._keys(), page * PAGE + PAGE - 1, self.records)

    def _keys(self) -> list[torch.Tensor]:
        return [keys for keys, _ in self.pools]

    def _empty_records(self) -> Summaries | Envelopes | None:
        pages, _, heads, dim = self.pools[0][0].shape
        lead = (len(self.pools), pages, heads)
        if self.selector in ("dense", "oracle"):
            return None
        if self.selector == "quest":
            return Envelopes.allocate(EnvelopeLayout(dim, PAGE), lead)
        return Summaries.allocate(SummaryLayout.parse(self.selector, dim, PAGE), lead)

    @staticmethod
    def _pool(cached: torch.Tensor, shared: int, own_pages: torch.Tensor) -> torch.Tensor:
        """Page view with the text's complete pages, and its last tokens at the head of each row's own."""
        pool = page_view(cached.new_zeros((shared + own_pages.numel()) * PAGE, *cached.shape[1:]), PAGE)
        pool[:shared] = cached[: shared * PAGE].unflatten(0, (shared, PAGE))
        rest = cached[shared * PAGE :]
        pool[own_pages[:, 0], : len(rest)] = rest
        return pool


def _run(model: Any, attention: Any, token_ids: torch.Tensor, start: int) -> torch.Tensor:
    """One forward of ``token_ids [rows, n]`` at positions from ``start``, with our attention; logits."""
    from transformers import AttentionInterface

    def adapter(module, query, key, value, attention_mask, scaling=None, **_):
        return attention(int(module.layer_idx), query, key, value, scaling).transpose(1, 2), None

    AttentionInterface.register(ATTENTION, adapter)
    model.set_attn_implementation(ATTENTION)
    positions = torch.arange(start, start + token_ids.shape[1]).expand(token_ids.shape)
    output = model(input_ids=token_ids, position_ids=positions, use_cache=False, logits_to_keep=1)
    return output.logits
