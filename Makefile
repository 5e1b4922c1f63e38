# Needs python3 (3.11 or newer) and pip; everything else goes into .venv.
PYTHON ?= python3
# Which locked packages to install: cpu, or gpu for CUDA. It is what .venv holds, else gpu where there is an NVIDIA driver.
INSTALL ?= $(or $(HELD),$(if $(wildcard /proc/driver/nvidia/version),gpu,cpu))
# Where `serve` and `ui` listen, on this machine alone.
PREFECT_PORT ?= 4200
MLFLOW_PORT ?= 5000
# Whether `serve` and `ui` ask for a password; off opens them to everybody who can log in here.
AUTH ?= on
# What `games` makes: names of overlays, each in a project of its own, so that params.yaml stays as it is meanwhile.
GAMES ?= bandit slippery_lake frozen_lake sokoban

# Servers that were told to end have not failed.
ENDED := || { code=$$?; test $$code -eq 143 || test $$code -eq 130 || exit $$code; }

VENV := .venv
# One file's tests stay in one process; CI says what takes long.
PYTEST := pytest --numprocesses auto --dist loadfile --no-loadscope-reorder --max-worker-restart 0 $(if $(CI),--durations=40)
INSTALLED := $(VENV)/.installed
HELD := $(shell cat $(INSTALLED) 2>/dev/null)
LOCK := requirements/$(INSTALL).txt
$(if $(filter-out cpu gpu,$(INSTALL)),$(error INSTALL is cpu or gpu, not '$(INSTALL)'))
$(if $(filter-out $(INSTALL),$(HELD)),$(error $(VENV) holds the packages for $(HELD); remove it to install those for $(INSTALL)))
# Of what is locked pip takes nothing but files of known content, and builds with nothing else either. The bytes of torch
# depend on where its CPU wheel comes from.
# pip says nothing but errors: a line for each step says what it installs, and how long that took. QUIET= shows all.
QUIET ?= -qq
PIP := python -m pip install $(QUIET)
timed = @printf '%s: ' '$(1)'; began=$$(date +%s); { $(2); } && echo "$$(($$(date +%s) - began)) s"
LOCKED := $(PIP) --require-hashes --no-deps --no-build-isolation
# Where PyTorch has its CPU wheels: asked for that one wheel, where pip's configured places do not have it.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH := $(PIP) --no-deps -r requirements/torch.txt
NO_TORCH := torch: neither pip's configured places nor $(TORCH_INDEX) have the wheel of requirements/torch.txt. In a closed\
	network set PIP_FIND_LINKS to a folder that holds it, or TORCH_INDEX to an index.
LISTED = $(shell grep -c '^[^ #]' $(LOCK)) packages of $(LOCK)$(if $(UV),, (minutes by pip))
# Where uv is there it installs the list, from the places that pip has from its variables. It reads no file of pip's, so
# what it cannot find is pip's again. For CUDA a folder that holds torch's CPU wheel changes nothing.
UV := $(shell command -v uv)
UV_PLACES = UV_FIND_LINKS="$(PIP_FIND_LINKS)" UV_EXTRA_INDEX_URL="$(PIP_EXTRA_INDEX_URL)" UV_INDEX_URL="$(PIP_INDEX_URL)"
BY_UV = $(UV_PLACES) $(UV) pip install $(QUIET:-qq=-q) --python $(VENV) --index-strategy unsafe-best-match --require-hashes --no-deps \
	--no-build-isolation
NO_CPU_TORCH := --constraint requirements/cuda.txt
COMPILE = $(UV_PLACES) uv pip compile --quiet \
	--generate-hashes --python-version 3.11 --index-strategy unsafe-best-match --no-emit-index-url \
	--no-emit-find-links --custom-compile-command "make lock"

# DVC runs `python`: the one of the environment. It puts names of params.yaml into shell commands, which the doctor looks
# at first.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
# A pipeline starts processes by the dozen: what they import is compiled once, and not by each of them for itself.
unexport PYTHONDONTWRITEBYTECODE
export DO_NOT_TRACK := 1
export DVC_NO_ANALYTICS := 1
export MLFLOW_DISABLE_TELEMETRY := true
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help repro ablations games recipe serve doctor check test hostile relock lint ui lock clean

