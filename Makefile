# What people and CI type. Needs Python 3.11 or newer; everything is installed into .venv, whatever is active.
#   PYTHON=python3.12       which interpreter makes .venv
#   TORCH="torch==2.13.0"   what to install (with any pip options) if .venv has no torch that fits

.DEFAULT_GOAL := help
.PHONY: help quickstart test checks one-step docs

help: ## say what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

quickstart: ## set up, then train and judge a first reward model on generated preferences (ARGS="--steps 20")
	@scripts/setup
	@.venv/bin/rewardlab quickstart $(ARGS)

test: ## set up, then check, run one step of the quickstart, and test
	@scripts/setup dev
	@$(MAKE) --no-print-directory -j 2 checks one-step
	@scripts/test # after the quickstart, which converts the built-in model that some tests load

checks:
	@scripts/check

one-step: # threads that wait asleep: spinning, they would hold up the checks beside them, and so each other
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
		OMP_WAIT_POLICY=passive .venv/bin/rewardlab quickstart --steps 1 --test-pairs 20 --output-dir "$$folder/quickstart"

docs: ## set up, then build the documentation as one site in build/site
	@scripts/setup docs
	@scripts/docs
