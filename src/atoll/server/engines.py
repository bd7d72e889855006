"""The engines of tenants: one for each namespace, opened when it is first used, and closed when nobody uses it.

An engine is a task, a store and what is open in it; a server may have thousands of tenants, of whom few work at a time.

Used by `server.py`, and through it by everything that does something in a tenant's sandboxes.
"""

from __future__ import annotations

import time
from typing import cast
from weakref import WeakValueDictionary

import anyio

from atoll.contract.errors import InvalidRequest
from atoll.runtime import engine as runtime_engine
from atoll.runtime.connections import PortPublisher
from atoll.runtime.engine import LocalEngine
from atoll.server.tenants import DEFAULT_TENANT
from atoll.settings import Settings

IDLE_S = 600.0
"""How long an engine stays open that nobody uses."""


class TenantEngines:
    """Open engines over one state directory."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.publisher: PortPublisher | None = None
        """Where programs of tenants that are not routes expose ports, such as the tool `browse`."""
        self._engines: dict[str, LocalEngine] = {}
        self._used_at: dict[str, float] = {}
        self._holders: dict[str, WeakValueDictionary[int, object]] = {}
        self._opening = anyio.Lock()
        self._closed = False

    async def get(self, tenant: str) -> LocalEngine:
        """The engine that sees the tenant's sandboxes and no others. It stays open for `IDLE_S` at least, and while it
        is connected to a sandbox; for longer, while who uses it is known (`hold`).

        Raises:
            InvalidRequest: the server is closed.
        """
        self._used_at[tenant] = time.monotonic()
        if (engine := self._engines.get(tenant)) is not None:
            return engine
        async with self._opening:
            if self._closed:
                raise InvalidRequest("the server is closed")
            if (engine := self._engines.get(tenant)) is None:
                opened = await runtime_engine.open(namespace=tenant, settings=self._settings)
                engine = cast("LocalEngine", opened)
                if self.publisher is not None:
                    engine.publish_at(self.publisher)
                self._engines[tenant] = engine
            return engine

    def hold(self, tenant: str, holder: object) -> None:
        """The engine of a tenant, which was just got, stays open for as long as `holder` lives: a request, say."""
        self._holders.setdefault(tenant, WeakValueDictionary())[id(holder)] = holder

    async def close_idle(self) -> None:
        """Close engines that nobody uses, until this is cancelled."""
        while True:
            await anyio.sleep(IDLE_S / 4)
            await self.close_unused(IDLE_S)

    async def close_unused(self, idle_s: float) -> None:
        """Close the engines that nobody has used for so long. Who asks for one meanwhile gets a new one."""
        for tenant in [*self._engines]:
            async with self._opening:
                if tenant != DEFAULT_TENANT and self._is_unused(tenant, idle_s):  # its engine watches all tenants
                    engine = self._engines.pop(tenant)
                    self._holders.pop(tenant, None)
                    with anyio.CancelScope(shield=True):
                        await engine.aclose()

    def _is_unused(self, tenant: str, idle_s: float) -> bool:
        engine = self._engines.get(tenant)
        if engine is None or engine.is_in_use or time.monotonic() - self._used_at[tenant] < idle_s:
            return False
        if len(self._holders.get(tenant, ())) == 0:
            return True
        self._used_at[tenant] = time.monotonic()
        return False

    async def close(self, tenant: str) -> None:
        """Close the engine of a tenant that is gone."""
        async with self._opening:
            if (engine := self._engines.pop(tenant, None)) is not None:
                await engine.aclose()

    async def aclose(self) -> None:
        """Close all of them. Sandboxes go on."""
        with anyio.CancelScope(shield=True):
            async with self._opening, anyio.create_task_group() as closing:
                self._closed = True
                for engine in self._engines.values():
                    closing.start_soon(engine.aclose)
                self._engines.clear()
