"""The adapter to FlashInfer: its indices, against attention over the strided view that FlashInfer sees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from locks_sglang import flashinfer_attend
from locks_sglang.buffers import Geometry
from locks_sglang.config import LocksConfig, LocksError
from locks_sglang.flashinfer_attend import FlashInferAttention, bucket, float_workspace_bytes, head_pages
from locks_sglang.policy import parse_request
from rig import PAGE, Rig

CONFIG = LocksConfig(selector="locks", budget=64, max_budget=96, attend="flashinfer")


class PagedDecode:
    """FlashInfer's wrapper as its documentation describes it, in plain torch."""

    made = 0

    def __init__(
        self, workspace: torch.Tensor, indptr: torch.Tensor, indices: torch.Tensor, last: torch.Tensor
    ) -> None:
        type(self).made += 1
        self.indptr, self.indices, self.last = indptr, indices, last
        self.planned: dict[str, Any] = {}

    def plan(self, indptr: torch.Tensor, indices: torch.Tensor, last: torch.Tensor, **options: Any) -> None:
        assert len(indptr) == len(self.indptr) and len(last) == len(self.last)
        assert len(indices) == indptr[-1] <= len(self.indices)
        self.indptr.copy_(indptr)
        self.last.copy_(last)
        self.indices[: len(indices)].copy_(indices)
        self.planned = options | {"lengths": indptr.diff()}

    def run(
        self,
        queries: torch.Tensor,
        pools: tuple[torch.Tensor, torch.Tensor],
        q_scale: float,
        v_scale: float | None,
    ) -> torch.Tensor:
        keys, values = pools
        options = self.planned
        assert queries.shape[1:] == (options["num_qo_heads"], options["head_dim"])
        assert keys.shape[1:] == (options["page_size"], options["num_kv_heads"], options["head_dim"])
        assert keys.stride() == values.stride()
        lengths = self.indptr.diff()
        # What was planned bounds how a row is cut into chunks.
        assert (lengths <= options["lengths"]).all() and (lengths >= 0).all()
        out = torch.zeros_like(queries)
        for row, length in enumerate(lengths.tolist()):
            if not length:
                continue
            listed = self.indices[self.indptr[row] : self.indptr[row] + length].long()
            tokens = (length - 1) * options["page_size"] + int(self.last[row])
            k, v = (pool[listed, :, 0].flatten(0, 1)[:tokens].float() for pool in (keys, values))
            weights = (queries[row].float() @ k.T * options["sm_scale"] * q_scale).softmax(-1)
            out[row] = (weights @ v).to(out.dtype)
        return out if v_scale is None else out * v_scale


def with_emulation(rig: Rig, max_rows: int) -> FlashInferAttention:
    state = rig.state
    made = FlashInferAttention(state.geometry, max_rows, PAGE, rig.dtype, "cpu", PagedDecode)
    state._flashinfer = made
    return made


def test_view_of_a_pool() -> None:
    pool = torch.arange(4 * 16 * 3 * 8).view(4, 16, 3, 8).float()
    view = head_pages(pool)
    assert view.shape == ((4 * 16 - 15) * 3, 16, 1, 8)
    for page in range(4):
        for head in range(3):
            assert torch.equal(view[page * 16 * 3 + head, :, 0], pool[page, :, head])
    assert view.data_ptr() == pool.data_ptr()
    last = view[-1, :, 0]
    assert torch.equal(last, pool[3, :, 2])  # ends where the pool ends


def test_pools_that_cannot_be_viewed() -> None:
    with pytest.raises(LocksError, match=r"token before head \(NHD\)"):
        head_pages(torch.zeros(4, 3, 16, 8).transpose(1, 2))
    with pytest.raises(
        LocksError, match=r"numbers 268435456 tokens x 8 KV heads in 32 bits; legal: native"
    ):
        head_pages(torch.empty(2**24, 16, 8, 64, device="meta"))


