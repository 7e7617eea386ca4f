# Everything a newcomer or CI needs; each target does its own set-up. Debian or macOS, Python >= 3.11.
#   make demo         train the demo model on two local volunteers
#   make test         all checks and tests (installs Chromium and Node first where root and apt-get allow)
#   make check        ruff, mypy, import-linter, tsc
#   make sim SEED=7   replay one seed of the simulator (SEEDS=n: that many, from SEED on)
#   make bench        the figures of the README
#   make screenshots  pictures of the pages, into build/screenshots
#   make pyodide-wheel  Pyodide's wheel through `pyodide build`, where that can be had (Python >= 3.12)
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMPS := .stamps
SEED ?= 0
SEEDS ?= 1

.PHONY: install demo serve test check bench sim screenshots pyodide-wheel clean browser node
install: $(STAMPS)/python $(STAMPS)/web $(STAMPS)/wasm $(STAMPS)/pyodide

$(STAMPS)/python: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python >= 3.11 is needed, got $$($(PYTHON) --version); set PYTHON=python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV): torch is large, this takes a few minutes (nothing outside this folder is changed)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@mkdir -p $(STAMPS) && touch $@

# Without npm the pages work but for the loss chart, /docs and the Pyodide engine, which come from npm.
$(STAMPS)/web: package-lock.json web/vendor.py $(STAMPS)/python
	@if command -v npm >/dev/null; then npm ci --no-audit --no-fund --ignore-scripts --loglevel=error && $(BIN)/python web/vendor.py; \
	else echo "npm is missing: the loss chart and /docs will not be shown (Debian: apt-get install npm)"; fi
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/wasm: $(wildcard kernels_wasm/*.c kernels_wasm/*.h kernels_wasm/build.py) $(STAMPS)/python
	$(BIN)/python kernels_wasm/build.py
	@mkdir -p $(STAMPS) && touch $@

# After web: the lock file beside the wheel is made for the Pyodide that npm brought.
$(STAMPS)/pyodide: $(wildcard kernels_wasm/*.c kernels_wasm/*.h kernels_wasm/build.py kernels_wasm/pyodide/*.py kernels_wasm/pyodide/*/*.py) $(STAMPS)/python $(STAMPS)/web
	$(BIN)/python kernels_wasm/pyodide/build_wheel.py
	@mkdir -p $(STAMPS) && touch $@

pyodide-wheel: install
	$(BIN)/python kernels_wasm/pyodide/cross_build.py

browser:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || \
	{ test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null; } || \
	{ echo "Chromium is needed and could not be installed (Debian, as root: apt-get install chromium)"; exit 1; }

node:
	@command -v npm >/dev/null || \
	{ test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends nodejs npm >/dev/null; } || \
	{ echo "Node >= 20 with npm is needed and could not be installed (Debian, as root: apt-get install nodejs npm)"; exit 1; }

demo: install
	$(BIN)/tileweave demo

serve: install
	$(BIN)/tileweave serve

check: node install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	npx --no-install tsc -p web --noEmit

test: node browser check
	$(BIN)/pytest

bench: node browser install
	$(BIN)/tileweave bench parity
	$(BIN)/tileweave bench e2e
	$(BIN)/tileweave bench recovery
	$(BIN)/tileweave bench kernels
	$(BIN)/tileweave bench train

sim: install
	$(BIN)/python -m backend.simulation --seed $(SEED) --seeds $(SEEDS)

screenshots: browser install
	$(BIN)/python tests/screenshots.py build/screenshots

clean:
	rm -rf $(VENV) node_modules $(STAMPS) build web/static/vendor web/static/wasm
