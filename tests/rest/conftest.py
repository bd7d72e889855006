from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

import httpx2
import pytest

from tests.agents.conftest import anthropic
from tests.rest.serving import Served, serving

__all__ = ["anthropic"]


@pytest.fixture(scope="module")
async def served(make_state_dir: Callable[[], Path]) -> AsyncIterator[Served]:
    """One server for all tests of this directory: SQLite, and events as they happen."""
    async with serving(make_state_dir(), webhook_allow="127.0.0.1") as served:
        yield served
        for tenant in await served.server.tenants.list():
            engine = await served.server.engines.get(tenant.name)
            for info in await engine.list():
                with suppress(LookupError):
                    await engine.destroy(info.name, checkpoints=True)
            for checkpoint in await engine.checkpoints():
                await engine.delete_checkpoint(checkpoint.id)
            for volume in await engine.volumes.list():
                await engine.volumes.remove(volume.name)


@pytest.fixture(scope="module")
async def client(served: Served) -> AsyncIterator[httpx2.AsyncClient]:
    """With the operator's key."""
    async with served.client() as client:
        yield client


@pytest.fixture(scope="module")
async def box(client: httpx2.AsyncClient) -> str:
    """The name of a sandbox that tests share, and leave as it is."""
    (await client.post("/api/v1/sandboxes", json={"name": "shared"})).raise_for_status()
    return "shared"