help:  ## say what can be made
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

repro: $(INSTALLED)  ## prepare, train, evaluate and report whatever is out of date; at another scale with OVERLAY=NAME
	$(if $(OVERLAY),agent-r1 overlay $(OVERLAY))
	agent-r1 doctor parameters
	agent-r1 pipeline
	@agent-r1 results

ablations: $(INSTALLED)  ## train, evaluate and compare every run of params.yaml's ablations; OVERLAY=NAME as above
	$(if $(OVERLAY),agent-r1 overlay $(OVERLAY))
	agent-r1 doctor parameters
	agent-r1 pipeline --sweep ablations
	@agent-r1 results --sweep ablations

games: $(INSTALLED)  ## play every game, or GAMES=sokoban: the same sweep in games/NAME
	@$(MAKE) --no-print-directory -j2 $(GAMES:%=game-%)

# Makes a folder that git ignores a project under an overlay, unless it is there. Its runs are in this clone's MLflow.
project = @test -e $(1)/params.yaml || { agent-r1 new project $(1) --from $(2) $(3) && ln -s ../../.tracking $(1)/.tracking; }

# Of several games two are under way, so that no place of operate.side_by_side stays empty during a warm start, and no stage
# is alone (ALONE of flows/stage.py). Their lines begin with the game's name then; they are read to their end where Ctrl-C
# ends what writes them.
game-%: SHELL := bash
game-%: .SHELLFLAGS := -o pipefail -c
game-%: $(INSTALLED)
	$(call project,games/$*,$*)
	@( $(if $(word 2,$(GAMES)),export GOMP_SPINCOUNT=0 && )cd games/$* && agent-r1 doctor parameters && \
	agent-r1 pipeline --sweep ablations && agent-r1 results --sweep ablations \
	) $(if $(word 2,$(GAMES)),2>&1 | (trap '' INT; awk '{print "$*  " $$0; fflush()}'))

# A recipe is an overlay in a project of its own, on files and a model that are there. DATA is named as the data set; MODEL is
# a folder or hub id. TINY=1 is the first score, within an hour on two cores.
RECIPE = recipes/$(NAME)$(if $(TINY),_tiny)
RAW = $(RECIPE)/data/raw/$(notdir $(abspath $(DATA)))
OF_MODEL = $(or $(realpath $(MODEL)),$(MODEL))
TINY_SET := train.iterations=4 runs.grpo.rollout.questions=4 warm_start.demonstrations=192 warm_start.steps=48 \
	evaluate.questions=100 evaluate.temperature=0.0 repro_baselines=[with_examples,base_tool_call]

