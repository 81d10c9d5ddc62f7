# `make demo` installs and does the main job on a real checkpoint; `make quick` is for after each edit; `make check` is what CI runs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip install --quiet --constraint constraints.txt
# A worker for each core, up to four; a file's tests stay together, since they share what is made for them.
PYTEST := $(BIN)/pytest -n $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 4 ? n : 4))) --dist loadfile --no-loadscope-reorder

# Where this is set, each `ckpt` that a test starts would compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo quick check campaign lint style types docs kernels kernels.of.all deltas.kernels lossy.kernels test samples clean

demo: $(VENV)/.installed  ## install, then convert, inspect and verify a real DeepSpeed checkpoint
	rm -rf demo-universal
	$(BIN)/ckpt convert sample_checkpoints/deepspeed-0.19-zero1-bf16-dp2 demo-universal
	$(BIN)/ckpt inspect demo-universal --depth 2
	$(BIN)/ckpt verify demo-universal

quick: $(VENV)/.tested  ## what finds most mistakes, in two minutes: all but the engines and what is slow
	$(MAKE) --jobs 2 lint docs kernels
	$(PYTEST) -m "not engines and not slow" --hypothesis-profile quick

check: $(VENV)/.tested  ## everything that CI runs
	$(MAKE) --jobs 2 lint docs kernels
	$(PYTEST)

campaign: kernels  ## what the check tries a sample of, twenty times as long: hours
	CKPT_CAMPAIGN=20 $(PYTEST) -m "not engines"

lint: style types

style: $(VENV)/.tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/.tested
	$(BIN)/mypy

docs: $(VENV)/.tested  ## docs/cli.md must be what --help says
	$(BIN)/python docs/make_cli.py --check

# Kernels are compiled once, or the tests' workers would each do it.
kernels: deltas.kernels lossy.kernels

deltas.kernels lossy.kernels: %: kernels.of.all
	$(BIN)/python -c "import ckpt_codecs.$@"

kernels.of.all: $(VENV)/.tested
	$(BIN)/python -c "import ckpt_codecs.kernels"

test: $(VENV)/.tested
	$(PYTEST)

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
