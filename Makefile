# Everything a person runs here. `make` lists the targets; every recipe is one line; what the lines run lives elsewhere.

PYTHON ?= python3
ARGS ?=
UV_VERSION := 0.13.9
COMPILE := .uv/bin/uv pip compile --quiet --universal --generate-hashes --python-version 3.11 --fork-strategy fewest \
	--no-header --no-emit-index-url pyproject.toml
INSTALL := .venv/bin/pip install --quiet --disable-pip-version-check

export define CAN_MAKE_VENV
import sys
if not (3, 11) <= sys.version_info < (3, 14):
    sys.exit("Python 3.11 to 3.13 is needed, $(PYTHON) is %d.%d; name another one: make PYTHON=python3.12" % sys.version_info[:2])
import importlib.util
if not importlib.util.find_spec("ensurepip"):
    sys.exit("$(PYTHON) cannot make a venv; install its venv package (Debian, Ubuntu: apt-get install python3-venv)")
endef

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup lock train test test-launchers test-monitoring test-faults test-faults-long test-gpu lint types format check docs dashboard clean bench-startup bench-mnist bench-data bench-saving bench-gpu

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

setup: .venv/.trainer ## make .venv with the locked dependencies; PYTHON=python3.12 picks the interpreter

train: .venv/.trainer ## train on the embedded data set with every visible device; ARGS='--epochs 1' adds options
	.venv/bin/trainer train $(ARGS)

test: .venv/.test ## run the tests, two at a time; ARGS='-k resume' adds options
	.venv/bin/pytest -n 2 $(ARGS)

test-launchers: .venv/.test ## train under every launcher and print one table; root's apt-get adds Slurm and Open MPI first
	tests/install.sh "munged slurmctld slurmd srun mpirun" "munge slurm-wlm openmpi-bin" && .venv/bin/pytest -n 2 tests/launchers $(ARGS)

test-monitoring: .venv/.test ## check rules, alerts and dashboard with a real Prometheus; root's apt-get adds it first
	tests/install.sh "prometheus promtool" prometheus && .venv/bin/pytest -n 2 tests/monitoring $(ARGS)

test-faults: .venv/.test ## break runs on purpose: kills, signals, hangs, disks, lost peers; prints what it took to go on
	tests/install.sh ip iproute2 && .venv/bin/pytest -n 2 tests/faults $(ARGS)

test-faults-long: .venv/.test ## the same with the long counts
	tests/install.sh ip iproute2 && .venv/bin/pytest -n 2 tests/faults -m "not gpu" $(ARGS)

test-gpu: ## run the tests that need GPUs, with the torch that PYTHON has
	$(PYTHON) -m pytest -m gpu $(ARGS)

lint: .venv/.test ## check style
	.venv/bin/ruff check && .venv/bin/ruff format --check

types: .venv/.test ## check types
	.venv/bin/mypy

format: .venv/.test ## rewrite the code in the project's style
	.venv/bin/ruff check --fix && .venv/bin/ruff format

check: lint types test ## run lint, types and test

docs: .venv/.trainer ## write docs/settings.md and the table of docs/metrics.md
	.venv/bin/trainer config --reference > docs/settings.md && .venv/bin/python -c 'import pathlib, trainer.metrics as m; page = pathlib.Path("docs/metrics.md"); page.write_text(m.renewed(page.read_text()))'

dashboard: .venv/.test ## write the dashboard's JSON
	.venv/bin/python docker/grafana/dashboard.py > docker/grafana/dashboards/trainer.json

bench-startup: .venv/.trainer ## print the times from start to help and to the first step, beside a bare script
	.venv/bin/python benchmarks/startup.py $(ARGS)

bench-mnist: .venv/.trainer ## print the time of a whole MNIST run, start included; TRAINER_TEST_DATA holds mnist/
	.venv/bin/python benchmarks/mnist.py $(ARGS)

bench-data: .venv/.trainer ## print the speed of reading pictures beside the classic way; TRAINER_TEST_DATA holds imagenet-sample/
	.venv/bin/python benchmarks/data.py $(ARGS)

bench-saving: .venv/.trainer ## print how long a save keeps training waiting, beside torch.save with fsync
	.venv/bin/python benchmarks/saving.py $(ARGS)

bench-gpu: ## print throughput on the visible GPUs, with the torch that PYTHON has
	$(PYTHON) benchmarks/gpu.py $(ARGS)

lock: .uv/bin/uv ## pin what pyproject.toml allows; ARGS=--upgrade takes newer releases
	$(COMPILE) $(ARGS) -o requirements.lock && $(COMPILE) $(ARGS) --no-annotate --group test -c requirements.lock -o requirements-test.lock

clean: ## remove what the other targets made, but not runs/
	rm -rf .venv .uv build *.egg-info .mypy_cache .pytest_cache .ruff_cache && find . -name __pycache__ -prune -exec rm -rf {} +

.venv/bin/pip:
	@$(PYTHON) -c "$$CAN_MAKE_VENV" && $(PYTHON) -m venv .venv

.venv/.trainer: requirements.lock pyproject.toml trainer/__init__.py | .venv/bin/pip
	$(INSTALL) --require-hashes -r requirements.lock && $(INSTALL) --no-deps --no-build-isolation -e . && touch $@

.venv/.test: requirements-test.lock .venv/.trainer
	$(INSTALL) --require-hashes -r requirements-test.lock && touch $@

.uv/bin/uv:
	$(PYTHON) -m venv .uv && .uv/bin/pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
