"""Quantised KV caches of the fidelity microscope, against values computed by hand."""

import numpy as np
import pytest
import torch
from attention_cases import GROUP, HEADS, made_up
from locks_sglang.fidelity import report
from locks_sglang.fidelity.kv_cache import KVCache, asymmetric, fp8, kivi_keys, kivi_values
from locks_sglang.fidelity.measure import Scene
from locks_sglang.fidelity.quantised import CacheAttention, KVStudy


@pytest.fixture(scope="module")
def captured():
    return made_up()


@pytest.fixture(scope="module")
def scene(captured):
    return Scene.of(captured, 0, 16)


@pytest.mark.parametrize(
    ("bits", "values", "want"),
    [
        (2, [0.0, 1.2, 2.9, 6.0], [0.0, 2.0, 2.0, 6.0]),  # steps of 2
        (2, [-1.0, 0.4, 0.6, 2.0], [-1.0, 0.0, 1.0, 2.0]),  # steps of 1 from -1
        (4, [-3.0, 0.1, 4.4, 12.0], [-3.0, 0.0, 4.0, 12.0]),  # steps of 1 from -3
        (4, [0.0, 0.26, 0.5, 1.5], [0.0, 0.3, 0.5, 1.5]),  # steps of 0.1
        (2, [5.0, 5.0, 5.0, 5.0], [5.0, 5.0, 5.0, 5.0]),
    ],
)
def test_rounding_between_minimum_and_maximum(bits, values, want):
    torch.testing.assert_close(asymmetric(torch.tensor(values), bits, 0), torch.tensor(want))


def test_a_key_group_is_one_channel_of_32_tokens():
    keys = torch.zeros(1, 70, 2)
    keys[0, 5, 0], keys[0, 6, :] = 90.0, 40.0  # an outlier in channel 0 of the first group
    keys[0, 40, 0], keys[0, 66, 0] = 0.7, 0.7
    got = kivi_keys(keys, 2)
    assert got[0, 5].tolist() == [90.0, 0.0]
    assert got[0, 6].tolist() == [30.0, 40.0]  # steps of 30 in channel 0; channel 1 has none of it
    assert got[0, 40, 0] == pytest.approx(0.7)  # nor has the next group
    assert torch.equal(got[0, 64:], keys[0, 64:])  # an incomplete group stays


def test_a_value_group_is_32_channels_of_one_token():
    values = torch.zeros(1, 2, 64)
    values[0, 0, 3], values[0, 0, 4], values[0, 0, 40], values[0, 1, 4] = 90.0, 40.0, 40.0, 40.0
    got = kivi_values(values, 2)
    assert got[0, 0, [3, 4, 40]].tolist() == [90.0, 30.0, 40.0]
    assert got[0, 1, 4] == 40.0
    with pytest.raises(ValueError, match="a multiple of 32"):
        kivi_values(torch.zeros(1, 2, 80), 2)


def test_fp8_is_e4m3():
    values = torch.tensor([0.3, 1.1, -17.0, 448.0, 2**-9])
    assert fp8(values).tolist() == [0.3125, 1.125, -16.0, 448.0, 2**-9]


