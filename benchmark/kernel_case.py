"""The cases of kernel_floor.py: one layer's decode step, the bytes that each op must move, a row."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from locks_kernels import SummaryLayout

PAGE = 16
COLD_BYTES = 300e6  # what a graph reads before it comes back to the first set: six times the L2
MOST_SETS = 24


@dataclass(frozen=True)
class Case:
    """One layer's decode step."""

    model: str
    kv_heads: int
    group: int
    head_dim: int
    context: int
    batch: int
    format: str
    budget_pages: int
    table_tokens: int = 0
    """What the page table has room for, as in a server; 0: for the request."""

    @property
    def table_pages(self) -> int:
        return max(self.row_pages, self.table_tokens // PAGE)

    @property
    def q_heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def row_pages(self) -> int:
        return self.context // PAGE

    @property
    def record_bytes(self) -> int:
        layout = SummaryLayout.parse(self.format, self.head_dim, PAGE)
        return self.batch * self.row_pages * self.kv_heads * layout.bytes_per_page

    @property
    def sets(self) -> int:
        """Sets of records that a graph goes through, so that each is read from memory, not from L2."""
        return max(2, min(MOST_SETS, round(COLD_BYTES / self.record_bytes)))

    def moved(self, op: str) -> int:
        """Bytes that any implementation of an op reads and writes: records in the paper's size, fp32
        scores, bf16 keys and values."""
        scores = 4 * self.batch * self.q_heads * self.row_pages
        attended = 2 * 2 * self.batch * self.kv_heads * self.budget_pages * PAGE * self.head_dim
        keys = 2 * self.batch * self.context * self.kv_heads * self.head_dim
        return {
            "score": self.record_bytes + scores,
            "select": scores,
            "path": self.record_bytes + scores,
            "attend": attended,
            "layer": self.record_bytes + scores + attended,
            "summarize": self.record_bytes + keys,
            "dense": 2 * keys,
        }[op]


def row(
    case: Case,
    op: str,
    impl: str,
    moved: int,
    timed: tuple[float, float, float],
    note: str | None = None,
) -> dict:
    """A row of the results file from median, least and most microseconds."""
    fields = {key: value for key, value in asdict(case).items() if key != "budget_pages"}
    if not case.table_tokens:
        del fields["table_tokens"]
    us, least, most = (round(value, 2) for value in timed)
    measured = {
        "op": op,
        "impl": impl,
        **fields,
        "page": PAGE,
        "us": us,
        "us_min": least,
        "us_max": most,
        "bytes": moved,
    }
    return measured if note is None else {**measured, "note": note}
