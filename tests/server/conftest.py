"""The demo model and one server for each set of flags, kept for the session.

On a CPU a server starts at first use. On a GPU all that the selected tests need start side by side, and
most tests run once for each attention backend.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import greedy
import pytest
from greedy import Greedy
from server import ON_GPU, Server, ServerPool
from traced import LOCKS, SMALL_POOL, Run, Traced, pages_tally

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests/probe"))
import locks_test_probe  # noqa: E402

# Attention backend -> the flags that choose it. A CPU has one, which `locks_sglang.cpu_stand_ins` names.
BACKENDS: dict[str, tuple[str, ...]] = (
    {name: ("--attention-backend", name) for name in ("fa3", "flashinfer")} if ON_GPU else {"cpu": ()}
)
# Batches of more than two rows decode outside of the graphs.
SPARSE = (*SMALL_POOL, *LOCKS, *(("--cuda-graph-max-bs", "2") if ON_GPU else ()))
# Seven pages a chunk (SGLang refuses what is not a multiple of the page), nothing cached, no graphs.
CHUNK = 112
ODD = ("--chunked-prefill-size", str(CHUNK), "--disable-radix-cache")
ODD_FLAGS = (*SMALL_POOL, *LOCKS, *ODD, *(("--disable-cuda-graph",) if ON_GPU else ()))
# The pool in host memory, a hot cache of some tiles, prefill in the chunks of a CPU server.
HOST_CHUNK = 512
HOST_FLAGS = (
    *(*SPARSE, "--sparse-decode-kv-tier", "host", "--sparse-decode-hot-gib", "0.004"),
    *("--sparse-decode-host-gib", "0.25", "--chunked-prefill-size", str(HOST_CHUNK)),
)
# Tests that show on a GPU what they show on a CPU; those of files *_gpu.py run on a GPU alone.
ALSO_ON_GPU = (
    *("exact_budget", "exact_reuse", "exact_batches", "exact_selection", "across_devices"),
    *("chunked_prefill", "per_request", "observed", "tensor_parallel", "fp8_server", "host_tier"),
)

# Importing it takes as long as a server takes to do so, and only servers need it.
if find_spec("sglang") is None:
    pytest.skip("the server tests need sglang (make env)", allow_module_level=True)


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Flags that choose the attention backend."""
    return BACKENDS[request.param]


@pytest.fixture(scope="session")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...]], Path]:
    """``traces(flags)``: the file that a server with these flags writes its trace to."""
    folder = tmp_path_factory.mktemp("traces")
    known: dict[tuple[str, ...], Path] = {}
    return lambda flags: known.setdefault(flags, folder / f"{len(known)}.jsonl")


@pytest.fixture(scope="session")
def probe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of servers that keep the queries and keys behind a selection (`probed.samples`)."""
    return locks_test_probe.install(tmp_path_factory.mktemp("probe") / "plugin")


@pytest.fixture(scope="session")
def servers(
    demo_model: Path,
    probe: dict[str, str],
    traces: Callable[[tuple[str, ...]], Path],
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[ServerPool]:
    """``servers.get(*flags)``: a running server with these flags and an empty cache."""
    pool = ServerPool(demo_model, tmp_path_factory.mktemp("servers"), 14 if ON_GPU else 2, probe)
    try:
        if ON_GPU:
            pool.start(*wanted_together(request.session.items, traces))
        yield pool
    finally:
        pool.close()


def wanted_together(
    items: Sequence[pytest.Item], traces: Callable[[tuple[str, ...]], Path]
) -> set[tuple[str, ...]]:
    """Flags of the servers that the selected tests get from fixtures of this file."""
    wanted = set()
    for item in items:
        if "backend" in (parameters := item.callspec.params if hasattr(item, "callspec") else {}):
            chosen = BACKENDS[parameters["backend"]]
            if {"dense_server", "dense_tokens"} & set(item.fixturenames):
                wanted.add(chosen)
            for fixture, flags in (("locks", SPARSE), ("odd", ODD_FLAGS), ("host", HOST_FLAGS)):
                if fixture in item.fixturenames:
                    wanted.add(with_trace((*flags, *chosen), traces))
        for marker in item.iter_markers("launches"):
            wanted.add(marker.args)
    return wanted


def with_trace(flags: tuple[str, ...], traces: Callable[[tuple[str, ...]], Path]) -> tuple[str, ...]:
    return (*flags, "--sparse-decode-trace-file", str(traces(flags)))


@pytest.fixture
def dense_server(servers: ServerPool, backend: tuple[str, ...]) -> Server:
    """SGLang without the plugin's flag."""
    return servers.get(*backend)


