"""The ground that the other server tests stand on: SGLang itself serves the demo model here, densely."""

import pytest
import requests
from server import Server, launch_refused


def test_answers_a_question(dense_server: Server) -> None:
    answer = dense_server.chat("What is the capital of France?")
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_long_prefix_comes_from_the_cache(dense_server: Server) -> None:
    prompt = "The lighthouse keeper wrote the weather into the log book every hour. " * 60
    first = dense_server.generate(prompt)
    second = dense_server.generate(prompt)
    assert first["meta_info"]["cached_tokens"] == 0
    assert second["meta_info"]["cached_tokens"] >= second["meta_info"]["prompt_tokens"] - 17
    assert first["output_ids"] == second["output_ids"]


def test_requests_together_equal_requests_alone(dense_server: Server) -> None:
    asked = [
        {"prompt": f"Here is a list of {thing}:", "max_new_tokens": 12}
        for thing in ("colours", "birds", "rivers")
    ]
    together = dense_server.generate_together(asked)
    for arguments, answer in zip(asked, together, strict=True):
        dense_server.flush_cache()
        assert dense_server.generate(**arguments)["output_ids"] == answer["output_ids"]


def test_metrics_count_requests(dense_server: Server) -> None:
    before = dense_server.metrics().get("sglang:num_requests_total", 0.0)
    dense_server.generate("One", max_new_tokens=1)
    assert dense_server.metrics()["sglang:num_requests_total"] == before + 1


def test_an_error_carries_the_servers_message(dense_server: Server) -> None:
    with pytest.raises(requests.HTTPError, match="400"):
        dense_server.generate("One", sampling={"temperature": -1})


def test_a_server_that_cannot_start_is_reported(demo_model, tmp_path) -> None:
    failure = launch_refused(demo_model, "--no-such-option", log_dir=tmp_path)
    assert failure.returncode == 2
    assert "--no-such-option" in str(failure)
