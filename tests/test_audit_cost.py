"""Arithmetic of the benchmark of the online audit's cost."""

import audit_cost
import make_results
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
    every_ten, every_hundred = audit_cost.cost([off], [on], [10, 100])
    # 20 us of copies by the graphs; an audit takes 0.8 ms of its step and 0.2 ms of the next.
    assert (every_ten["copies_ms"], every_ten["audit_ms"]) == (0.02, 1.0)
    assert (every_ten["interval"], every_hundred["interval"]) == (10, 100)
    assert (every_ten["cost_percent"], every_hundred["cost_percent"]) == (1.2, 0.3)
    assert every_ten["format"] == "r6h" and every_ten["tapped_step_ms"] == 10.5
    assert "audited_ms" not in every_ten


def test_without_graphs_the_steps_tell() -> None:
    (row,) = audit_cost.cost([{**OFF, "graph_ms": None}], [{**ON, "graph_ms": None}], [100])
    assert (row["copies_ms"], row["cost_percent"]) == (0.5, 5.1)


def test_a_run_without_audits_is_no_measurement() -> None:
    with pytest.raises(ValueError, match="no step of 1 x 16384 was audited"):
        audit_cost.cost([{**OFF, "graph_ms": 8.0}], [{**ON, "graph_ms": 8.0, "audited_ms": None}], [100])


def test_processes_that_differ_by_themselves_show_as_a_range() -> None:
    """Off twice, 40 us apart; on twice, 20 us apart: copies cost 10 us in the mean, and 40 or -20."""
    off = [{**OFF, "graph_ms": 8.0}, {**OFF, "graph_ms": 8.04}]
    on = [{**ON, "graph_ms": 8.02}, {**ON, "graph_ms": 8.04, "audited_ms": 11.5}]
    (row,) = audit_cost.cost(off, on, [100])
    assert (row["copies_ms"], row["copies_ms_min"], row["copies_ms_max"]) == (0.01, -0.02, 0.04)
    assert (row["off_spread_ms"], row["on_spread_ms"]) == (0.04, 0.02)
    assert (row["audit_ms"], row["audit_ms_min"], row["audit_ms_max"]) == (1.1, 1.0, 1.2)
    assert (row["cost_percent"], row["cost_percent_min"], row["cost_percent_max"]) == (0.21, -0.1, 0.52)
    assert row["processes"] == "2 off, 2 on"
    assert make_results.audit_cells(row) == [
        *("1 x 16,384", "10.00", "40 off, 20 on", "10 (-20 to 40)", "1.100 (1.000 to 1.200)"),
        *("100", "0.21 (-0.10 to 0.52) %"),
    ]


def test_processes_take_turns_and_each_leaves_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    ran, written = [], []

    def run(child: str, checks: dict, script: str) -> list[dict]:
        ran.append(child)
        return [{**(OFF if child == "off" else ON), "graph_ms": 8.0 + 0.01 * len(ran)}]

    monkeypatch.setattr(audit_cost.decode_step, "run_variant", run)
    monkeypatch.setattr(audit_cost.results_file, "copy_rate_tb_s", lambda: None)
    monkeypatch.setattr(
        audit_cost.results_file, "write", lambda name, rows, **kwargs: written.append(rows) or "file"
    )
    monkeypatch.setattr("sys.argv", ["audit_cost.py", "--intervals", "100"])
    assert audit_cost.main() == 0
    assert ran == ["off", "on", "off", "on"]
    assert [rows[0]["processes"] for rows in written] == ["1 off, 1 on", "2 off, 1 on", "2 off, 2 on"]
    monkeypatch.setattr("sys.argv", ["audit_cost.py", "--order", "on,on"])
    with pytest.raises(SystemExit, match="legal: off and on, each at least once"):
        audit_cost.main()
