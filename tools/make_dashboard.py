"""Write docs/grafana/sparse_decode.json, a Grafana dashboard of sparse decode beside SGLang's own metrics.

python tools/make_dashboard.py            # update the file
python tools/make_dashboard.py --check    # exit status 1 if it is out of date
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parents[1] / "docs" / "grafana" / "sparse_decode.json"
# Grafana fills in the data source that is chosen above the panels.
SOURCE = {"type": "prometheus", "uid": "${source}"}
WHERE = '{model_name=~"$model"}'
COLUMNS, WIDTH, HEIGHT = 3, 8, 8


def rate(metric: str) -> str:
    return f"sum(rate({metric}{WHERE}[$__rate_interval]))"


def quantile(q: float, histogram: str) -> str:
    return f"histogram_quantile({q}, sum by (le) (rate({histogram}_bucket{WHERE}[$__rate_interval])))"


def mean(histogram: str) -> str:
    return f"{rate(histogram + '_sum')} / {rate(histogram + '_count')}"


ROWS_SPARSE, ROWS_DENSE = rate("locks:rows_sparse_total"), rate("locks:rows_dense_total")
HITS, MISSES = rate("locks:hot_hits_total"), rate("locks:hot_misses_total")
INTER_TOKEN, FIRST_TOKEN = "sglang:inter_token_latency_seconds", "sglang:time_to_first_token_seconds"

# Title, unit, what it says, and the lines: legend -> expression.
PANELS: tuple[tuple[str, str, str, dict[str, str]], ...] = (
    (
        "Sparse share of the decode rows",
        "percentunit",
        "0 with long requests: something keeps them dense; see docs/operating.md.",
        {"sparse": f"{ROWS_SPARSE} / ({ROWS_SPARSE} + {ROWS_DENSE})"},
    ),
    (
        "Pages attended of pages present",
        "percentunit",
        "What a decode step reads of the KV cache. It falls as requests grow longer.",
        {"attended": f"{rate('locks:pages_attended_total')} / {rate('locks:pages_available_total')}"},
    ),
    (
        "Retained attention mass",
        "percentunit",
        "Of audited rows (--sparse-decode-audit-interval); empty without audits.",
        {
            "mean": mean("locks:retained_mass"),
            "worst tenth": quantile(0.1, "locks:retained_mass"),
            "median": quantile(0.5, "locks:retained_mass"),
        },
    ),
    (
        "Decode rows a second",
        "short",
        "A row is one request in one step, so this is also tokens a second.",
        {"sparse": ROWS_SPARSE, "dense": ROWS_DENSE},
    ),
    (
        "Summaries built a second",
        "short",
        "Completed pages, all layers together: prefill shows as peaks.",
        {"pages": rate("locks:summaries_built_total")},
    ),
    (
        "Rows audited a second",
        "short",
        "How much the retained mass rests on.",
        {"rows": rate("locks:retained_mass_count")},
    ),
    (
        "Time between tokens",
        "s",
        "What sparse decode is there to lower.",
        {"median": quantile(0.5, INTER_TOKEN), "99th percentile": quantile(0.99, INTER_TOKEN)},
    ),
    (
        "Time to first token",
        "s",
        "Prefill is dense; summaries add to it.",
        {"median": quantile(0.5, FIRST_TOKEN), "99th percentile": quantile(0.99, FIRST_TOKEN)},
    ),
    (
        "Generated tokens a second",
        "short",
        "SGLang's own figure.",
        {"tokens": f"sum(sglang:gen_throughput{WHERE})"},
    ),
    (
        "Requests",
        "short",
        "Running and waiting.",
        {
            "running": f"sum(sglang:num_running_reqs{WHERE})",
            "waiting": f"sum(sglang:num_queue_reqs{WHERE})",
        },
    ),
    (
        "KV pool in use",
        "percentunit",
        "Summaries are charged to the pool, so it holds fewer tokens than without them.",
        {"tokens": f"max(sglang:token_usage{WHERE})"},
    ),
    (
        "Memory of the summaries",
        "bytes",
        "Of one rank; fixed when the server starts.",
        {"rank": f"max(locks:summary_bytes{WHERE})"},
    ),
    (
        "Host tier: hot share",
        "percentunit",
        "Of the tiles that decode read, those that lay on the GPU; a low share makes the link the limit. "
        "With --sparse-decode-kv-tier host, as the next two.",
        {"hot": f"{HITS} / ({HITS} + {MISSES})"},
    ),
    (
        "Host tier: bytes over the link",
        "Bps",
        "Read for decode, prefill and summaries, and written for every new token.",
        {
            "read": rate("locks:host_bytes_read_total"),
            "written": rate("locks:host_bytes_written_total"),
        },
    ),
    (
        "Host tier: pages of the pool",
        "short",
        "Used by requests and by the prefix cache; of all ranks.",
        {
            "used": f"sum(locks:host_pages_used{WHERE})",
            "free": f"sum(locks:host_pages_free{WHERE})",
        },
    ),
)


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    return {
        "title": "SGLang sparse decode",
        "uid": "locks-sparse-decode",
        "tags": ["sglang", "sparse decode"],
        "schemaVersion": 39,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "10s",
        "templating": {"list": _variables()},
        "panels": [_panel(number, *panel) for number, panel in enumerate(PANELS)],
    }


def _variables() -> list[dict[str, Any]]:
    model = "label_values(locks:summary_bytes, model_name)"
    return [
        {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
        {
            "name": "model",
            "label": "Model",
            "type": "query",
            "datasource": SOURCE,
            "definition": model,
            "query": {"query": model, "refId": "model"},
            "refresh": 2,
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
        },
    ]


def _panel(number: int, title: str, unit: str, text: str, lines: dict[str, str]) -> dict[str, Any]:
    column, row = number % COLUMNS, number // COLUMNS
    defaults: dict[str, Any] = {"unit": unit, "min": 0}
    if unit == "percentunit":
        defaults["max"] = 1
    return {
        "id": number + 1,
        "title": title,
        "description": text,
        "type": "timeseries",
        "datasource": SOURCE,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {"refId": chr(65 + index), "datasource": SOURCE, "expr": expression, "legendFormat": legend}
            for index, (legend, expression) in enumerate(lines.items())
        ],
    }


def text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 if out of date")
    if parser.parse_args().check:
        return 0 if FILE.exists() and FILE.read_text() == text() else 1
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(text())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
