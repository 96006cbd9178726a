"""score: queries and records -> page scores and their normaliser (paper Eq. 2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import dispatch
from .layout import Envelopes, Records, Summaries
from .reference import score_keys, score_open_page
from .torch_path import score_pages


@dataclass
class PageScores:
    """Per-head page scores of a batch.

    Attributes:
        scores: fp32 ``[rows, q_heads, max_pages]``, natural-log units; -inf past a row's pages
            (where a caller gave ``out``, a GPU leaves these entries as they were).
        lse: fp32 ``[rows, q_heads]``, log-sum-exp of a row's scores: ``exp(scores - lse)`` is
            the page's share of the head's attention.
    """

    scores: torch.Tensor
    lse: torch.Tensor


def score(
    queries: torch.Tensor,
    keys: torch.Tensor,
    records: Records | None,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float,
    *,
    open_pages: torch.Tensor | None = None,
    out: PageScores | None = None,
    impl: str = "auto",
) -> PageScores:
    """Estimate the attention mass of every page of every request.

    Pages before the current one are scored from their records; the page of the current
    token has no record yet and is scored exactly from its keys.

    Args:
        queries: ``[rows, q_heads, d]``, one decode query a request, after RoPE.
        keys: page view ``[pages, B, kv_heads, d]`` of the layer's K pool.
        records: the layer's records (no layer dimension): ``Summaries`` for the ``locks``
            selector, ``Envelopes`` for ``quest``, ``None`` for ``oracle`` (reads every key).
        page_table: int32 ``[rows, max_pages]``, physical page of every logical page.
        seq_lens: int ``[rows]``, tokens of each request, the current one included (>= 1).
        sm_scale: softmax scale, usually ``1 / sqrt(d)``.
        open_pages: int32 ``[rows]``, page of ``keys`` that holds the current page of each row, where that
            is not the page table's: ``keys`` is then read there alone (see ``HotCache.open_keys``).
            Needs ``Summaries``.
        out: results of an earlier call with the same shapes, filled again, so that a GPU need
            not allocate; the torch path makes new ones.
        impl: ``auto``, ``cuda``, ``triton`` or ``torch`` (see ``dispatch.choose``).

    Returns:
        :class:`PageScores`.

    Raises:
        ValueError: q_heads is no multiple of kv_heads, the records do not fit the keys, or the
            implementation does not take a dtype or stride; the message names what is legal.
    """
    check(queries, keys, records, open_pages)
    chosen = dispatch.choose(impl, queries.device)
    if chosen == "torch":
        return _score_torch(queries, keys, records, page_table, seq_lens, sm_scale, open_pages)
    if out is None:
        out = _empty_scores(queries, page_table.shape[1], even=chosen == "cuda")
    if chosen == "cuda":
        from . import cuda_score as implementation
    else:
        from . import triton_score as implementation  # type: ignore[no-redef]
    implementation.score(
        queries, keys, records, page_table, seq_lens, sm_scale, out.scores, out.lse, open_pages
    )
    return out


def _empty_scores(queries: torch.Tensor, max_pages: int, even: bool) -> PageScores:
    rows, q_heads, _ = queries.shape
    # The CUDA kernel stores pairs of scores: its rows have an even length.
    padded = max_pages + (max_pages % 2 if even else 0)
    scores = torch.full((rows, q_heads, padded), float("-inf"), dtype=torch.float32, device=queries.device)
    lse = torch.empty(rows, q_heads, dtype=torch.float32, device=queries.device)
    return PageScores(scores[..., :max_pages], lse)


def _score_torch(
    queries: torch.Tensor,
    keys: torch.Tensor,
    records: Records | None,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float,
    open_pages: torch.Tensor | None,
) -> PageScores:
    rows, q_heads, _ = queries.shape
    page_size = keys.shape[1]
    scores = queries.new_full((rows, q_heads, page_table.shape[1]), float("-inf"), dtype=torch.float32)
    selector = "quest" if isinstance(records, Envelopes) else "locks"
    for row, length in enumerate(seq_lens.tolist()):
        closed = (length - 1) // page_size
        table = page_table[row].long()
        if closed and records is not None:
            scores[row, :, :closed] = score_pages(queries[row], records, table[:closed], sm_scale)
        elif closed:
            scores[row, :, :closed] = score_keys(queries[row], keys[table[:closed]], sm_scale)
        page = table[closed] if open_pages is None else open_pages[row]
        open_keys = keys[page, : length - closed * page_size]
        scores[row, :, closed : closed + 1] = score_open_page(queries[row], open_keys, sm_scale, selector)
    return PageScores(scores, scores.logsumexp(-1))


def check(
    queries: torch.Tensor,
    keys: torch.Tensor,
    records: Records | None,
    open_pages: torch.Tensor | None = None,
) -> None:
    """Raise ValueError unless queries, keys and records are of one geometry."""
    if open_pages is not None and (
        not isinstance(records, Summaries)
        or open_pages.dtype != torch.int32
        or open_pages.shape != queries.shape[:1]
        or not open_pages.is_contiguous()
    ):
        raise ValueError(
            f"open_pages {list(open_pages.shape)} {open_pages.dtype} with {type(records).__name__}; legal: "
            f"[{len(queries)}] torch.int32, contiguous, with Summaries"
        )
    q_heads, head_dim = queries.shape[1:]
    _, page_size, kv_heads, key_dim = keys.shape
    if head_dim != key_dim:
        raise ValueError(f"queries have head_dim {head_dim}, keys {key_dim}")
    if q_heads % kv_heads:
        raise ValueError(f"{q_heads} query heads are no multiple of {kv_heads} KV heads")
    if records is not None and (
        records.layout.page_size != page_size or records.layout.head_dim != head_dim
    ):
        raise ValueError(
            f"records are for page size {records.layout.page_size} and head_dim "
            f"{records.layout.head_dim}, keys have {page_size} and {head_dim}"
        )
