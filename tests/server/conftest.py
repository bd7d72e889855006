"""Both databases, for every test that takes one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import cast

import anyio
import pytest

from atoll.server.database import Database
from atoll.server.server import Server
from atoll.settings import Settings
from tests.postgresql import Postgresql, running

DATABASES = ("sqlite", "postgresql")


@pytest.fixture(scope="session")
def postgresql() -> Iterator[Postgresql]:
    with running() as server:
        yield server


@pytest.fixture(scope="session")
def migrated(postgresql: Postgresql, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The name of a PostgreSQL database with all tables and no rows: copying it is faster than migrating."""
    url = postgresql.create(name="migrated")

    async def migrate() -> None:
        await (await Database.open(url, tmp_path_factory.mktemp("unused"))).aclose()

    anyio.run(migrate)
    return "migrated"


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
    template = request.getfixturevalue("migrated")
    url = request.getfixturevalue("postgresql").create(template)
    return Settings.model_validate({"state_dir": tmp_path, "database_url": url})


@pytest.fixture
async def server(settings: Settings) -> AsyncIterator[Server]:
    async with Server.open(settings) as server:
        yield server
