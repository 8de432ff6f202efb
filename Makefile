# `make` without a target lists the targets. CI uses the same targets as people.
VENV ?= .venv
# The Python that creates the environment: 3.11.
PYTHON ?= $(shell command -v python3.11 || echo python3)
BIN := $(VENV)/bin
UV := $(BIN)/uv
PYTEST_ARGS ?=
# The unit tests run on all cores, at most 8.
UNIT = -m "not integration and not e2e" -n auto --maxprocesses 8 --dist loadfile
# The tests with real engines mostly use one core each, so two files run at once, except on a GPU, which they would share.
INTEGRATION = -m integration $(if $(filter cpu,$(ENVIRONMENT)),-n auto --maxprocesses 2 --dist loadfile)
FUZZ_SECONDS ?= 600
# For make install and make images: cpu or cuda. By default, an existing environment keeps its device, a new one is
# for the devices of this machine, and images are for cpu.
DEVICE ?=
FOUND := $(shell { ls /dev/nvidia[0-9]* || nvidia-smi -L | grep '^GPU'; } >/dev/null 2>&1 && echo cuda || echo cpu)
MADE_FOR := $(shell cat $(VENV)/.device 2>/dev/null)
ENVIRONMENT := $(or $(DEVICE),$(MADE_FOR),$(FOUND))
# A folder of wheels (an air-gapped site) replaces PyTorch's CPU index.
LINKS := $(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS))
TORCH := $(or $(LINKS),--torch-backend cpu)
SOURCES_cpu := $(TORCH) --override requirements/overrides.txt
SOURCES_cuda := $(LINKS) --override requirements/overrides-cuda.txt
# For make images: the command that builds an image (with the arguments of `docker build`), the prefix of the image
# names, the tag, and the images to build.
BUILD ?= docker build
REPOSITORY ?= retrace
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
TAG ?= $(VERSION)
IMAGES ?= flow rollout training

.DEFAULT_GOAL := help
.PHONY: help install quickstart mismatch check test test-all test-unit test-integration bench lint format lock docs images e2e-images e2e kind-up kind-demo kind-down clean

help: ## List the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-18s %s\n", $$1, $$2}'

install: $(VENV)/.installed ## Create the virtual environment, with all packages pinned

$(VENV)/.installed: requirements/$(ENVIRONMENT).txt $(wildcard requirements/overrides*.txt) requirements/uv.txt pyproject.toml
	@echo "creating an environment for $(ENVIRONMENT) in $(VENV) (found: $(FOUND); DEVICE=cpu or DEVICE=cuda overrides this)"
	@[ -z "$(MADE_FOR)" ] || [ "$(MADE_FOR)" = "$(ENVIRONMENT)" ] || { echo "$(VENV) was created for $(MADE_FOR); to replace it, run: make clean install DEVICE=$(ENVIRONMENT)"; exit 1; }
	@test -x $(BIN)/python || { echo "1/4 creating $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); }
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) and "Retrace pins its packages for Python 3.11, found %d.%d; set PYTHON" % sys.version_info[:2])'
	@echo "2/4 installing uv, which installs the packages"
	@$(BIN)/python -m pip install --quiet -r requirements/uv.txt
	@echo $(ENVIRONMENT) >$(VENV)/.device
	@grep -v '^transformer-engine-torch==' requirements/$(ENVIRONMENT).txt >$(VENV)/.packages
	@echo "3/4 installing $$(grep -c '==' $(VENV)/.packages) pinned packages: about a minute, plus their download"
	$(UV) pip install --python $(BIN)/python --compile-bytecode $(SOURCES_$(ENVIRONMENT)) -r $(VENV)/.packages
	@echo "4/4 installing Retrace from this folder"
	@$(UV) pip install --python $(BIN)/python --quiet --no-deps --no-build-isolation --editable .
	@# Built last, against the installed torch; this requires the CUDA compiler (nvcc) and the headers of cuDNN's wheel.
	@! grep '^transformer-engine-torch==' requirements/$(ENVIRONMENT).txt >$(VENV)/.packages \
	  || { echo "building Transformer Engine with the CUDA compiler, which takes many minutes"; false; } \
	  || CPATH=$$(echo $(abspath $(VENV))/lib/python3*/site-packages/nvidia/cudnn/include):$$CPATH $(UV) pip install --python $(BIN)/python --quiet --no-deps --no-build-isolation -r $(VENV)/.packages
	@[ $(ENVIRONMENT) = cuda ] || $(BIN)/python -c 'import importlib.util as u, sys; sys.exit(bool(u.find_spec("torchvision")) and "torchvision is installed in $(VENV) and breaks vLLM on CPU: make clean install")'
	@touch $@
	@echo "$(VENV) is ready; try: $(BIN)/retrace run examples/quickstart.yaml"

