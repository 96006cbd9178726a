"""Greedy tokens, compared in a way that rounding cannot disturb.

On a CPU the servers compute in float32, and what should be the same is the same. On a GPU they compute in
bf16, where another order of sums (batch size, chunk, attention kernel) turns near ties between the two best
tokens. A near tie is therefore where a comparison may end early, and nothing else may.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from server import ON_GPU

# From float32 to bf16 the difference of the demo model's two best logits moved by 0.27 at most, and the
# best token changed only where it was below 0.11 (31 of 700 positions of tests/data/harbour.txt); with
# sparse decode at 8 pages by 0.17 at most (50 positions).
NEAR_TIE = 0.3 if ON_GPU else 0.0
# A comparison that ends before this many tokens has shown nothing: take another prompt. Those of the tests
# were chosen by their gaps on a CPU.
ENOUGH = 2

ASKED = {"return_logprob": True, "top_logprobs_num": 2}
"""What the body of a request needs for `Greedy.of`."""


@dataclass(frozen=True)
class Greedy:
    """Tokens, and by how much (log probability) each was better than the next best."""

    tokens: list[int]
    gaps: list[float]

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> "Greedy":
        """From the answer to a request that carried `ASKED`."""
        best = answer["meta_info"]["output_top_logprobs"]
        return cls(answer["output_ids"], [first[0] - second[0] for first, second in best])

    def until(self, count: int) -> "Greedy":
        """The first `count` tokens."""
        return Greedy(self.tokens[:count], self.gaps[:count])

    def since(self, count: int) -> "Greedy":
        """All but the first `count` tokens."""
        return Greedy(self.tokens[count:], self.gaps[count:])


@dataclass
class Tally:
    """How much of what was compared was really compared."""

    tokens: int = 0
    compared: int = 0
    near_ties: int = 0


tally = Tally()


def assert_same_tokens(
    found: Greedy, expected: Greedy, near_tie: float = NEAR_TIE, enough: int = ENOUGH
) -> int:
    """The same tokens, up to a near tie that fell the other way. Returns how many are the same."""
    assert len(found.tokens) == len(expected.tokens)
    same = next(
        (n for n, pair in enumerate(zip(found.tokens, expected.tokens, strict=True)) if pair[0] != pair[1]),
        len(expected.tokens),
    )
    tally.tokens += len(expected.tokens)
    tally.compared += same
    if same < len(expected.tokens):
        gap = expected.gaps[same]
        assert gap < near_tie, (
            f"token {same} is {found.tokens[same]}, expected {expected.tokens[same]}, which was better "
            f"by {gap:.3f}: {found.tokens} instead of {expected.tokens}"
        )
        tally.near_ties += 1
        assert same >= enough, f"near tie at token {same}: next to nothing was compared"
    return same
