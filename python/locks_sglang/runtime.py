"""SparseDecode: the state of sparse decode for one model runner, and its decode step."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from locks_kernels import StepTables, Summaries, attend, score_select, snapshot
from locks_kernels.workspace import Workspace

from . import memory
from .audit import AUDITED_ROWS, AUDITED_ROWS_ON_HOST, Audit, spread
from .buffers import EAGER_ROWS, Geometry, StepBuffers, TapPlan
from .config import LocksConfig
from .dense_steps import DenseSteps
from .flashinfer_attend import FlashInferAttention
from .policy import PolicyTable
from .summaries import SummaryPool, bytes_per_token
from .taps import LayerTap
from .telemetry import Counters, PrometheusMetrics
from .tier import staged_forward
from .tier.decode import HostTier
from .tier.staging import PrefillStaging
from .trace import Trace

logger = logging.getLogger(__name__)


class SparseDecode:
    """Summaries, per-request policy and counters of one model runner.

    Args:
        config: the configuration, with the page size of the pool.
        pool: SGLang's MHA KV pool.
        req_to_token_pool: SGLang's token table, ``req_to_token [slots, context]``.
        q_heads: query heads of a layer on this rank.
        query_dtype: dtype of the model's queries; the pool's where it is None.
        graph_rows: largest batch that gets a CUDA graph, 0 without graphs.
        rank: tensor-parallel rank, which has KV heads of its own.
    """

    def __init__(
        self,
        config: LocksConfig,
        pool: Any,
        req_to_token_pool: Any,
        q_heads: int,
        query_dtype: torch.dtype | None = None,
        graph_rows: int = 0,
        rank: int = 0,
    ) -> None:
        self.config = config
        self.summaries = SummaryPool(config, pool)
        self._token_table = req_to_token_pool.req_to_token
        self.device = self._token_table.device
        self.policy = PolicyTable(config, self._token_table.shape[0], self.device)
        self.counters = Counters(self.device)
        self.dense_layers: dict[int, str] = {}
        self.dense_steps = DenseSteps(budget=config.budget)
        self.sparse_layers: list[int] = []
        self.geometry = Geometry.of(
            tokens=self._token_table.shape[1],
            page_size=config.page_size,
            width=config.largest_budget // config.page_size,
            q_heads=q_heads,
            kv_heads=self.summaries.kv_heads,
            head_dim=self.summaries.head_dim,
            query_dtype=query_dtype or self.summaries.keys[0].dtype,
        )
        self.tier: HostTier | None = None
        """Set by who knows how large it is, where the pool lies in host memory."""
        self._planning = False
        self._graph_rows = graph_rows
        self._plan = TapPlan()
        self._audit: Audit | None = None
        self._trace = Trace(config.trace_file, config.page_size, rank) if config.trace_file else None
        self._flashinfer: FlashInferAttention | None = None
        self._workspace: Workspace | None = None
        self._graph_buffers: StepBuffers | None = None
        self._eager_buffers: StepBuffers | None = None
        self._step: StepTables | None = None
        self._taps: dict[int, LayerTap] = {}

    def set_layers(self, sparse: list[int], dense: dict[int, str]) -> None:
        """Say which model layers decode sparse, and why the others do not."""
        self.sparse_layers, self.dense_layers = sparse, dense
        layers = [self.summaries.index(layer) for layer in sparse]
        audited = spread(layers, self.config.audit_layers) if self.config.audit_interval else ()
        self._plan = TapPlan(audited, tuple(layers) if self._trace is not None else ())
        if audited:
            self._audit = Audit(
                self.config.audit_interval, audited, self.summaries, self.geometry, self._observe,
                AUDITED_ROWS_ON_HOST if self.config.kv_tier == "host" else AUDITED_ROWS,
            )  # fmt: skip

    def _observe(self, index: int, mass: float) -> None:
        self.counters.observe_mass(self.summaries.layer_id(index), mass)
        if _metrics is not None:
            _metrics.observe_mass(mass)

    def allocate_graph_buffers(self, max_rows: int) -> None:
        """Buffers for the steps that CUDA graphs replay; their addresses never change."""
        self._graph_buffers = StepBuffers.allocate(self.geometry, self._plan, max_rows, self.device)
        self._allocate_scratch(max_rows)
        self._warm_up(self._graph_buffers)

    def _allocate_scratch(self, rows: int) -> None:
        """What all layers share: scratch of the kernels for ``rows`` requests at a time."""
        self._workspace = self.geometry.workspace(rows, self.device)
        if self.config.attend == "flashinfer":
            dtype = self.summaries.keys[0].dtype
            self._flashinfer = FlashInferAttention(
                self.geometry, rows, self.config.page_size, dtype, self.device
            )

    def _warm_up(self, buffers: StepBuffers) -> None:
        if self._audit is not None:
            self._audit.warm_up(buffers.tables, buffers.taps)

    def begin_step(self, forward_batch: Any) -> None:
        """Snapshot page table, lengths and budgets of a decode batch.

        Runs outside of CUDA graphs, in the place where SGLang promises that its token table
        is not being overwritten.
        """
        # A dense step reads nothing of ours; finish_dense_step counts it.
        if not forward_batch.forward_mode.is_decode() or self.dense_steps.now:
            self.end_step()
            return
        buffers = self._buffers_for(forward_batch)
        self._taps = buffers.taps
        self._step = step = buffers.tables.rows(len(forward_batch.req_pool_indices))
        snapshot(
            self._token_table,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            self.policy.budgets,
            step,
            self.counters.step,
            page_size=self.config.page_size,
            min_len=self.config.min_len,
        )
        if self._flashinfer is not None and len(step.seq_lens) <= self._rows_at_a_time:
            self._flashinfer.prepare(step)
        if self.tier is not None:
            self.tier.begin_step(step, forward_batch.req_pool_indices)

    @contextmanager
    def staged_planning(self, backend: Any, forward_batch: Any) -> Iterator[None]:
        """The attention backend's planning of a forward, which may be a prefill from a host pool."""
        staging = self._staging()
        if staging is not None:
            staging.end()
        if staging is None or not forward_batch.forward_mode.is_extend():
            yield
            return
        if not staged_forward.can_stage(forward_batch):
            staging.pass_by("where it reads is planned before the backend is asked (SGLang 0.5.23)")
            yield
            return
        prefixes, new = forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu
        lengths = [before + more for before, more in zip(prefixes, new, strict=True)]
        if not staging.begin(self._token_table, forward_batch.req_pool_indices, prefixes, lengths):
            yield
            return
        with staged_forward.planning(backend, forward_batch, staging):
            self._planning = True
            try:
                yield
            finally:
                self._planning = False

    def plan_out_of_graph(self, forward_batch: Any) -> None:
        """A forward is planned for a CUDA graph, which reads what it read at its capture: the pool."""
        staging = self._staging()
        if staging is not None and not self._planning and forward_batch.forward_mode.is_extend():
            staging.end()
            staging.pass_by("it runs in a CUDA graph, which reads where it read at its capture")

    @contextmanager
    def staged_attention(self, backend: Any, layer: Any, written: torch.Tensor | None) -> Iterator[None]:
        """The attention of a layer in a forward that is no decode step.

        ``written`` are the pool slots of its tokens, if the model has written them by itself.
        """
        staging = self._staging()
        if staging is None or not staging.active:
            yield
            return
        assert self.tier is not None
        index = self.summaries.index(layer.layer_id)
        with staged_forward.attending(backend, staging, index, written):
            yield
            self.tier.build_staged(index)

    def _staging(self) -> PrefillStaging | None:
        return self.tier.staging if self.tier is not None else None

    @property
    def in_step(self) -> bool:
        return self._step is not None

    def end_step(self) -> None:
        self._step = None

    def _buffers_for(self, forward_batch: Any) -> StepBuffers:
        """The graphs' buffers, or growing ones of their own for eager batches that are larger.

        The graphs' are never replaced: captured steps go on reading their addresses.
        """
        rows = len(forward_batch.req_pool_indices)
        if self.device.type == "cpu":
            pages = -(-int(forward_batch.seq_lens.max()) // self.config.page_size)
            tables = StepTables.allocate(rows, pages, self.device)
            return StepBuffers(tables, self._plan.allocate(self.geometry, rows, self.device))
        if self._graph_buffers is not None and rows <= self._graph_buffers.max_rows:
            return self._graph_buffers
        if self._eager_buffers is None or rows > self._eager_buffers.max_rows:
            room = 1 << (rows - 1).bit_length()
            self._eager_buffers = StepBuffers.allocate(self.geometry, self._plan, room, self.device)
            if self._workspace is None:
                self._allocate_scratch(EAGER_ROWS)
                self._warm_up(self._eager_buffers)
        return self._eager_buffers

    @property
    def _rows_at_a_time(self) -> int:
        """Requests that the kernels' scratch has room for."""
        assert self._step is not None
        return len(self._step.seq_lens) if self._workspace is None else self._workspace.max_rows

    def write(self, layer: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Say what a decode step writes into the pool for its current tokens, before :meth:`decode`."""
        if self.tier is not None:
            self.tier.write(self.summaries.index(layer.layer_id), keys, values)

    def written(self, layer: Any, slots: torch.Tensor) -> None:
        """As :meth:`write`, where the model has written the pool's ``slots`` by itself."""
        if self.tier is not None:
            self.tier.written(self.summaries.index(layer.layer_id), slots)

    def decode(self, queries: torch.Tensor, layer: Any) -> torch.Tensor:
        """Attention of one layer over its selected pages: ``[rows, q_heads, d]`` -> same shape.

        The keys and values of the current token must be in the pool already.
        """
        step = self._step
        assert step is not None, "decode() outside of a decode step"
        rows, most = len(queries), self._rows_at_a_time
        if rows <= most:
            return self._decode_rows(queries, layer, step, 0)
        # An eager batch above the largest graph: the scratch, which is large, is not made larger.
        parts = []
        for first in range(0, rows, most):
            part = slice(first, min(first + most, rows))
            tables = StepTables(step.page_table[part], step.seq_lens[part], step.budgets[part])
            if self._flashinfer is not None:
                self._flashinfer.prepare(tables)
            parts.append(self._decode_rows(queries[part], layer, tables, first))
        return torch.cat(parts)

    def _decode_rows(
        self, queries: torch.Tensor, layer: Any, step: StepTables, first_row: int
    ) -> torch.Tensor:
        index = self.summaries.index(layer.layer_id)
        keys, values = self.summaries.keys[index], self.summaries.values[index]
        records = self.summaries.records_of(index)
        rows = slice(first_row, first_row + len(queries))
        scored, open_pages = keys, None
        # Other selectors read the current page from the host pool.
        if self.tier is not None and isinstance(records, Summaries):
            scored, open_pages = self.tier.open_keys(index, rows)
        k_scale, v_scale = self.summaries.scales_of(layer)
        sm_scale = layer.scaling * k_scale
        selection = score_select(
            queries,
            scored,
            records,
            step.page_table,
            step.seq_lens,
            step.budgets,
            sm_scale,
            width=self.geometry.width,
            open_pages=open_pages,
            workspace=self._workspace,
            # Tables and records are older than this layer's own projections.
            settled=True,
        )
        tap = self._taps.get(index) if self._taps else None
        if tap is not None:
            tap.record(queries, selection, sm_scale, first_row)
        if self._flashinfer is not None:
            return self._flashinfer.attend(queries, keys, values, selection, sm_scale, v_scale)
        if self.tier is not None:
            selection = self.tier.resolve(index, selection, rows)
        output, _ = attend(
            queries,
            keys,
            values,
            selection,
            step.page_table,
            step.seq_lens,
            sm_scale,
            v_scale,
            # Only straight after score_select may the kernel begin before it has ended.
            budgets=step.budgets if tap is None and self.tier is None else None,
            hot=self.tier.hot if self.tier is not None else None,
            workspace=self._workspace,
        )
        return output

    def finish_forward(self, slots: torch.Tensor) -> None:
        """Build the summaries of the pages that this forward completed."""
        if self.tier is None or not self.tier.took_staged():
            self.summaries.build(slots)
        self.counters.count_built(slots, self.config.page_size)

    def finish_dense_step(self, forward_batch: Any) -> None:
        """Count a decode step that ran dense, and build the summaries of the pages that it completed.

        From the host's copy of the lengths, so that a step that completes no page launches what SGLang
        launches without sparse decode, and nothing else.
        """
        lengths, page_size = forward_batch.seq_lens_cpu, self.config.page_size
        completed = int((lengths % page_size == 0).sum())
        pages = int(((lengths + page_size - 1) // page_size).sum())
        self.counters.count_dense(len(lengths), pages, completed)
        if completed:
            self.summaries.build(forward_batch.out_cache_loc)

    def wrote(self, slots: torch.Tensor) -> None:
        """A forward that is no decode step wrote these pool slots."""
        if self.tier is not None:
            self.tier.wrote(slots)

    def finish_step(self, forward_batch: Any) -> None:
        """Look at what the decode step selected, once it has been launched.

        Never in a CUDA graph, and before the next forward is launched: see ``audit``.
        """
        if not self._taps or self.dense_steps.now:
            return
        assert self._step is not None
        rids = forward_batch.rids
        # A graph's batch is padded; its tables are too.
        rows = min(forward_batch.batch_size, len(self._step.seq_lens))
        if self._audit is not None:
            self._audit.after_step(self._step, self._taps, rows)
        if self._trace is not None:
            self._trace.after_step(self._step, self._taps, rows, rids)

    @property
    def audits_launched(self) -> int:
        """Decode steps that were audited, whether the results have arrived or not."""
        return self._audit.launched if self._audit is not None else 0

    def status(self) -> dict[str, Any]:
        """What ``/server_info`` shows: :meth:`describe` and the counters, with every finished audit."""
        if self._audit is not None:
            self._audit.collect(wait=True)
        counted = self.counters.to_dict()
        tier = self.tier.describe(*_rows_and_pages(counted)) if self.tier is not None else {}
        return {**self.describe(), **counted, **tier}

    def totals(self) -> tuple[dict[str, int], dict[str, int]]:
        """Counters since the start, and gauges, by the names of their metrics."""
        counters, gauges = self.counters.totals(), {"summary_bytes": self.summaries.nbytes}
        if self.tier is not None:
            counters |= self.tier.counts(*_rows_and_pages(counters))
            gauges |= self.tier.pages()
        return counters, gauges

    def describe(self) -> dict[str, Any]:
        """Plain values for the handshake and ``/server_info``."""
        layout = self.summaries.layout
        layers, kv_heads = len(self.summaries.keys), self.summaries.kv_heads
        return {
            "selector": self.config.selector,
            "attend": self.config.attend if self.config.attend != "auto" else "native",
            "format": layout.name if layout is not None else None,
            "budget": self.config.budget,
            "max_budget": self.config.largest_budget,
            "min_len": self.config.min_len,
            "dense_below": self.dense_steps.below,
            "page_size": self.config.page_size,
            "bytes_per_token": bytes_per_token(self.config, self.summaries.head_dim, kv_heads, layers),
            "summary_bytes": self.summaries.nbytes,
            "step_bytes": self._step_bytes(),
            "sparse_layers": len(self.sparse_layers),
            "dense_layers": {str(layer): reason for layer, reason in self.dense_layers.items()},
        }

    def _step_bytes(self) -> int:
        if self.device.type == "cpu":
            return 0
        return memory.step_bytes(self.config, self.geometry, self._plan, self._graph_rows)

    def log_start(self, kv_bytes: int, tokens: int) -> None:
        """The start-up log line, for a KV pool of ``tokens`` tokens."""
        status, below = self.describe(), self.dense_steps.below
        logger.info(
            "Sparse decode on: selector %s, record format %s, budget %d tokens, page %d; summaries "
            "%d bytes a token, %.3f GiB beside %.3f GiB of KV for %d tokens, %.3f GiB for decode steps; "
            "%d layers sparse, %d dense%s%s",
            status["selector"],
            status["format"],
            status["budget"],
            status["page_size"],
            status["bytes_per_token"],
            status["summary_bytes"] / 2**30,
            kv_bytes / 2**30,
            tokens,
            status["step_bytes"] / 2**30,
            status["sparse_layers"],
            len(self.dense_layers),
            "".join(f"; layer {layer}: {why}" for layer, why in self.dense_layers.items()),
            f"; steps that would leave out fewer than {below} tokens run dense" if below else "",
        )
        if self._trace is not None:
            logger.warning("Sparse decode writes a trace to %s", self._trace.path.resolve())


def _rows_and_pages(counted: dict[str, Any]) -> tuple[int, int]:
    """Rows that were decoded, and pages whose summaries were built."""
    return counted["rows_sparse"] + counted["rows_dense"], counted["summaries_built"]


_active: SparseDecode | None = None
_metrics: PrometheusMetrics | None = None


def activate(state: SparseDecode) -> None:
    """Make ``state`` the one of this scheduler process."""
    global _active
    _active = state


def active() -> SparseDecode | None:
    """State of this scheduler process; None before its memory pool exists."""
    return _active


def set_metrics(exported: PrometheusMetrics) -> None:
    """Export the counters of this scheduler process to Prometheus."""
    global _metrics
    _metrics = exported


def metrics() -> PrometheusMetrics | None:
    """Metrics of this scheduler process; None without ``--enable-metrics``."""
    return _metrics
