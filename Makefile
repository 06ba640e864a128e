# Every recipe is one command a person could type; `make help` lists them.
PY := .venv/bin/python
NODES ?= 4
ARGS ?=
SLURM_VERSION ?=
CLUSTER := python3 slurm/cluster/cluster.py
VERSION_OPTION := $(if $(SLURM_VERSION),--slurm-version $(SLURM_VERSION))
SHARED_FS ?= none
PREFIX ?= /opt/ftslurm

.DEFAULT_GOAL := help
.PHONY: help setup packages submit sweep bench test test-rest test-runs test-cluster test-full test-slurm lint cluster-up cluster-down cluster-status install-node clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  make submit ARGS='cluster.nodes=2 experiment=gpt_fsdp'   any override of conf/ goes into ARGS"

.venv/.complete: pyproject.toml constraints.txt slurm/setup-venv.sh
	bash slurm/setup-venv.sh

setup: .venv/.complete ## make .venv from constraints.txt

submit: setup ## run the main experiment to its end: on Slurm where there is one, else on this machine
	$(PY) -m ftslurm submit experiment=main --wait $(ARGS)

sweep: setup ## one run for each combination: make sweep ARGS="optim.lr=1e-4,3e-4 seed=0,1"
	$(PY) -m ftslurm submit -m $(ARGS)

packages: ## Debian as root: install Slurm, MariaDB and munge for the test cluster; elsewhere nothing
	@if [ "$$(id -u)" = 0 ] && [ -f /etc/debian_version ]; then $(CLUSTER) setup-packages; fi

lint: setup ## ruff, mypy and shellcheck
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	cd slurm/cluster && ../../.venv/bin/mypy --strict *.py
	@if command -v shellcheck >/dev/null; then shellcheck slurm/*.sh slurm/site/*.sh; \
	else echo "lint: shellcheck is not installed; shell scripts were not checked"; fi

test: setup packages lint ## lint, types and all tests; with a real Slurm cluster where it can be had
	@echo "test: runs and cluster, which mostly wait, go beside the others; output follows, part by part"
	@$(MAKE) --no-print-directory --jobs=3 --output-sync=target test-rest test-runs test-cluster

# Whole runs and real ranks. Torch comes last: the tests of train/ load it here, after which what a
# thread forks may crash before its exec.
RUNS := $(wildcard tests/test_*_chain.py tests/test_hydra_*.py) $(addprefix tests/test_, \
	agent_processes.py agent_scale.py agent_unheard.py disk_conditions.py fence_leftover.py local.py \
	local_failures.py local_placement.py metrics_agent.py program_beat.py program_rank.py readme.py \
	same_code.py standby_streams.py storage_faults.py submit_command.py sweep_command.py) \
	tests/train

test-rest: setup ## all tests but whole runs and those on the cluster
	$(PY) -m pytest -m "not full" --durations=10 --ignore=tests/cluster $(addprefix --ignore=,$(RUNS))

test-runs: setup ## the tests that start whole runs and ranks on this machine
	$(PY) -m pytest -m "not full" --durations=10 $(RUNS)

test-cluster: setup packages ## the tests on a real Slurm cluster
	$(PY) -m pytest -m "not full" --durations=10 tests/cluster

test-full: setup packages lint ## all of it and what takes long, one after the other
	$(PY) -m pytest --durations=25

# A cluster of its own, so that one that is up stays as it is.
test-slurm: export FTSLURM_CLUSTER ?= /var/tmp/ftslurm-test$(SLURM_VERSION)$(SHARED_FS:none=)
test-slurm: setup packages ## all cluster tests on another Slurm or file system: make test-slurm SLURM_VERSION=24.11 SHARED_FS=bindfs
	$(CLUSTER) setup-packages --shared-fs $(SHARED_FS)
	@trap '$(CLUSTER) down' EXIT INT TERM; \
	$(CLUSTER) up --nodes 4 --expose . $(VERSION_OPTION) --shared-fs $(SHARED_FS) && \
	$(CLUSTER) enter -- $(PY) -m pytest --durations=10 $(or $(ARGS),tests/cluster)

bench: setup ## measure against torch.save, DCP, a bare loop, hydra-submitit-launcher, reportseff, in pairs (half an hour)
	$(PY) tests/bench/run.py $(ARGS)

cluster-up: ## start a real throwaway Slurm cluster here (root): make cluster-up NODES=4 SLURM_VERSION=24.11
	$(CLUSTER) up --nodes $(NODES) $(VERSION_OPTION)

cluster-down: ## stop it and leave nothing behind
	$(CLUSTER) down

cluster-status: ## what runs of it
	$(CLUSTER) status

# Settings that are there stay, unless ARGS say others.
NEW_SETTINGS = $(strip $(ARGS))$(if $(wildcard $(PREFIX)/etc/health.json),,first)
install-node: setup ## as root: the health probe for a node: make install-node PREFIX=/opt/ftslurm ARGS='health=shadow'
	@settings=$$(mktemp) && trap 'rm -f "$$settings"' EXIT && \
	$(PY) -m ftslurm health settings --out "$$settings" $(ARGS) && \
	$(PY) slurm/install_node.py --prefix $(PREFIX) $(if $(NEW_SETTINGS),--settings "$$settings")

clean: ## remove the environment and all caches; runs/ stays
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info build dist
