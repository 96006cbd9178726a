# make serve: a real model with sparse decode, end to end.   make test: everything that CI checks.

SGLANG := 0.5.17
SGLANG_NEWEST := 0.5.23
VENV := .venv
VENV_NEWEST := .venv-newest
MODEL := .models/SmolLM2-135M-Instruct
PYTEST_FLAGS ?=
# Processes that run tests. Each may have two servers up, which take 3 GB each.
PYTEST_WORKERS ?= 2

BIN := $(VENV)/bin
# More threads than this are slower on the CPU, and two servers share the cores in the tests.
export OMP_NUM_THREADS ?= 1

.PHONY: help serve test test-gpu sanitize test-newest env env-newest model lint format clean
.DEFAULT_GOAL := help

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' | awk -F'|' '{printf "make %-12s %s\n", $$1, $$2}'

serve: model ## environment, demo model, server with sparse decode, one answer; serves until Ctrl-C
	@$(BIN)/python tools/serve.py --model $(MODEL) $(SERVE_FLAGS)

test: lint model ## environment, lint, types, all tests
	@$(BIN)/python -m pytest -n $(PYTEST_WORKERS) $(PYTEST_FLAGS)

test-gpu: model ## the GPU tests (kernels, servers), with a result file if GPU_FLAGS="--machine-name NAME"
	@$(BIN)/python tools/test_gpu.py --demo-model $(MODEL) $(GPU_FLAGS)

# One small case of each kernel; of score another with 16 query heads a KV head, of select two with
# clusters and behind score.
SANITIZED := kv_heads[2] or two_warps_a_kv_head[16-2] or group_sizes[8] or one_long_row[4097] \
 or then_select[r4i4] or fp32[glm-cuda] or degenerate_pages[r4i4-cuda] or degenerate_pages[r6h-cuda]
SANITIZE = compute-sanitizer --error-exitcode 9 --kernel-name-exclude kernel_substring=at:: --tool
SANITIZE_TESTS = $(BIN)/python -m pytest -q -p no:cacheprovider -k "$(SANITIZED)" \
 $(patsubst %,tests/kernels/test_%_gpu.py,score select attend summarize)

sanitize: ## memcheck and racecheck on a small case of each CUDA kernel
	$(SANITIZE) memcheck $(SANITIZE_TESTS)
	$(SANITIZE) racecheck $(SANITIZE_TESTS)

test-newest: env-newest model ## the server tests on the newest SGLang known to work (slow: a second environment)
	@$(VENV_NEWEST)/bin/python -m pytest tests/server -n $(PYTEST_WORKERS) $(PYTEST_FLAGS)

env: ## the virtual environment alone
	@tools/env.sh $(VENV) $(SGLANG) requirements/cpu.txt

env-newest:
	@tools/env.sh $(VENV_NEWEST) $(SGLANG_NEWEST) requirements/cpu-newest.txt

model: env ## the demo model alone
	@$(BIN)/python -m locks_sglang.demo_model --out $(MODEL)

lint: env ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy python kernels

format: env ## let ruff fix what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove environments, the demo model and caches
	rm -rf $(VENV) $(VENV_NEWEST) .models .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
