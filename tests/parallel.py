"""Several workers of pytest-xdist (``-n 2``): tests of a file, and tests that share servers, stay on one.

What takes long begins first, so that the workers end at about the same time. Without ``-n`` nothing here
is used.
"""

from pathlib import PurePath
from typing import Any

import pytest

# Files of tests/server that start servers which no other file uses.
OWN_SERVERS = ("test_tensor_parallel", "test_does_not_start", "test_serve_demo", "test_throughput_starts")
# Other files that take more than ten seconds, the longest first.
SLOW = (
    *("test_build", "test_needles", "test_real_keys", "test_newest_sglang", "test_patches", "test_docker"),
    *("test_tier_cases", "test_tier"),
)


def unit_of(file: str) -> str:
    """Name of the tests that run on the same worker, in their order, as this file's."""
    path = PurePath(file)
    return "servers" if path.parent.name == "server" and path.stem not in OWN_SERVERS else file


def place_of(file: str) -> int:
    """Sort key: shared servers, other servers, slow files, the rest."""
    path = PurePath(file)
    if path.parent.name == "server":
        return int(unit_of(file) != "servers")
    return 2 + (SLOW.index(path.stem) if path.stem in SLOW else len(SLOW))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hands out whole units in the order of collection, whatever ``--dist`` says."""
    from xdist.scheduler import LoadFileScheduling

    class ByUnit(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(super()._split_scope(nodeid))

    config.option.loadscopereorder = False
    return ByUnit(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: place_of(item.location[0]))
