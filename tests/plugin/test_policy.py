"""Per-request mode and budget: what is accepted, what gets a 400, and how slots keep it."""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from locks_kernels import ATTEND_ALL
from locks_sglang.config import LocksConfig, LocksError
from locks_sglang.policy import PolicyTable, RequestPolicy, parse_request
from plugin_process import AtLoad

CONFIG = LocksConfig(selector="locks", budget=512, max_budget=1024)

GOOD = [
    (None, RequestPolicy("sparse", None)),
    ({}, RequestPolicy("sparse", None)),
    ({"other": 1}, RequestPolicy("sparse", None)),
    ({"locks": None}, RequestPolicy("sparse", None)),
    ({"locks": {}}, RequestPolicy("sparse", None)),
    ({"locks": {"mode": "sparse"}}, RequestPolicy("sparse", None)),
    ({"locks": {"mode": "dense"}}, RequestPolicy("dense", None)),
    ({"locks": {"budget": None}}, RequestPolicy("sparse", None)),
    ({"locks": {"mode": "dense", "budget": None}}, RequestPolicy("dense", None)),
    ({"locks": {"budget": 32}}, RequestPolicy("sparse", 32)),
    ({"locks": {"budget": 1024}, "other": "x"}, RequestPolicy("sparse", 1024)),
]
BAD = [
    ([1], "custom_params is", "an object"),
    ("locks", "custom_params is", "an object"),
    ({"locks": "dense"}, "custom_params.locks is 'dense'", "'mode' (sparse, dense)"),
    ({"locks": True}, "custom_params.locks is True", "'mode' (sparse, dense)"),
    ({"locks": []}, "custom_params.locks is []", "'mode' (sparse, dense)"),
    ({"locks": {"mod": "dense"}}, "unknown keys ['mod']", "'mode', 'budget'"),
    ({"locks": {"mode": "fast"}}, "mode is 'fast'", "sparse, dense"),
    ({"locks": {"mode": None}}, "mode is None", "sparse, dense"),
    ({"locks": {"mode": ["dense"]}}, "mode is ['dense']", "sparse, dense"),
    ({"locks": {"budget": 16}}, "budget is 16", "at least two pages (32 tokens)"),
    ({"locks": {"budget": 0}}, "budget is 0", "at least two pages"),
    ({"locks": {"budget": -64}}, "budget is -64", "at least two pages"),
    ({"locks": {"budget": 100}}, "budget is 100", "a multiple of the page size (16)"),
    ({"locks": {"budget": 1040}}, "budget is 1040", "at most 1024 tokens"),
    ({"locks": {"budget": 2**70}}, f"budget is {2**70}", "at most 1024 tokens"),
    ({"locks": {"budget": 512.0}}, "budget is 512.0", "a whole number"),
    ({"locks": {"budget": float("nan")}}, "budget is nan", "a whole number"),
    ({"locks": {"budget": "512"}}, "budget is '512'", "a whole number"),
    ({"locks": {"budget": True}}, "budget is True", "a whole number"),
    ({"locks": {"mode": "dense", "budget": 512}}, "no meaning with mode 'dense'", "leave one of them out"),
]


@pytest.mark.parametrize(("params", "expected"), GOOD, ids=str)
def test_accepted(params: Any, expected: RequestPolicy) -> None:
    assert parse_request(params, CONFIG) == expected


