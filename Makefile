# Everything a person or CI runs. Needs Python >= 3.11 and make; each target makes .venv first.
PYTHON ?= python3
VENV ?= .venv
RUNS ?= 100
JOBS ?= 2
OUT ?= build/gpu
WHEELS ?=
WHEELS_FOR ?= 3.12
SEED ?= 0
FUZZ_SECONDS ?= 3600
BIN := $(VENV)/bin
# What is installed: everything, or one extra of pyproject.toml.
ALL := $(VENV)/.installed
LINT := $(ALL)-lint
TEST := $(ALL)-test
DOCS := $(ALL)-docs
EXAMPLES := $(ALL)-examples
INSTALL := -m pip install --quiet --disable-pip-version-check -c constraints.txt
# Each process takes the next part of the tests, and then of what the others have left.
PYTEST := $(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal

.PHONY: help demo test thorough check unit docs placement recording versions fuzz chaos format bench scale gpu wheels clean
.NOTPARALLEL: # two targets would install into one environment

help:            ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## */\t/' | expand -t 12

$(ALL): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(INSTALL) -e '.[dev]'
	@touch $@ $(LINT) $(TEST) $(DOCS) $(EXAMPLES)

$(ALL)-%: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(INSTALL) -e '.[$*]'
	@touch $@

demo: $(EXAMPLES) ## train examples/digits.py on every GPU, or on 2 CPU processes where there is none
	@if $(BIN)/python -c 'import sys; from ddp_kit.devices.gpus import gpus; sys.exit(not gpus())'; \
	then $(BIN)/ddpkit launch --gpus all examples/digits.py; \
	else $(BIN)/ddpkit launch --nproc-per-node 2 examples/digits.py; fi

test: $(ALL) check ## lint, types, quick tests and the launches of tests/gate.py: under 10 minutes on two cores
	$(PYTEST) -m "not slow or gate"

thorough: $(ALL) check ## all launches and long tests, an hour of damaged checkpoints; ONLY="slurm hosts": some parts
	FUZZ_SECONDS=$(FUZZ_SECONDS) $(BIN)/python tests/thorough.py --jobs $(JOBS) --only "$(ONLY)"

check: $(LINT)   ## lint and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: $(LINT) $(TEST) ## the quick tests alone, in JOBS (2) processes: under a minute
	$(PYTEST) -m "not slow"

docs: $(DOCS)    ## the generated pages, and the documentation site in build/site; a broken link is an error
	$(BIN)/python docs/tools/settings.py
	$(BIN)/python docs/tools/recipes.py
	$(BIN)/python docs/tools/api.py
	$(BIN)/python docs/tools/layers.py
	$(BIN)/python docs/tools/mistakes_page.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

placement: $(ALL) ## every placement against one process, in float64: the table of docs/placement.md
	$(BIN)/python benchmarks/exactness.py

recording: $(ALL) ## docs/images: launches and a report, from real runs; needs Chromium
	$(BIN)/python docs/tools/recording.py
	$(BIN)/python docs/tools/report_pictures.py

fuzz: $(TEST)    ## FUZZ_SECONDS (3600) of checkpoints that are changed at random: each is refused in words
	FUZZ_SECONDS=$(FUZZ_SECONDS) $(BIN)/python -m pytest tests/checkpoint/test_fuzz.py -k many_changed_files

versions:        ## the tests with every torch and Python, or with ONLY="2.10 3.13"; KEEP=1 keeps the environments
	$(PYTHON) tests/versions.py --only "$(ONLY)" $(if $(filter-out 0,$(KEEP)),--keep)

chaos: $(ALL)    ## RUNS (100) training runs killed at random: bitwise identical, every sample once; up to an hour
	$(BIN)/python -m tests.support.chaos --runs $(RUNS) --seed $(SEED)

format: $(LINT)  ## lay the code out and fix what can be fixed by machine
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(ALL)    ## launch, failures, rendezvous, loop and checkpoints, against peers: over two hours, writes RESULTS.md
	$(BIN)/python $(INSTALL) accelerate lightning transformers
	$(BIN)/python benchmarks/launch.py
	$(BIN)/python benchmarks/faults.py
	$(BIN)/python benchmarks/losses.py
	$(BIN)/python benchmarks/nodes.py
	$(BIN)/python benchmarks/train.py
	$(BIN)/python benchmarks/checkpoint.py
	$(BIN)/python benchmarks/storage.py

scale: $(ALL)    ## how costs grow with ranks, nodes, time and modules, counted; under ten minutes, writes RESULTS.md
	$(BIN)/python benchmarks/scale.py

gpu: $(if $(WHEELS),,$(ALL)) ## all that only a GPU shows, in under ten minutes; offline: PYTHON=with torch, WHEELS=folder
	$(if $(WHEELS),,$(BIN)/python $(INSTALL) accelerate lightning)
	$(if $(WHEELS),$(PYTHON),$(BIN)/python) benchmarks/gpu.py --out $(OUT) $(if $(WHEELS),--wheels $(WHEELS))

wheels:          ## what `make gpu` needs on a machine without a network, but torch: WHEELS=folder, WHEELS_FOR=3.12
	$(PYTHON) benchmarks/gpu_environment.py $(or $(WHEELS),wheels) --for $(WHEELS_FOR)

clean:           ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis dist build
