"""Tenants are namespaces: what one has the other does not find, and goes with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.contract.errors import InvalidRequest, SandboxNotFound, TenantNotFound, Unauthenticated
from atoll.server.server import Server
from atoll.settings import Settings


async def test_a_tenant_is_deleted_with_all_that_it_has_if_that_is_asked_for(
    make_state_dir: Callable[[], Path], any_settings: Settings
) -> None:
    async with Server.open(any_settings.model_copy(update={"state_dir": make_state_dir()})) as server:
        for name in ("acme", "other"):
            await server.tenants.create(name)
        acme, other = await server.engines.get("acme"), await server.engines.get("other")
        box = await acme.create("box")
        await box.checkpoint("saved")
        await acme.volumes.create("data")
        with pytest.raises(SandboxNotFound):
            await other.get("box")
        await other.create("box")

        _, text = await server.keys.create("ci", tenant="acme")
        with pytest.raises(InvalidRequest, match="has 1 sandboxes, 1 checkpoints, 1 volumes; remove them first"):
            await server.delete_tenant("acme")
        assert (await server.keys.verify(text.get_secret_value())).tenant == "acme"
        await server.delete_tenant("acme", destroy=True)
        with pytest.raises(Unauthenticated):
            await server.keys.verify(text.get_secret_value())
        with pytest.raises(TenantNotFound):
            await server.tenants.get("acme")

        await server.tenants.create("acme")
        again = await server.engines.get("acme")
        assert (await again.list(), await again.checkpoints(), await again.volumes.list()) == ([], [], [])
        assert [each.name for each in await other.list()] == ["box"]
        await server.delete_tenant("other", destroy=True)
