"""A running `atoll serve`, and the E2B SDK pointed at it by its three environment variables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atoll.testing.server import RunningServer, running_server as run


@pytest.fixture(scope="session")
def state_dir(make_state_dir: Callable[[], Path]) -> Path:
    """Of this directory's tests alone: in that of others, the server of another test may run."""
    return make_state_dir()


@pytest.fixture(scope="module")
def server(state_dir: Path) -> Iterator[RunningServer]:
    with run(state_dir) as server:
        yield server


@pytest.fixture(autouse=True)
def redirected(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a user sets, and nothing else."""
    monkeypatch.setenv("E2B_API_URL", server.url)
    monkeypatch.setenv("E2B_SANDBOX_URL", server.url)
    monkeypatch.setenv("E2B_API_KEY", server.key)
