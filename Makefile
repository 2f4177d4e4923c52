# One environment, .venv, for everything; an existing one is used as it is.
# The first Python >= 3.11 on the path makes it; choose another with `make PYTHON=python3.12 ...`.

PYTHON ?= $(shell for p in python3.12 python3.11 python3.13 python3.14 python3 python; do \
	$$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
VENV := .venv
RUN := $(VENV)/bin/python
OUT ?= runs/quickstart
# A process for each 6 GB of free memory, at most eight, which take a file of tests at a time: three for two cores,
# as tests wait for processes that they start. Later arguments win: PYTEST_ARGS="-n 0" is one process.
WORKERS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); n=$$(((3 * n + 1) / 2)); n=$$((n < 8 ? n : 8)); \
	m=$$(awk '/MemAvailable/ {print int($$2 / 6000000)}' /proc/meminfo 2>/dev/null); m=$${m:-8}; m=$$((m < 1 ? 1 : m)); \
	echo $$((n < m ? n : m)))
PYTEST := $(RUN) -m pytest -n $(WORKERS) --dist loadfile
# Most of the time of the tests is compiling: XLA optimises less for them. `make test-all` compiles as users do.
FAST := XLA_FLAGS="$$($(RUN) -m tests.plain_process) $$XLA_FLAGS"
PYTEST_ARGS ?=
INSTALLING := echo "installing prb_jax and its libraries into $(VENV): about 1 GB, some minutes the first time ..."

# The libraries are installed without compiled modules, and the first import writes those that are used. Where this
# variable, which many containers set, forbids that, every process compiles them again: two seconds each and more.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart install install-report install-check install-test install-docs docs test test-fast test-all test-newest lint format types clean intervals

quickstart: install-report
	$(VENV)/bin/prb quickstart --out $(OUT)

install: $(VENV)/.installed
install-report: $(VENV)/.installed-report
install-check: $(VENV)/.installed-check
install-test: $(VENV)/.installed-test
install-docs: $(VENV)/.installed-docs

# Not the slow parity and size sweeps: they are in test-all.
test: install-test
	$(FAST) $(PYTEST) -m "not slow" $(PYTEST_ARGS)

# For the inner loop: what starts no process and compiles little, less than four minutes on two quiet cores.
FAST_ROOMS := commands golden metrics models/checkpoints models/readouts records reports runs text trees
test-fast: install-test
	$(FAST) $(PYTEST) -m "not slow" --fast $(addprefix tests/,$(FAST_ROOMS)) tests/test_*.py $(PYTEST_ARGS)

test-all: install-test
	$(PYTEST) $(PYTEST_ARGS)

# What new versions of jax break first: kernels, meshes, int8 products, trained weights.
# `make test-newest VENV=.venv-3.12 PYTHON=python3.12` has the newest pair of jax and flax; it needs no torch, and
# skips the tests that do.
test-newest: install-check
	@$(RUN) -m pip list 2>/dev/null | grep -E '^(jax|flax) '
	$(FAST) $(PYTEST) -m "not slow" -p no:cacheprovider $(PYTEST_ARGS) \
		$(addprefix tests/models/attention/test_,streams.py stream_kernel.py cudnn_streams.py) tests/models/test_quantization.py \
		tests/platform/sharding tests/parity/test_stories260k.py

lint: install-test
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

format: install-test
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

types: install-test
	$(RUN) -m pyright --pythonpath $(RUN)

# The documentation as a site, in build/docs; a broken link or an undocumented name is an error.
docs: install-docs
	$(RUN) -m mkdocs build --quiet
	@echo "written to build/docs/index.html"

# The tables of docs/statistics.md: what share of the intervals holds the true value, and how wide they are; an hour of one core.
intervals: install-test
	$(RUN) -m tests.metrics.simulation

clean:
	rm -rf $(VENV) build dist *.egg-info

$(RUN):
	@test -n "$(PYTHON)" || { echo "error: no Python >= 3.11 with venv found; install one, or set PYTHON=" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Installs again when the requirements change; not where they are met already (no network needed then). Python compiles
# the few modules that are used when it first imports them; compiling all of them here would take a minute.
$(VENV)/.installed: pyproject.toml | $(RUN)
	@$(RUN) .ci/satisfied.py || { $(INSTALLING); $(RUN) -m pip install --quiet --no-compile --editable .; }
	touch $@

$(VENV)/.installed-%: pyproject.toml | $(RUN)
	@$(RUN) .ci/satisfied.py $* || { $(INSTALLING); $(RUN) -m pip install --quiet --no-compile --editable '.[$*]'; }
	touch $@ $(VENV)/.installed
