"""A runtime in this process, for servers over HTTP. Those on standard streams are programs of their own.

Every test is checked for what it leaves: a session that has ended leaves nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from atoll.testing.nursery import Nursery

if TYPE_CHECKING:
    from atoll import Engine
    from atoll.testing.plugin import LeakCheck
    from tests.mcp.serving import Program


@pytest.fixture(autouse=True)
async def nothing_left(leak_check: LeakCheck) -> None:
    """Set up before, and looked at after, all else that a test asks for."""


@pytest.fixture
async def host(nothing_left: None, state_dir: Path) -> AsyncIterator[Engine]:
    import atoll

    async with atoll.open(state_dir) as engine:
        yield engine


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    modules = ("cli.app", "cli.terminal", "cli.commands.mcp", "mcp.session", "mcp.stdio")
    nursery = Nursery(tmp_path_factory.mktemp("nursery"), *(f"atoll.surfaces.{name}" for name in modules))
    yield nursery
    nursery.close()


@pytest.fixture
def program(nursery: Nursery, nothing_left: None, state_dir: Path) -> Program:
    from tests.mcp.serving import Program

    return Program([*nursery.program, "mcp"], state_dir)