@pytest.fixture(scope="session")
def traced_server(servers: ServerPool, traces: Callable[[tuple[str, ...]], Path]) -> Callable[..., Traced]:
    """``traced_server(*flags)``: as ``servers.get``, with a trace of the selected pages. The pool should be
    small (`SMALL_POOL`), so that requests evict and retract each other."""
    solo: dict[tuple[str, ...], dict[tuple, Run]] = {}

    def get(*flags: str) -> Traced:
        server = servers.get(*with_trace(flags, traces))
        return Traced(server, traces(flags), solo.setdefault(flags, {}))

    return get


@pytest.fixture
def locks(traced_server: Callable[..., Traced], backend: tuple[str, ...]) -> Traced:
    """The selector of the paper at a budget of 8 pages, with an empty cache."""
    return traced_server(*SPARSE, *backend)


@pytest.fixture
def odd(traced_server: Callable[..., Traced], backend: tuple[str, ...]) -> Traced:
    """As `locks`, but prefill in chunks of 7 pages, no prefix cache, no CUDA graphs."""
    return traced_server(*ODD_FLAGS, *backend)


@pytest.fixture
def host(traced_server: Callable[..., Traced], backend: tuple[str, ...]) -> Traced:
    """As `locks`, with its KV pool in host memory."""
    return traced_server(*HOST_FLAGS, *backend)


@pytest.fixture(scope="session")
def dense_tokens(servers: ServerPool, backend: tuple[str, ...]) -> Callable[[Sequence[int], int], Greedy]:
    """``dense_tokens(prompt, new)``: what SGLang without the plugin's flag generates."""
    known: dict[tuple, Greedy] = {}

    def get(prompt: Sequence[int], new: int) -> Greedy:
        key = (tuple(prompt), new)
        if key not in known:
            server = servers.get(*backend)
            known[key] = Greedy.of(server.generate(prompt, new, **greedy.ASKED))
        return known[key]

    return get


@pytest.fixture(scope="session")
def words(demo_model: Path) -> list[int]:
    """Tokens of a real text; 1,271 of them."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    return tokenizer.encode((ROOT / "tests/data/harbour.txt").read_text()).ids


@pytest.fixture(scope="session", autouse=True)
def how_much_was_compared(
    record_testsuite_property: Callable[[str, object], None],
) -> Iterator[None]:
    """For the report: comparisons end early at near ties, and some slots move by rounding."""
    yield
    for tally, found in (("greedy", greedy.tally), ("pages", pages_tally)):
        for name, value in vars(found).items():
            record_testsuite_property(f"{tally}_{name}", value)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder; bound each, since a server that hangs would hold the whole run."""
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    if not ON_GPU:  # there all start at once
        items[:] = [item for item in items if item not in here] + in_order_of_servers(here)
    for item in here:
        item.add_marker("server")
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(300 if ON_GPU else 900))
        if item.path.stem.endswith("_gpu"):
            item.add_marker("gpu")
            if not ON_GPU:
                item.add_marker(pytest.mark.skip("needs an NVIDIA GPU"))
        elif ON_GPU and item.path.stem.removeprefix("test_") in ALSO_ON_GPU:
            item.add_marker("gpu")


def in_order_of_servers(items: list[pytest.Item]) -> list[pytest.Item]:
    """Files that need the same servers follow each other: a pool of two then starts each server once."""
    server_of = {
        "dense_server": "dense",
        "dense_tokens": "dense",
        "locks": "locks",
        "odd": "odd",
        "host": "host",
    }
    order = [{"dense"}, {"dense", "locks"}, {"locks"}, {"locks", "odd"}, {"locks", "host"}]
    needed: dict[Path, set[str]] = {}
    for item in items:
        found = {server_of[name] for name in getattr(item, "fixturenames", ()) if name in server_of}
        needed.setdefault(item.path, set()).update(found)

    def place(item: pytest.Item) -> int:
        return order.index(needed[item.path]) if needed[item.path] in order else len(order)

    return sorted(items, key=place)
