"""What is evaluated: tasks of lm-evaluation-harness with the settings that the paper names.

A recipe fixes everything but the model and the arm: FullKV and every sparse arm see the same prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

RULER_SYNTHETIC = {
    "niah_single_1": "NIAH-S1",
    "niah_multikey_2": "NIAH-MK2",
    "niah_multikey_3": "NIAH-MK3",
    "ruler_vt": "VT",
    "ruler_cwe": "CWE",
    "ruler_fwe": "FWE",
}
RULER = {
    **RULER_SYNTHETIC,
    "niah_single_2": "NIAH-S2",
    "niah_single_3": "NIAH-S3",
    "niah_multikey_1": "NIAH-MK1",
    "niah_multivalue": "NIAH-MV",
    "niah_multiquery": "NIAH-MQ",
    "ruler_qa_squad": "QA-1",
    "ruler_qa_hotpot": "QA-2",
}
# LongBench's own code gives these to the model as they are, without a chat template.
LONGBENCH_PLAIN = ("trec", "triviaqa", "samsum")
LONGBENCH = (
    *("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "dureader"),
    *("gov_report", "qmsum", "multi_news", *LONGBENCH_PLAIN, "passage_retrieval_en"),
)
INFINITEBENCH = {
    "passkey": "passkey",
    "number_string": "num-str",
    "kv_retrieval": "kv-retr",
    "longdialogue_qa_en": "dialog-qa",
    "longbook_sum_en": "book-sum",
    "longbook_choice_en": "book-choice",
    "longbook_qa_en": "book-qa-en",
    "longbook_qa_chn": "book-qa-zh",
    "math_find": "math-find",
    "code_run": "code-run",
    "code_debug": "code-debug",
}
BOXED = "{{problem}}\nPlease reason step by step, and put your final answer within \\boxed{}."
# What Qwen3's model card asks for in thinking mode.
QWEN3_THINKING = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "until": []}


@dataclass(frozen=True)
class Recipe:
    """One evaluation.

    Args:
        tasks: lm-evaluation-harness task -> its row in the paper's table.
        metric: of every task, as the harness names it.
        model: the paper's.
        data: what the harness downloads at the first run; None where it makes the prompts itself.
        paper: table of ``paper.json`` to compare with; None is the recipe's own name.
        length: tokens of a RULER prompt, answer included.
        limit: prompts a task; None is all.
        plain: tasks whose prompts get no chat template.
        overrides: of the tasks' own configuration in the harness.
        repeats: independent answers a prompt, averaged.
        think_end: what ends a reasoning trace; only what follows is scored.
        tolerance: points that FullKV's mean may be off the paper's before sparse arms are refused.
    """

    tasks: Mapping[str, str]
    metric: str
    model: str
    data: str | None
    paper: str | None = None
    length: int | None = None
    limit: int | None = None
    plain: tuple[str, ...] = ()
    overrides: Mapping[str, Any] = field(default_factory=dict)
    repeats: int = 1
    think_end: str | None = None
    tolerance: float = 1.0


def ruler(length: int) -> Recipe:
    return Recipe(
        tasks=RULER,
        metric=str(length),
        model="meta-llama/Llama-3.1-8B-Instruct",
        data="Paul Graham's essays (GitHub), SQuAD and HotpotQA, NLTK's punkt_tab",
        length=length,
        limit=50,
    )


RECIPES = {
    "ruler-synthetic": Recipe(
        tasks=RULER_SYNTHETIC,
        metric="length",
        model="meta-llama/Llama-3.1-8B-Instruct",
        data=None,
        paper="ruler-16k",
        length=4096,
        limit=50,
    ),
    "ruler-16k": ruler(16384),
    "ruler-32k": ruler(32768),
    "longbench": Recipe(
        tasks={f"longbench_{name}": name for name in LONGBENCH},
        metric="score",
        model="meta-llama/Llama-3.1-8B-Instruct",
        data="Xnhyacinth/LongBench (Hugging Face)",
        plain=tuple(f"longbench_{name}" for name in LONGBENCH_PLAIN),
        tolerance=0.5,
    ),
    "infinitebench": Recipe(
        tasks={f"infinitebench_{name}": row for name, row in INFINITEBENCH.items()},
        metric="score",
        model="zai-org/glm-4-9b-chat-1m",
        data="xinrongzhang2022/InfiniteBench (Hugging Face)",
        limit=50,
        tolerance=2.1,
    ),
    "math500": Recipe(
        tasks={"minerva_math500": "MATH-500"},
        metric="math_verify",
        model="Qwen/Qwen3-4B",
        data="HuggingFaceH4/MATH-500 (Hugging Face)",
        limit=50,
        overrides={
            "num_fewshot": 0,
            "doc_to_text": BOXED,
            "generation_kwargs": {**QWEN3_THINKING, "max_gen_toks": 16384},
        },
        repeats=4,
        think_end="</think>",
        tolerance=3.0,
    ),
    "aime26": Recipe(
        tasks={"aime25": "AIME26"},
        metric="exact_match",
        model="Qwen/Qwen3-4B",
        data="MathArena/aime_2026 (Hugging Face)",
        overrides={
            "dataset_path": "MathArena/aime_2026",
            "test_split": "train",
            "fewshot_split": None,
            "training_split": None,
            "doc_to_text": BOXED,
            "generation_kwargs": {**QWEN3_THINKING, "max_gen_toks": 38912},
        },
        repeats=4,
        think_end="</think>",
        tolerance=5.0,
    ),
}
