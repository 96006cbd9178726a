"""Rules for the number of pages, by hand and on made-up attention."""

import fidelity_report
import pytest
import torch
from attention_cases import made_up
from locks_sglang.fidelity import auto_budget, formats, report
from locks_sglang.fidelity.auto_budget import AutoStudy, Curves, fixed_outcome, outcome
from locks_sglang.fidelity.measure import Scene, combine, fidelity, ranks
from locks_sglang.fidelity.page_counts import (
    RULES,
    Bounds,
    calibrated,
    equal_threshold,
    fixed,
    mean_pages,
    per_head,
    per_layer,
    rule,
    threshold,
)

# Two KV heads, one row each: a concentrated and a diffuse one.
SHARES = torch.tensor([[[0.5, 0.8, 0.92, 0.97, 1.0]], [[0.1, 0.3, 0.55, 0.75, 1.0]]])
FREE = Bounds(floor=1)


@pytest.fixture(scope="module")
def captured():
    return made_up()


@pytest.mark.parametrize(
    ("target", "bounds", "want"),
    [
        (0.5, FREE, [1, 3]),
        (0.9, FREE, [3, 5]),
        (0.9, Bounds(floor=4), [4, 5]),
        (0.9, Bounds(floor=1, cap=2), [2, 2]),
        (1.0, FREE, [5, 5]),
        (1.5, FREE, [5, 5]),  # what rounding may ask for: never more than all
    ],
)
def test_fewest_pages_that_reach_the_target(target, bounds, want):
    assert per_head(target, bounds)(0, SHARES).flatten().tolist() == want


def test_rules_that_heads_or_rows_share():
    # means over heads: 0.3, 0.55, 0.735, 0.86, 1.0
    assert per_layer(0.7, FREE)(0, SHARES).flatten().tolist() == [3, 3]
    # shares past the two fixed pages: 0.12, 0.05, 0.03 and 0.25, 0.2, 0.25
    assert threshold(0.1, FREE)(0, SHARES).flatten().tolist() == [3, 5]
    assert threshold(0.3, FREE)(0, SHARES).flatten().tolist() == [2, 2]
    rows = SHARES.transpose(0, 1)  # one head, two rows
    assert calibrated(0.7, FREE, [rows])(0, SHARES).flatten().tolist() == [3, 3]
    assert fixed(4)(0, SHARES).flatten().tolist() == [4, 4]
    with pytest.raises(ValueError, match="legal: head, layer, calibrated, threshold"):
        rule("top-p", 0.9, FREE, [])


def test_threshold_takes_as_many_pages_as_the_target(captured):
    curves = Curves()
    curves.add(Scene.of(captured, 0, 16), "r8i4")
    shares = curves.estimated
    bounds = Bounds(floor=2, cap=12)
    wanted = mean_pages(per_head(0.9, bounds), shares)
    assert 2 < wanted < 12
    assert mean_pages(equal_threshold(0.9, bounds, shares), shares) == pytest.approx(wanted, abs=0.1)


def test_curves_are_the_masses_of_the_selection(captured):
    scene = Scene.of(captured, 0, 16)
    curves = Curves()
    curves.add(scene, "r6h")
    scores = scene.scores(formats.stored(scene, "r6h"))
    places = ranks(combine(scores, "share-average"), scene.current)
    for pages in (2, 5, 9):
        want = fidelity(scene, places, places, pages).mass
        assert outcome(fixed(pages), curves).mass == pytest.approx(want, abs=1e-5)
        # what was estimated is something else
        assert float(curves.estimated[0][..., pages - 1].mean()) != pytest.approx(want, abs=1e-5)
    between = fixed_outcome(5.25, curves)
    ends = [outcome(fixed(pages), curves) for pages in (5, 6)]
    assert between.p5 == pytest.approx(0.75 * ends[0].p5 + 0.25 * ends[1].p5, abs=1e-6)


def test_exact_shares_keep_what_they_promise(captured):
    curves = Curves()
    curves.add(Scene.of(captured, 0, 16), "oracle")
    found = outcome(per_head(0.9, FREE), curves)
    assert found.p1 >= 0.9 > fixed_outcome(found.pages, curves).p5
    counts = per_head(0.9, FREE)(0, curves.estimated[0])
    one_less = curves.retained[0].gather(-1, (counts - 2).clamp_min(0).unsqueeze(-1)).squeeze(-1)
    assert (one_less[counts > 1] < 0.9).all()


def test_study_compares_every_rule(captured):
    study = AutoStudy(("oracle", "r6h"))
    study.calibrate(captured)
    for text in ("a", "b"):
        study.add_layer(captured, 0, text)
    rows = study.rows()
    cases = {(row["format"], row["rule"], row["target"], row["cap"], row["text"]) for row in rows}
    assert len(cases) == len(rows) == 2 * 4 * len(auto_budget.TARGETS) * 2 * 2
    assert {row["rule"] for row in rows} == set(RULES)
    decoded = {**rows[0], "table": "decode", "rule": "fixed", "pages": 8.0, "kl": 0.5, "agree": 0.75}
    assert "0.7500" in report.auto_table([*rows, decoded])


def test_report_holds_rules_against_fixed_budgets():
    """A fixed budget's divergence falls from 0.4 at 10 pages to 0.1 at 40: halved with every doubling."""
    blank = {"table": "decode", "text": "a", "agree": 0.5}
    rows = [
        {**blank, "rule": "fixed", "target": None, "pages": pages, "kl": kl}
        for pages, kl in ((10.0, 0.4), (40.0, 0.1))
    ]
    rows += [
        {**blank, "rule": "head", "target": 0.9, "pages": pages, "kl": 0.1, "text": text}
        for pages, text in ((15.0, "a"), (25.0, "b"))
    ]
    last = fidelity_report.auto_decode(rows).splitlines()[-1]
    assert last == "| each row and head | 0.90 | 20.0 | 0.1000 | 50.0 | 0.2000 (0.50x) | 40 (0.50x) |"
    assert fidelity_report.interpolated([(40, 0.1), (10, 0.4)], 80) == pytest.approx(0.05)
