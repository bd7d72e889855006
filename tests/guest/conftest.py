"""The guest to talk to: what ATOLL_GUEST names, what `make` built if nothing has changed since, or one built here."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.guest.client import SOURCE, Guest, build


@pytest.fixture(scope="session")
def binary(tmp_path_factory: pytest.TempPathFactory) -> str:
    given = os.environ.get("ATOLL_GUEST")
    if given:
        return given
    built = SOURCE.parent / "_bin" / "guest"
    if built.exists() and built.stat().st_mtime > max(source.stat().st_mtime for source in SOURCE.glob("*.[ch]")):
        return str(built)
    return str(build(tmp_path_factory.mktemp("guest") / "atoll-guest", "-O2", "-static"))


@pytest.fixture
def guest(binary: str) -> Iterator[Guest]:
    guest = Guest(binary)
    yield guest
    guest.close()
