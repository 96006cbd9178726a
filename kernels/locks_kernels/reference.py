"""The paper's equations in readable fp32 torch: the specification of every other path.

Symbols follow arXiv 2607.24555: page j holds B tokens, mu is its centroid, V its basis
``[d, r]``, C its coefficients ``[B, r]``; G query heads share a KV head.  Everything is
vectorised over pages and heads of one request, so this is also what serves on a CPU.
"""

from __future__ import annotations

import torch

from .layout import (
    EnvelopeLayout,
    Envelopes,
    Records,
    Summaries,
    SummaryLayout,
    hadamard,
    pack_basis,
    pack_coefficients,
    unpack_basis,
    unpack_coefficients,
)

# Columns whose singular value is below this share of the largest carry rounding noise only.
RANK_TOLERANCE = 1e-6


def quantize(values: torch.Tensor, dim: int, code_max: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric quantisation along ``dim``: codes in [-code_max, code_max] and bf16 scales.

    The scale is rounded to bf16 before the codes are, so that ``codes * scale`` is what a
    reader of the record sees.  A zero vector gets scale 0 and codes 0.
    """
    scale = (values.abs().amax(dim, keepdim=True) / code_max).to(torch.bfloat16)
    step = scale.float()
    codes = torch.where(step > 0, values / step, torch.zeros_like(values))
    return codes.round().clamp(-code_max, code_max), scale


def principal_basis(centred: torch.Tensor, rank: int) -> torch.Tensor:
    """Top right singular vectors of ``[..., B, d]`` as ``[..., d, rank]``, zero where there are none.

    Computed from the ``B x B`` Gram matrix, which is several times smaller than ``d x d``.
    """
    scale = centred.abs().amax((-1, -2), keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    unit = centred / scale
    values, vectors = torch.linalg.eigh(unit @ unit.transpose(-1, -2))
    values, vectors = values.flip(-1)[..., :rank], vectors.flip(-1)[..., :rank]
    basis = unit.transpose(-1, -2) @ vectors
    norms = basis.norm(dim=-2, keepdim=True)
    present = values.unsqueeze(-2) > RANK_TOLERANCE * values[..., :1].unsqueeze(-2)
    return torch.where(present & (norms > 0), basis / norms, torch.zeros_like(basis))


def summarize_pages(keys: torch.Tensor, layout: SummaryLayout) -> Summaries:
    """Records of complete pages: ``keys [pages, B, kv_heads, d]`` -> planes ``[pages, kv_heads, ...]``.

    Section 4: ``mu = mean_i k_i``, ``D = K - mu``, V = top-r right singular vectors of D,
    ``C = D V`` from the unquantised V and mu.  Rotated formats instead refit C to the
    quantised V and mu by least squares.  A non-finite key element counts as 0, so one
    broken key cannot spread to other pages.
    """
    # Contiguous, since in which order a product sums may depend on the strides, and so on the pool's order.
    values = torch.nan_to_num(keys.float(), nan=0.0, posinf=0.0, neginf=0.0).transpose(1, 2).contiguous()
    if layout.rotated:
        values = values @ hadamard(layout.head_dim, values.device)
    centroid = values.mean(-2)
    centred = values - centroid.unsqueeze(-2)
    basis = principal_basis(centred, layout.rank)

    centroid_codes, centroid_scale = quantize(centroid, -1, 127)
    if layout.rotated:
        basis_codes, _ = quantize(basis, -2, layout.basis_max)
        stored_centroid = centroid_codes * centroid_scale.float()
        coefficients = _refit(values - stored_centroid.unsqueeze(-2), basis_codes)
        coefficient_codes, column_scale = quantize(coefficients, -2, layout.coefficient_max)
        scales = [centroid_scale, column_scale.squeeze(-2)]
    else:
        coefficient_codes, row_scale = quantize(centred @ basis, -1, layout.coefficient_max)
        scales = [centroid_scale, row_scale.squeeze(-1)]
        basis_codes = basis
        if layout.basis_max:
            basis_codes, column_scale = quantize(basis, -2, layout.basis_max)
            scales.append(column_scale.squeeze(-2))

    return Summaries(
        layout,
        pack_basis(layout, basis_codes),
        pack_coefficients(layout, coefficient_codes),
        centroid_codes.to(torch.int8).view(torch.uint8),
        torch.cat(scales, dim=-1),
    )


def _refit(centred: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """Least-squares coefficients of ``centred [..., B, d]`` in the columns of ``basis [..., d, r]``."""
    gram = basis.transpose(-1, -2) @ basis
    ridge = 1e-6 * gram.diagonal(dim1=-2, dim2=-1).amax(-1).clamp_min(1.0)
    gram = gram + ridge[..., None, None] * torch.eye(gram.shape[-1], device=gram.device)
    return torch.linalg.solve(gram, (centred @ basis).transpose(-1, -2)).transpose(-1, -2)


def envelope_pages(keys: torch.Tensor, layout: EnvelopeLayout) -> Envelopes:
    """Quest's records: element-wise minimum and maximum of complete pages ``[pages, B, H, d]``."""
    values = torch.nan_to_num(keys.float(), nan=0.0, posinf=0.0, neginf=0.0)
    return Envelopes(layout, values.amin(1).to(torch.bfloat16), values.amax(1).to(torch.bfloat16))


def reconstruct(records: Summaries) -> torch.Tensor:
    """Keys that the records stand for: fp32 ``[..., B, d]`` in the model's own coordinates."""
    centroid, basis, coefficients = _factors(records)
    keys = centroid.unsqueeze(-2) + coefficients @ basis.transpose(-1, -2)
    return keys @ hadamard(records.layout.head_dim, keys.device) if records.layout.rotated else keys


def _factors(records: Summaries) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Dequantised ``mu [..., d]``, ``V [..., d, r]`` and ``C [..., B, r]`` of the records."""
    layout = records.layout
    scales = records.scales.float()
    centroid = records.centroid.view(torch.int8).float() * scales[..., :1]
    basis = unpack_basis(layout, records.basis)
    coefficients = unpack_coefficients(layout, records.coefficients)
    if layout.rotated:
        return centroid, basis, coefficients * scales[..., None, 1:]
    rows = scales[..., 1 : 1 + layout.page_size]
    coefficients = coefficients * rows.unsqueeze(-1)
    if layout.basis_max:
        basis = basis * scales[..., None, 1 + layout.page_size :]
    return centroid, basis, coefficients


def score_pages(queries: torch.Tensor, records: Records, sm_scale: float) -> torch.Tensor:
    """Scores of complete pages from their records: ``[q_heads, d]`` -> fp32 ``[q_heads, pages]``.

    Summaries (Eq. 2): ``q.mu * sm + log sum_i exp((V^T q).c_i * sm)``.  Envelopes (Quest):
    ``sm * sum_c max(q_c * low_c, q_c * high_c)``, an upper bound of the page's largest logit.
    """
    heads = records.planes[0].shape[1]
    grouped = queries.float().unflatten(0, (heads, -1))  # [H, G, d]
    if isinstance(records, Envelopes):
        low, high = records.low.float(), records.high.float()
        positive, negative = grouped.clamp_min(0), grouped.clamp_max(0)
        scores = torch.einsum("hgd,phd->hgp", positive, high)
        scores += torch.einsum("hgd,phd->hgp", negative, low)
        return (scores * sm_scale).flatten(0, 1)
    if records.layout.rotated:
        grouped = grouped @ hadamard(records.layout.head_dim, grouped.device)
    centroid, basis, coefficients = _factors(records)
    projected = torch.einsum("hgd,phdr->phgr", grouped, basis)
    within = projected @ coefficients.transpose(-1, -2) * sm_scale  # [pages, H, G, B]
    offset = torch.einsum("hgd,phd->phg", grouped, centroid) * sm_scale
    return (offset + within.logsumexp(-1)).flatten(1).transpose(0, 1)


def score_keys(queries: torch.Tensor, keys: torch.Tensor, sm_scale: float) -> torch.Tensor:
    """Exact page log-masses (Eq. 1): ``keys [pages, B, H, d]`` -> fp32 ``[q_heads, pages]``."""
    heads = keys.shape[2]
    grouped = queries.float().unflatten(0, (heads, -1))
    logits = torch.einsum("hgd,pbhd->hgpb", grouped, keys.float()) * sm_scale
    return logits.logsumexp(-1).flatten(0, 1)


def score_open_page(
    queries: torch.Tensor, keys: torch.Tensor, sm_scale: float, selector: str
) -> torch.Tensor:
    """Score of the current page from its ``keys [tokens, H, d]``, fp32 ``[q_heads, 1]``.

    Exact LSE, or Quest's envelope bound where that is the score of the other pages, since
    shares of one softmax must be of one kind.
    """
    if selector == "quest":
        layout = EnvelopeLayout(keys.shape[-1], keys.shape[0])
        return score_pages(queries, envelope_pages(keys.unsqueeze(0), layout), sm_scale)
    return score_keys(queries, keys.unsqueeze(0), sm_scale)


def group_shares(scores: torch.Tensor, lse: torch.Tensor, heads: int) -> torch.Tensor:
    """Share-average combine: ``mean_g exp(s_g - LSE_g)``, ``[q_heads, pages]`` -> ``[H, pages]``."""
    return (scores - lse.unsqueeze(-1)).exp().unflatten(0, (heads, -1)).mean(1)


def select_pages(shares: torch.Tensor, budget: int) -> torch.Tensor:
    """Logical pages to attend, ascending: ``shares [H, pages]`` -> int64 ``[H, min(budget, pages)]``.

    The sink (page 0) and the current (last) page always, the rest by share; ties go to the
    lower page index.  With at most ``budget`` pages everything is attended; a smaller budget
    than the two fixed pages is a ValueError.
    """
    heads, pages = shares.shape
    if pages <= budget:
        return torch.arange(pages, device=shares.device).expand(heads, pages)
    if budget < 2:
        raise ValueError(f"a budget of {budget} pages; legal: at least 2 (sink and current page)")
    inner = shares[:, 1 : pages - 1]
    order = inner.argsort(dim=-1, descending=True, stable=True)[:, : budget - 2] + 1
    sink = torch.zeros(heads, 1, dtype=order.dtype, device=order.device)
    last = torch.full_like(sink, pages - 1)
    return torch.cat([sink, order.sort(-1).values, last], dim=-1)


def attend_pages(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: torch.Tensor,
    last_tokens: int,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention over listed pages, the last of which holds ``last_tokens`` tokens.

    ``queries [q_heads, d]``, ``keys`` and ``values`` page views ``[pages, B, H, d]``, ``pages``
    int64 physical ids ``[H, k]``.  Returns fp32 output ``[q_heads, d_v]`` and LSE ``[q_heads]``.
    """
    heads, page_size = keys.shape[2], keys.shape[1]
    tokens = (pages.shape[1] - 1) * page_size + last_tokens
    head = torch.arange(heads, device=pages.device).unsqueeze(-1)
    picked_keys = keys[pages, :, head].flatten(1, 2)[:, :tokens].float()  # [H, tokens, d]
    picked_values = values[pages, :, head].flatten(1, 2)[:, :tokens].float()
    grouped = queries.float().unflatten(0, (heads, -1))
    logits = grouped @ picked_keys.transpose(1, 2) * sm_scale
    output = logits.softmax(-1) @ picked_values
    return output.flatten(0, 1), logits.logsumexp(-1).flatten()
