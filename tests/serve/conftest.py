"""One server for the tests of a module, in a state directory that all tests of this process share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.testing.server import RunningServer, running_server as run


@pytest.fixture(scope="module")
def running_server(state_dir: Path) -> Iterator[RunningServer]:
    """A running `atoll serve`, with its `url`, its administrator's `key` and its `state_dir`."""
    with run(state_dir) as server:
        yield server
