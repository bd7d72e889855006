"""The guest to talk to: the binary that ATOLL_GUEST names, or one built for this run."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.guest.client import Guest, build


@pytest.fixture(scope="session")
def binary(tmp_path_factory: pytest.TempPathFactory) -> str:
    given = os.environ.get("ATOLL_GUEST")
    if given:
        return given
    return str(build(tmp_path_factory.mktemp("guest") / "atoll-guest", "-O2", "-static"))


@pytest.fixture
def guest(binary: str) -> Iterator[Guest]:
    guest = Guest(binary)
    yield guest
    guest.close()
