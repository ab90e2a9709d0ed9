# Each target does its own set-up: it needs only Python 3.11+ and make.
#   make test                      fast tests        make test PYTHON=python3.12   on another Python
#   make audit                     the example audit
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help audit audit-lora test test-slow lint format docs notebook wheel bench figures results parity parity-full-size lock clean

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 18

# The lock is complete: nothing is resolved again, so that a new release of something cannot get in the way.
# The stamp carries the Python version, so that another PYTHON gets a fresh environment.
STAMP := $(VENV)/.installed-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "dime_jax needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	@ls $(STAMP) >/dev/null 2>&1 || rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes --no-deps -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --editable .
	@touch $@

audit: $(STAMP)  ## audit the shipped model, write its report
	$(BIN)/dime-jax audit --output out/audit

audit-lora: $(STAMP)  ## audit the shipped LoRA beside its base
	$(BIN)/dime-jax audit --model digits --lora digits_lora --output out/audit-lora

test: $(STAMP)  ## fast tests
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test-slow: $(STAMP)  ## simulations, coverage, kill-and-resume
	$(BIN)/python -m pytest -m slow -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

lint: $(STAMP)  ## format check, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP)  ## format in place
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# A second environment with PyTorch and diffusers, to compare with; pip alone knows where to find their builds.
PARITY := .venv-parity
$(PARITY)/.installed: requirements.lock pyproject.toml
	$(MAKE) VENV=$(PARITY) $(subst $(VENV),$(PARITY),$(STAMP))
	$(PARITY)/bin/python -m pip install --quiet torch==2.13.0
	$(PARITY)/bin/python -m pip install --quiet "diffusers>=0.35" "peft>=0.17" "transformers>=5" torch==2.13.0
	@touch $@

parity: $(PARITY)/.installed  ## compare with PyTorch and diffusers, live
	$(PARITY)/bin/python -m pytest -m parity

parity-full-size: $(PARITY)/.installed  ## the same for one network of 860M parameters (10 GB)
	$(PARITY)/bin/python -m pytest -m full_size -s

bench: $(PARITY)/.installed  ## speed ratios, measured side by side
	$(PARITY)/bin/python -m benchmarks

figures: $(STAMP)  ## every figure that needs no accelerator
	$(BIN)/python -m experiments.figures --output=out/figures

results: $(STAMP)  ## write docs/RESULTS.md and docs/results_*.md again from docs/results
	$(BIN)/python -m experiments.tables --kept=docs/results --results=docs/RESULTS.md

wheel: $(STAMP)  ## build the wheel, and try it in an environment of its own
	$(BIN)/python -m hatchling build --target wheel --directory out/dist
	$(BIN)/python -m pytest -m slow tests/test_wheel.py

# What the site is made from besides its pages: each is made once, until it is removed.
out/audit/report.html:
	$(BIN)/dime-jax audit --output out/audit --quiet
out/docs/figures/roc.svg:
	$(BIN)/python -m experiments.figures --runs=docs/results/digits/seed_0,docs/results/cifar10_laptop/seed_0 --output=out/docs/figures
out/docs/five_minutes.ipynb: docs/five_minutes.ipynb
	$(BIN)/python docs/run_notebook.py $< $@

notebook: $(STAMP) out/docs/five_minutes.ipynb  ## execute docs/five_minutes.ipynb

docs: $(STAMP) out/audit/report.html out/docs/figures/roc.svg out/docs/five_minutes.ipynb  ## build the site into out/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

lock:  ## renew requirements.lock (needs uv)
	uv pip compile pyproject.toml --extra dev --extra train --extra dp --extra latent --extra tfds --extra docs --python-version 3.11 --universal \
	  --generate-hashes --no-emit-index-url --no-header --quiet --output-file requirements.lock

clean:  ## remove the environment and outputs
	rm -rf $(VENV) $(PARITY) .cache out
