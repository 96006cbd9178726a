"""Arithmetic of the benchmark of the online audit's cost."""

import audit_cost
import pytest

CASE = {"batch": 1, "context": 16384, "format": "r6h"}
OFF = {
    **CASE,
    "step_ms": 10.0,
    "step_ms_min": 9.9,
    "step_ms_max": 10.2,
    "audited_ms": None,
    "after_ms": None,
}
ON = {**CASE, "step_ms": 10.5, "audited_ms": 11.3, "after_ms": 10.7}


def test_cost_is_what_every_step_pays_and_a_share_of_an_audit() -> None:
    off, on = {**OFF, "graph_ms": 8.0}, {**ON, "graph_ms": 8.02}
    every_ten, every_hundred = audit_cost.cost(off, on, [10, 100])
    # 20 us of copies by the graphs; an audit takes 0.8 ms of its step and 0.2 ms of the next.
    assert (every_ten["copies_ms"], every_ten["audit_ms"]) == (0.02, 1.0)
    assert (every_ten["interval"], every_hundred["interval"]) == (10, 100)
    assert (every_ten["cost_percent"], every_hundred["cost_percent"]) == (1.2, 0.3)
    assert every_ten["format"] == "r6h" and every_ten["tapped_step_ms"] == 10.5
    assert "audited_ms" not in every_ten


def test_without_graphs_the_steps_tell() -> None:
    (row,) = audit_cost.cost({**OFF, "graph_ms": None}, {**ON, "graph_ms": None}, [100])
    assert (row["copies_ms"], row["cost_percent"]) == (0.5, 5.1)


def test_a_run_without_audits_is_no_measurement() -> None:
    with pytest.raises(ValueError, match="no step of 1 x 16384 was audited"):
        audit_cost.cost({**OFF, "graph_ms": 8.0}, {**ON, "graph_ms": 8.0, "audited_ms": None}, [100])
