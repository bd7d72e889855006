# `make install` for users, the other commands for developers. On a fresh Debian or Ubuntu machine with root or sudo
# they install what is missing; later runs install nothing.

SHELL := /bin/sh
PYTHON ?= python3
BIN := .venv/bin
export PYTHON

# Arguments for pytest: make test PYTEST_ARGS='-n 0 -x tests/attacks'
# Workers: two for each core of the smallest machine, as a worker waits for sandboxes most of its time.
PYTEST_WORKERS ?= 4
PYTEST_ARGS ?= -n $(PYTEST_WORKERS) --dist loadfile
BENCH_ARGS ?=
FUZZ_SECONDS ?= 60
FUZZ_EXAMPLES ?= 200
KILLS ?= 1000
SERVER_KILLS ?= 100
SOAK_MINUTES ?= 30
SOAK_SANDBOXES ?= 200
SOAK_ARGS ?=
VM_PARTS ?=
FOREIGN ?=

# The paths that ruff and mypy check, if they exist.
CHECKED := $(wildcard src tests bench examples build_guest.py scripts/*.py)

SHELL_SCRIPTS := $(addprefix scripts/,bootstrap foreign fuzz install lock old-gvisor os-packages) $(wildcard scripts/vm/*) .ci/run

NATIVE := src/atoll/_bin
GUEST_HEADERS := $(wildcard src/atoll/guest/*.h)

.PHONY: help install uninstall wheel demo test test-old-gvisor test-remote test-vm test-foreign check format bench soak fuzz \
	fuzz-rest chaos build lock clean programs lint dist
.DEFAULT_GOAL := help

help: ## show this list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1 | \2/p' $(firstword $(MAKEFILE_LIST)) | \
		while IFS='|' read -r target what; do printf '%-24s%s\n' "$$target" "$$what"; done

install: ## put atoll on the PATH, in a virtual environment below PREFIX (/usr/local; not as root: ~/.local)
	@scripts/bootstrap install
	@$(MAKE) --no-print-directory dist
	@scripts/install

uninstall: ## remove what `make install` has installed and, after asking, all sandboxes of this user; YES=1 does not ask
	@scripts/install --remove $(if $(YES),--yes)

wheel: ## build a wheel that needs no compiler, and the source distribution, in dist/
	@scripts/bootstrap wheel
	@$(MAKE) --no-print-directory dist
	@ls dist/*

demo: ## install what is missing and run the demo
	@scripts/bootstrap demo
	@$(MAKE) --no-print-directory programs
	@$(BIN)/python -m examples.demo

test: ## install what is missing, run all checks and tests
	@scripts/bootstrap test
	@$(MAKE) --no-print-directory programs WERROR=--werror
	@$(MAKE) --no-print-directory lint
	@$(BIN)/pytest $(PYTEST_ARGS)

test-old-gvisor: ## run the tests of sandboxes with the gVisor of Debian 12 itself, of 2022
	@scripts/bootstrap test
	@$(MAKE) --no-print-directory programs WERROR=--werror
	@old=$$(scripts/old-gvisor) && PATH="$$old:$$PATH" $(BIN)/pytest $(PYTEST_ARGS) --atoll-runtime runsc \
		tests/conformance tests/attacks tests/chaos src/atoll/testing/conformance

test-remote: ## run the tests that can differ for the engine of a server: the suite, and the command line with ATOLL_URL
	@scripts/bootstrap test
	@$(MAKE) --no-print-directory programs WERROR=--werror
	@$(BIN)/pytest $(PYTEST_ARGS) --atoll-face remote --atoll-runtime crun --atoll-runtime runsc src/atoll/testing/conformance
	@$(BIN)/pytest $(PYTEST_ARGS) --atoll-face remote tests/cli

test-vm: ## run a core of the tests in an emulated guest with systemd and cgroup v2; VM_PARTS='systemd container'
	@scripts/bootstrap vm
	@scripts/vm/test $(VM_PARTS)

test-foreign: ## run the tests of frameworks of others in environments of their own; FOREIGN='NAME...' chooses, FOREIGN=ci those of CI
	@scripts/bootstrap test
	@$(MAKE) --no-print-directory programs WERROR=--werror
	@scripts/foreign $(FOREIGN)

check: ## check format, lint, types, import contract and shell scripts
	@scripts/bootstrap check
	@$(MAKE) --no-print-directory lint

format: ## rewrite the Python sources as `check` wants them
	@scripts/bootstrap check
	@$(BIN)/ruff check --fix-only --quiet $(CHECKED)
	@$(BIN)/python scripts/sync_stub.py
	@$(BIN)/python scripts/reference.py
	@$(BIN)/python scripts/typescript_client.py
	@$(BIN)/ruff format $(CHECKED)

bench: ## run the benchmarks with BENCH_ARGS='...'
	@scripts/bootstrap bench
	@$(MAKE) --no-print-directory programs
	@$(BIN)/python -m bench $(BENCH_ARGS)

soak: ## keep SOAK_SANDBOXES sandboxes busy for SOAK_MINUTES, and fail on any error, leak or growth
	@scripts/bootstrap bench
	@$(MAKE) --no-print-directory programs
	@$(BIN)/python -m bench.soak --minutes $(SOAK_MINUTES) --sandboxes $(SOAK_SANDBOXES) $(SOAK_ARGS)

fuzz: ## fuzz the parsers of the C programs, each for FUZZ_SECONDS
	@scripts/bootstrap test
	@scripts/fuzz $(FUZZ_SECONDS)

fuzz-rest: ## let schemathesis test the REST API, with FUZZ_EXAMPLES for each operation; SEED=... repeats a run
	@scripts/bootstrap test
	@$(MAKE) --no-print-directory programs
	@ATOLL_FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) ATOLL_FUZZ_SEED=$(SEED) $(BIN)/pytest -n 0 -s tests/rest/test_schemathesis.py

chaos: ## kill a host process KILLS times during its work, and a server SERVER_KILLS times; SEED=... repeats a run
	@scripts/bootstrap test
	@$(MAKE) --no-print-directory programs
	@ATOLL_CHAOS_KILLS=$(KILLS) ATOLL_SERVER_KILLS=$(SERVER_KILLS) ATOLL_CHAOS_SEED=$(SEED) \
		$(BIN)/pytest -n 0 -s tests/chaos/test_chaos.py tests/chaos/test_server_chaos.py tests/chaos/test_chat_chaos.py

build: ## compile the guest and the keeper
	@scripts/bootstrap build
	@$(MAKE) --no-print-directory programs WERROR=--werror

lock: ## pin the dependencies again; UPGRADE=1 takes the newest versions
	@scripts/lock

clean: ## remove everything built, installed and cached in this directory
	rm -rf .venv .foreign dist $(NATIVE) tests/fuzz/out clients/typescript/dist clients/typescript/node_modules
	rm -rf tests/e2b/javascript/node_modules
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find $(CHECKED) -name __pycache__ -type d -prune -exec rm -rf {} +

# -------------------------------------------------------------------------------------------- steps of these targets

lint:
	@$(BIN)/ruff format --check --quiet $(CHECKED) || { echo "not formatted: run 'make format'" >&2; exit 1; }
	@$(BIN)/ruff check --quiet $(CHECKED)
	@$(BIN)/python scripts/sync_stub.py --check
	@$(BIN)/python scripts/reference.py --check
	@$(BIN)/mypy --no-error-summary $(CHECKED)
	@said=$$($(BIN)/lint-imports) || { echo "$$said" >&2; exit 1; }
	@! command -v shellcheck >/dev/null || shellcheck -x $(SHELL_SCRIPTS)

# Not by the wheel's own build hook, which would compile each time.
dist: programs
	@rm -rf dist
	@said=$$(ATOLL_BUILD_GUEST=0 $(BIN)/python -m hatchling build -d dist 2>&1) || { echo "$$said" >&2; exit 1; }

programs: $(NATIVE)/guest $(NATIVE)/keeper $(NATIVE)/statx.so
	@:

$(NATIVE)/guest: build_guest.py $(GUEST_HEADERS) $(wildcard src/atoll/guest/*.c)
	@$(BIN)/python build_guest.py $(WERROR) guest

$(NATIVE)/keeper: build_guest.py $(GUEST_HEADERS) $(wildcard src/atoll/drivers/keeper/*.[ch])
	@$(BIN)/python build_guest.py $(WERROR) keeper

$(NATIVE)/statx.so: build_guest.py $(wildcard src/atoll/drivers/statx/*.c)
	@$(BIN)/python build_guest.py $(WERROR) statx.so
