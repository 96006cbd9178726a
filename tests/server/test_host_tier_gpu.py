"""A host tier as shipped: default sizes, all graphs, prefill's too."""

import pytest
from server import AS_SHIPPED, ServerPool

# Not started beside the others: of what is free of the GPU when it starts, a share has to be left when the
# weights are loaded. A small one, since it needs little, and kernel tests take and give memory meanwhile.
SHIPPED = (
    *(AS_SHIPPED, "--sparse-decode", "locks", "--mem-fraction-static", "0.8"),
    *("--sparse-decode-kv-tier", "host", "--sparse-decode-host-gib", "4"),
)


def test_it_serves(servers: ServerPool) -> None:
    server = servers.get(*SHIPPED)
    # In bf16 the demo model's chat answer names no city, dense either (seen on an H200).
    assert "Paris" in server.generate("The capital of France is", 8)["text"]
    before = server.locks_info()
    long = "The keeper wrote the weather into the log book. " * 600
    server.generate(long, 16)
    again = server.generate(long + "Then", 16)
    assert again["meta_info"]["cached_tokens"] > 5000
    info = server.locks_info()
    assert info["rows_sparse"] > before["rows_sparse"]
    assert info["prefills_staged"] >= before["prefills_staged"] + 2 and info["prefills_unstaged"] == 0
    assert info["hot_hits"] > before["hot_hits"] and info["hot_share"] > 0.5


def test_capacity_is_the_hosts(servers: ServerPool) -> None:
    server = servers.get(*SHIPPED)
    info, locks = server.server_info(), server.locks_info()
    token = 2 * 2 * 64 * 90
    assert info["max_total_num_tokens"] == pytest.approx(4 * 2**30 / token, rel=1e-3)
    assert locks["host_bytes"] == pytest.approx(4 * 2**30, rel=1e-3)
    # Four steps of the largest graph, or all that there is.
    assert 0 < locks["hot_bytes"] <= locks["host_bytes"]
