"""The pages under docs/ say what the code says."""

import re
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import locks_kernels
import make_reference
import make_results
import pages
import pytest
import torch
from locks_kernels.layout import HEAD_DIMS
from locks_sglang import model_checks, policy, scheduler_hooks
from locks_sglang.config import LocksConfig
from locks_sglang.runtime import SparseDecode
from locks_sglang.telemetry import TIER_METRICS
from locks_sglang.tier.decode import HostTier

ROOT = Path(__file__).parents[2]
REFERENCE = (ROOT / "docs/reference.md").read_text()
SOURCES = [*ROOT.glob("python/locks_sglang/*.py"), *ROOT.glob("kernels/locks_kernels/*.py")]


def test_reference_is_up_to_date() -> None:
    assert make_reference.render(REFERENCE) == REFERENCE, "run: python tools/make_reference.py"


def test_measured_parts_are_up_to_date() -> None:
    for path, parts in make_results.PAGES.items():
        page = path.read_text()
        assert pages.render(page, parts) == page, "run: python tools/make_results.py"


def test_a_part_that_is_missing_is_noticed() -> None:
    with pytest.raises(ValueError, match="no place for flags"):
        make_reference.render(REFERENCE.replace("<!-- generated: flags -->", ""))
    with pytest.raises(ValueError, match="unknown part 'flogs'"):
        make_reference.render(REFERENCE.replace("<!-- generated: flags -->", "<!-- generated: flogs -->"))


def test_every_public_name_is_documented() -> None:
    for name in locks_kernels.__all__:
        assert re.search(rf"^\*\*`(class )?{name}\b", REFERENCE, re.M), name
        described = getattr(locks_kernels, name)
        if callable(described) and not isinstance(described, int):
            assert described.__doc__, f"{name} has no docstring"


@pytest.mark.parametrize("selector", ["locks", "quest", "oracle"])
def test_server_info_fields_are_documented(selector: str) -> None:
    config = LocksConfig(selector=selector, budget=64)
    pool = SimpleNamespace(
        start_layer=0,
        layer_num=2,
        _get_key_buffer=lambda layer: torch.zeros(64, 2, 64),
        _get_value_buffer=lambda layer: torch.zeros(64, 2, 64),
    )
    slots = SimpleNamespace(req_to_token=torch.zeros(4, 64, dtype=torch.int32))
    state = SparseDecode(config, pool, slots, 4)
    described = list(state.describe())
    assert [*described, *state.counters.to_dict()] == list(make_reference.SERVER_INFO)
    assert len(described) == 13, "the page says thirteen"


def test_tier_fields_are_documented() -> None:
    pool = SimpleNamespace(keys=[torch.zeros(4, 16, 2, 64)], values=[torch.zeros(4, 16, 2, 64)])
    size = SimpleNamespace(available_size=lambda: 32)
    tier = HostTier(pool, hot_bytes=0, width=4, requests=3, device=torch.device("cpu"), allocator=size)
    described = tier.describe(0, 0)
    assert list(described) == list(make_reference.TIER_INFO)
    assert (described["host_pages_used"], described["host_pages_free"]) == (1, 2)
    counted = {name.removeprefix("locks:") for name, (kind, _) in TIER_METRICS.items() if kind == "counter"}
    assert counted == set(tier.counts(0, 0))
    assert set(tier.pages()) == {name.removeprefix("locks:") for name in TIER_METRICS} - counted


@pytest.mark.parametrize("room", ["kernels/locks_kernels", "python/locks_sglang"])
def test_every_module_has_a_line_in_architecture(room: str) -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    cells = re.findall(r"^\| (`.*?) \|", page[page.index("\n## Modules") :], re.M)
    patterns = [name.rstrip("/") for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    modules = {path.stem for path in (ROOT / room).iterdir() if not path.name.startswith("_")}
    assert {name for name in modules if not any(fnmatch(name, pattern) for pattern in patterns)} == set()


def test_what_is_written_by_hand() -> None:
    words = " ".join(REFERENCE.split())
    *first, last = map(str, HEAD_DIMS)
    assert f"a `head_dim` other than {', '.join(first)} or {last}" in words
    assert f"more than {model_checks.MAX_GROUP} query heads per KV head" in words
    *first, last = (str(dtype).removeprefix("torch.") for dtype in scheduler_hooks.POOL_DTYPES)
    assert f"pools of other dtypes than {', '.join(first)} and {last}" in words
    assert all(f"`{mode}`" in words for mode in policy.MODES)
    assert "Sparse decode on: " in REFERENCE and "Sparse decode, #sparse-row: " in REFERENCE
    log_lines = "".join(path.read_text() for path in SOURCES)
    assert '"Sparse decode on: ' in log_lines and '"Sparse decode, #sparse-row: ' in log_lines
