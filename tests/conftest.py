"""Lets every test import the shared modules of this folder and, without a GPU too, SGLang itself."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
from locks_sglang import cpu_stand_ins
from locks_sglang import demo_model as demo
from parallel import pytest_collection_modifyitems, pytest_xdist_make_scheduler  # noqa: F401

# Their assertions explain themselves as those of test files do.
pytest.register_assert_rewrite("greedy", "probed", "traced")
if not torch.cuda.is_available():
    cpu_stand_ins.activate()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--demo-model",
        type=Path,
        help="folder of the demo model (default: .models/SmolLM2-135M-Instruct, made at first use)",
    )
    parser.addoption("--slow", action="store_true", help="run what is too slow for CI, too")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("slow") and not item.config.getoption("--slow"):
        pytest.skip("slow: run with --slow (make test PYTEST_FLAGS=--slow)")


@pytest.fixture(scope="session")
def demo_model(request: pytest.FixtureRequest) -> Path:
    """Folder of the demo model; made at first use unless --demo-model names it."""
    return demo.ensure(request.config.getoption("demo_model") or request.config.rootpath / demo.DEFAULT_OUT)
