# make phases                     everything set up, then phases 1 to 6 on the best target found
# make phase N=3  (make phase3)   phase 3, after the gates it requires
#   RANKS=1,2,8  TARGET=host|sm90  CASES=name,name  ARGS='...'   narrow or extend it (ARGS goes to `python -m harness run`)
#   NODE=name                     on a GPU node of nodes.yaml (docs/nodes.md)
# make test  [ARGS='...']         the tests, two files at a time (ARGS goes to pytest: -n 0 for one)
# make lint                       ruff and mypy
# make clean                      removes .venv and what runs and tools left
# PYTHON=/path/to/python3         use that interpreter as it is; nothing is installed

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help phases phase phase1 phase2 phase3 phase4 phase5 phase6 test lint clean env

TARGET ?= best
RANKS ?=
CASES ?=
NODE ?=
N ?=
ARGS ?=
PYTHON ?=
export PYTHON

# Every recipe begins with this: it sets up what is missing, and P is the interpreter.
run_python = @command -v python3 >/dev/null || { echo 'set-up: no python3 on PATH; install Python 3.11 or newer' >&2; exit 2; }; \
	P="$$(python3 scripts/ensure_env.py $(1))" || exit 2; \
	export PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}";
harness = "$$P" -m harness run --target $(TARGET) $(if $(RANKS),--ranks $(RANKS)) $(if $(CASES),--cases $(CASES)) $(if $(NODE),--node $(NODE))
python_trees = $(wildcard megamoe harness phases tests scripts bench)

help:
	@sed -n '/^$$/q; s/^# //p' Makefile

env:
	$(call run_python,dev) echo "$$P"

phases:
	$(call run_python,run) exec $(harness) --phases 1-6 $(ARGS)

phase:
	@[[ "$(N)" =~ ^[1-6]$$ ]] || { echo "make phase N=1..6, got N='$(N)'" >&2; exit 2; }
	$(call run_python,run) exec $(harness) --phases $(N) $(ARGS)

phase1 phase2 phase3 phase4 phase5 phase6:
	@$(MAKE) --no-print-directory phase N=$(patsubst phase%,%,$@)

test:
	$(call run_python,dev) exec "$$P" -m pytest -n 2 --dist loadfile $(ARGS)

lint:
	$(call run_python,dev) \
	"$$P" -m ruff check . && "$$P" -m mypy $(python_trees)

clean:
	rm -rf .venv build dist runs *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