quickstart: install ## Train the example on this machine (1 to 4 minutes)
	$(BIN)/retrace run examples/quickstart.yaml

mismatch: install ## Compare GRPO, TIS, GSPO and R3 on one policy (20 minutes)
	$(BIN)/python -m examples.mismatch

check: install ## Check the quickstart's settings without starting anything
	$(BIN)/retrace check examples/quickstart.yaml

test: install ## Run all tests that this machine can run, and list the skipped ones with reasons
	@# Both parts run, even if the first one fails. Arguments may select the tests of one part only (exit status 5).
	@passed=0; failed=0; \
	part() { $(BIN)/python -m pytest "$$@" $(PYTEST_ARGS) && passed=1 || [ $$? = 5 ] || failed=1; }; \
	part $(UNIT); part $(INTEGRATION); \
	[ $$passed$$failed = 10 ]
	@echo "Not included: the tests on Kubernetes, which kill pods on the cluster of KUBECONFIG: make e2e"

test-all: install ## Run the same tests, the large ones in full instead of as a sample (hours)
	RETRACE_TEST_ALL=1 $(MAKE) test PYTEST_ARGS="--timeout=14400 $(PYTEST_ARGS)"
	$(BIN)/python -m tests.mutation # changes that no unit test of the algorithms notices: at most 5%

test-unit: install ## Run the unit tests (a few minutes)
	$(BIN)/python -m pytest $(UNIT) $(PYTEST_ARGS)

test-integration: install ## Run the tests with real engines (half an hour)
	$(BIN)/python -m pytest $(INTEGRATION) $(PYTEST_ARGS)

bench: install ## Generate benchmarks/performance.md: traces and replay compared with other formats (half an hour)
	$(BIN)/python -m benchmarks

lint: install ## Check format, lint, types, import contracts and prose
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m scripts.prose

format: install ## Format the code and apply automatic fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

LOCK = $(UV) pip compile --python-version 3.11 --no-emit-index-url --no-emit-find-links \
  --no-emit-package retrace-moe --custom-compile-command "make lock"
lock: install ## Compile requirements/cpu.txt and cuda.txt from cpu.in and cuda.in
	$(LOCK) requirements/cpu.in $(SOURCES_cpu) -o requirements/cpu.txt
	cp requirements/cpu.txt requirements/cuda.txt # keeps these versions where possible
	$(LOCK) requirements/cuda.in $(SOURCES_cuda) -o requirements/cuda.txt

docs: install ## Generate the generated pages and tables of docs/ and the chart's README
	$(BIN)/python -m pipeline.config.docs
	$(BIN)/python -m pipeline.metrics.page
	$(BIN)/python -m tests.algorithms_page
	$(BIN)/python -m tests.verl_jobs
	$(BIN)/python -m tests.sizes_page
	$(BIN)/python -m tests.scale_page
	$(BIN)/python scripts/chart_readme.py

images: $(IMAGES:%=image-%) ## Build the three images (TAG, DEVICE=cuda, BUILD: see images/README.md)

image-%: # the flow's image contains no engine, so it has one variant
	$(BUILD) -t $(REPOSITORY)/$*:$(TAG) -f images/$*/Dockerfile $(if $(filter-out flow,$*),--target $(or $(DEVICE),cpu)) \
	  --build-arg VERSION=$(VERSION) --build-arg REVISION=$$(git rev-parse HEAD) .

e2e-images: images ## Build the three images and the tests' PostgreSQL; use TAG=test for make e2e
	$(BUILD) -t retrace-test/postgres:1 -f tests/e2e/postgres/Dockerfile tests/e2e/postgres

e2e: install ## Run the tests on the cluster of KUBECONFIG, which needs the images of make e2e-images TAG=test
	@[ -n "$$KUBECONFIG" ] || { echo "KUBECONFIG is not set. The tests kill pods and fill the node, so use a disposable cluster: see CONTRIBUTING.md"; exit 1; }
	@kubectl get --raw /readyz >/dev/null || { echo "The cluster of KUBECONFIG=$$KUBECONFIG does not answer: see CONTRIBUTING.md"; exit 1; }
	$(BIN)/python -m pytest -m e2e $(PYTEST_ARGS)

kind-up: ## Create a kind cluster, build the images and load them
	scripts/kind/up.sh

kind-demo: ## Install the chart in the kind cluster, train the quickstart, show its traces
	CONTEXT=kind-$${KIND_CLUSTER:-retrace} scripts/kind/demo.sh

kind-down: ## Remove the kind cluster
	scripts/kind/down.sh

clean: ## Remove the virtual environment and caches (runs in outputs/ stay)
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
