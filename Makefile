# Every target builds what it needs; `make help` lists the targets.
#
# PYTHON       the interpreter the environment is made of (3.11 or 3.12)
# PIP_ARGS     further arguments of every `pip install`
# EXAMPLE      folder of examples/ that `make quickstart` runs: arithmetic, or code (needs bubblewrap)
# CUDA_PYTHON  the interpreter of `make setup-cuda` (3.12)
# TESTS        files and folders of tests: what `make test` and its parts run, all by default
# SUDO         what makes `make test-cluster` root, for example sudo
# TORCH_INDEX  package index that torch alone comes from, for a CPU build where the default index has CUDA builds

PYTHON ?= python3.11
PIP_ARGS ?=
TORCH_INDEX ?=
VENV ?= .venv
VENV_CUDA ?= .venv-cuda
CUDA_PYTHON ?= python3.12
EXAMPLE ?= arithmetic
TESTS ?= tests
SUDO ?=

# What is imported is compiled once, by whoever imports it first: a third of what pip would compile.
export PYTHONDONTWRITEBYTECODE :=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile $(PIP_ARGS)
# The environment is for CPUs, also on a machine with GPUs, where commands that start processes would refuse it.
RUN := CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 $(BIN)/python

# $(call timed,NAME,COMMAND) says how long a part of the set-up took.
timed = @begin=$$(date +%s); $(2) && echo "set-up: $(1) $$(( $$(date +%s) - begin )) s"

BENCHMARKS := at_scale control_plane drafting drafting.store_soak drafting.trees end_to_end faults faults.soak \
    learning.algorithms learning.example_epochs learning.guard learning.mismatch learning.quickstart \
    learning.soak packing planner planner.real_engines publish publish.delta publish.over_nodes report rollout \
    rollout.sampling rollout.step_time saves

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: help check-code check-packages test-fast test-engines test-trainer test-slow setup setup-cuda quickstart test test-long test-bench test-cluster faults rehearse check bench records test-gpu
.DELETE_ON_ERROR:

X86_64 = [ "$$(uname -m)" = x86_64 ] || { echo "make: this machine is $$(uname -m), but the packages are locked for \
	x86_64: use an x86-64 machine." >&2; exit 2; }

setup: $(STAMP) ## the environment .venv from the locks

$(STAMP): requirements/torch.txt requirements/cpu.txt requirements/dev.txt setup.py
	@$(X86_64)
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

setup-cuda: $(VENV_CUDA)/.installed ## the environment of GPU machines, .venv-cuda: 10 GB, a quarter of an hour

