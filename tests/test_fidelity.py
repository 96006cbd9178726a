"""The fidelity microscope measures what it says, on small made-up attention."""

import json

import independent
import numpy as np
import pytest
import torch
from attention_cases import DIM, GROUP, HEADS, TOKENS, made_up
from locks_kernels import EnvelopeLayout, Envelopes, Summaries, SummaryLayout, page_view, score, summarize
from locks_kernels.reference import select_pages
from locks_sglang.fidelity import formats, report
from locks_sglang.fidelity.__main__ import main as fidelity_main
from locks_sglang.fidelity.capture import Capture, rotate
from locks_sglang.fidelity.experiments import TABLES, Study
from locks_sglang.fidelity.measure import COMBINE_RULES, Scene, combine, fidelity, ranks, shares


@pytest.fixture(scope="module")
def captured() -> Capture:
    return made_up()


@pytest.fixture(scope="module")
def scene(captured) -> Scene:
    return Scene.of(captured, 0, 16)


def test_exact_masses(captured, scene):
    for index, position in enumerate(captured.positions.tolist()):
        for q_head in range(HEADS * GROUP):
            keys = captured.keys[0, q_head // GROUP, : position + 1].numpy()
            query = captured.queries[0, q_head, index].numpy()
            want = independent.head_scores(query, keys, 16, captured.sm_scale, "oracle")
            got = scene.exact[q_head // GROUP, q_head % GROUP, index].numpy()
            np.testing.assert_allclose(got[: len(want)], want, atol=1e-4)
            assert (got[len(want) :] == -np.inf).all()


@pytest.mark.parametrize("name", ["r4i4", "r6h", "quest"])
def test_scores_are_those_of_the_op(captured, scene, name):
    """The tool and the served path score alike, the current page included."""
    complete = TOKENS // 16 * 16
    padded = torch.nn.functional.pad(captured.keys[0], (0, 0, 0, 16 - TOKENS % 16)).transpose(0, 1)
    pool = page_view(padded.contiguous(), 16)
    lead = (1, pool.shape[0], HEADS)
    if name == "quest":
        records = Envelopes.allocate(EnvelopeLayout(DIM, 16), lead)
        got = scene.quest_scores()
    else:
        records = Summaries.allocate(SummaryLayout.parse(name, DIM, 16), lead)
        got = scene.scores(formats.stored(scene, name))
    summarize([pool], torch.arange(complete), records)
    rows = len(captured.positions)
    table = torch.arange(pool.shape[0], dtype=torch.int32).expand(rows, -1)
    queries = captured.queries[0].transpose(0, 1)
    want = score(queries, pool, records.layer(0), table, captured.positions + 1, captured.sm_scale).scores
    want = want.transpose(0, 1).unflatten(0, (HEADS, GROUP))
    torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)


def test_order_is_that_of_the_op(scene):
    values = combine(scene.exact, "share-average")
    places = ranks(values, scene.current)
    for index, page in enumerate(scene.current.tolist()):
        for slots in (2, 3, 7, 30):
            want = select_pages(values[:, 0, index, : page + 1], slots)
            for head in range(HEADS):
                got = (places[head, 0, index] < slots).nonzero().flatten()
                assert got[got <= page].tolist() == want[head].tolist()


def test_mass_and_recall_by_hand(scene):
    mass = shares(scene.exact)
    ideal = ranks(combine(scene.exact, "share-average"), scene.current)
    places = ranks(combine(scene.quest_scores(), "share-average"), scene.current)
    kept, worst, found = [], [], []
    for head in range(HEADS):
        for index in range(len(scene.positions)):
            chosen = {int(page) for page in (places[head, 0, index] < 6).nonzero()}
            wanted = {int(page) for page in (ideal[head, 0, index] < 6).nonzero()}
            by_query_head = [float(mass[head, g, index, sorted(chosen)].sum()) for g in range(GROUP)]
            kept.append(np.mean(by_query_head))
            worst.append(min(by_query_head))
            found.append((len(chosen & wanted) - 2) / 4)
    figures = fidelity(scene, places, ideal, 6)
    assert figures.mass == pytest.approx(np.mean(kept), abs=1e-5)
    assert figures.worst_head == pytest.approx(np.mean(worst), abs=1e-5)
    assert figures.recall == pytest.approx(np.mean(found), abs=1e-5)
    assert 0.2 < figures.recall < 1.0


def test_everything_is_kept_when_the_budget_covers(scene):
    ideal = ranks(combine(scene.exact, "share-average"), scene.current)
    figures = fidelity(scene, ideal, ideal, 21)
    assert figures.mass == pytest.approx(1.0) and figures.recall == 1.0


def test_share_average_keeps_most_mean_mass_of_all_shared_rules(scene):
    """Appendix A.4 with exact scores; only separate sets a head can keep more."""
    ideal = ranks(combine(scene.exact, "share-average"), scene.current)
    for slots in (3, 6, 12):
        kept = {
            rule: fidelity(scene, ranks(combine(scene.exact, rule), scene.current), ideal, slots).mass
            for rule in COMBINE_RULES
        }
        best = kept.pop("share-average")
        assert kept.pop("per-head") > best
        assert all(best >= other - 1e-6 for other in kept.values())
        assert len(set(kept.values())) > 1


def test_unknown_combine_rule(scene):
    with pytest.raises(ValueError, match=r"legal: share-average, .*per-head"):
        combine(scene.exact, "mean")


def test_full_rank_stands_for_the_keys_before_and_after_rope(captured, scene):
    keys = captured.keys[0, :, : TOKENS // 16 * 16]
    step = keys.abs().max() / 127
    for rebuilt in (formats.stored(scene, "r16bf16"), formats.stored_before_rope(scene, "r16bf16")):
        assert (rebuilt - keys).abs().max() < 4 * step
    turned = rotate(captured.keys, captured.cos, captured.sin)
    torch.testing.assert_close(rotate(turned, captured.cos, captured.sin, inverse=True), captured.keys)


@pytest.mark.parametrize(
    ("tier", "own_centroid", "rank"), [(4, True, 20), (4, False, 28), (8, True, 40), (8, False, 48)]
)
def test_shared_bases_get_the_papers_ranks(tier, own_centroid, rank):
    """Appendix B.1: ranks 20, 28, 40 and 48 at the bytes of r4i4 and r8i4, d = 128."""
    scene = Scene(
        torch.zeros(1, 1, 1, 128),
        torch.zeros(1, 230 * 16, 128),
        torch.tensor([100]),
        torch.zeros(230 * 16, 128),
        torch.zeros(230 * 16, 128),
        1.0,
        16,
    )
    assert formats.equal_rank(scene, tier, own_centroid, scene.complete) == rank


def test_study_fills_every_table_and_reports_it(captured, tmp_path):
    study = Study((64, 128))
    study.add_layer(captured, 0, "a", captured)
    study.add_layer(captured, 0, "b", captured)
    rows = study.rows()
    assert {row["table"] for row in rows} == set(TABLES)
    assert {row["text"] for row in rows} == {"a", "b"}
    assert all(0 <= row["recall"] <= 1 and 0 < row["mass"] <= 1 for row in rows)
    oracle = [row for row in rows if row["table"] == "selectors" and row["selector"] == "oracle"]
    assert len(oracle) == 4 and all(row["recall"] == 1 for row in oracle)

    report.save(rows, {"model": "made up"}, tmp_path / "out.json", "fidelity", report.commit())
    saved = json.loads((tmp_path / "out.json").read_text())
    assert saved["benchmark"] == "fidelity" and saved["rows"] == rows
    text = report.table(rows)
    assert "selectors:" in text and "per-head" in text and "pre-RoPE" in text


def test_result_files_name_no_folder_of_the_machine(monkeypatch, tmp_path):
    folder = tmp_path / "models" / "small"
    monkeypatch.setattr("sys.argv", ["x", "--model", str(folder), "--text", "docs/a.txt"])
    report.save([], {}, tmp_path / "out.json", "fidelity", "abc-dirty")
    saved = json.loads((tmp_path / "out.json").read_text())
    assert saved["command"] == "python -m locks_sglang.fidelity --model small --text docs/a.txt"
    assert saved["commit"] == "abc-dirty"


@pytest.mark.parametrize("study", ["tables", "auto"])
def test_what_is_calibrated_needs_a_text(study, capsys):
    with pytest.raises(SystemExit):
        fidelity_main(["--model", "m", "--text", "a.txt", "--study", study])
    assert "needs --calibration" in capsys.readouterr().err


def test_texts_of_one_name_are_refused(capsys):
    """Rows are told apart by the name alone: two texts would count as one."""
    with pytest.raises(SystemExit):
        fidelity_main(["--model", "m", "--text", "a/x.txt", "b/x.txt", "--study", "kv"])
    assert "--text is x.txt, x.txt; legal: files of different names" in capsys.readouterr().err
