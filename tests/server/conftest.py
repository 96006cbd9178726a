"""The demo model and one server for each set of flags, started at first use and kept for the session."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from server import Server, ServerPool
from traced import LOCKS, SMALL_POOL, Run, Traced

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


@pytest.fixture(scope="session")
def traced_server(servers: ServerPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Traced]:
    """``traced_server(*flags)``: as ``servers.get``, with a trace of the selected pages. The pool is small,
    so that requests evict and retract each other."""
    folder = tmp_path_factory.mktemp("traces")
    solo: dict[tuple[str, ...], dict[tuple, Run]] = {}

    def get(*flags: str) -> Traced:
        known = solo.setdefault(flags, {})
        trace = folder / f"{list(solo).index(flags)}.jsonl"
        server = servers.get(*SMALL_POOL, *flags, "--sparse-decode-trace-file", str(trace))
        return Traced(server, trace, known)

    return get


@pytest.fixture
def locks(traced_server: Callable[..., Traced]) -> Traced:
    """The selector of the paper at a budget of 8 pages, with an empty cache."""
    return traced_server(*LOCKS)


@pytest.fixture(scope="session")
def dense_tokens(servers: ServerPool) -> Callable[[Sequence[int], int], list[int]]:
    """``dense_tokens(prompt, new)``: what SGLang without the plugin's flag generates."""
    known: dict[tuple, list[int]] = {}

    def get(prompt: Sequence[int], new: int) -> list[int]:
        key = (tuple(prompt), new)
        if key not in known:
            known[key] = servers.get().generate(prompt, new)["output_ids"]
        return known[key]

    return get


@pytest.fixture(scope="session")
def words(demo_model: Path) -> list[int]:
    """Tokens of a real text; 1,271 of them."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    return tokenizer.encode((ROOT / "tests/data/harbour.txt").read_text()).ids


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder; bound each, since a server that hangs would hold the whole run."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("server")
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(900))
