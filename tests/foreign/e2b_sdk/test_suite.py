"""The live tests of E2B's own Python SDK, unmodified, from a checkout of its repository (`E2B_REPOSITORY`).

`not_passing.toml` lists the tests that do not pass, with reasons: an unlisted one that does not pass fails here, and so
does a listed one that passes. Tests of the SDK alone, which talk to no server, run along where they share a directory.
Not run: builds of templates (they fetch images and packages), volumes and secrets (not supported: docs/e2b.md).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from atoll.testing.server import RunningServer, running_server
from atoll.testing.waiting import BOUND_S

HERE = Path(__file__).parent
SERVER_PYTHON = str(HERE.parents[2] / ".venv/bin/python")
COMMIT = "b8029973a"
WANTED = (
    "E2B_REPOSITORY is not set: run `git clone https://github.com/e2b-dev/E2B` and "
    f"`git -C E2B checkout {COMMIT}`, then `make test-foreign FOREIGN=e2b_sdk E2B_REPOSITORY=$PWD/E2B`"
)
SUITES = (
    "sync/api_sync",
    "sync/sandbox_sync",
    "async/api_async",
    "async/sandbox_async",
    "shared/git",
)
DOMAIN = "boxes.localhost"
TEST_BOUND_S = 4 * BOUND_S
SUITE_BOUND_S = 60 * BOUND_S


@pytest.fixture(scope="module")
def tests() -> Path:
    """The directory of E2B's tests."""
    repository = os.environ.get("E2B_REPOSITORY")
    assert repository, WANTED
    tests = Path(repository).resolve() / "packages/python-sdk/tests"
    missing = [suite for suite in SUITES if not (tests / suite).is_dir()]
    assert not missing, f"{tests} has no {', '.join(missing)}; {WANTED}"
    return tests


def by_urls(state_dir: Path) -> AbstractContextManager[RunningServer]:
    return running_server(state_dir, python=SERVER_PYTHON)


def by_domain(state_dir: Path) -> AbstractContextManager[RunningServer]:
    return running_server(state_dir, "--tls-self-signed", environment={"ATOLL_DOMAIN": DOMAIN}, python=SERVER_PYTHON)


@pytest.fixture(params=["urls", "domain"])
def way(request: pytest.FixtureRequest) -> str:
    """How the SDK is pointed at the server."""
    return str(request.param)


@pytest.fixture
def environment(way: str, state_dir: Path) -> Iterator[dict[str, str]]:
    """What a user sets, and nothing else."""
    if way == "urls":
        with by_urls(state_dir) as server:
            yield {"E2B_API_URL": server.url, "E2B_SANDBOX_URL": server.url} | _key(server)
    else:
        with by_domain(state_dir) as server:
            authority = str(state_dir / "server/tls/ca.pem")
            yield {"E2B_DOMAIN": f"{DOMAIN}:{server.port}", "SSL_CERT_FILE": authority} | _key(server)


def _key(server: RunningServer) -> dict[str, str]:
    return {"E2B_API_KEY": server.key, "E2B_VALIDATE_API_KEY": "false"}


def test_what_does_not_pass_is_listed_with_its_reason(
    way: str, environment: dict[str, str], tests: Path, tmp_path: Path
) -> None:
    outcomes = run(tests, environment, tmp_path / "outcomes.json")
    listed = tomllib.loads((HERE / "not_passing.toml").read_text())
    reasons = {**listed["both"], **listed[way]}
    problems = [
        f"{name} did not pass ({told['outcome']}), and is not in not_passing.toml:\n{told['text']}"
        for name, told in outcomes.items()
        if told["outcome"] != "passed" and name not in reasons
    ]
    problems += [
        f"{name} is in not_passing.toml, but {'passed' if name in outcomes else 'is not in the checkout'}"
        for name in reasons
        if outcomes.get(name, {"outcome": "passed"})["outcome"] == "passed"
    ]
    assert not problems, "\n\n".join(problems)


def run(tests: Path, environment: dict[str, str], file: Path) -> dict[str, dict[str, str]]:
    """What became of each test, by its name."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("E2B_", "PYTEST_"))}
    path = os.pathsep.join(filter(None, [str(HERE), kept.get("PYTHONPATH")]))
    arguments = ["-p", "outcomes", "-p", "no:cacheprovider", "-n", "2", f"--timeout={TEST_BOUND_S}"]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, *(f"tests/{suite}" for suite in SUITES)],
        cwd=tests.parent,
        env=kept | environment | {"PYTHONPATH": path, "E2B_OUTCOMES": str(file)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SUITE_BOUND_S,
        check=False,
    )
    assert ran.returncode in (0, 1), ran.stdout
    outcomes: dict[str, dict[str, str]] = json.loads(file.read_text())
    return {name.removeprefix("tests/"): told for name, told in outcomes.items()}
