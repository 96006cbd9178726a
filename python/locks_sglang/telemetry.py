"""What can be seen from outside: counters, the decode log line, /server_info, Prometheus."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from locks_kernels.snapshot import COUNTERS

# Prometheus metrics: name -> (kind, help).  docs/reference.md lists them; a test compares.
METRICS = {
    "locks:rows_sparse": ("counter", "Decode rows that attended fewer pages than they had."),
    "locks:rows_dense": (
        "counter",
        "Decode rows that attended all their pages: short, dense by request, or in a step that ran dense.",
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
# With --sparse-decode-kv-tier host, beside those.
TIER_METRICS = {
    "locks:hot_hits": ("counter", "Tiles that decode read from the hot cache."),
    "locks:hot_misses": ("counter", "Tiles that decode read and the hot cache did not hold."),
    "locks:host_bytes_read": (
        "counter",
        "Bytes read from the host's KV pool: tiles for decode, prefixes for prefill, keys for summaries.",
    ),
    "locks:host_bytes_written": ("counter", "Bytes written to the host's KV pool."),
    "locks:host_pages_used": ("gauge", "Pages of the host's KV pool in use, by the prefix cache too."),
    "locks:host_pages_free": ("gauge", "Pages of the host's KV pool that are free."),
}
_MASS_BUCKETS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.925, 0.95, 0.97, 0.98, 0.99, 0.995, 1.0)


class Counters:
    """Totals since the start of the server.

    Counted on the device of the pool, inside the steps, and read back only when somebody
    asks: reading every step would cost a host synchronisation.  Steps that run dense are counted
    on the host.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.step = torch.zeros(len(COUNTERS), dtype=torch.int64, device=device)
        self._built = torch.zeros(1, dtype=torch.int64, device=device)
        self._on_host: Counter[str] = Counter()
        self.audited_rows = 0
        self._mass: dict[int, tuple[int, float]] = {}
        self._reported: dict[str, int] = {}
        self._new_mass = (0, 0.0)
        self._latest_mass: float | None = None

    def count_built(self, slots: torch.Tensor, page_size: int) -> None:
        """Count the pages that the writes to ``slots`` completed."""
        self._built += (slots % page_size == page_size - 1).sum()

    def count_dense(self, rows: int, pages: int, built: int) -> None:
        """Count a step that ran dense: its requests, their pages, and the pages that it completed."""
        self._on_host.update(
            rows_dense=rows, pages_attended=pages, pages_available=pages, summaries_built=built
        )

    def observe_mass(self, layer: int, mass: float) -> None:
        """Count one audited row of a model layer."""
        self.audited_rows += 1
        rows, total = self._mass.get(layer, (0, 0.0))
        self._mass[layer] = (rows + 1, total + mass)
        rows, total = self._new_mass
        self._new_mass = (rows + 1, total + mass)

    @property
    def retained_mass(self) -> float | None:
        """Mean retained mass of the audited rows; None before the first audit."""
        total = sum(total for _, total in self._mass.values())
        return total / self.audited_rows if self.audited_rows else None

    def totals(self) -> dict[str, int]:
        """The counters that Prometheus exports, by the name of their metric."""
        values = torch.cat([self.step, self._built]).tolist()
        names = (*COUNTERS, "summaries_built")
        return {name: value + self._on_host[name] for name, value in zip(names, values, strict=True)}

    def to_dict(self) -> dict[str, Any]:
        layers = {str(layer): total / rows for layer, (rows, total) in sorted(self._mass.items())}
        audit = {
            "audited_rows": self.audited_rows,
            "retained_mass": self.retained_mass,
            "retained_mass_by_layer": layers,
        }
        return {**self.totals(), **audit}

    def log_line(self) -> str:
        """Text of the decode log line, over the time since the last one.

        The retained mass is that of the newest audits, which may be older than that.
        """
        totals = self.totals()
        since = {name: value - self._reported.get(name, 0) for name, value in totals.items()}
        self._reported = totals
        available = since["pages_available"]
        share = 100 * since["pages_attended"] / available if available else 100.0
        rows, total = self._new_mass
        if rows:
            self._latest_mass, self._new_mass = total / rows, (0, 0.0)
        audit = f", retained mass: {self._latest_mass:.4f}" if self._latest_mass is not None else ""
        return (
            f"Sparse decode, #sparse-row: {since['rows_sparse']}, #dense-row: {since['rows_dense']}, "
            f"pages attended: {since['pages_attended']} of {available} ({share:.1f} %), "
            f"#summary: {since['summaries_built']}{audit}"
        )


class PrometheusMetrics:
    """The metrics of :data:`METRICS`; made once SGLang has set up its own collector.

    Args:
        labels: of every sample.
        host_tier: whether those of :data:`TIER_METRICS` are there too.
    """

    def __init__(self, labels: dict[str, str], host_tier: bool = False) -> None:
        # SGLang sets PROMETHEUS_MULTIPROC_DIR first; importing earlier would miss it.
        from prometheus_client import Counter, Gauge, Histogram

        self._labels = labels
        self._published: dict[str, int] = {}
        self._counters, self._gauges = {}, {}
        names = list(labels)
        for name, (kind, text) in {**METRICS, **(TIER_METRICS if host_tier else {})}.items():
            if kind == "counter":
                self._counters[name] = Counter(name, text, labelnames=names)
            elif kind == "gauge":
                gauge = Gauge(name, text, labelnames=names, multiprocess_mode="mostrecent")
                self._gauges[name] = gauge
        mass = "locks:retained_mass"
        self._mass = Histogram(
            mass, METRICS[mass][1], labelnames=labels.keys(), buckets=_MASS_BUCKETS
        ).labels(**labels)

    def publish(self, counters: dict[str, int], gauges: dict[str, int]) -> None:
        """Add what was counted since the last call; names are those of the metrics without ``locks:``."""
        for name, value in gauges.items():
            self._gauges[f"locks:{name}"].labels(**self._labels).set(value)
        for name, total in counters.items():
            metric = self._counters[f"locks:{name}"].labels(**self._labels)
            metric.inc(total - self._published.get(name, 0))
            self._published[name] = total

    def observe_mass(self, mass: float) -> None:
        self._mass.observe(mass)
