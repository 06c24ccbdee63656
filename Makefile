# make train | test | test-faults | lint | setup. Everything is installed into .venv, from PYTHON.
PYTHON ?= python3
ACCELERATOR ?= cpu
CONFIG ?= configs/dp4_tp2.py
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# The jax extra; CUDA 12 drivers are the most common, and 13's run them too.
EXTRA_cpu :=
EXTRA_tpu := jax[tpu]
EXTRA_gpu := jax[cuda12]
ifeq ($(filter $(ACCELERATOR),cpu tpu gpu),)
$(error ACCELERATOR=$(ACCELERATOR): cpu, tpu or gpu)
endif

.PHONY: setup train test test-faults lint clean

setup: $(VENV)/.installed-$(ACCELERATOR)

train: $(VENV)/.installed-$(ACCELERATOR)
	$(BIN)/python main.py --config=$(CONFIG)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadfile

# More than an hour on two quiet cores; FAULT_TRIALS=2 runs two trials of each test.
test-faults: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m faults

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than Python 3.11; name a newer one: make PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-$(ACCELERATOR): requirements.txt | $(BIN)/python
	$(PIP) -r requirements.txt $(EXTRA_$(ACCELERATOR))
	@touch $@

$(VENV)/.installed-dev: requirements.txt requirements-dev.txt | $(BIN)/python
	$(PIP) -r requirements-dev.txt
	@touch $@
