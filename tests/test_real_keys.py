"""Selection on keys and queries of the demo model, against float64 from the paper's equations."""

from pathlib import Path

import independent
import numpy as np
import pytest
import torch
from locks_kernels import EnvelopeLayout, Envelopes, Summaries, SummaryLayout, score, select, summarize
from locks_sglang import demo_model
from locks_sglang.fidelity import page_counts
from locks_sglang.fidelity.auto_budget import Curves
from locks_sglang.fidelity.capture import Capture, capture, load_model, rotate
from locks_sglang.fidelity.experiments import Study
from locks_sglang.fidelity.forced_decode import ForcedDecode
from locks_sglang.fidelity.measure import Scene

DATA = Path(__file__).parent / "data"
PAGE = 16
SLOTS = 8  # b = 128
LAYERS = (0, 9, 18, 29)
FORMATS = ("r8i4", "r4i4", "r2i4", "r8h", "r6h", "r4h")


@pytest.fixture(scope="module")
def model():
    demo_model.ensure(demo_model.DEFAULT_OUT)
    return load_model(demo_model.DEFAULT_OUT)


@pytest.fixture(scope="module")
def token_ids(model) -> list[int]:
    text = (DATA / "harbour.txt").read_text() + "\n" + (DATA / "observatory.txt").read_text()
    ids = model[1](text)["input_ids"]
    assert 1900 < len(ids) < 2200
    return ids


@pytest.fixture(scope="module")
def captured(model, token_ids) -> Capture:
    return capture(model[0], token_ids, queries=16, stride=16)


def test_keys_are_the_models_after_rope(model, token_ids, captured):
    """Taking the rotation away from layer 0's keys leaves what its projection made of the text."""
    decoder = model[0].model
    layer = decoder.layers[0]
    with torch.inference_mode():
        hidden = layer.input_layernorm(decoder.embed_tokens(torch.tensor([token_ids])))
        projected = layer.self_attn.k_proj(hidden)[0].unflatten(-1, (3, 64)).transpose(0, 1)
    plain = rotate(captured.keys[0], captured.cos, captured.sin, inverse=True)
    assert torch.allclose(plain, projected, atol=1e-4)
    assert not torch.allclose(captured.keys[0], projected, atol=1.0)


def chosen(captured: Capture, layer: int, name: str) -> torch.Tensor:
    """Pages ``[n, H, SLOTS]`` by the four ops, with the layer's keys scattered over a pool."""
    keys = captured.keys[layer].transpose(0, 1)  # [T, H, d]
    pages = -(-captured.tokens // PAGE)
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(layer)) + 1
    pool = torch.zeros(pages + 1, PAGE, *keys.shape[1:])
    padded = torch.cat([keys, keys.new_zeros(pages * PAGE - len(keys), *keys.shape[1:])])
    pool[table] = padded.unflatten(0, (pages, PAGE))
    records = None
    if name != "oracle":
        lead = (1, pages + 1, keys.shape[1])
        if name == "quest":
            stored = Envelopes.allocate(EnvelopeLayout(64, PAGE), lead)
        else:
            stored = Summaries.allocate(SummaryLayout.parse(name, 64, PAGE), lead)
        slots = (table[:, None] * PAGE + torch.arange(PAGE)).flatten()[: captured.tokens]
        summarize([pool], slots, stored)
        records = stored.layer(0)
    lengths = captured.positions + 1
    tables = table.int().expand(len(lengths), pages)
    scores = score(
        captured.queries[layer].transpose(0, 1), pool, records, tables, lengths, captured.sm_scale
    )
    budgets = torch.full((len(lengths),), SLOTS, dtype=torch.int32)
    return select(
        scores, tables, lengths, budgets, kv_heads=keys.shape[1], page_size=PAGE, width=SLOTS
    ).logical


@pytest.mark.parametrize("name", ["oracle", "quest", *FORMATS])
def test_selected_sets_agree_with_the_equations(captured, name):
    same = total = 0
    heads = captured.keys.shape[1]
    group = captured.queries.shape[1] // heads
    for layer in LAYERS:
        pages = chosen(captured, layer, name)
        for head in range(heads):
            keys = captured.keys[layer, head].numpy()
            selector = name if name in ("oracle", "quest") else independent.records(keys, PAGE, name)
            for query in (0, 5, 15):
                seen = keys[: int(captured.positions[query]) + 1]
                scores = [
                    independent.head_scores(
                        captured.queries[layer, q_head, query].numpy(),
                        seen,
                        PAGE,
                        captured.sm_scale,
                        selector,
                    )
                    for q_head in range(head * group, (head + 1) * group)
                ]
                share = independent.group_share(np.stack(scores))
                want = independent.chosen_pages(share, SLOTS)
                got = pages[query, head].tolist()
                same += len(set(want) & set(got))
                total += SLOTS
                # Where they differ, the pages exchanged are worth the same: near ties, or codes
                # at a rounding boundary that fell the other way.
                assert share[want].sum() - share[got].sum() < 2e-3, (layer, head, query, want, got)
    print(f"{name}: {same} of {total} pages agree ({same / total:.2%})")
    assert same / total > 0.99


def test_order_of_retained_mass(captured):
    """oracle >= r8i4 >= r4i4 >= r2i4 > quest, over every layer of the demo model."""
    study = Study((128, 256), ["selectors"])
    with torch.inference_mode():
        for layer in range(captured.layers):
            study.add_layer(captured, layer, "test", captured)
    mass: dict[tuple[str, int], float] = {}
    for row in study.rows():
        name = row["format"] if row["selector"] == "locks" else row["selector"]
        mass[name, row["budget"]] = row["mass"]
        print(f"{name:9s} b={row['budget']:4d} mass {row['mass']:.4f} recall {row['recall']:.4f}")
    for budget in (128, 256):
        paper = [mass[name, budget] for name in ("oracle", "r8i4", "r4i4", "r2i4", "quest")]
        assert paper == sorted(paper, reverse=True) and paper[-2] > paper[-1] + 0.005
        rotated = [mass[name, budget] for name in ("oracle", "r8h", "r6h", "r4h", "quest")]
        assert rotated == sorted(rotated, reverse=True)
        # the rotated records are smaller and keep at least as much
        assert mass["r8h", budget] > mass["r8i4", budget] - 5e-4
        assert mass["r4h", budget] > mass["r4i4", budget] - 5e-4


def test_forced_decode(model, token_ids, captured):
    """The dense run gives the model's own distributions; a rule sees the shares of the tool's records."""
    decode = ForcedDecode(model[0], token_ids, captured, 32, "r6h")
    with torch.inference_mode():
        ids = torch.tensor([token_ids])
        own = model[0](input_ids=ids, use_cache=False, logits_to_keep=32).logits[0].log_softmax(-1)
    assert torch.allclose(decode.dense, own, atol=1e-3)

    seen = {}

    def spy(layer: int, shares: torch.Tensor) -> torch.Tensor:
        seen[layer] = shares
        return page_counts.fixed(8)(layer, shares)

    sparse = decode.run(spy)
    assert sparse.pages == 8 and sparse.kl > 1e-3 and 0.5 < sparse.agree <= 1
    # The last query is one of the capture's; layer 0 has no error of layers before.
    curves = Curves()
    curves.add(Scene.of(captured, 0, PAGE), "r6h")
    assert torch.allclose(seen[0][:, -1], curves.estimated[0][:, -1], atol=1e-4)
    assert len(seen) == captured.layers
