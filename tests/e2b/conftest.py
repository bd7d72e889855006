"""A running `atoll serve`, and the E2B SDK pointed at it by its three environment variables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest

from atoll.testing.server import RunningServer, running_server as run
from atoll.testing.waiting import BOUND_S


@pytest.fixture(scope="session")
def state_dir(make_state_dir: Callable[[], Path]) -> Path:
    """Of this directory's tests alone: in that of others, the server of another test may run."""
    return make_state_dir()


@pytest.fixture(scope="module")
def server(state_dir: Path, request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    failed_before = request.session.testsfailed
    with run(state_dir) as server:
        yield server
        if request.session.testsfailed > failed_before:
            remove_left(server)


def remove_left(server: RunningServer) -> None:
    """Remove what tests that failed have left, so that the leak check does not blame another. After tests that passed,
    what is left is a leak."""
    with httpx2.Client(base_url=server.url, headers=server.headers, timeout=BOUND_S) as client:
        for sandbox in client.get("/v2/sandboxes").json():
            client.delete(f"/sandboxes/{sandbox['sandboxID']}")
        for snapshot in client.get("/snapshots").json():
            client.delete(f"/templates/{snapshot['snapshotID']}")


@pytest.fixture(autouse=True)
def redirected(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a user sets, and nothing else."""
    monkeypatch.setenv("E2B_API_URL", server.url)
    monkeypatch.setenv("E2B_SANDBOX_URL", server.url)
    monkeypatch.setenv("E2B_API_KEY", server.key)
