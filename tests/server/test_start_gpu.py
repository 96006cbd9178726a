"""Starting on a GPU: with no option but the selector, and with a backend that is refused."""

import re

import pytest
from server import AS_SHIPPED, ServerFailed, ServerPool

# Less of the memory than SGLang takes by default, since the other servers have theirs on the same GPU.
SHIPPED = (AS_SHIPPED, "--sparse-decode", "locks", "--mem-fraction-static", "0.5")
# Both kinds of graph are replayed: steps of one request are sparse from 2048 + 1536 + 400 tokens on.
SHIPPED = (*SHIPPED, "--sparse-decode-dense-below", "400")
FIRST_SPARSE = 3984
TRITON = ("--sparse-decode", "locks", "--attention-backend", "triton")


@pytest.mark.launches(*SHIPPED)
def test_one_flag_serves(servers: ServerPool) -> None:
    """All graphs are captured, prefill's too; the answer is right and the decode rows are sparse."""
    server = servers.get(*SHIPPED)
    # In bf16 the demo model's chat answer names no city, dense either (seen on an H200).
    assert "Paris" in server.generate("The capital of France is", 8)["text"]
    before = server.locks_info()
    assert (before["rows_sparse"], before["budget"], before["dense_below"]) == (0, 2048, 400)
    assert before["rows_dense"] >= 7
    words = "The keeper wrote the weather into the log book. " * 500
    server.generate(words, 8)
    after = server.locks_info()
    assert after["rows_sparse"] >= 7 and after["rows_dense"] == before["rows_dense"]


@pytest.mark.launches(*SHIPPED)
def test_a_request_that_outgrows_dense_steps(servers: ServerPool) -> None:
    """Its summaries were built in the dense steps, too: the same tokens as when it comes again."""
    server = servers.get(*SHIPPED)
    prompt = list(range(1000, 1000 + FIRST_SPARSE - 40))
    before = server.locks_info()
    whole = server.generate(prompt, 96)["output_ids"]
    after = server.locks_info()
    assert after["rows_dense"] - before["rows_dense"] in range(38, 42)
    assert after["rows_sparse"] - before["rows_sparse"] in range(54, 58)
    assert after["summaries_built"] > before["summaries_built"]
    server.flush_cache()
    assert server.generate(prompt, 96)["output_ids"] == whole


@pytest.mark.launches(*SHIPPED)
def test_memory_is_charged_and_logged(servers: ServerPool) -> None:
    """KV, summaries and scratch stay within the fraction that SGLang was given."""
    server = servers.get(*SHIPPED)
    line = re.search(
        r"Sparse decode on: .* ([\d.]+) GiB beside ([\d.]+) GiB of KV for (\d+) tokens, "
        r"([\d.]+) GiB for decode steps",
        server.log,
    )
    assert line
    summaries, kv, tokens, steps = map(float, line.groups())
    info = server.server_info()
    locks = info["internal_states"][0]["locks"]
    assert tokens == info["max_total_num_tokens"]
    assert kv == pytest.approx(2 * 2 * 64 * 90 * tokens / 2**30, rel=1e-2)
    assert summaries == pytest.approx(locks["bytes_per_token"] * tokens / 2**30, rel=1e-2)
    assert steps == pytest.approx(locks["step_bytes"] / 2**30, abs=1e-3)
    total, left = memory(server.log)
    assert kv + summaries + steps < 0.5 * total
    # What SGLang leaves free holds the scratch of the decode steps, which comes later.
    assert left > 0.5 * total - 1 + steps


def memory(log: str) -> tuple[float, float]:
    """GB of the GPU before the weights and after the KV pool, from SGLang's own lines."""
    before = re.search(r"Load weight begin. avail mem=([\d.]+) GB", log)
    after = re.search(r"Memory pool end. avail mem=([\d.]+) GB", log)
    assert before and after
    return float(before[1]), float(after[1])


@pytest.mark.launches(*TRITON)
def test_triton_backend_is_refused(servers: ServerPool) -> None:
    with pytest.raises(ServerFailed) as failure:
        servers.get(*TRITON)
    assert failure.value.returncode not in (None, 0)
    assert "does not work with the attention backend TritonAttnBackend; legal: " in failure.value.log
