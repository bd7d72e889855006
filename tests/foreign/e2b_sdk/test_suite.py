"""The live tests of E2B's own Python SDK, unmodified, from a checkout of its repository (`E2B_REPOSITORY`).

`not_passing.toml` lists the tests that do not pass, with reasons: an unlisted one that does not pass fails here, and so
does a listed one that passes. One that the checkout does not have says nothing. They run with the SDK of the checkout,
else with the one that is installed, against a server of their own and in an internet of their own (`internet.py`), so
that nothing leaves the machine: that takes root. Not run: builds of templates (they fetch images and packages), volumes
and secrets (docs/e2b.md).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from expected import problems

from atoll.testing.waiting import BOUND_S

HERE = Path(__file__).parent
COMMIT = "b8029973a"
WANTED = (
    "E2B_REPOSITORY is not set: run `git clone https://github.com/e2b-dev/E2B` and "
    f"`git -C E2B checkout {COMMIT}`, then `make test-foreign FOREIGN=e2b_sdk E2B_REPOSITORY=$PWD/E2B`"
)
SUITES = ("sync/api_sync", "sync/sandbox_sync", "async/api_async", "async/sandbox_async", "shared/git")
NAMESPACES = ("unshare", "--net", "--mount", "--propagation", "private")
SUITE_BOUND_S = 120 * BOUND_S


@pytest.fixture(scope="module")
def tests() -> Path:
    """The directory of E2B's tests."""
    repository = os.environ.get("E2B_REPOSITORY")
    assert repository, WANTED
    tests = Path(repository).resolve() / "packages/python-sdk/tests"
    missing = [suite for suite in SUITES if not (tests / suite).is_dir()]
    assert not missing, f"{tests} has no {', '.join(missing)}: check out {COMMIT} of https://github.com/e2b-dev/E2B"
    return tests


@pytest.mark.parametrize("way", ["urls", "domain"])
def test_what_does_not_pass_is_listed_with_its_reason(
    way: str, tests: Path, make_state_dir: Callable[[], Path]
) -> None:
    outcomes = run(way, tests, make_state_dir())
    listed = tomllib.loads((HERE / "not_passing.toml").read_text())
    reasons = {**listed["both"], **listed[way]}
    assert not (found := problems(outcomes, reasons)), "\n\n".join(found)


def run(way: str, tests: Path, directory: Path) -> dict[str, dict[str, str]]:
    """What became of each test, by its name."""
    directory.mkdir(parents=True, exist_ok=True)
    suites = [f"tests/{suite}" for suite in SUITES]
    ran = subprocess.run(
        [*NAMESPACES, sys.executable, HERE / "inside.py", way, directory, tests, *suites],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SUITE_BOUND_S,
        check=False,
    )
    outcomes = directory / "outcomes.json"
    assert outcomes.exists(), ran.stdout
    told: dict[str, dict[str, str]] = json.loads(outcomes.read_text())
    assert told, ran.stdout
    return {name.removeprefix("tests/"): each for name, each in told.items()}
