# One environment, .venv, for everything; an existing one is used as it is.
# The first Python >= 3.11 on the path makes it; choose another with `make PYTHON=python3.12 ...`.

PYTHON ?= $(shell for p in python3.12 python3.11 python3.13 python3.14 python3 python; do \
	$$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
VENV := .venv
RUN := $(VENV)/bin/python
OUT ?= runs/quickstart
PYTEST_ARGS ?=

.PHONY: quickstart install install-test test test-all lint format types clean

quickstart: install
	$(VENV)/bin/prb quickstart --out $(OUT)

install: $(VENV)/.installed
install-test: $(VENV)/.installed-test

# Not the slow parity and size sweeps: they are in test-all.
test: install-test
	$(RUN) -m pytest -m "not slow" $(PYTEST_ARGS)

test-all: install-test
	$(RUN) -m pytest $(PYTEST_ARGS)

lint: install-test
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

format: install-test
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

types: install-test
	$(RUN) -m pyright --pythonpath $(RUN)

clean:
	rm -rf $(VENV) build dist *.egg-info

$(RUN):
	@test -n "$(PYTHON)" || { echo "error: no Python >= 3.11 with venv found; install one, or set PYTHON=" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Installs again when the requirements change; not where they are met already (no network needed then).
$(VENV)/.installed: pyproject.toml | $(RUN)
	$(RUN) .ci/satisfied.py || $(RUN) -m pip install --quiet --editable .
	touch $@

$(VENV)/.installed-test: pyproject.toml | $(RUN)
	$(RUN) .ci/satisfied.py test || $(RUN) -m pip install --quiet --editable '.[test]'
	touch $@ $(VENV)/.installed
