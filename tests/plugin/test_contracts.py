"""Every contract of the hooks is checked, and each breach is reported as exactly that row."""

import re
from pathlib import Path

import pytest
import source_tree
from locks_sglang import check, compat
from locks_sglang.config import LocksError
from locks_sglang.hooks import HOOKS, Hook
from locks_sglang.refusals import REFUSALS, REFUSED_VARIABLES

# Contracts that are no hooks: (row of the table, name that gets lost).
OTHER_CONTRACTS = [
    *((target, names[-1]) for target, names in compat._METHODS + compat._FIELDS + compat._ASSIGNED),
    ("sglang.srt.server_args.ServerArgs", "page_size"),
    *(("sglang.srt.server_args.ServerArgs", row.field) for row in (REFUSALS[0], REFUSALS[-1])),
    *(("sglang.srt.environ.Envs", row.name) for row in REFUSED_VARIABLES if row.since == "0.5.17"),
]


def failing(root: Path) -> list[compat.Check]:
    return [check for check in compat.run_checks(root) if not check.ok]


def breaches() -> list[tuple[Hook, str]]:
    return [(hook, how) for hook in HOOKS for how in ("name", "binding", hook.parameters[-1])]


def breach_name(value: object) -> str:
    return check.short_name(value.target) if isinstance(value, Hook) else str(value)


def test_all_contracts_hold_here(installed_sources: Path) -> None:
    checks = compat.run_checks(installed_sources)
    assert [check for check in checks if not check.ok] == []
    assert len(checks) > len(HOOKS)
    compat.require(checks)


@pytest.mark.parametrize(("hook", "how"), breaches(), ids=breach_name)
def test_broken_hook(broken: source_tree.Break, hook: Hook, how: str) -> None:
    name, owner = hook.target.split(".")[-1], hook.target.split(".")[-2]

    def change(source: str) -> str:
        function = source_tree.find(source, name, None if hook.binding == "function" else owner)
        if how == "name":
            return source_tree.rename_function(source, function)
        if how == "binding":
            return source_tree.change_binding(source, function)
        return source_tree.rename_parameter(source, function, how)

    root = broken(hook.target, change)
    (found,) = failing(root)
    assert (found.name, found.purpose) == (hook.target, hook.purpose)
    expected = {"name": "not found", "binding": f"expected a {hook.binding}"}
    assert expected.get(how, f"other_{how}") in found.detail
    with pytest.raises(LocksError, match=re.escape(hook.target)):
        compat.require(compat.run_checks(root))


@pytest.mark.parametrize(("row", "name"), OTHER_CONTRACTS, ids=str)
def test_lost_name(broken: source_tree.Break, row: str, name: str) -> None:
    root = broken(row, lambda source: re.sub(rf"\b{name}\b", f"{name}_of_old", source))
    found = [check for check in failing(root) if check.name == row]
    assert [check.detail for check in found] == [f"missing: {name}"]
    with pytest.raises(LocksError, match=f"missing: {name}"):
        compat.require(compat.run_checks(root))


def test_no_sglang_at_all(tmp_path: Path) -> None:
    (tmp_path / "sglang").mkdir()
    checks = compat.run_checks(tmp_path)
    assert not any(check.ok for check in checks)


def test_untested_version_needs_the_flag() -> None:
    for version in compat.TESTED_VERSIONS:
        compat.check_version(version, allow_untested=False)
    for version in ("0.5.16", "0.6.0", compat.UNKNOWN):
        with pytest.raises(LocksError, match="--sparse-decode-allow-untested") as error:
            compat.check_version(version, allow_untested=False)
        assert all(tested in str(error.value) for tested in compat.TESTED_VERSIONS)
        compat.check_version(version, allow_untested=True)


def test_options_of_newer_versions_are_not_asked_of_older_ones(
    installed_sources: Path, newest_sources: Path
) -> None:
    newer = {row.field for row in REFUSALS if row.since == "0.5.23"}
    assert newer
    assert compat.version_of_sources(newest_sources) == "0.5.23"
    text = "".join(path.read_text() for path in newest_sources.glob("sglang/srt/arg_groups/fields/*.py"))
    assert all(re.search(rf"^    {field}: ", text, re.M) for field in newer)
    old = (installed_sources / "sglang/srt/server_args.py").read_text()
    if compat.version_of_sources(installed_sources) == "0.5.17":
        assert not any(re.search(rf"^    {field}: ", old, re.M) for field in newer)


def test_version_of_an_editable_install(
    installed_sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout that SGLang was installed from in place may lack the file that states its version."""
    (tmp_path / "sglang").mkdir()
    assert compat.version_of_sources(tmp_path) == compat.UNKNOWN
    monkeypatch.setattr(compat, "sglang_root", lambda: tmp_path)
    assert compat.version_of_sources(tmp_path) == compat.sglang_version() != compat.UNKNOWN
    assert compat.version_of_sources(installed_sources) == compat.sglang_version()


def test_all_contracts_hold_on_the_newest_sglang(newest_sources: Path) -> None:
    assert [check for check in compat.run_checks(newest_sources) if not check.ok] == []
