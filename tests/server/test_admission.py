"""What programs of a tenant can have the engine do that is not a route, such as MCP sessions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.contract.errors import Forbidden, QuotaExceeded
from atoll.contract.model import Limits
from atoll.runtime.interface import Engine
from atoll.server.admission import admitting
from atoll.server.server import Server
from atoll.server.tenants import Quotas
from atoll.settings import Settings


async def test_what_could_create_or_widen_a_sandbox_unseen_is_refused(server: Server) -> None:
    engine = admitting(server, "default", await server.engines.get("default"))
    for name in ("warm", "import_", "set_network", "update", "gc", "volumes", "storage", "aclose"):
        assert hasattr(Engine, name)
        with pytest.raises(Forbidden, match=name):
            getattr(engine, name)
    with pytest.raises(Forbidden, match="REST"):
        await engine.restore("any", "cp-1", foreign=True)
    with pytest.raises(Forbidden, match="REST"):
        await engine.create(from_checkpoint="cp-1")


async def test_forks_are_counted_under_the_names_that_they_get(make_state_dir: Callable[[], Path]) -> None:
    async with Server.open(Settings(state_dir=make_state_dir())) as server:
        await _fork_within_a_quota(server)


async def _fork_within_a_quota(server: Server) -> None:
    await server.tenants.update("default", quotas=Quotas(sandboxes=3))
    engine = admitting(server, "default", await server.engines.get("default"))
    await engine.create("source", limits=Limits())
    try:
        with pytest.raises(QuotaExceeded) as refused:
            await engine.fork("source", 3)
        assert (refused.value.details["used"], refused.value.details["asked"]) == (1, 3)
        assert len(await engine.fork("source", 2)) == 2
    finally:
        for info in await engine.list():
            await engine.destroy(info.name)