def test_recent_tokens_stay():
    """Keys are quantised in blocks of 128, so 0 to 127 of those before a query's own stay; values: 128."""
    keys, values = torch.randn(2, 1, 400, 64, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([100, 255, 256, 300])
    cache = KVCache.of("kivi2", keys, values, positions)
    assert cache.key_border.tolist() == [0, 128, 256, 256]
    assert cache.value_border.tolist() == [0, 127, 128, 172]
    assert torch.equal(cache.recent_keys, keys.bfloat16().float())
    assert (cache.keys[:, :384] != cache.recent_keys[:, :384]).any(-1).all()
    with pytest.raises(ValueError, match="legal: bf16, fp8, kivi4, kivi2"):
        KVCache.of("kivi8", keys, values, positions)


@pytest.mark.parametrize("name", ["bf16", "fp8", "kivi4", "kivi2"])
def test_attention_over_a_cache(captured, scene, name):
    """Token by token in float64: which key and value each query reads, and the chosen pages' output."""
    cache = KVCache.of(name, scene.keys, captured.values[0], scene.positions)
    attention = CacheAttention(scene, cache)
    chosen = torch.rand(HEADS, 1, 6, 21, generator=torch.Generator().manual_seed(1)) < 0.5
    chosen[..., 0] = True
    got = attention.output(chosen)
    for head, member, query in ((0, 0, 0), (1, 2, 3), (1, 1, 5)):
        position = int(scene.positions[query])
        key_border = {"bf16": 0, "fp8": 999}.get(name, position // 128 * 128)
        value_border = {"bf16": 0, "fp8": 999}.get(name, position - 128)
        keys = [
            (cache.keys if token < key_border else cache.recent_keys)[head, token].double()
            for token in range(position + 1)
        ]
        values = [
            (cache.values if token < value_border else cache.recent_values)[head, token].double()
            for token in range(position + 1)
        ]
        q = scene.queries[head, member, query].double()
        weights = np.exp([float(q @ key) * scene.sm_scale for key in keys])
        read = np.array([bool(chosen[head, 0, query, token // 16]) for token in range(position + 1)])
        want = (weights * read) @ torch.stack(values).numpy() / (weights * read).sum()
        np.testing.assert_allclose(got[head, member, query].numpy(), want, atol=2e-5)
        page = weights[32:48].sum() / weights.sum()
        assert float(attention.shares[head, member, query, 2]) == pytest.approx(page, rel=1e-4)


def test_study(captured):
    study = KVStudy((64, 128))
    study.add_layer(captured, 0, "a")
    rows = study.rows()
    found = {(r["kv"], r["format"], r["summaries"], r["budget"]): r for r in rows}
    assert len(found) == len(rows) == 4 + 2 * 5 * (1 + 3 * 2)
    errors = [found[kv, "keys", "", None]["error"] for kv in ("bf16", "kivi4", "kivi2")]
    assert errors[0] < 0.01 < errors[1] < errors[2]
    for kv in ("fp8", "kivi4", "kivi2"):
        early, late = (found[kv, "r8i4", s, 128] for s in ("bf16", "stored"))
        # Summaries made before quantising select as with a bf16 cache ...
        same = found["bf16", "r8i4", "bf16", 128]
        assert (early["mass"], early["recall"]) == (same["mass"], same["recall"])
        assert early["error"] > same["error"]
        # ... and those made after it select something else.
        assert late["mass"] != early["mass"]
    # The exact scores of the stored keys select what holds most of the attention to those.
    early, late = (found["kivi2", "keys", s, 64] for s in ("bf16", "stored"))
    assert late["stored_mass"] > early["stored_mass"] and late["mass"] < early["mass"]
    assert f"{'kivi2':>11s}" in report.kv_table(rows)


def test_recent_pages_are_scored_from_unquantised_keys(captured, monkeypatch):
    """A query reads its own block of 128 tokens as it is, and so must its pages' summaries."""
    from locks_sglang.fidelity import quantised

    scene = Scene.of(captured, 0, 16)
    cache = KVCache.of("kivi2", scene.keys, captured.values[0], scene.positions)
    early = quantised._scores(scene)
    rows = dict(
        ((row.format, row.summaries), scores) for row, scores in quantised._selections(scene, cache, early)
    )
    late = rows["r8i4", "stored"]
    for query, border in enumerate((8, 16, 16, 16, 16, 16)):
        assert torch.equal(late[:, :, query, border:], early["r8i4"][:, :, query, border:])
        assert (late[:, :, query, :border] != early["r8i4"][:, :, query, :border]).float().mean() > 0.9
    assert late.shape[1] == GROUP