recipe: $(INSTALLED)  ## train a real model from the model and its data to the report: NAME=smollm2 MODEL=FOLDER DATA=FOLDER
	$(if $(and $(NAME),$(MODEL),$(DATA)),,$(error make recipe NAME=smollm2 MODEL=FOLDER DATA=FOLDER, and TINY=1 for a first score))
	$(call project,$(RECIPE),$(NAME),--set model.path=$(OF_MODEL) $(if $(TINY),$(TINY_SET:%=--set %)))
	@grep -qE 'path: "?$(OF_MODEL)"?( |$$)' $(RECIPE)/params.yaml || { echo "$(RECIPE) is of another model: remove it, or edit its params.yaml"; exit 1; }
	mkdir -p $(RAW) && ln -sf $(abspath $(DATA))/* $(RAW)/
	cd $(RECIPE) && dvc repro index
	test -e $(RAW)/examples.jsonl || (cd $(RECIPE) && agent-r1 new examples $(notdir $(RAW)))
	cd $(RECIPE) && agent-r1 pipeline && agent-r1 results

serve: $(INSTALLED)  ## bring up Prefect (PREFECT_PORT or PREFECT_API_URL), deployments, a worker and MLflow (MLFLOW_PORT)
	agent-r1 serving --prefect-port $(PREFECT_PORT) --mlflow-port $(MLFLOW_PORT) --auth $(AUTH) $(ENDED)

doctor: $(INSTALLED)  ## check versions, places, ports, disk, engine, Prefect, MLflow and DVC, and say what to do
	agent-r1 doctor

check: lint  ## style, types, fast tests and one walk through the graph: what to run before every commit
	$(PYTEST) -m "not slow"

test: $(INSTALLED)  ## run the whole test suite
	$(PYTEST)

hostile: $(INSTALLED)  ## give 37,080 hostile inputs to whatever reads what others wrote; exits with 1 if one does harm
	python -m benchmarks.hostile

relock: $(INSTALLED)  ## have dvc.lock take over code that changes no output of a small graph; names what does, or was not run
	python -m benchmarks.relock

lint: $(INSTALLED)  ## check style, format, types and import contracts
	ruff check
	ruff format --check
	mypy
	lint-imports --no-cache

ui: $(INSTALLED)  ## show the runs in MLflow, at http://127.0.0.1:5000 or MLFLOW_PORT
	agent-r1 serving --only-mlflow --mlflow-port $(MLFLOW_PORT) --auth $(AUTH) $(ENDED)

lock: $(INSTALLED)  ## write requirements/cpu.txt, gpu.txt and build.txt anew from pyproject.toml
	$(COMPILE) pyproject.toml --upgrade --extra cpu --extra dev --override requirements/overrides.txt \
		--no-emit-package torch --output-file requirements/cpu.txt
	cp requirements/cpu.txt requirements/gpu.txt  # whose versions are taken over where they fit
	$(COMPILE) pyproject.toml --extra gpu --extra dev $(NO_CPU_TORCH) --output-file requirements/gpu.txt
	echo setuptools | $(COMPILE) - --constraint requirements/cpu.txt --output-file requirements/build.txt

clean:  ## remove what the stages and checks wrote, registered policies too; keeps .venv, data/raw and .tracking
	rm -rf outputs dvc.lock ablations/dvc.* scales games recipes data/prepared data/index data/.index.* .dvc/cache .dvc/tmp dvc_plots build *.egg-info models/*/
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis

# Where the environment was installed, if not here. The scripts in the environment of a copied clone run the original's code.
MOVED_FROM := $(shell test -L $(VENV) || sed -n 's|^VIRTUAL_ENV=[^/]*\(/.*\)/$(VENV)\b.*|\1|p' $(VENV)/bin/activate 2>/dev/null \
	| grep -vxF '$(CURDIR)')
ifneq ($(MOVED_FROM),)
.PHONY: $(INSTALLED)
endif

$(INSTALLED): $(LOCK) requirements/torch.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed: make PYTHON=...")'
	$(if $(filter gpu,$(INSTALL)),@$(PYTHON) -c 'import sys; sys.version_info < (3, 13) or sys.exit("the packages for CUDA have\
 no wheels above Python 3.12: make PYTHON=python3.12, or make INSTALL=cpu")')
	$(if $(MOVED_FROM),@echo "$(VENV) is a copy of the one in $(MOVED_FROM); installing it for this folder")
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(call timed,what builds packages,$(LOCKED) -r requirements/build.txt)
ifeq ($(INSTALL),gpu)
	$(call timed,$(LISTED),$(if $(UV),$(BY_UV) -r $(LOCK) $(NO_CPU_TORCH) || )$(LOCKED) -r $(LOCK) $(NO_CPU_TORCH))
else
	$(call timed,$(LISTED),$(if $(UV),$(BY_UV) -r $(LOCK) || )$(LOCKED) -r $(LOCK))
	$(call timed,torch,$(TORCH) || { echo "asking $(TORCH_INDEX)" && $(TORCH) --index-url $(TORCH_INDEX); } || { echo "$(NO_TORCH)" >&2; exit 1; })
endif
	$(call timed,agent_r1,$(PIP) --no-deps --no-build-isolation -e .)
	$(if $(MOVED_FROM),grep -lIrF '$(MOVED_FROM)/$(VENV)' $(VENV)/bin | xargs sed -i 's|$(MOVED_FROM)/$(VENV)|$(CURDIR)/$(VENV)|g')
	@python -c 'import vl_convert; print(vl_convert.javascript_bundle())' > $(VENV)/vega.js  # for .dvc/plots.html
	echo $(INSTALL) > $@
