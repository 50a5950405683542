# Two commands on a new machine with python3 (3.10+), make and a package index:
#   make demo   installs into .venv and runs the main job on this machine: no Slurm, no GPU
#   make test   installs what the tests need and runs them, a real Slurm included when root
# Both are safe to repeat.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# The CPU build where the index or a local wheel folder offers one; any torch >= 2.6 works.
TORCH ?= torch==2.13.0
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test test-all test-gpu lint bench docs clean

demo: $(VENV)/.installed-train
	$(BIN)/mtlaunch submit examples/tiny-lora/job.yaml --wait --executor local

test: $(VENV)/.installed-test
	bash .ci/debian-packages.sh
	@# as root the real Slurm must be there: its tests fail then, elsewhere they skip with a reason
	MTLAUNCH_REQUIRE_SLURM=$$(test "$$(id -u)" != 0 || echo 1) \
	  $(BIN)/python -m pytest -m "not long and not gpu"

# Adds the long tests and a second Python with the newest megatron-core.
test-all: test
	$(BIN)/python -m pytest -m "long and not gpu"
	bash .ci/newest-megatron-core.sh

test-gpu: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m gpu

lint: $(VENV)/.installed-lint
	$(BIN)/ruff check .
	@# mypy does not follow an editable install's package-dir: show it the folders as a package.
	@mkdir -p build/types/mtlaunch
	@for part in preflight launcher kernels templates; do \
	  ln -sfn ../../../$$part build/types/mtlaunch/$$part; done
	MYPYPATH=build/types $(BIN)/mypy -p mtlaunch.preflight -p mtlaunch.launcher -p mtlaunch.kernels

bench: $(VENV)/.installed-train
	$(BIN)/python benchmarks/check_startup.py
	$(BIN)/python benchmarks/memory_accuracy.py

docs: $(VENV)/.installed-test
	$(BIN)/python docs/generate.py

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "python3 is $$($(PYTHON) --version), 3.10 or newer is needed: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.installed-train: pyproject.toml | $(VENV)/.created
	@echo "installing torch and megatron-core into $(VENV), once"
	$(PIP_INSTALL) "$(TORCH)"
	$(PIP_INSTALL) --editable '.[train]'
	@# where PYTHONDONTWRITEBYTECODE is set, every start would compile the sources again
	$(BIN)/python -m compileall -q launcher preflight kernels templates
	touch $@

$(VENV)/.installed-test: pyproject.toml | $(VENV)/.installed-train
	$(PIP_INSTALL) --editable '.[train,test]'
	touch $@

$(VENV)/.installed-lint: pyproject.toml | $(VENV)/.installed-train
	$(PIP_INSTALL) --editable '.[train,test,lint]'
	touch $@

clean:
	rm -rf $(VENV) .venv-newest build dist *.egg-info
