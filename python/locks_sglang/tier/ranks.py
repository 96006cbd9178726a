"""What the ranks of a server tell each other before they allocate, so that all refuse together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from ..config import LocksError

T = TypeVar("T")


def gather(value: T) -> list[T]:
    """The values of all ranks, in their order.  Every rank must call it."""
    from sglang.srt.distributed.parallel_state import get_world_group

    group = get_world_group()
    if group.world_size == 1:
        return [value]
    found: list = [None] * group.world_size
    torch.distributed.all_gather_object(found, value, group=group.cpu_group)
    return found


def rank() -> int:
    from sglang.srt.distributed.parallel_state import get_world_group

    return get_world_group().rank_in_group


def together(step: Callable[[], T], undo: Callable[[T], None] | None = None) -> T:
    """Run a step on every rank; where it fails on one, all fail with the first rank's message.

    Args:
        step: raises LocksError where it cannot be done.
        undo: takes back what the step did on a rank where it went well.

    Raises:
        LocksError: on every rank.
    """
    done, wrong = None, None
    try:
        done = step()
    except LocksError as error:
        wrong = str(error)
    said = [text for text in gather(wrong) if text is not None]
    if said:
        if wrong is None and undo is not None:
            undo(done)  # type: ignore[arg-type]
        raise LocksError(said[0])
    return done  # type: ignore[return-value]
