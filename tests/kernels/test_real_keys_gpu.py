"""Scores of the CUDA kernels from records of real keys are as near the exact ones as the reference's."""

from pathlib import Path

import pytest
import torch
from gpu_cases import cuda
from locks_kernels import Summaries, SummaryLayout, score, summarize
from locks_kernels.reference import score_keys, score_pages, summarize_pages

pytestmark = [pytest.mark.gpu, cuda]

DATA = Path(__file__).parents[1] / "data"
PAGE = 16
# Of the demo model's three KV heads; with two, r8i4's score is a library that other tests load, too.
HEADS = {"r4i4": 3, "r8i4": 2, "r6h": 3}


@pytest.fixture(scope="module")
def captured(request):
    """Keys of every layer of the demo model for a text of 2,000 tokens, and queries at 16 positions."""
    if request.config.getoption("demo_model") is None:
        pytest.skip("needs the demo model: --demo-model FOLDER")
    pytest.importorskip("transformers")
    from locks_sglang.fidelity.capture import capture, load_model

    model, tokenizer = load_model(request.getfixturevalue("demo_model"), "cuda")
    text = (DATA / "harbour.txt").read_text() + "\n" + (DATA / "observatory.txt").read_text()
    return capture(model, tokenizer(text)["input_ids"], queries=16, stride=16)


def errors(captured, name, device="cuda", impl="cuda"):
    """Absolute error, log units, of the scores of complete pages of all layers: ours, the reference's."""
    heads = HEADS[name]
    group = captured.queries.shape[1] // captured.keys.shape[1]
    keys = captured.keys[:, :heads].to(device, torch.bfloat16).transpose(1, 2)  # [L, T, H, d]
    queries = captured.queries[:, : heads * group].to(device, torch.bfloat16).transpose(1, 2)
    layers, tokens, _, head_dim = keys.shape
    pages = -(-tokens // PAGE)
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).to(device) + 1
    pool = keys.new_zeros(layers, pages + 1, PAGE, heads, head_dim)
    padded = torch.nn.functional.pad(keys, (0, 0, 0, 0, 0, pages * PAGE - tokens))
    pool[:, table] = padded.unflatten(1, (pages, PAGE))

    layout = SummaryLayout.parse(name, head_dim, PAGE)
    records = Summaries.allocate(layout, (layers, pages + 1, heads), device)
    slots = torch.arange((pages + 1) * PAGE, device=device)
    summarize(list(pool), slots, records, impl=impl)
    lengths = captured.positions.to(device) + 1
    tables = table.int().repeat(len(lengths), 1)
    complete = torch.arange(pages, device=device) < (lengths[:, None] - 1) // PAGE  # [n, pages]

    def by_row(scores):  # [H * n * G, pages] -> [n, H * G, pages]
        return scores.unflatten(0, (heads, len(lengths), group)).transpose(0, 1).flatten(1, 2)

    ours, theirs = [], []
    for layer in range(layers):
        stacked = queries[layer].unflatten(1, (heads, group)).transpose(0, 1).flatten(0, 2).float()
        present = pool[layer, table].float()
        exact = by_row(score_keys(stacked, present, captured.sm_scale))
        reference = by_row(score_pages(stacked, summarize_pages(present, layout), captured.sm_scale))
        got = score(
            queries[layer], pool[layer], records.layer(layer), tables, lengths, captured.sm_scale, impl=impl
        ).scores
        here = complete.unsqueeze(1).expand_as(exact)
        ours.append((got - exact)[here].abs())
        theirs.append((reference - exact)[here].abs())
    return torch.cat(ours), torch.cat(theirs)


@pytest.mark.parametrize("name", HEADS)
def test_scores_of_real_keys(captured, name, record_property):
    ours, theirs = errors(captured, name)
    found = {
        "mean": (ours.mean().item(), theirs.mean().item()),
        "p99": (ours.quantile(0.99).item(), theirs.quantile(0.99).item()),
    }
    for measure, (cuda_error, reference_error) in found.items():
        record_property(f"score_error_{measure}", round(cuda_error, 5))
        record_property(f"score_error_{measure}_reference", round(reference_error, 5))
    # Arithmetic of the score kernel, and the few codes at a rounding boundary that fall the other way.
    for cuda_error, reference_error in found.values():
        assert cuda_error < 1.02 * reference_error + 1e-3, found
