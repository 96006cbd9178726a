"""The demo model and one server for each set of flags, started at first use and kept for the session."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from server import Server, ServerPool

ROOT = Path(__file__).parents[2]

pytest.importorskip("sglang", reason="the server tests need sglang (make env)")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Folder of the demo model; made at first use."""
    from locks_sglang import demo_model

    return demo_model.ensure(ROOT / demo_model.DEFAULT_OUT)


@pytest.fixture(scope="session")
def servers(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    """``servers.get(*flags)``: a running server with these flags and an empty cache."""
    pool = ServerPool(demo_model, tmp_path_factory.mktemp("servers"))
    try:
        yield pool
    finally:
        pool.close()


@pytest.fixture
def dense_server(servers: ServerPool) -> Server:
    """SGLang without the plugin's flag."""
    return servers.get()


@pytest.fixture
def sparse_server(servers: ServerPool) -> Server:
    """``--sparse-decode locks`` with a budget of 512 tokens."""
    return servers.get("--sparse-decode", "locks", "--sparse-decode-budget", "512")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder; bound each, since a server that hangs would hold the whole run."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("server")
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(600))
