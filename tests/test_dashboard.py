"""The Grafana dashboard and the alert rules ask for metrics that this code and SGLang export."""

import json
import re
from pathlib import Path

import make_dashboard
import pytest
import yaml
from locks_sglang import compat
from locks_sglang.telemetry import METRICS, TIER_METRICS

ROOT = Path(__file__).parents[1]

DASHBOARD = json.loads(make_dashboard.FILE.read_text())
RULES = yaml.safe_load((ROOT / "docs/grafana/rules.yaml").read_text())
# prometheus_client adds these to the names that the code declares.
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_sum", "_count", "_bucket")}
OURS = {**METRICS, **TIER_METRICS}
EXPORTED = {name + suffix for name, (kind, _) in OURS.items() for suffix in SUFFIXES[kind]}


def expressions() -> list[str]:
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    variables = [variable.get("definition", "") for variable in DASHBOARD["templating"]["list"]]
    return [*panels, *variables, *(rule["expr"] for group in RULES["groups"] for rule in group["rules"])]


def asked(prefix: str) -> set[str]:
    return {name for text in expressions() for name in re.findall(rf"{prefix}:\w+", text)}


def test_it_is_up_to_date() -> None:
    assert make_dashboard.FILE.read_text() == make_dashboard.text(), "run: python tools/make_dashboard.py"


def test_our_metrics_exist() -> None:
    assert asked("locks") - EXPORTED == set()


def test_every_metric_of_ours_is_shown() -> None:
    shown = {re.sub(r"_(total|sum|count|bucket)$", "", name) for name in asked("locks")}
    assert shown == set(OURS)


@pytest.mark.parametrize("name", sorted(asked("sglang")))
def test_metrics_of_sglang_exist(name: str) -> None:
    declared = re.sub(r"_(sum|count|bucket)$", "", name)
    sources = (compat.sglang_root() / "sglang/srt/observability").glob("*.py")
    assert any(f'"{declared}"' in path.read_text() for path in sources)


def test_expressions_are_balanced() -> None:
    for text in expressions():
        for opening, closing in ("()", "{}", "[]"):
            assert text.count(opening) == text.count(closing), text


def test_panels_do_not_overlap() -> None:
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    assert len({(place["x"], place["y"]) for place in places}) == len(places)
    assert all(place["x"] + place["w"] <= 24 for place in places), "Grafana's grid has 24 columns"
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)


def test_alerts_point_to_a_page_that_is_there() -> None:
    for group in RULES["groups"]:
        for rule in group["rules"]:
            for page in re.findall(r"docs/\S+\.md", rule["annotations"]["description"]):
                assert (ROOT / page).exists()
