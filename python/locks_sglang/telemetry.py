"""What can be seen from outside: counters, the decode log line, /server_info, Prometheus."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

# Prometheus metrics: name -> (kind, help).  docs/reference.md lists them; a test compares.
METRICS = {
    "locks:rows_sparse": ("counter", "Decode rows that attended fewer pages than they had."),
    "locks:rows_dense": (
        "counter",
        "Decode rows that attended all their pages: short, or dense by request.",
    ),
    "locks:pages_attended": ("counter", "Pages attended, per KV head and layer, summed over rows."),
    "locks:pages_available": ("counter", "Pages present, per KV head and layer, summed over rows."),
    "locks:summaries_built": ("counter", "Pages whose summaries were built, all layers together."),
    "locks:summary_bytes": ("gauge", "Bytes of the summaries of this rank."),
    "locks:retained_mass": (
        "histogram",
        "Share of the exact attention mass on the selected pages, per audited row.",
    ),
}
_MASS_BUCKETS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.925, 0.95, 0.97, 0.98, 0.99, 0.995, 1.0)


@dataclass
class Counters:
    """Totals since the start of the server."""

    rows_sparse: int = 0
    rows_dense: int = 0
    pages_attended: int = 0
    pages_available: int = 0
    summaries_built: int = 0
    audited_rows: int = 0
    audited_mass: float = 0.0
    _reported: dict[str, int] = field(default_factory=dict, repr=False)

    def count_step(self, seq_lens: torch.Tensor, budgets: torch.Tensor, page_size: int) -> None:
        """Count the rows and pages of one decode step; ``seq_lens`` and ``budgets`` are ``[rows]``."""
        available = (seq_lens.long() + page_size - 1) // page_size
        attended = torch.minimum(available, budgets.long())
        sparse = int((attended < available).sum())
        self.rows_sparse += sparse
        self.rows_dense += len(available) - sparse
        self.pages_attended += int(attended.sum())
        self.pages_available += int(available.sum())

    def count_built(self, slots: torch.Tensor, page_size: int) -> None:
        self.summaries_built += int((slots % page_size == page_size - 1).sum())

    @property
    def retained_mass(self) -> float | None:
        """Mean retained mass of the audited rows; None before the first audit."""
        return self.audited_mass / self.audited_rows if self.audited_rows else None

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.totals(),
            "audited_rows": self.audited_rows,
            "retained_mass": self.retained_mass,
        }

    def log_line(self) -> str:
        """Text of the decode log line, over the time since the last one."""
        since = {name: value - self._reported.get(name, 0) for name, value in self.totals().items()}
        self._reported = self.totals()
        available = since["pages_available"]
        share = 100 * since["pages_attended"] / available if available else 100.0
        mass = self.retained_mass
        audit = f", retained mass: {mass:.4f}" if mass is not None else ""
        return (
            f"Sparse decode, #sparse-row: {since['rows_sparse']}, #dense-row: {since['rows_dense']}, "
            f"pages attended: {since['pages_attended']} of {available} ({share:.1f} %), "
            f"#summary: {since['summaries_built']}{audit}"
        )

    def totals(self) -> dict[str, int]:
        """The counters that Prometheus exports, by the name of their metric."""
        return {
            "rows_sparse": self.rows_sparse,
            "rows_dense": self.rows_dense,
            "pages_attended": self.pages_attended,
            "pages_available": self.pages_available,
            "summaries_built": self.summaries_built,
        }


class PrometheusMetrics:
    """The metrics of :data:`METRICS`; made once SGLang has set up its own collector."""

    def __init__(self, labels: dict[str, str]) -> None:
        # SGLang sets PROMETHEUS_MULTIPROC_DIR first; importing earlier would miss it.
        from prometheus_client import Counter, Gauge, Histogram

        self._labels = labels
        self._published: dict[str, int] = {}
        self._counters = {}
        for name, (kind, text) in METRICS.items():
            if kind == "counter":
                self._counters[name] = Counter(name, text, labelnames=labels.keys())
        gauge = "locks:summary_bytes"
        self._summary_bytes = Gauge(
            gauge, METRICS[gauge][1], labelnames=labels.keys(), multiprocess_mode="mostrecent"
        ).labels(**labels)
        mass = "locks:retained_mass"
        self._mass = Histogram(
            mass, METRICS[mass][1], labelnames=labels.keys(), buckets=_MASS_BUCKETS
        ).labels(**labels)

    def publish(self, counters: Counters, summary_bytes: int) -> None:
        """Add what was counted since the last call."""
        self._summary_bytes.set(summary_bytes)
        for name, total in counters.totals().items():
            metric = self._counters[f"locks:{name}"].labels(**self._labels)
            metric.inc(total - self._published.get(name, 0))
            self._published[name] = total

    def observe_mass(self, mass: float) -> None:
        self._mass.observe(mass)
