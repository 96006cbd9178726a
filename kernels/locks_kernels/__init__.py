"""LOCKS kernels: page summaries, page scores, page selection and sparse attention.

Pure functions on tensors, usable with any paged KV cache; nothing here knows SGLang.
"""

from .attend import attend
from .audit import retained_mass
from .layout import (
    EnvelopeLayout,
    Envelopes,
    Records,
    Summaries,
    SummaryLayout,
    page_view,
)
from .score import PageScores, score
from .score_select import score_select
from .select import ATTEND_ALL, Selection, select
from .snapshot import StepTables, snapshot
from .summarize import summarize

__all__ = [
    "ATTEND_ALL",
    "EnvelopeLayout",
    "Envelopes",
    "PageScores",
    "Records",
    "Selection",
    "StepTables",
    "Summaries",
    "SummaryLayout",
    "attend",
    "page_view",
    "retained_mass",
    "score",
    "score_select",
    "select",
    "snapshot",
    "summarize",
]
