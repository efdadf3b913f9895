# Everything starts from nothing but Python 3.11+: each target makes the environment it needs.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.installed

.PHONY: demo test check clean

demo: $(READY)
	$(BIN)/txl demo

test: $(READY)
	$(BIN)/python -m pytest

check: $(READY)
	$(BIN)/ruff format --check src tests
	$(BIN)/ruff check src tests
	$(BIN)/mypy

# pip, not uv: it finds a CPU build of torch wherever pip is configured to look.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