@pytest.mark.parametrize(("params", "wrong", "legal"), BAD, ids=str)
def test_refused(params: Any, wrong: str, legal: str) -> None:
    with pytest.raises(LocksError) as error:
        parse_request(params, CONFIG)
    assert wrong in str(error.value) and legal in str(error.value)
    assert isinstance(error.value, ValueError), "SGLang answers only a ValueError with status 400"


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
KEYS = st.sampled_from(["mode", "budget", "locks"]) | st.text(max_size=5) | st.integers()
ANYTHING = st.recursive(
    SCALARS | st.sampled_from(["sparse", "dense", 16, 32, 512, 1024, 1040]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@given(params=ANYTHING | st.fixed_dictionaries({"locks": ANYTHING}))
def test_no_input_crashes(params: Any) -> None:
    try:
        policy = parse_request(params, CONFIG)
    except LocksError:
        return
    pages = policy.pages(CONFIG, CONFIG.page_size)
    assert pages == ATTEND_ALL or 2 <= pages <= CONFIG.largest_budget // CONFIG.page_size


def request(params: Any = None, rid: str = "r") -> SimpleNamespace:
    return SimpleNamespace(rid=rid, sampling_params=SimpleNamespace(custom_params=params))


def test_table_starts_with_the_server_budget() -> None:
    table = PolicyTable(CONFIG, 4, "cpu")
    assert table.budgets.tolist() == [32] * 4


def test_slots_get_their_requests_and_forget_them() -> None:
    table = PolicyTable(CONFIG, 5, "cpu")
    dense, small = request({"locks": {"mode": "dense"}}), request({"locks": {"budget": 64}})
    table.write([3, 1], [dense, small])
    assert table.budgets.tolist() == [32, 4, 32, ATTEND_ALL, 32]
    table.write([3, 2], [request(), request({"locks": {"budget": 1024}})])
    assert table.budgets.tolist() == [32, 4, 64, 32, 32]
    table.write([1], [request({"other": True})])
    assert table.budgets.tolist() == [32, 32, 64, 32, 32]


def test_options_that_came_around_the_check_do_not_end_the_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    table = PolicyTable(CONFIG, 3, "cpu")
    table.write([1, 2], [request({"locks": {"budget": 7}}, "bad"), request({"locks": {"budget": 64}})])
    assert table.budgets.tolist() == [32, 32, 4]
    assert "request bad has bad sparse-decode options" in caplog.text


def test_other_page_size() -> None:
    config = LocksConfig(selector="locks", budget=512, page_size=64)
    assert parse_request({"locks": {"budget": 128}}, config).pages(config, 64) == 2
    with pytest.raises(LocksError, match=r"page size \(64\)"):
        parse_request({"locks": {"budget": 96}}, config)


def test_sglang_refuses_the_request(prepare: Callable[..., Any]) -> None:
    """SamplingParams.verify is where SGLang refuses a request; it is hooked in the serving process."""
    from sglang.srt.sampling.sampling_params import SamplingParams

    prepare("--sparse-decode", "locks", "--sparse-decode-budget", "512")
    bad = SamplingParams(custom_params={"locks": {"budget": 100}})
    SamplingParams(custom_params={"locks": {"budget": 512}}).verify(128)
    with pytest.raises(ValueError, match=re.escape("custom_params.locks.budget is 100; legal: ")):
        bad.verify(128)
    prepare()
    bad.verify(128)  # a server without sparse decode has no opinion


def test_beam_search_is_refused(prepare: Callable[..., Any]) -> None:
    """Requests of SGLang 0.5.23 may ask for it."""
    from locks_sglang.parent_hooks import verify_sampling_params

    prepare("--sparse-decode", "locks")
    for beams in (None, 1):
        verify_sampling_params(None, SimpleNamespace(custom_params=None, beam_width=beams), 128)
    with pytest.raises(LocksError, match=r"beam_width is 4.*legal: 1"):
        verify_sampling_params(None, SimpleNamespace(custom_params=None, beam_width=4), 128)


def test_requests_are_written_when_they_get_their_slots(
    at_load: AtLoad, monkeypatch: pytest.MonkeyPatch
) -> None:
    from locks_sglang import runtime, scheduler_hooks

    table = PolicyTable(CONFIG, 4, "cpu")
    monkeypatch.setattr(runtime, "_active", SimpleNamespace(policy=table))
    scheduler_hooks.alloc_requests([2], None, [request({"locks": {"mode": "dense"}})])
    scheduler_hooks.alloc_requests(None, None, [request({"locks": {"budget": 64}})])
    assert table.budgets.tolist() == [32, 32, ATTEND_ALL, 32]
