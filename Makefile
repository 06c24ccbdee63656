# make train | test | test-long | test-all | test-faults | test-plan | test-transformers | test-sinks
# | test-deploy | test-slurm | test-ray | buckets | sinks | ray | lint | setup | lock. Everything is installed into .venv, from
# PYTHON, as the lock files say: every package pinned and checked by its SHA-256.
PYTHON ?= python3
ACCELERATOR ?= cpu
CONFIG ?= configs/dp4_tp2.py:lm_bpe
FAULTS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes
UPGRADE ?=
# Where packages ask for extras of others, whose hashes pip does not find in a lock file; uv does.
UV_PIP := .venv-lock/bin/python -m uv pip install --quiet --require-hashes

# GPUs: jax[cuda12]. CUDA 12 drivers are the most common, and 13's run it too.
LOCKS_cpu := -r requirements/locks/base.txt
LOCKS_tpu := -r requirements/locks/base.txt -r requirements/locks/tpu.txt
LOCKS_gpu := -r requirements/locks/base.txt -r requirements/locks/gpu.txt
LOCKS_dev := -r requirements/locks/base.txt -r requirements/locks/dev.txt
LOCKS_plan := $(LOCKS_dev) -r requirements/locks/plan.txt
ifeq ($(filter $(ACCELERATOR),cpu tpu gpu),)
$(error ACCELERATOR=$(ACCELERATOR): cpu, tpu or gpu)
endif

.PHONY: setup train test test-long test-all test-faults test-plan test-transformers test-sinks test-deploy test-slurm test-ray buckets ray sinks lint lock clean

setup: $(VENV)/.installed-$(ACCELERATOR)

train: $(VENV)/.installed-$(ACCELERATOR)
	$(BIN)/python main.py --config=$(CONFIG)

# Three workers on two cores: a fifth of the time a test waits for processes that it has started.
test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# The tests that take longest one by one.
test-long: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist load -m 'long and not plan'

# The tests, and every mesh by every variant beside one device, which writes docs/compare.md.
test-all: test test-long
	$(BIN)/python -m tests.parity.matrix --write

# The plan of docs/reliability.md, whose table it writes, then the tests that are too long for
# `make test`: hours on two quiet cores. FAULTS="--row=4 --trials=2" tries less of the plan.
test-faults: $(VENV)/.installed-dev
	@code=0; $(BIN)/python -m tests.faults --write $(FAULTS) || code=1; \
	$(BIN)/python -m pytest -m faults || code=1; exit $$code

# Plans for TPUs that are not here, by their real compiler. The longest one is a command of
# docs/performance.md.
test-plan: $(VENV)/.installed-plan
	$(BIN)/python -m pytest -m 'plan and not long' tests/planning

# Beside Hugging Face's library, both major versions of it, each in an environment of its own with
# PyTorch: several GB on Linux.
test-transformers: $(VENV)/.installed-dev .venv-transformers4/.installed .venv-transformers5/.installed
	$(BIN)/python -m pytest -n 2 --dist loadfile -m transformers

# What opens files at gs://, for a workdir there.
buckets: $(VENV)/.installed-$(ACCELERATOR) .venv-lock/.installed
	$(UV_PIP) --python $(BIN)/python -r requirements/locks/base.txt -r requirements/locks/buckets.txt

# The packages of experiment trackers, in an environment of their own: metrics.sinks_python.
sinks: .venv-sinks/.installed

test-sinks: $(VENV)/.installed-dev sinks
	$(BIN)/python -m pytest -m sinks tests/training/metrics

# The templates of processes/launch/, by SkyPilot, XPK, Kubernetes' schemas and hadolint.
test-deploy: $(VENV)/.installed-dev .venv-deploy/.installed
	$(BIN)/python -m pytest -m deploy tests/launch

# processes/launch/slurm.sh by Slurm itself, whose daemons the test starts: as root, on Debian or Ubuntu.
test-slurm: $(VENV)/.installed-dev
	@{ command -v slurmctld && command -v slurmd && command -v sbatch && command -v munged; } >/dev/null || \
	  { apt-get update -qq && apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge; } || \
	  { echo "test-slurm: cannot install slurmctld, slurmd, slurm-client and munge by apt-get; run it as root on Debian or Ubuntu" >&2; exit 2; }
	$(BIN)/python -m pytest -m slurm tests/launch

# Ray, in an environment of its own, and processes/launch/ray.py on a cluster of it.
ray: .venv-ray/.installed

test-ray: $(VENV)/.installed-dev ray
	$(BIN)/python -m pytest -m ray tests/launch

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# After a change of requirements/*.txt; UPGRADE=--upgrade takes newer versions of what those require.
lock: .venv-lock/.installed
	.venv-lock/bin/python requirements/locks/update.py $(UPGRADE)

clean:
	rm -rf $(VENV) .venv-deploy .venv-lock .venv-ray .venv-sinks .venv-transformers4 .venv-transformers5

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than Python 3.11; name a newer one: make PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-$(ACCELERATOR): requirements/locks/base.txt $(wildcard requirements/locks/$(ACCELERATOR).txt) | $(BIN)/python
	$(PIP) $(LOCKS_$(ACCELERATOR))
	@touch $@

$(VENV)/.installed-dev: requirements/locks/base.txt requirements/locks/dev.txt requirements/locks/fixtures.txt | $(BIN)/python
	$(PIP) $(LOCKS_dev)
	$(PIP) --no-deps -r requirements/locks/fixtures.txt
	@touch $@

$(VENV)/.installed-plan: requirements/locks/plan.txt $(VENV)/.installed-dev
	$(PIP) $(LOCKS_plan)
	@touch $@

.venv-deploy/.installed: requirements/locks/deploy.txt | .venv-lock/.installed
	$(PYTHON) -m venv .venv-deploy
	$(UV_PIP) --python .venv-deploy/bin/python -r $<
	@touch $@

.venv-ray/.installed: requirements/locks/ray.txt | .venv-lock/.installed
	$(PYTHON) -m venv .venv-ray
	$(UV_PIP) --python .venv-ray/bin/python -r $<
	@touch $@

.venv-sinks/.installed: requirements/locks/sinks.txt | .venv-lock/.installed
	$(PYTHON) -m venv .venv-sinks
	$(UV_PIP) --python .venv-sinks/bin/python -r $<
	@touch $@

.venv-transformers%/.installed: requirements/locks/transformers%.txt
	$(PYTHON) -m venv .venv-transformers$*
	.venv-transformers$*/bin/python -m pip install --quiet --disable-pip-version-check \
	  --require-hashes -r $<
	@touch $@

.venv-lock/.installed: Makefile
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet --disable-pip-version-check uv==0.13.9
	@touch $@
