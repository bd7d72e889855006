"""Both databases, for every test that takes one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import anyio
import pytest

from atoll.server.database import Database
from atoll.server.server import Server
from atoll.server.tables import metadata
from atoll.settings import Settings
from tests.postgresql import Postgresql, running

DATABASES = ("sqlite", "postgresql")


@pytest.fixture(scope="session")
def postgresql() -> Iterator[Postgresql]:
    with running() as server:
        yield server


@pytest.fixture(scope="session")
def with_tables(postgresql: Postgresql, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of a PostgreSQL database with all tables: emptying it is faster than migrating another."""
    url = postgresql.create()

    async def migrate() -> None:
        await (await Database.open(url, tmp_path_factory.mktemp("unused"))).aclose()

    # In a thread: fixtures of a session elsewhere may keep this one's event loop.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(anyio.run, migrate).result()
    return url


@pytest.fixture(params=DATABASES)
def new_url(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], str]:
    """Makes databases without tables."""
    if request.param == "postgresql":
        return cast("Callable[[], str]", request.getfixturevalue("postgresql").create)
    return lambda: f"sqlite+aiosqlite:///{tmp_path}/other.db"


@pytest.fixture(params=DATABASES)
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    """Of a server that has never been opened."""
    if request.param == "sqlite":
        return Settings.model_validate({"state_dir": tmp_path})
    url = request.getfixturevalue("with_tables")
    request.getfixturevalue("postgresql").empty(url, metadata.tables)
    return Settings.model_validate({"state_dir": tmp_path, "database_url": url})


@pytest.fixture
async def server(settings: Settings) -> AsyncIterator[Server]:
    async with Server.open(settings) as server:
        yield server
