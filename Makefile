# Every target builds what it needs; `make help` lists the targets.
#
# PYTHON       the interpreter the environment is made of (3.11 or 3.12)
# PIP_ARGS     further arguments of every `pip install`
# EXAMPLE      folder of examples/ that `make quickstart` runs: arithmetic, or code (needs bubblewrap)
# SUDO         what makes `make test-cluster` root, for example sudo
# TORCH_INDEX  package index that torch alone comes from, for a CPU build where the default index has CUDA builds

PYTHON ?= python3.11
PIP_ARGS ?=
TORCH_INDEX ?=
VENV ?= .venv
EXAMPLE ?= arithmetic
SUDO ?=

# What is imported is compiled once, by whoever imports it first: a third of what pip would compile.
export PYTHONDONTWRITEBYTECODE :=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile $(PIP_ARGS)
RUN := OMP_NUM_THREADS=1 $(BIN)/python

# $(call timed,NAME,COMMAND) says how long a part of the set-up took.
timed = @begin=$$(date +%s); $(2) && echo "set-up: $(1) $$(( $$(date +%s) - begin )) s"

BENCHMARKS := control_plane drafting drafting.store_soak drafting.trees faults learning.ablation learning.example_epochs \
    learning.mismatch learning.quickstart learning.soak packing planner planner.real_engines publish \
    publish.delta publish.over_nodes rollout rollout.sampling rollout.step_time

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: help test-fast test-engines test-slow setup quickstart test test-long test-bench test-cluster faults check bench records test-gpu
.DELETE_ON_ERROR:

setup: $(STAMP) ## the environment .venv from the locks

$(STAMP): requirements/torch.txt requirements/cpu.txt requirements/dev.txt setup.py
	@[ "$$(uname -m)" = x86_64 ] || { echo "make: this machine is $$(uname -m), but the packages are locked for \
	x86_64: use an x86-64 machine." >&2; exit 2; }
	@command -v $(PYTHON) >/dev/null || { echo "make: there is no $(PYTHON): install Python 3.11 or 3.12, or name one of \
	them with PYTHON=." >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' || { echo "make: $(PYTHON) is \
	$$($(PYTHON) --version 2>&1), but 3.11 or 3.12 is needed: name one of them with PYTHON=." >&2; exit 2; }
	$(call timed,venv,$(PYTHON) -m venv $(VENV))
	$(call timed,torch,$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) -r requirements/torch.txt)
	$(call timed,rest,$(PIP) --no-deps -r requirements/cpu.txt -r requirements/dev.txt)
	$(call timed,megatron-rl,$(PIP) --no-deps --no-build-isolation -e .)
	$(call timed,kernels,$(RUN) -m history.drafting.compile)
	touch $@

quickstart: ## from nothing to a model that learned: set-up, data, model, warm start, RL, report
	@begin=$$(date +%s) && $(MAKE) --no-print-directory setup && \
	$(RUN) -m examples.$(EXAMPLE).quickstart --setup-seconds $$(( $$(date +%s) - begin ))

ANYWHERE := not gpu and not long and not bench and not multinode and not sandbox
# `make check` runs these.
CHECKED := --ignore=tests/test_layering.py --ignore=tests/test_packaging.py

# Beside the other tests, a part prints what it has to say at its end.
PRINTED = > $(VENV)/$$@.log 2>&1; code=$$$$?; cat $(VENV)/$$@.log; exit $$$$code
AT_THE_END :=

test-fast: $(STAMP) ## tests below three minutes: no Ray, no vLLM engine, no whole run
	$(RUN) -m pytest -q tests $(CHECKED) -m "$(ANYWHERE) and not slow" $(PYTEST_ARGS) $(AT_THE_END)

test-engines: $(STAMP) ## tests of the engines of make test: vLLM
	$(RUN) -m pytest tests/rollout -m "$(ANYWHERE) and slow" $(PYTEST_ARGS) $(AT_THE_END)

test-slow: $(STAMP) ## the other tests of make test: Ray, trainer processes
	$(RUN) -m pytest tests $(CHECKED) --ignore=tests/rollout -m "$(ANYWHERE) and slow" $(PYTEST_ARGS)

test: $(STAMP) ## tests that need neither a GPU nor root, without those of check and test-long
	@$(MAKE) --no-print-directory -j3 test-slow test-engines test-fast AT_THE_END='$(PRINTED)'

test-long: $(STAMP) ## whole runs, engines of two ranks, proof that drafts lose nothing
	$(RUN) -m pytest tests -m "long and not gpu" $(PYTEST_ARGS)

test-bench: $(STAMP) ## tests of benchmarks that start engines; `make bench` runs all benchmarks the quick way
	$(RUN) -m pytest tests -m "bench and not gpu" $(PYTEST_ARGS)

test-cluster: $(STAMP) ## tests on a SLURM cluster of test nodes and of the sandbox; needs root and installs Debian's packages
	$(SUDO) $(RUN) -m tests.support.cluster.packages
	$(SUDO) $(RUN) -m pytest -m "(multinode and not faults) or sandbox" tests/launcher/cluster tests/rollout/rewards $(PYTEST_ARGS)

faults: $(STAMP) ## every process is killed and frozen in every phase, nodes of the test cluster too; hours; needs root
	$(RUN) -m benchmarks.faults --json runs/bench/faults.json
	$(SUDO) $(RUN) -m tests.support.cluster.packages
	$(SUDO) $(RUN) -m pytest -m faults tests/launcher/cluster $(PYTEST_ARGS)

check: $(STAMP) ## lint, format, types, layering, packaging
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(RUN) -m pytest -q tests/test_layering.py tests/test_packaging.py

bench: $(STAMP) ## all benchmarks, the quick way
	@for name in $(BENCHMARKS); \
	do echo "== $$name" && $(RUN) -m benchmarks.$$name --quick --json runs/bench/$$name.json || exit 1; done

records: $(STAMP) ## committed rows that were measured by other code than today's
	$(RUN) -m benchmarks.record --check

test-gpu: ## tests that need a GPU, in PYTHON as it is; builds no environment
	$(PYTHON) -m pytest tests -m gpu $(PYTEST_ARGS)
