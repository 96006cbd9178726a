"""The server that docker/compose.yaml starts: its flags go through SGLang's own parser."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from locks_sglang import compat
from locks_sglang.activation import config_of
from locks_sglang.config import LocksConfig, flag_name, options

DOCKER = Path(__file__).parents[2] / "docker"
COMPOSE = (DOCKER / "compose.yaml").read_text()
EXAMPLE = dict(
    line.split("=", 1)
    for line in (DOCKER / "env.example").read_text().splitlines()
    if line and not line.startswith("#")
)
_VARIABLE = re.compile(r"\$\{(\w+):([-?])([^{}]*)\}")
_OPTIONAL = re.compile(r"\$\{(\w+):\+([^{}]*)\$\{\1:-\}\}")


def interpolated(variables: dict[str, str]) -> dict[str, Any]:
    """The service as compose reads it: ``${A:-default}``, ``${A:?error}`` and ``${A:+text ${A:-}}``."""

    def value(match: re.Match[str]) -> str:
        name, kind, rest = match.groups()
        if variables.get(name):
            return variables[name]
        if kind == "?":
            raise KeyError(rest)
        return rest

    def optional(match: re.Match[str]) -> str:
        name, text = match.groups()
        return text + variables[name] if variables.get(name) else ""

    text = _VARIABLE.sub(value, _OPTIONAL.sub(optional, COMPOSE))
    return yaml.safe_load(text)["services"]["server"]


def flags(model: Path, **variables: str) -> list[str]:
    command = interpolated({"MODEL": "/data/m", **variables})["command"]
    return [str(model) if word == "/model" else word for word in shlex.split(command)]


def test_every_variable_is_understood_and_in_the_example() -> None:
    plain, optional = _VARIABLE.findall(_OPTIONAL.sub("", COMPOSE)), _OPTIONAL.findall(COMPOSE)
    assert COMPOSE.count("$") == len(plain) + 2 * len(optional)
    assert {match[0] for match in (*plain, *optional)} == set(EXAMPLE)


def test_the_example_is_the_default() -> None:
    for name, kind, default in _VARIABLE.findall(COMPOSE):
        if kind == "-":
            assert EXAMPLE[name] == default, name
    assert all(EXAMPLE[name] == "" for name, _ in _OPTIONAL.findall(COMPOSE))


def test_defaults_are_those_of_the_flags(prepare: Callable[..., Any], model: Path) -> None:
    args = prepare(*flags(model))
    assert config_of(args) == LocksConfig(selector="locks")
    assert (args.host, args.port, args.enable_metrics) == ("0.0.0.0", 30000, True)


def test_flags_come_from_the_environment(prepare: Callable[..., Any], model: Path) -> None:
    args = prepare(
        *flags(
            model,
            SPARSE_DECODE="quest",
            SPARSE_DECODE_BUDGET="512",
            SPARSE_DECODE_MIN_LEN="65536",
            SPARSE_DECODE_SUMMARY="r8i4",
            SGLANG_FLAGS="--sparse-decode-max-budget 1024 --max-running-requests 3",
            MODEL_NAME="glm",
        )
    )
    expected = LocksConfig(selector="quest", summary="r8i4", budget=512, max_budget=1024, min_len=65536)
    assert config_of(args) == expected
    assert (args.served_model_name, args.max_running_requests) == ("glm", 3)


def test_the_host_tier_is_a_variable_away(prepare: Callable[..., Any], model: Path) -> None:
    """With the flags that the example gives beside it."""
    (example,) = re.findall(r"^# SGLANG_FLAGS=(.*)$", (DOCKER / "env.example").read_text(), re.M)
    example = example.replace("--context-length 131072", "--context-length 2048")  # the test model's
    args = prepare(*flags(model, SPARSE_DECODE_KV_TIER="host", SGLANG_FLAGS=example))
    assert config_of(args) == LocksConfig(selector="locks", kv_tier="host", host_gib=400.0)
    assert (args.max_running_requests, args.context_length) == (40, 2048)
    build = interpolated({"MODEL": "/data/m", "SPARSE_DECODE_KV_TIER": "host"})["build"]
    assert build["args"]["LOCKS_KV_TIER"] == "host"


def test_dense_is_a_variable_away(prepare: Callable[..., Any], model: Path) -> None:
    assert not config_of(prepare(*flags(model, SPARSE_DECODE="off"))).enabled


def test_the_flags_are_ours() -> None:
    named = set(re.findall(r"--sparse-decode[\w-]*", COMPOSE))
    assert named <= {flag_name(option.name) for option in options()}


def test_the_model_must_be_named() -> None:
    with pytest.raises(KeyError, match="set MODEL"):
        interpolated({})


def test_what_a_gpu_server_needs() -> None:
    service = interpolated({"MODEL": "/data/m", "GPUS": "2"})
    assert service["volumes"] == ["/data/m:/model:ro"]
    assert service["ports"] == ["127.0.0.1:30000:30000"], "open to this machine alone unless told"
    assert service["ulimits"]["memlock"] == -1 and service["ipc"] == "host"
    assert service["cap_add"] == ["SYS_NICE"]
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 2, "capabilities": ["gpu"]}


def test_image_and_version_agree() -> None:
    arguments = interpolated({"MODEL": "/data/m"})["build"]["args"]
    dockerfile = (DOCKER / "Dockerfile").read_text()
    found = dict(re.findall(r'^ARG (\w+)="?([^"\n]*)"?$', dockerfile, re.M))
    found["SGLANG_IMAGE"] = found["SGLANG_IMAGE"].replace("${SGLANG_VERSION}", compat.TESTED_VERSIONS[0])
    assert {name: str(value) for name, value in arguments.items()} == found
