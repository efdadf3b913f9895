# Everything starts from nothing but Python 3.11+: each target makes the environment it needs.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# What was installed: the package with pictures, for the demo; the same with all extras and the tools of the tests.
SHOWN = $(VENV)/.installed-demo
READY = $(VENV)/.installed

.PHONY: demo quick test test-faults test-soak test-sanitizers check site wheel clean chromium

demo: $(SHOWN)
	$(BIN)/txl demo

# Compiled Python is kept, whatever the environment says: the tests start several hundred processes, and each would compile everything anew.
quick test test-faults test-soak: export PYTHONDONTWRITEBYTECODE =

# A file's tests stay together, for they share what they made; long files come first, as tests/conftest.py sorts them, so that both cores end together.
TWO = $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# For whoever changes something, in about a minute: all that stays in its process and takes little time.
quick: $(READY)
	$(TWO) --ignore tests/serving -m "not slow and not thorough and not processes"

# What fails is tried once more, by itself: hundreds of processes share two cores here, and a clock may have run out. Whatever fails again fails. What
# does not is named above it as a failure, and is to be mended.
ONCE_MORE = { [ $$? -eq 1 ] && echo "--- once more, by themselves: those that failed" && \
	$(BIN)/python -m pytest -v --last-failed --last-failed-no-failures none -m "not slow"; }

# Everything. Two at a time; after them those of the server that compare times, come in great numbers or start a browser.
test: $(READY) chromium
	$(TWO) -m "not slow and not alone" || $(ONCE_MORE)
	$(BIN)/python -m pytest tests/serving -m "not slow and alone" || $(ONCE_MORE)

# Kills, damaged and hostile files, in full; prints what each met.
FAULTS = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "slow or not slow" -s --timeout 3600
test-faults: $(READY)
	$(FAULTS) tests/faults tests/interop/test_mutated_imports.py tests/interop/test_hostile_files.py --ignore tests/faults/test_soak.py

# For the night: 20,000 steps and 1,000,000 tokens, with memory and open files watched.
test-soak: $(READY)
	$(FAULTS) tests/faults/test_soak.py

# The kernels' tests with every access and every piece of arithmetic of the kernels watched (several times slower). Python and torch are not built
# so, hence the runtimes are loaded first, and leaks, which would be Python's, are not counted.
SANITIZED = tests/native tests/inference tests/model tests/decoding/test_generation.py tests/decoding/test_writing.py
test-sanitizers: $(READY)
	TXL_SANITIZE=address,undefined OMP_NUM_THREADS=2 ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libasan.so) $$($${CXX:-c++} -print-file-name=libubsan.so)" \
	$(BIN)/python -m pytest -p no:cacheprovider --timeout 1200 $(SANITIZED)

check: $(READY)
	$(BIN)/ruff format --check src tests recipes hatch_build.py
	$(BIN)/ruff check src tests recipes hatch_build.py
	$(BIN)/mypy

# The pages of docs/ as a site: dist/site/index.html.
site: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# dist/: a wheel for every system, whose kernels are built on first use, and one with built kernels for each machine that there is a compiler for.
WHEEL = $(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
wheel: $(READY)
	$(WHEEL)
	for machine in x86_64 aarch64; do \
		if [ $$machine = "$$(uname -m)" ] || command -v $$machine-linux-gnu-g++ > /dev/null; then TXL_WHEEL=$$machine $(WHEEL) || exit 1; \
		else echo "No wheel for $$machine: there is no compiler $$machine-linux-gnu-g++ (Debian: g++-$$machine-linux-gnu)."; fi; done
	ls -l dist

# The page's tests drive Debian's Chromium; where it is absent and cannot be installed they are skipped, and the build goes on.
CHROMIUM = DEBIAN_FRONTEND=noninteractive timeout 300 apt-get install -y --no-install-recommends chromium
chromium:
	@if command -v chromium > /dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && grep -qs '^ID=debian' /etc/os-release && echo "Installing chromium for the tests of the page." && \
		{ $(CHROMIUM) || { timeout 300 apt-get update && $(CHROMIUM); }; } > /dev/null 2>&1; then echo "Installed chromium."; \
	else echo "There is no chromium here and none can be installed (that needs root on Debian): the tests of the page are skipped."; fi

# pip, not uv: it finds a CPU build of torch wherever pip is configured to look.
INSTALL = $(BIN)/python -m pip install --quiet -c constraints.txt -e
define ENVIRONMENT
$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
$(PYTHON) -m venv $(VENV)
endef
$(SHOWN): pyproject.toml constraints.txt
	$(ENVIRONMENT)
	$(INSTALL) '.[viz]'
	touch $(SHOWN)

# Has what the demo needs, too.
$(READY): pyproject.toml constraints.txt
	$(ENVIRONMENT)
	$(INSTALL) '.[dev]'
	touch $(SHOWN) $(READY)

clean:
	rm -rf $(VENV) dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
