"""SparseDecode: the state of sparse decode for one model runner, and its decode step."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from locks_kernels import Selection, StepTables, attend, retained_mass, score_select, snapshot
from locks_kernels.workspace import Workspace

from .buffers import Geometry, StepBuffers
from .config import LocksConfig
from .policy import PolicyTable
from .summaries import SummaryPool, bytes_per_token
from .telemetry import Counters, PrometheusMetrics

logger = logging.getLogger(__name__)


class SparseDecode:
    """Summaries, per-request policy and counters of one model runner.

    Args:
        config: the configuration, with the page size of the pool.
        pool: SGLang's MHA KV pool.
        req_to_token_pool: SGLang's token table, ``req_to_token [slots, context]``.
        q_heads: query heads of a layer on this rank.
    """

    def __init__(self, config: LocksConfig, pool: Any, req_to_token_pool: Any, q_heads: int) -> None:
        self.config = config
        self.summaries = SummaryPool(config, pool)
        self._token_table = req_to_token_pool.req_to_token
        self.device = self._token_table.device
        self.policy = PolicyTable(config, self._token_table.shape[0], self.device)
        self.counters = Counters(self.device)
        self.dense_layers: dict[int, str] = {}
        self.sparse_layers: list[int] = []
        self._width = config.largest_budget // config.page_size
        self._q_heads = q_heads
        self._graph_buffers: StepBuffers | None = None
        self._eager_buffers: StepBuffers | None = None
        self._workspace: Workspace | None = None
        self._step: StepTables | None = None
        self._rids: list[str] | None = None
        self._steps = 0
        self._trace = open(config.trace_file, "w") if config.trace_file else None  # noqa: SIM115

    def allocate_graph_buffers(self, max_rows: int) -> None:
        """Tables and workspace for the steps that CUDA graphs replay; their addresses never change."""
        self._graph_buffers = StepBuffers.allocate(self.geometry, max_rows, self.device)

    @property
    def geometry(self) -> Geometry:
        return Geometry(
            q_heads=self._q_heads,
            kv_heads=self.summaries.kv_heads,
            head_dim=self.summaries.head_dim,
            max_pages=-(-self._token_table.shape[1] // self.config.page_size),
            width=self._width,
        )

    def begin_step(self, forward_batch: Any) -> None:
        """Snapshot page table, lengths and budgets of a decode batch.

        Runs outside of CUDA graphs, in the place where SGLang promises that its token table
        is not being overwritten.
        """
        if not forward_batch.forward_mode.is_decode():
            self.end_step()
            return
        self._step = self._tables(forward_batch)
        self._rids = getattr(forward_batch, "rids", None)
        self._steps += 1
        snapshot(
            self._token_table,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            self.policy.budgets,
            self._step,
            self.counters.step,
            page_size=self.config.page_size,
            min_len=self.config.min_len,
        )

    @property
    def in_step(self) -> bool:
        return self._step is not None

    def end_step(self) -> None:
        self._step = None

    def _tables(self, forward_batch: Any) -> StepTables:
        rows = len(forward_batch.req_pool_indices)
        if self.device.type == "cpu":
            pages = -(-int(forward_batch.seq_lens.max()) // self.config.page_size)
            return StepTables.allocate(rows, pages, self.device)
        buffers = self._buffers_for(rows)
        self._workspace = buffers.workspace
        return buffers.tables.rows(rows)

    def _buffers_for(self, rows: int) -> StepBuffers:
        """The graphs' buffers, or growing ones of their own for eager batches that are larger.

        The graphs' are never replaced: captured steps go on reading their addresses.
        """
        if self._graph_buffers is not None and rows <= self._graph_buffers.max_rows:
            return self._graph_buffers
        if self._eager_buffers is None or rows > self._eager_buffers.max_rows:
            self._eager_buffers = StepBuffers.allocate(
                self.geometry, 1 << (rows - 1).bit_length(), self.device
            )
        return self._eager_buffers

    def decode(self, queries: torch.Tensor, layer: Any) -> torch.Tensor:
        """Attention of one layer over its selected pages: ``[rows, q_heads, d]`` -> same shape.

        The keys and values of the current token must be in the pool already.
        """
        step = self._step
        assert step is not None, "decode() outside of a decode step"
        index = self.summaries.index(layer.layer_id)
        keys, values = self.summaries.keys[index], self.summaries.values[index]
        selection = score_select(
            queries,
            keys,
            self.summaries.records_of(index),
            step.page_table,
            step.seq_lens,
            step.budgets,
            layer.scaling,
            width=self._width,
            workspace=self._workspace,
        )
        if self._trace is not None:
            self._write_trace(selection, step, index)
        if self._is_audited(index):
            self._audit(queries, keys, selection, step, layer.scaling)
        output, _ = attend(
            queries,
            keys,
            values,
            selection,
            step.page_table,
            step.seq_lens,
            layer.scaling,
            workspace=self._workspace,
        )
        return output

    def finish_forward(self, slots: torch.Tensor) -> None:
        """Build the summaries of the pages that this forward completed."""
        self.summaries.build(slots)
        self.counters.count_built(slots, self.config.page_size)

    def _is_audited(self, index: int) -> bool:
        """One layer in turn every ``audit_interval`` steps, so that all layers get seen."""
        interval = self.config.audit_interval
        if not interval or self._steps % interval:
            return False
        turn = self._steps // interval % len(self.sparse_layers)
        return self.summaries.index(self.sparse_layers[turn]) == index

    def _audit(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        selection: Selection,
        step: StepTables,
        sm_scale: float,
    ) -> None:
        mass = retained_mass(queries, keys, selection, step.page_table, step.seq_lens, sm_scale)
        for row in mass.mean(-1).tolist():
            self.counters.audited_rows += 1
            self.counters.audited_mass += row
            if _metrics is not None:
                _metrics.observe_mass(row)

    def _write_trace(self, selection: Selection, step: StepTables, index: int) -> None:
        """One JSON line a row: logical pages a KV head, None for a row that attends everything."""
        assert self._trace is not None
        page_size = self.config.page_size
        lengths, counts = step.seq_lens.tolist(), selection.counts.tolist()
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            restricted = count < -(-length // page_size)
            pages = selection.logical[row, :, :count].tolist() if restricted else None
            rid = self._rids[row] if self._rids else None
            line = {"rid": rid, "seq_len": length, "layer": index, "pages": pages}
            self._trace.write(json.dumps(line) + "\n")
        self._trace.flush()

    def describe(self) -> dict[str, Any]:
        """Plain values for the handshake and ``/server_info``."""
        layout = self.summaries.layout
        layers, kv_heads = len(self.summaries.keys), self.summaries.kv_heads
        return {
            "selector": self.config.selector,
            "format": layout.name if layout is not None else None,
            "budget": self.config.budget,
            "max_budget": self.config.largest_budget,
            "min_len": self.config.min_len,
            "page_size": self.config.page_size,
            "bytes_per_token": bytes_per_token(self.config, self.summaries.head_dim, kv_heads, layers),
            "summary_bytes": self.summaries.nbytes,
            "sparse_layers": len(self.sparse_layers),
            "dense_layers": {str(layer): reason for layer, reason in self.dense_layers.items()},
        }

    def log_start(self, kv_bytes: int) -> None:
        """The start-up log line."""
        status = self.describe()
        logger.info(
            "Sparse decode on: selector %s, record format %s, budget %d tokens, page %d; summaries "
            "%d bytes a token, %.3f GiB beside %.3f GiB of KV; %d layers sparse, %d dense%s",
            status["selector"],
            status["format"],
            status["budget"],
            status["page_size"],
            status["bytes_per_token"],
            status["summary_bytes"] / 2**30,
            kv_bytes / 2**30,
            status["sparse_layers"],
            len(self.dense_layers),
            "".join(f"; layer {layer}: {why}" for layer, why in self.dense_layers.items()),
        )
        if self.config.trace_file:
            logger.warning("Sparse decode writes a trace to %s", Path(self.config.trace_file).resolve())


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
