"""score and select in one call, which spends no work on rows that attend everything."""

from __future__ import annotations

import torch

from . import dispatch
from .layout import Records
from .score import check, score
from .select import Selection, empty_selection, select
from .workspace import Workspace


def score_select(
    queries: torch.Tensor,
    keys: torch.Tensor,
    records: Records | None,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    budgets: torch.Tensor,
    sm_scale: float,
    *,
    width: int,
    open_pages: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    settled: bool = False,
    impl: str = "auto",
) -> Selection:
    """Choose the pages of every (request, KV head) for one decode step of one layer.

    Arguments as in :func:`locks_kernels.score.score` and :func:`locks_kernels.select.select`;
    ``workspace`` holds the buffers of the GPU implementations, without it they allocate; the
    selection then lives in the workspace until its next use.  Rows that do not fit a workspace
    of limited ``total_pages`` attend all their pages.

    ``settled`` says that the page table, lengths, budgets and records were complete before the
    last kernel on this stream began (not so the queries and keys): reading them then overlaps
    with that kernel.  In a model every layer's rotary embedding or KV write is such a kernel.

    Raises:
        ValueError: shapes or dtypes do not fit, or the workspace is too small for the batch.
    """
    check(queries, keys, records, open_pages)
    chosen = dispatch.choose(impl, queries.device)
    arguments = (queries, keys, records, page_table, seq_lens, budgets, sm_scale, width)
    if chosen == "cuda":
        return _score_select_cuda(*arguments, open_pages, workspace, settled)
    if chosen == "triton":
        scores = score(
            queries, keys, records, page_table, seq_lens, sm_scale, open_pages=open_pages, impl=chosen
        )
        return select(
            scores,
            page_table,
            seq_lens,
            budgets,
            kv_heads=keys.shape[2],
            page_size=keys.shape[1],
            width=width,
            impl=chosen,
        )
    return _score_select_torch(*arguments, open_pages)


def _score_select_cuda(
    queries: torch.Tensor,
    keys: torch.Tensor,
    records: Records | None,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    budgets: torch.Tensor,
    sm_scale: float,
    width: int,
    open_pages: torch.Tensor | None,
    workspace: Workspace | None,
    settled: bool,
) -> Selection:
    from . import cuda_score, cuda_select

    rows, q_heads, head_dim = queries.shape
    page_size, kv_heads = keys.shape[1], keys.shape[2]
    max_pages = page_table.shape[1]
    if workspace is None:
        workspace = Workspace.allocate(
            max_rows=max(rows, 1),
            q_heads=q_heads,
            kv_heads=kv_heads,
            max_pages=max_pages,
            width=width,
            head_dim=head_dim,
            device=queries.device,
        )
    workspace.check(rows, q_heads, kv_heads, max_pages, width)
    cuda_score.score_packed(
        queries,
        keys,
        records,
        page_table,
        seq_lens,
        budgets,
        sm_scale,
        workspace.scores,
        settled,
        open_pages,
    )
    out = Selection(workspace.pages[:rows], workspace.logical[:rows], workspace.counts[:rows])
    cuda_select.select(
        workspace.scores,
        None,
        page_table,
        seq_lens,
        budgets,
        q_heads,
        page_size,
        out.pages,
        out.logical,
        out.counts,
    )
    return out


def _score_select_torch(
    queries: torch.Tensor,
    keys: torch.Tensor,
    records: Records | None,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    budgets: torch.Tensor,
    sm_scale: float,
    width: int,
    open_pages: torch.Tensor | None,
) -> Selection:
    page_size, kv_heads = keys.shape[1], keys.shape[2]
    present = (seq_lens + page_size - 1) // page_size
    counts = torch.minimum(present, budgets.to(present.dtype)).to(torch.int32)
    out = empty_selection(page_table, kv_heads, width)
    pages, logical = out.pages, out.logical

    whole = min(width, page_table.shape[1])
    slots = torch.arange(whole, dtype=torch.int32, device=page_table.device)
    filled = (slots < counts.unsqueeze(-1)) & (counts.unsqueeze(-1) <= width)
    pages[..., :whole] = (page_table[:, :whole] * filled).unsqueeze(1)
    logical[..., :whole] = (slots * filled).unsqueeze(1)

    rows = (present > counts).nonzero().flatten()
    if rows.numel():
        lengths = seq_lens[rows]
        page_scores = score(
            queries[rows], keys, records, page_table[rows], lengths, sm_scale,
            open_pages=None if open_pages is None else open_pages[rows],
        )  # fmt: skip
        chosen = select(
            page_scores,
            page_table[rows],
            lengths,
            budgets[rows],
            kv_heads=kv_heads,
            page_size=page_size,
            width=width,
        )
        pages[rows], logical[rows] = chosen.pages, chosen.logical
    return Selection(pages, logical, counts)
