"""Needles in a text of 2,000 tokens: LOCKS finds them at b = 256 as dense attention does, Quest fewer.

Text prefill is dense; the question's last words and the answer go through sparse decode.
"""

from pathlib import Path

import pytest
from locks_sglang import demo_model
from locks_sglang.fidelity.capture import load_model
from sparse_transformers import Decoder, prefill

# A busy machine takes several times as long as an idle one.
pytestmark = pytest.mark.timeout(1200)

DATA = Path(__file__).parent / "data"
BUDGET = 256
SELECTORS = ("dense", "r6h", "quest")
FACTS = (
    ("The password of the night clerk is", " falcon"),
    ("The name of the captain's parrot was", " Bertram"),
    ("A ticket to the museum costs", " 47 crowns"),
    ("The train to the capital leaves from platform", " nine"),
    ("The treasure was buried under the", " walnut tree"),
    ("The secret number of the blue door is", " 7391"),
    ("The best soup in town is made of", " pumpkin"),
)


def haystack() -> str:
    """The two texts with one sentence a fact, spread evenly between their paragraphs."""
    paragraphs = "\n\n".join(
        (DATA / name).read_text().strip() for name in ("harbour.txt", "observatory.txt")
    ).split("\n\n")
    for number, (question, answer) in reversed(list(enumerate(FACTS))):
        place = round((number + 0.5) * len(paragraphs) / len(FACTS))
        paragraphs.insert(place, f"{question}{answer}.")
    return "\n\n".join(paragraphs)


@pytest.fixture(scope="module")
def results() -> dict[str, tuple[int, float]]:
    """By selector: how many facts greedy decoding gives, and the answers' mean log-probability."""
    demo_model.ensure(demo_model.DEFAULT_OUT)
    model, tokenizer = load_model(demo_model.DEFAULT_OUT)

    def tokens(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    prompt = (
        f"<|im_start|>user\nRead the text and repeat the facts.\n\n{haystack()}\n\n"
        "Which facts does the text hold?<|im_end|>\n<|im_start|>assistant\n"
    )
    text = prefill(model, tokens(prompt))
    assert 2000 < text.tokens < 2300
    questions = [tokens(question) for question, _ in FACTS]
    answers = [tokens(answer) for _, answer in FACTS]
    steps = max(map(len, questions)) + max(map(len, answers))
    results = {}
    for selector in SELECTORS:
        judged = Decoder(model, text, len(FACTS), steps, selector, BUDGET).judge(questions, answers)
        found = sum(exact for exact, _ in judged)
        likely = sum(value for _, value in judged) / len(judged)
        results[selector] = found, likely
        print(f"{selector:6s} {found} of {len(FACTS)} facts, mean log-probability {likely:.3f}", flush=True)
        print(
            "      ",
            ", ".join(f"{a.strip()} {v:.2f}" for (_, a), (_, v) in zip(FACTS, judged, strict=True)),
            flush=True,
        )
    return results


def test_the_model_can_do_it_at_all(results):
    assert results["dense"][0] >= len(FACTS) - 1


def test_locks_answers_as_well_as_dense(results):
    assert results["r6h"][0] >= results["dense"][0]
    assert results["r6h"][1] > results["dense"][1] - 0.3


def test_quest_answers_worse(results):
    assert results["quest"][0] < results["r6h"][0]
    assert results["quest"][1] < results["r6h"][1] - 0.5
