# Two commands on a fresh machine: `make tour` shows what this does, `make test` proves it. Each sets up all that it needs.

PYTHON ?= python3
# Colab runs Python 3.12; `make COLAB_PYTHON=... test` names one that is not found.
COLAB_PYTHON ?= $$(tools/find_python.sh 3.12 $(PYTHON))
VENV := .venv
COLAB := .venv-colab
PY := $(VENV)/bin/python
READY := $(VENV)/.complete
COLAB_READY := $(COLAB)/.complete
TESTS ?= tests

# Seconds after which a run is ended, whatever hangs in it.
LIMIT_S := 1800
LIMIT_ALL_S := 9000

# Tests find the Colab-like kernel by this name.
export TORCHDEBUG_COLAB_PYTHON ?= $(CURDIR)/$(COLAB)/bin/python
# Models are made from configurations; nothing is downloaded.
export HF_HUB_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYDEVD_DISABLE_FILE_VALIDATION := 1

# Both environments and the browser at once: most of it is waiting for the network.
MAKEFLAGS += --jobs=3

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help tour lab test test-all cover check format bench docs pictures coverage lock environments browser clean

help:
	@sed -n 's/^## //p' $(MAKEFILE_LIST)

## make tour      run notebooks/00_tour.ipynb and write a page that shows every output
tour: $(READY)
	$(PY) tools/execute_notebook.py notebooks/00_tour.ipynb build/tour.html
	@echo
	@echo "The tour, with every output:    $(CURDIR)/build/tour.html"
	@echo "To run it yourself, in Jupyter: make lab"

## make lab       open the tour in JupyterLab
lab: $(READY)
	$(PY) -m jupyterlab $(if $(filter 0,$(shell id -u)),--allow-root) notebooks/00_tour.ipynb

## make test      what reaches every branch twice, and what a change touches (ONLY=shapes: all of an instrument; TESTS=tests/unit: a part)
test: environments
	$(PY) tools/run_tests.py $(LIMIT_S) $(if $(ONLY),--only $(ONLY)) $(TESTS)

## make test-all  every test, on both stacks
test-all: environments
	$(PY) tools/run_tests.py $(LIMIT_ALL_S) --whole $(TESTS)

## make cover     choose anew which tests `make test` runs, into tests/cover.txt: an hour (FILES=tests/unit/test_fixes.py: of a file alone)
cover: environments
	$(COLAB)/bin/python tools/cover_set.py build/cover $(FILES)

## make check     ruff, mypy, import-linter
check: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports --no-cache
	$(PY) -m pytest -q tests/docs tests/unit/test_architecture.py

## make format    let ruff repair and format
format: $(READY)
	$(PY) -m ruff check --fix --exit-zero .
	$(PY) -m ruff format .

## make bench     time against plain torch and against rivals
bench: $(READY)
	$(PY) tests/bench/run.py
	$(PY) tests/bench/watch.py
	$(PY) tests/bench/shapes.py
	$(PY) tests/bench/memory.py
	$(PY) tests/bench/deterministic.py
	$(PY) tests/bench/hangwatch.py
	$(PY) tests/bench/shrink.py
	$(PY) tests/bench/autograd.py
	$(PY) tests/bench/gradwatch.py
	$(PY) tests/bench/overfit.py
	$(PY) tests/bench/ranks.py

## make docs      write docs/magics anew, from the help of each magic
docs: $(READY)
	$(PY) tools/help_pages.py

## make pictures  make the pictures of the README anew, from a real run in JupyterLab
pictures: $(READY) browser
	$(PY) tools/pictures.py

## make coverage  the unit tests, with the lines that they miss
coverage: $(READY)
	$(PY) -m coverage run -m pytest --whole tests/unit
	$(PY) -m coverage report

## make clean     remove all that make made
clean:
	rm -rf $(VENV) $(COLAB) build dist

# An environment is whole when its stamp is there; one without a stamp was cut short, and is made anew.
$(READY): pyproject.toml requirements/constraints-modern.txt
	tools/make_venv.sh $(PYTHON) $(VENV) requirements/constraints-modern.txt -e '.[dev]'

$(COLAB_READY): pyproject.toml requirements/constraints-colab.txt
	tools/make_venv.sh "$(COLAB_PYTHON)" $(COLAB) requirements/constraints-colab.txt -e '.[kernel]' transformers

environments: $(READY) $(COLAB_READY) browser

# Playwright drives the Chromium of the machine; it never downloads one of its own.
browser:
	tools/ensure_chromium.sh

# Take the newest releases: resolve without the pins (save torch and what makes Colab Colab) and write them down.
lock:
	tools/lock.sh $(PYTHON) requirements/constraints-modern.txt '^torch==' '.[dev]'
	tools/lock.sh "$(COLAB_PYTHON)" requirements/constraints-colab.txt \
		'^(torch|ipython|ipykernel|ipywidgets|jupyter_client|traitlets|notebook|widgetsnbextension)==' '.[kernel]' transformers
