# `make demo` and `make test` are all that is needed; both set up .venv first, once.
VENV := .venv
BIN := $(VENV)/bin
# In their order: what is in one folder shares what its fixtures start, and the last files are quick.
WORKERS := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: help demo demo-robot demo-roles demo-rl test check lint test-long setup clean

help:
	@echo "make demo       serve a small language model here and talk to it"
	@echo "make demo-robot drive a robot through the gateway with LeRobot's own client"
	@echo "make demo-roles a student, a judge and a teacher behind one gateway: asked, put to sleep, scaled"
	@echo "make demo-rl    distil a teacher into a student, on four devices and on one by turns"
	@echo "make test       everything that must hold before a change goes in (= make check)"
	@echo "make test-long  fault injection, fuzzing, real peers: minutes more"
	@echo "make lint       format, lint, types and layering alone"
	@echo "make clean      remove the environments and the caches of the tools"

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt scripts/setup.sh
	@PYTHON="$(PYTHON)" scripts/setup.sh $(VENV)

demo: setup
	@$(BIN)/python examples/demo.py

demo-robot: setup
	@$(BIN)/python examples/robot_demo.py

demo-roles: setup
	@$(BIN)/python examples/roles_demo.py

demo-rl: setup
	@$(BIN)/python examples/rl_demo.py

# One torch thread: two of them on a busy two-core machine can be ten times slower.
check test-long: export OMP_NUM_THREADS := 1
# The many processes that tests start compile nothing anew, wherever this is set.
check test-long: export PYTHONDONTWRITEBYTECODE :=

test: check

check: lint
	$(BIN)/python -m pytest -m "not long" $(WORKERS)

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test-long: setup
	$(BIN)/python scripts/peer_env.py router
	$(BIN)/python scripts/peer_env.py openpi
	$(BIN)/python scripts/peer_env.py transferqueue
	$(BIN)/python scripts/peer_env.py trl
	$(BIN)/python scripts/peer_env.py diffusers
	@# Status 3: there is no interpreter for it here, which it says; its tests are skipped.
	$(BIN)/python scripts/peer_env.py lerobot04 || [ $$? -eq 3 ]
	$(BIN)/python scripts/peer_env.py lerobot06 || [ $$? -eq 3 ]
	$(BIN)/python -m pytest -m long $(WORKERS)

clean:
	rm -rf $(VENV) .venv-* build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
