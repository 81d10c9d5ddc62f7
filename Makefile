# `make demo` installs and does the main job on a real checkpoint; `make check` is what CI runs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip install --quiet --constraint constraints.txt

.PHONY: demo check test lint docs samples install clean

demo: $(VENV)/.installed  ## install, then convert, inspect and verify a real DeepSpeed checkpoint
	rm -rf demo-universal
	$(BIN)/ckpt convert sample_checkpoints/deepspeed-0.19-zero1-bf16-dp2 demo-universal
	$(BIN)/ckpt inspect demo-universal --depth 2
	$(BIN)/ckpt verify demo-universal

check: $(VENV)/.tested lint docs test  ## everything that CI runs

lint: $(VENV)/.tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: $(VENV)/.tested
	$(BIN)/pytest

docs: $(VENV)/.tested  ## docs/cli.md must be what --help says
	$(BIN)/python docs/make_cli.py --check

samples: $(VENV)/.tested  ## make sample_checkpoints/ again, with the real engines
	$(BIN)/python sample_checkpoints/make.py
	$(BIN)/python sample_checkpoints/make_universal.py
	$(BIN)/python sample_checkpoints/make_compressed.py
	$(BIN)/python sample_checkpoints/make_dcp.py
	$(BIN)/python sample_checkpoints/make_megatron.py

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	touch $@

# DeepSpeed's set-up imports torch, so torch comes first and the build is not isolated from it.
$(VENV)/.tested: $(VENV)/.installed
	$(PIP) torch setuptools wheel ninja py-cpuinfo
	DS_BUILD_OPS=0 $(PIP) --no-build-isolation deepspeed
	$(PIP) --editable '.[test]'
	$(PIP) --no-deps megatron-core
	touch $@

clean:
	rm -rf $(VENV) demo-universal dist
