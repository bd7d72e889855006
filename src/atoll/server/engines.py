"""The engines of tenants: one for each namespace, opened when it is first used.

Used by `server.py`, and through it by everything that does something in a tenant's sandboxes.
"""

from __future__ import annotations

from typing import cast

import anyio

from atoll.contract.errors import InvalidRequest
from atoll.runtime import engine as runtime_engine
from atoll.runtime.connections import PortPublisher
from atoll.runtime.engine import LocalEngine
from atoll.settings import Settings


class TenantEngines:
    """Open engines over one state directory."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.publisher: PortPublisher | None = None
        """Where programs of tenants that are not routes expose ports, such as the tool `browse`."""
        self._engines: dict[str, LocalEngine] = {}
        self._opening = anyio.Lock()
        self._closed = False

    async def get(self, tenant: str) -> LocalEngine:
        """The engine that sees the tenant's sandboxes and no others. It is open for as long as the server.

        Raises:
            InvalidRequest: the server is closed.
        """
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
