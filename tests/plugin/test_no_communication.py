"""A decode step of the plugin talks to no other rank: each selects for its own KV heads alone."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from locks_sglang.config import LocksConfig
from rig import Rig
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

LENGTHS = [700, 47, 320]


class Namespaces(TorchDispatchMode):
    """Those of the operators that ran: torch's collectives are not in ``aten``, nor are SGLang's own."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func.namespace)
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def second_of_two_ranks() -> Iterator[None]:
    """As far as the process can tell; what it sends goes nowhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield
    dist.destroy_process_group()


def step(selector: str, collective: bool = False) -> set[str]:
    """What a decode step calls, from its tables to the records of completed pages and the audit."""
    rig = Rig(LocksConfig(selector=selector, budget=128, audit_interval=1), LENGTHS, rank=1)
    queries, batch = rig.queries(len(LENGTHS)), rig.batch(LENGTHS)
    with Namespaces() as namespaces:
        rig.state.begin_step(batch)
        outputs = rig.run_layers(queries)
        if collective:
            dist.all_reduce(outputs[0])
        rig.state.finish_step(batch)
        rig.state.finish_forward(rig.token_table[1, :64].long())
    assert rig.state.counters.to_dict()["rows_sparse"]
    return namespaces.seen


@pytest.mark.parametrize("selector", ["locks", "quest", "oracle"])
def test_a_step_runs_no_collective(selector: str) -> None:
    assert step(selector) == {"aten"}


def test_one_would_be_seen() -> None:
    assert step("locks", collective=True) == {"aten", "c10d"}
