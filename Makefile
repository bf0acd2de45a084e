# Every target sets up what it needs. Python 3.11 or newer must be on the PATH; nothing else.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do command -v $$p >/dev/null 2>&1 && $$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
BIN := .venv/bin
# Clusters at once in test-cluster; 0: one, or the one that `make cluster-up` left running.
WORKERS ?= 4
READY := .venv/.ready
# Images of Python set it for one program that is started once. Here hundreds are started, and each would be compiled again.
unexport PYTHONDONTWRITEBYTECODE
IN_PODS := tests/cluster/test_frameworks_in_pods.py
# Of the Python in the test images. A cluster given by STOKER_TEST_KUBECONFIG could not mount them.
FRAMEWORKS_FOR_PODS = test -n "$$STOKER_TEST_KUBECONFIG" || $(BIN)/python tests/frameworks/environment.py --for 3.11 >/dev/null

help:  ## what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(READY)  ## .venv with stoker in it

$(READY): requirements/lock.txt requirements/tools.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "error: no Python >= 3.11 with venv on the PATH"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/tools.txt
	@$(BIN)/uv pip install --quiet --system-certs --python $(BIN)/python --require-hashes -r requirements/lock.txt
	@$(BIN)/uv pip install --quiet --system-certs --python $(BIN)/python --no-deps --no-build-isolation -e .
	@touch $@

demo: setup  ## train a real model on real data to its final accuracy
	@$(BIN)/python examples/demo.py

lint: setup  ## style, types, layers, unused code, the launcher's Python 3.9, lock file
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/vulture
	$(BIN)/vermin --quiet --no-tips --violations -t=3.9- --backport typing src/stoker/linux src/stoker/task src/stoker/launcher src/stoker/sdk src/stoker/courier src/stoker/__init__.py
	$(BIN)/python requirements/check.py

test: setup  ## everything that runs in CI, under ten minutes
	$(BIN)/python -m pytest -n 4 --maxschedchunk 2 --durations 10 -m "not soak and not alone" $(ARGS)
	$(BIN)/python -m pytest -m "alone and not soak" $(ARGS)

test-cluster: setup  ## against a real Kubernetes cluster on this machine (root); the first time builds it
	@PYTHONPATH=tests/cluster $(BIN)/python -m harness build coredns helm kwok >/dev/null
	PYTHONPATH=tests/cluster $(BIN)/python -m pytest tests/cluster --ignore $(IN_PODS) -p slots -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not soak" $(ARGS)

test-frameworks: setup  ## real torch, TensorFlow, JAX, Open MPI, Dask, here and in pods; the first time downloads them
	@place=$$($(BIN)/python tests/frameworks/environment.py) && \
	  STOKER_FRAMEWORKS=$$place $(BIN)/python -m pytest tests/frameworks -m "not soak" $(ARGS)
	@PYTHONPATH=tests/cluster $(BIN)/python -m harness build coredns helm kwok >/dev/null
	@$(FRAMEWORKS_FOR_PODS)
	PYTHONPATH=tests/cluster $(BIN)/python -m pytest $(IN_PODS) -p slots -m "not soak" $(ARGS)

cluster-up: setup  ## leave that cluster running: test-cluster then uses it
	@PYTHONPATH=tests/cluster $(BIN)/python -m harness up

cluster-down: setup  ## end it, with all it left
	@PYTHONPATH=tests/cluster $(BIN)/python -m harness down

soak: setup  ## many seeds, long runs
	STOKER_SEEDS=$${STOKER_SEEDS:-30} $(BIN)/python -m pytest -m "soak or not soak" --timeout 3600 $(ARGS)
	@PYTHONPATH=tests/cluster $(BIN)/python -m harness build coredns helm kwok >/dev/null
	@$(FRAMEWORKS_FOR_PODS)
	STOKER_SEEDS=$${STOKER_SEEDS:-30} $(BIN)/python -m pytest tests/cluster -m "soak or not soak" --timeout 3600 $(ARGS)
	@PYTHONPATH=tests/cluster STOKER_TEST_KUBERNETES=1.29 $(BIN)/python -m harness build >/dev/null
	PYTHONPATH=tests/cluster STOKER_TEST_KUBERNETES=1.29 $(BIN)/python -m pytest tests/cluster/test_parity.py tests/cluster/test_faults.py tests/cluster/test_faults_between.py --timeout 3600 $(ARGS)

bench: setup  ## ours against peers and limits; writes bench/results.json
	$(BIN)/python -m bench $(ARGS)

docs: setup  ## regenerate the generated pages
	$(BIN)/python docs/generate.py

lock:  ## refresh the lock files
	$(BIN)/uv pip compile --quiet --system-certs --upgrade --generate-hashes --no-header --no-annotate pyproject.toml requirements/dev.in -o requirements/lock.txt
	$(BIN)/uv pip compile --quiet --system-certs --upgrade --generate-hashes --no-header --no-annotate requirements/tools.in -o requirements/tools.txt
	$(BIN)/uv pip compile --quiet --system-certs --upgrade --generate-hashes --no-header --no-annotate requirements/frameworks.in -o requirements/frameworks.txt

clean:
	rm -rf .venv build .mypy_cache .ruff_cache .pytest_cache .hypothesis

.PHONY: help setup demo lint test test-cluster test-frameworks cluster-up cluster-down soak bench docs lock clean
