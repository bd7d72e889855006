"""The suites of other projects' frameworks: each is collected by the Python of its own virtual environment alone.

`scripts/foreign NAME` makes that environment, `.foreign/NAME`, from `tests/foreign/NAME/requirements.txt`. Any other
Python lacks what the suite imports. Servers are started with the Python of `.venv`, which has what they need.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atoll.testing.server import RunningServer, running_server

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]

collect_ignore = [each.name for each in HERE.iterdir() if Path(sys.prefix) != REPOSITORY / ".foreign" / each.name]


@pytest.fixture(scope="session")
def state_dir(make_state_dir: Callable[[], Path]) -> Path:
    return make_state_dir()


@pytest.fixture(scope="module")
def atoll_server(state_dir: Path) -> Iterator[RunningServer]:
    with running_server(state_dir, python=str(REPOSITORY / ".venv/bin/python")) as server:
        yield server


@pytest.fixture
def e2b_drop_in(atoll_server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> RunningServer:
    """What a user sets to have E2B's clients use Atoll, and nothing else."""
    monkeypatch.setenv("E2B_API_URL", atoll_server.url)
    monkeypatch.setenv("E2B_SANDBOX_URL", atoll_server.url)
    monkeypatch.setenv("E2B_API_KEY", atoll_server.key)
    monkeypatch.setenv("E2B_VALIDATE_API_KEY", "false")
    return atoll_server
