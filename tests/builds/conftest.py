"""Where tests of builds get an engine from."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import cast

import pytest

import atoll
from atoll.runtime.engine import LocalEngine


@pytest.fixture(scope="session")
def state_dir(make_state_dir: Callable[[], Path]) -> Path:
    """Of this directory's tests alone: they remove all that builds leave."""
    return make_state_dir()


@pytest.fixture
async def engine(state_dir: Path) -> AsyncIterator[LocalEngine]:
    async with atoll.open(state_dir) as engine:
        yield cast("LocalEngine", engine)
        for template in await engine.templates.list():
            await engine.templates.remove(template.name)
        for each in await engine.checkpoints():
            await engine.delete_checkpoint(each.id)