# Transformer Engine's torch extension has no wheels. It is compiled against the torch and the headers of the environment;
# in an isolated build it would be compiled against the newest torch, and lack symbols.
CUDA_PIP = $(VENV_CUDA)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps $(PIP_ARGS)
PYTHON_H = $$($(CUDA_PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
CUDA_HEADERS = $$($(VENV_CUDA)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib") + "/nvidia")')

$(VENV_CUDA)/.installed: requirements/cuda.txt requirements/cuda_build.txt requirements/dev.txt setup.py
	@$(X86_64)
	@$(CUDA_PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null || { echo "make: \
	CUDA_PYTHON=$(CUDA_PYTHON) is not Python 3.12: install it, or name it with CUDA_PYTHON=." >&2; exit 2; }
	@$(CUDA_PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "make: $(CUDA_PYTHON) has no module ensurepip, so it makes \
	no environment: install python3.12-venv, or name another interpreter with CUDA_PYTHON=." >&2; exit 2; }
	@[ -f "$(PYTHON_H)" ] || { echo "make: there is no header $(PYTHON_H), which Transformer Engine's extension includes: \
	install python3.12-dev, or name another interpreter with CUDA_PYTHON=." >&2; exit 2; }
	@command -v "$${CXX:-c++}" >/dev/null || { echo "make: there is no C++ compiler $${CXX:-c++}, which Transformer Engine's \
	extension needs: install g++, or name one with CXX=." >&2; exit 2; }
	@echo "set-up: $(VENV_CUDA) needs 10 GB of disk, downloads 4 GB, and compiles for 13 minutes of a core"
	$(call timed,venv,$(CUDA_PYTHON) -m venv $(VENV_CUDA))
	$(call timed,packages,$(CUDA_PIP) --no-compile -r requirements/cuda.txt -r requirements/dev.txt)
	$(call timed,Transformer Engine,headers=$(CUDA_HEADERS) && CUDA_HOME=$$headers/cu13 NVTE_FRAMEWORK=pytorch \
	NVTE_PYTORCH_FORCE_BUILD=TRUE CPATH=$$headers/cu13/include:$$headers/cudnn/include:$$headers/nccl/include \
	MAX_JOBS=$${MAX_JOBS:-$$(nproc)} $(CUDA_PIP) --no-build-isolation -r requirements/cuda_build.txt)
	$(call timed,megatron-rl,$(CUDA_PIP) --no-build-isolation -e .)
	$(VENV_CUDA)/bin/python -m pip --disable-pip-version-check check
	touch $@

quickstart: ## from nothing to a model that learned: set-up, data, model, warm start, RL, report
	@begin=$$(date +%s) && $(MAKE) --no-print-directory setup && \
	$(RUN) -m examples.$(EXAMPLE).quickstart --setup-seconds $$(( $$(date +%s) - begin ))

ANYWHERE := not gpu and not long and not bench and not multinode and not sandbox and not rehearsal
# Given by the user. The parts of `make test` divide these tests between them, and a part may be left without any.
NARROWED := $(filter-out tests,$(TESTS))
# `make check` runs these.
CHECKED := $(if $(NARROWED),,--ignore=tests/test_layering.py --ignore=tests/test_packaging.py)
# $(call within,FOLDER): the given tests in FOLDER, all of them if none are given.
within = $(if $(NARROWED),$(filter $(1) $(1)/%,$(TESTS)),$(1))
ENGINE_TESTS := $(call within,tests/rollout)
TRAINER_TESTS := $(call within,tests/megatron_rl)
OTHER_TESTS := $(if $(NARROWED),$(filter-out $(ENGINE_TESTS) $(TRAINER_TESTS),$(TESTS)),tests $(CHECKED) --ignore=tests/rollout --ignore=tests/megatron_rl)

# $(call part,PATHS,MARKS) runs the tests of a part. Pytest exits with 5 if it has selected none of them.
part = $(if $(NARROWED),$(if $(1),{ $(pytest) || [ $$? -eq 5 ]; },echo "$@ has none of: $(TESTS)"),$(pytest))
pytest = $(RUN) -m pytest $(1) -m "$(2)" $(PYTEST_ARGS)

# Beside the other tests, a part prints what it has to say at its end.
PRINTED = > $(VENV)/$$@.log 2>&1; code=$$$$?; cat $(VENV)/$$@.log; exit $$$$code
AT_THE_END :=

test-fast: $(STAMP) ## tests below three minutes: no Ray, no vLLM engine, no whole run
	$(call part,-q $(TESTS) $(CHECKED),$(ANYWHERE) and not slow) $(AT_THE_END)

test-engines: $(STAMP) ## tests of the engines of make test: vLLM
	$(call part,$(ENGINE_TESTS),$(ANYWHERE) and slow) $(AT_THE_END)

test-trainer: $(STAMP) ## tests of the trainer of make test: processes that learn together
	$(call part,$(TRAINER_TESTS),$(ANYWHERE) and slow) $(AT_THE_END)

test-slow: $(STAMP) ## the other tests of make test: Ray, commands, benchmarks
	$(call part,$(OTHER_TESTS),$(ANYWHERE) and slow)

test: $(STAMP) ## tests that need neither a GPU nor root, without those of check and test-long
	@$(MAKE) --no-print-directory -j3 test-slow test-trainer test-fast test-engines AT_THE_END='$(PRINTED)'

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

rehearse: $(VENV_CUDA)/.installed ## GPU code on stub devices, without a GPU; forty minutes after `make setup-cuda`
	$(VENV_CUDA)/bin/python -m benchmarks.rehearsal --json runs/bench/rehearsal.json

check: $(STAMP) ## lint, format, types, layering, packaging
	@$(MAKE) --no-print-directory --output-sync=target -j2 check-code check-packages

check-code: $(STAMP) ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check-packages: $(STAMP) ## layering, packaging
	$(RUN) -m pytest -q tests/test_layering.py tests/test_packaging.py

bench: $(STAMP) ## all benchmarks, the quick way
	@for name in $(BENCHMARKS); \
	do echo "== $$name" && $(RUN) -m benchmarks.$$name --quick --json runs/bench/$$name.json || exit 1; done

records: $(STAMP) ## committed rows that were measured by other code than today's
	$(RUN) -m benchmarks.record --check

test-gpu: ## tests that need a GPU, in PYTHON as it is; builds no environment, and fails where there is no GPU
	@$(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null || { echo "make: torch in \
	$(PYTHON) finds no GPU, so no test would run: use a machine with a GPU, and name an interpreter with CUDA's torch with \
	PYTHON= (\`make setup-cuda\` builds .venv-cuda)." >&2; exit 2; }
	$(PYTHON) -m pytest tests -m gpu $(PYTEST_ARGS)
