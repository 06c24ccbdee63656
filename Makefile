# make train | test | test-all | test-faults | test-plan | lint | setup. Everything is installed into .venv, from PYTHON.
PYTHON ?= python3
ACCELERATOR ?= cpu
CONFIG ?= configs/dp4_tp2.py
FAULTS ?=
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

.PHONY: setup train test test-all test-faults test-plan lint clean

setup: $(VENV)/.installed-$(ACCELERATOR)

train: $(VENV)/.installed-$(ACCELERATOR)
	$(BIN)/python main.py --config=$(CONFIG)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# The tests, and every mesh by every variant beside one device, which writes docs/parity.md.
test-all: test
	$(BIN)/python -m tests.parity.matrix --write

# The plan of docs/reliability.md, whose table it writes, then the tests that are too long for
# `make test`: hours on two quiet cores. FAULTS="--row=4 --trials=2" tries less of the plan.
test-faults: $(VENV)/.installed-dev
	@code=0; $(BIN)/python -m tests.faults --write $(FAULTS) || code=1; \
	$(BIN)/python -m pytest -m faults || code=1; exit $$code

# Plans for TPUs that are not here, by their real compiler.
test-plan: $(VENV)/.installed-plan
	$(BIN)/python -m pytest -m plan tests/planning

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

$(VENV)/.installed-plan: requirements-plan.txt $(VENV)/.installed-dev
	$(PIP) -r requirements-plan.txt
	@touch $@
