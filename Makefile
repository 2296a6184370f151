# Each target sets up what it needs by itself, on a Debian machine with Python 3 and make.
#
#   make demo    train on real data, kill a worker in the middle, show what it cost
#   make test    every test but the trials; some of them with the newest torch, too
#   make ready   install what the tests need: packages, programs, the newest torch
#   make trials  the long ones: kills at random moments, launchers times sizes, the other store
#   make gpu     the tests that need a GPU and NCCL
#   make lint    format, lint, types, size
#   make check   the same and the fast tests: about a minute
#   make claims  what README claims, measured beside torchrun: a table of what holds; seven minutes
#   make bench   elaunch beside torchrun: a table, and JSON in bench-results/
#   make bench-cluster  the same with several nodes, through a TCPStore and through etcd
#   make bench-checkpoint  saving and resuming, beside torch.save and torch.distributed.checkpoint
#   make matrix  the fast tests, parity and the demo with other versions of torch and Python
#   make clients  Lightning, Accelerate, Transformers and others under elaunch, a rank of each killed
#   make docs    the documentation as a site: build/docs; `python3 -m http.server -d build/docs` shows it
#   make pictures  the pictures of README and docs/tutorial.md, by running what it says, and the loss curve
#   make size    lines, files, threads, constants, held to the limits of scripts/size.toml
#   make clean   remove everything that the other targets made, but for the newest torch in ~/.cache
#
# PYTHON=python3.12 chooses the interpreter of the virtual environment.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The names hold digests: of the place, which the environment's own scripts contain, and of Python;
# and of all that decides what is installed. Nothing is made again until one of these changes.
MADE := $(VENV)/.made-$(shell { pwd; $(PYTHON) -VV; } 2>&1 | cksum | cut -d' ' -f1)
STAMP := $(MADE)-$(shell cat setup.cfg pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
# Most of the time a test of processes waits for one of them: six for each of two cores.
# Tests rewritten for their assertions are kept, or each process of pytest rewrites all of them.
# No test is a coroutine: anyio's plugin for those would load asyncio in each process of pytest.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -p no:anyio -n 12 --dist worksteal

.PHONY: demo test trials gpu lint check fast claims bench bench-cluster bench-checkpoint matrix clients docs pictures size clean venv ready system newest

venv: $(STAMP)

$(MADE):
	scripts/setup-venv.sh $(PYTHON) $(VENV)
	touch $@

$(STAMP): $(MADE)
	@echo "Installing into $(VENV): torch and the tools of constraints.txt; this takes minutes once."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
		-c constraints.txt -e '.[test,dev,examples]'
	# By all cores, which pip does not. CI compiles what it imports, a third of it, as it does so.
	$(if $(CI),,-$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib)
	rm -f $(MADE)-*
	touch $@

# All that the tests need. With -j 3 apt, pip, and pip for the newest torch work beside each other.
ready: $(STAMP) system newest

system:
	scripts/setup-system.sh

newest: $(MADE) system
	$(BIN)/python scripts/newest.py --install

demo: $(STAMP)
	$(BIN)/python scripts/demo.py

test:
	@$(MAKE) --no-print-directory -j 3 ready
	# The tests start elaunch a thousand times; where Python may not write bytecode, it is here.
	$(BIN)/python -m compileall -q elaunch
	# Beside the newest torch's part, which is shown at the end: half of the time tests wait.
	mkdir -p build
	$(BIN)/python scripts/newest.py -q >build/newest.log 2>&1 & newest=$$!; \
	trap 'kill $$newest; exit 130' INT TERM; \
	$(PYTEST) --strict-machine -m "not trial and not gpu"; code=$$?; \
	wait $$newest || code=$$?; cat build/newest.log; exit $$code

trials: $(STAMP)
	scripts/setup-system.sh --trials
	$(PYTEST) -n 7 --strict-machine --hypothesis-profile=trials -m "trial or hypothesis"

gpu: $(STAMP)
	$(PYTEST) -n 2 -m gpu

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	@$(BIN)/python scripts/size.py

# Types are checked by one process, beside which the tests are begun.
check: $(STAMP)
	@$(MAKE) --no-print-directory -j 2 -O lint fast

fast: $(STAMP)
	# Some wait for a moment: a third process uses what two leave of two cores, more would only import.
	# A module stays whole: the tests of style, above all, would parse everything in each process.
	$(PYTEST) -n 3 --dist loadfile -q -m "not slow and not ranks and not trial"

claims: $(STAMP)
	$(BIN)/python scripts/bench/run.py --only claims --repeats 3

bench: $(STAMP)
	$(BIN)/python scripts/bench/run.py

bench-cluster: $(STAMP)
	scripts/setup-system.sh
	$(BIN)/python scripts/bench/cluster.py

bench-checkpoint: $(STAMP)
	$(BIN)/python scripts/bench/checkpoint.py

# TORCH="2.6 2.15" and PYTHONS="3.11 3.13" choose among the pairs, STEPS="fast parity demo" what is run.
matrix:
	scripts/setup-system.sh
	$(PYTHON) scripts/matrix.py $(if $(TORCH),--torch $(TORCH)) $(if $(PYTHONS),--python $(PYTHONS)) $(if $(STEPS),--steps $(STEPS))

# In environments of their own. ONLY="accelerate composer" chooses among the libraries.
# EXAMPLES=DIRECTORY runs PyTorch's examples instead, from a checkout of them.
clients:
	$(PYTHON) scripts/clients/$(if $(EXAMPLES),examples.py $(EXAMPLES),clients.py) $(if $(ONLY),--only $(ONLY))

docs: $(STAMP)-docs
	# Not quiet: then warnings would not count, either. The variable turns off an advertisement.
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build -f scripts/docs/mkdocs.yml

$(STAMP)-docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

pictures: $(STAMP)
	PYTHONPATH=. $(BIN)/python scripts/docs/pictures.py $(ONLY)

size: $(STAMP)
	@$(BIN)/python scripts/size.py

clean:
	rm -rf $(VENV) .venv-newest build dist bench-results matrix-results .clients .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf elaunch.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
