# One way to work. Every target sets up what it needs, so each runs alone on a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help setup demo docs browser test test-all check format bench sanitize fuzz soak clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

setup: $(READY)  ## create .venv and install the package with all extras

KERNEL := src/dape/ops/score_attention/csrc

$(READY): pyproject.toml setup.py constraints.txt $(wildcard $(KERNEL)/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

demo: $(READY)  ## the idea in four parts: recall, reading past the training length, training, retrofit
	$(BIN)/python -m dev.demo

docs: $(READY)  ## the guide and the API reference as a static site with search, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open it with: $(BIN)/python -m http.server --directory site"

browser:  ## install Chromium, in which the report's page is tested (Debian, as root)
	@command -v chromium >/dev/null || { command -v apt-get >/dev/null && test "$$(id -u)" = 0 \
		&& apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; } \
		|| echo "no Chromium, and it cannot be installed from here: the browser tests will be skipped"

test: $(READY) browser  ## the test suite (minutes on two cores)
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-all: $(READY) browser  ## every test: the full product of methods and properties, tests of minutes, and other people's tools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[tools]'
	$(BIN)/python -m pytest -n 2

check: $(READY)  ## lint, format, types, and numbers of the pages against the tables of results
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m papers report --check

format: $(READY)  ## apply the formatter and the safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)  ## time the attention backends, interleaved, as ratios
	$(BIN)/dape bench attention

SANITIZED := build/sanitized
SANITIZERS := -fsanitize=address,undefined -fno-sanitize-recover=all

sanitize: $(READY)  ## the C++ kernel under AddressSanitizer and UBSan, over the shape table
	CFLAGS="-g -O1 $(SANITIZERS)" LDFLAGS="$(SANITIZERS)" \
	$(BIN)/python setup.py --quiet build_ext --build-lib $(SANITIZED) --build-temp $(SANITIZED)/objects
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=. $(BIN)/python tests/ops/sanitize.py $(SANITIZED)/dape/ops/score_attention/_kernel*.so

fuzz: $(READY)  ## random calls and models against the definition in float64, for ten minutes
	$(BIN)/python tests/fuzz.py --minutes 10 --start $$(date +%s)

soak: $(READY)  ## kill -9 at random moments, 100 times, over train, data, compare, sweep and export (tens of minutes)
	nice -n 19 $(BIN)/python tests/soak.py --kills 100 --json results/soak/soak.json

clean:  ## remove the virtual environment and the tools' caches
	rm -rf $(VENV) build site .pytest_cache .mypy_cache .ruff_cache .hypothesis