@pytest.mark.parametrize("kv_heads", [1, 2, 3])
def test_same_output_as_native(kv_heads: int) -> None:
    """Rows of one token, of full and of open pages, with fewer pages than the list and with more; batches
    that are no power of two, that shrink and grow."""
    lengths = [1, 16, 17, 64, 65, 300, 211]
    native = Rig(CONFIG, lengths, kv_heads=kv_heads)
    other = Rig(CONFIG, lengths, kv_heads=kv_heads)
    with_emulation(other, len(lengths))
    PagedDecode.made = 0
    for batch in (lengths, lengths[:1], lengths[:5], [n + 3 for n in lengths], lengths[:2]):
        queries = native.queries(len(batch))
        expected, found = native.step(batch, queries), other.step(batch, queries)
        for one, two in zip(expected, found, strict=True):
            torch.testing.assert_close(two, one, atol=1e-5, rtol=1e-5)
    assert PagedDecode.made == 3, "one plan for 1, 2 and 8 rows each, whatever the steps"


def test_short_rows_by_min_len_and_every_budget() -> None:
    """Rows under min_len attend everything; their lists are filled where they fit."""
    lengths = [95, 96, 130]
    config = replace(CONFIG, min_len=97)
    native, other = Rig(config, lengths), Rig(config, lengths)
    with_emulation(other, len(lengths))
    for rig in (native, other):
        rig.state.policy.budgets[3] = 96 // PAGE
    queries = native.queries(3)
    for one, two in zip(native.step(lengths, queries), other.step(lengths, queries), strict=True):
        torch.testing.assert_close(two, one, atol=1e-5, rtol=1e-5)


def test_batch_above_the_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [40 * row + 7 for row in range(1, 6)]
    native, other = Rig(CONFIG, lengths), Rig(CONFIG, lengths)
    with_emulation(other, 2)
    monkeypatch.setattr(type(other.state), "_rows_at_a_time", 2)
    queries = native.queries(5)
    for one, two in zip(native.step(lengths, queries), other.step(lengths, queries), strict=True):
        torch.testing.assert_close(two, one, atol=1e-5, rtol=1e-5)


def test_what_lies_past_the_lists_does_not_matter() -> None:
    lengths = [17, 300]
    rig = Rig(CONFIG, lengths)
    adapter = with_emulation(rig, 2)
    queries = rig.queries(2)
    expected = rig.step(lengths, queries)
    adapter._buffers.indices.fill_(-1)
    adapter._buffers.entries.fill_(2**30)
    adapter._buffers.queries.fill_(float("nan"))
    for one, two in zip(expected, rig.step(lengths, queries), strict=True):
        assert torch.equal(one, two)


def test_no_two_entries_go_to_one_place() -> None:
    """A GPU writes them in any order."""
    rig = Rig(CONFIG, [1, 40, 300, 96])
    adapter = with_emulation(rig, 4)
    rig.step([1, 40, 300, 96], rig.queries(4))
    counts = torch.tensor([1, 3, 4, 4]).view(4, 1, 1).expand(4, rig.kv_heads, 1)
    inside = torch.arange(96 // PAGE) < counts
    places = adapter._buffers.places[:4]
    assert places[inside].sort().values.tolist() == list(range(int(inside.sum())))
    assert (places[~inside] == len(adapter._buffers.indices) - 1).all()


def test_buckets_and_workspace() -> None:
    assert [bucket(rows) for rows in (1, 2, 3, 4, 5, 160)] == [1, 2, 4, 4, 8, 256]
    geometry = Geometry(32, 4, 128, 100, 128, torch.bfloat16)
    # Two chunks a multiprocessor, 8 heads in tiles of 16 rows, fp32, and their sums.
    assert float_workspace_bytes(geometry, 1) >= 8 * 2 * 160 * 16 * 129 * 4
    # A row that is not cut is a chunk as well.
    assert float_workspace_bytes(geometry, 160) >= 8 * (256 * 4 + 256 * 4 * 8 // 16) * 16 * 129 * 4


def test_dense_requests_are_refused() -> None:
    with pytest.raises(
        LocksError, match=r"mode 'dense' does not work with .*lists end at 96 tokens; legal"
    ):
        parse_request({"locks": {"mode": "dense"}}, CONFIG)
    assert parse_request({"locks": {"budget": 96}}, CONFIG).budget == 96
    assert parse_request({"locks": {"mode": "dense"}}, replace(CONFIG, attend="native")).mode == "dense"


def test_availability_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_attend.importlib.util, "find_spec", lambda name: name == "flashinfer")
    assert flashinfer_attend.available()
    monkeypatch.setattr(flashinfer_attend.importlib.util, "find_spec", lambda name: None)
    assert not flashinfer_attend.available()
