"""A host tier's server that is killed and started again, on a GPU too small for its longest request."""

from pathlib import Path

import locks_test_probe
import pytest
import torch
from conftest import HOST_FLAGS
from server import ServerPool, launch
from traced import PAGE, Traced

GPU_MIB = 88
"""Of them staged prefill takes 60."""
TOKEN_BYTES = 30 * 3 * 64 * 2 * 4
NEW = 8
AGAIN = (
    *(*HOST_FLAGS, "--max-total-tokens", "16384", "--context-length", "4096"),
    *("--max-running-requests", "4"),
)


@pytest.mark.timeout(900)
def test_it_comes_back_and_holds_what_the_gpu_could_not(
    host: Traced,
    servers: ServerPool,
    demo_model: Path,
    probe: dict[str, str],
    words: list[int],
    tmp_path: Path,
) -> None:
    """Killed in the middle of an answer. The new one gives the old one's tokens, also after a flush, and
    those of the model in transformers for a context for which a pool on that GPU would have no room."""
    before = host.alone(words[:480], NEW)
    host.start(words[500:800], 200).wait_for_rows(2)
    servers.kill(host.server)

    env = {**probe, locks_test_probe.GPU_MIB: str(GPU_MIB)}
    with launch(demo_model, *AGAIN, log_dir=tmp_path, env=env) as server:
        for _ in range(2):
            assert server.generate(words[:480], NEW)["output_ids"] == before.tokens
            server.flush_cache()
        capacity = server.server_info()["max_total_num_tokens"]
        resident = GPU_MIB * 2**20 // TOKEN_BYTES  # without its records, and with nothing else there
        prompt = (words * 2)[: resident + 30 * PAGE]
        assert resident < len(prompt) < capacity
        start = server.locks_info()
        assert start["host_pages_free"] * PAGE == capacity
        sparse = server.generate(prompt, NEW)
        whole = server.generate(prompt, NEW, {"custom_params": {"locks": {"mode": "dense"}}})
        assert whole["output_ids"] == in_transformers(demo_model, prompt)
        end = server.locks_info()
        assert len(sparse["output_ids"]) == NEW and end["rows_sparse"] - start["rows_sparse"] >= NEW - 1
        assert whole["meta_info"]["cached_tokens"] >= len(prompt) - PAGE  # in host memory, all of it
        server.flush_cache()
        assert server.locks_info()["host_pages_used"] == 0


def in_transformers(model: Path, prompt: list[int]) -> list[int]:
    """Greedy tokens of the model, every token attended."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found = loaded.generate(torch.tensor([prompt]), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
    return found[0, len(prompt) :].tolist()
