# `make demo` installs and does the main job on a real checkpoint; `make quick` is for after each edit; `make check` is what CI runs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Of what `make dist` runs, with versions of its own.
RELEASE := .venv-release
PIP    := $(BIN)/pip install --quiet --constraint constraints.txt
# What the library of kernels is built from.
SOURCES := $(filter-out %/fuzz.c $(wildcard codecs/kernels/fuzz_*.c), $(wildcard codecs/kernels/*.[ch]))
# What tests write lies in memory, where there is enough: no disk has to flush what is gone a moment later.
MEMORY := $(shell test "$$(df -k --output=avail /dev/shm 2>/dev/null | tail -1)" -gt 4000000 2>/dev/null && echo /dev/shm)

# A worker for each core, up to four; a file's tests stay together, since they share what is made for them.
PYTEST := PYTEST_DEBUG_TEMPROOT=$(MEMORY) $(BIN)/pytest -n $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 4 ? n : 4))) --dist loadfile --no-loadscope-reorder

# Where this is set, each `ckpt` that a test starts would compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo quick check versions campaign lint style types kernels wheels aarch64 test samples pictures browser clean

demo: $(VENV)/.kernels  ## install, then convert, inspect and verify a real DeepSpeed checkpoint
	rm -rf demo-universal
	$(BIN)/ckpt convert sample_checkpoints/deepspeed-0.19-zero1-bf16-dp2 demo-universal
	$(BIN)/ckpt inspect demo-universal --depth 2
	$(BIN)/ckpt verify demo-universal

quick: $(VENV)/.tested $(VENV)/.kernels  ## what finds most mistakes, in a minute and a half: all but the engines and what is slow
	$(MAKE) --jobs 2 lint
	$(PYTEST) -m "not engines and not slow" --hypothesis-profile quick

check: $(VENV)/.tested $(VENV)/.kernels  ## everything that CI runs
	$(MAKE) --jobs 2 lint versions browser
	$(PYTEST)

versions: $(VENV)/.tested $(VENV)/.kernels  ## each Python that is promised, and the lowest versions of dependencies
	$(BIN)/python tests/campaigns/versions.py

campaign: $(VENV)/.tested $(VENV)/.kernels  ## what the check tries a sample of, twenty times as long: hours
	CKPT_CAMPAIGN=20 $(PYTEST) -m "not engines"

lint: style types

style: $(VENV)/.tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/.tested
	$(BIN)/mypy

.PHONY: site terminals dist

site: $(VENV)/.tested  ## the site of the docs, into site/; look at it with `python3 -m http.server --directory site`
	$(BIN)/python docs/make_site.py

terminals: $(VENV)/.installed $(VENV)/.kernels  ## the terminal pictures of the docs, drawn anew
	$(BIN)/python docs/make_terminal_pictures.py

dist: $(RELEASE)/.installed  ## what is published, into dist/: built twice and compared, checked, installed, tried
	$(RELEASE)/bin/python release/dist.py

kernels: $(VENV)/.installed  ## the library of C kernels, built in place from what the sources are now
	$(BIN)/python hatch_build.py

wheels: $(VENV)/.tested  ## a wheel for each platform, its contents compared with what they must be
	$(BIN)/python tests/campaigns/wheels.py

aarch64: $(VENV)/.tested  ## the kernels of aarch64 against those of this machine, emulated by qemu-aarch64
	$(BIN)/python tests/campaigns/aarch64.py

test: $(VENV)/.tested $(VENV)/.kernels
	$(PYTEST)

browser: $(VENV)/.tested  ## what the tests of pages need beside Python: a Chromium, and axe-core from npm
	$(BIN)/python tests/support/browsing.py

pictures: $(VENV)/.tested $(VENV)/.kernels browser  ## the pictures of pages in docs/pictures
	$(BIN)/python docs/make_page_pictures.py

samples: $(VENV)/.tested $(VENV)/.kernels  ## make sample_checkpoints/ again, with the real engines
	$(BIN)/python sample_checkpoints/make.py
	$(BIN)/python sample_checkpoints/make_universal.py
	$(BIN)/python sample_checkpoints/make_compressed.py
	$(BIN)/python sample_checkpoints/make_dcp.py
	$(BIN)/python sample_checkpoints/make_megatron.py

# zig compiles the kernels, so it stays in the environment: a changed source is compiled in seconds, without a new installation.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) click editables hatchling ziglang
	$(PIP) --no-build-isolation --editable .
	touch $@

$(VENV)/.kernels: $(VENV)/.installed hatch_build.py $(SOURCES)
	$(BIN)/python hatch_build.py
	touch $@

# DeepSpeed's set-up imports torch, so torch comes first and the build is not isolated from it.
# Of 24,000 modules the tests import a few thousand, which Python compiles when they are first imported.
$(VENV)/.tested: $(VENV)/.installed
	$(PIP) --no-compile torch setuptools wheel ninja py-cpuinfo
	DS_BUILD_OPS=0 $(PIP) --no-compile --no-build-isolation deepspeed
	$(PIP) --no-compile --no-build-isolation --editable '.[test,site]'
	$(PIP) --no-compile --no-deps megatron-core
	touch $@

$(RELEASE)/.installed: release/requirements.txt
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/pip install --quiet --requirement release/requirements.txt
	touch $@

clean:
	rm -rf $(VENV) $(RELEASE) .zig-cache demo-universal dist site .site .cache
