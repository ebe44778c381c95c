# Everything runs in .venv, made from pyproject.toml and pinned by constraints.txt. The tests that run vLLM, which wants
# versions of its own, have .venv-vllm.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VENV_VLLM := .venv-vllm

.PHONY: demo real test pytest test-vllm test-triton test-transformers lint format install install-dev clean

demo: install
	$(BIN)/ladderize demo

# A real model on known tasks (docs/results.md): 79 minutes on 2 cores. A killed run goes on when run again.
TEXTS ?= ../shared/real
real: install
	$(BIN)/python scripts/real_model.py real $(TEXTS)
	test -e real/own.jsonl || $(BIN)/ladderize generate real/smollm2 --prompt-file real/prompts.jsonl \
	    --max-new-tokens 256 --out real/own.jsonl
	$(BIN)/python scripts/real_model.py real $(TEXTS) --mix
	$(BIN)/ladderize sweep benchmarks/real.yaml
	$(BIN)/ladderize report real/sweep --out real/report.html --markdown real/RESULTS.md

test: lint pytest

# The tests start hundreds of processes: what these import is compiled once, also where PYTHONDONTWRITEBYTECODE is set
pytest: install-dev
	$(BIN)/python -m compileall -q ladderize tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-vllm: $(VENV_VLLM)/.installed
	OMP_NUM_THREADS=1 $(VENV_VLLM)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests/vllm

# The kernels for GPUs, on a CPU by Triton's interpreter. vLLM's environment has Triton.
test-triton: $(VENV_VLLM)/.installed
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(VENV_VLLM)/bin/python -m pytest -n 2 tests/test_gpu_operations.py

# transformers' own tests of models, from its source distribution: needs a network
test-transformers: install-dev
	OMP_NUM_THREADS=1 $(BIN)/python scripts/transformers_tests.py

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

# torch goes first and alone, with the exact version: only so does pip take a CPU build where one lies on disk
$(VENV)/.torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[report]"
	touch $@

$(VENV)/.installed-dev: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@ $(VENV)/.installed

$(VENV_VLLM)/.installed: constraints-vllm.txt scripts/install_vllm.py pyproject.toml
	$(PYTHON) -m venv $(VENV_VLLM)
	$(VENV_VLLM)/bin/python scripts/install_vllm.py
	touch $@

clean:
	rm -rf $(VENV) $(VENV_VLLM)
