"""/mcp and /v1/messages on the server: for each tenant an app of its own, over its own sandboxes.

Owns which tenant a request belongs to, by its API key, when a tenant's app begins and ends, and that a stream ends when
its key is revoked. Not here: what the apps do (`surfaces/mcp/`, `surfaces/messages/`). Used by `app.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import anyio
import anyio.abc
from starlette.requests import HTTPConnection
from starlette.types import Message, Receive, Scope, Send

from atoll.contract.errors import InvalidRequest, Unauthenticated
from atoll.runtime.interface import Engine
from atoll.server.admission import admitting
from atoll.server.server import Server
from atoll.surfaces.rest.caller import Caller, identify

_CHECK_KEY_S = 1.0


class TenantApp(Protocol):
    """An app that answers while it is running."""

    def running(self) -> AbstractAsyncContextManager[None]: ...

    def end_all(self) -> None: ...

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


@dataclass(frozen=True)
class _RunningApp:
    app: TenantApp
    engine: Engine
    """Whose sandboxes it uses. A tenant that is made anew after its deletion has another."""
    scope: anyio.CancelScope


class TenantApps:
    """The apps of one path, as one ASGI app."""

    def __init__(
        self,
        path: str,
        server: Server,
        make: Callable[[str, Engine], TenantApp],
        *,
        check: Callable[[Caller], Awaitable[None]] | None = None,
    ) -> None:
        """`check` is asked before each request, and raises."""
        self.path = path
        self._server = server
        self._make = make
        self._check = check
        self._apps: dict[str, _RunningApp] = {}
        self._starting = anyio.Lock()
        self._tasks: anyio.abc.TaskGroup | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            try:
                yield
            finally:
                self.end_all()
                self._tasks = None
                tasks.cancel_scope.cancel()

    def end_all(self) -> None:
        """Begin to end all sessions, and accept no new one."""
        for running in self._apps.values():
            running.app.end_all()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = await identify(HTTPConnection(scope))
        caller.key.require("sandboxes:exec")
        caller.key.require("sandboxes:write")
        if self._check is not None:
            await self._check(caller)
        scope["state"]["mounted"] = self.path
        app = await self._app_of(caller)
        ended = False

        async def watched(message: Message) -> None:
            nonlocal ended
            ended = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        async def watch(scope: anyio.CancelScope) -> None:
            while True:
                await anyio.sleep(_CHECK_KEY_S)
                try:
                    await caller.require_valid()
                except Unauthenticated:
                    scope.cancel()
                    return

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch, tasks.cancel_scope)
            await app(scope, receive, watched)
            tasks.cancel_scope.cancel()
        if not ended:
            with anyio.CancelScope(shield=True):
                await send({"type": "http.response.body", "body": b""})

    async def _app_of(self, caller: Caller) -> TenantApp:
        tenant = caller.tenant.name
        async with self._starting:
            known = self._apps.get(tenant)
            if known is not None and known.engine is not caller.engine:
                del self._apps[tenant]
                known.app.end_all()
                known.scope.cancel()
                known = None
            if known is None:
                if self._tasks is None:
                    raise InvalidRequest("the server is stopping, or has not started")
                app = self._make(tenant, admitting(self._server, tenant, caller.engine))
                scope: anyio.CancelScope = await self._tasks.start(self._run, app)
                known = self._apps[tenant] = _RunningApp(app, caller.engine, scope)
                self._server.engines.hold(tenant, app)
            return known.app

    async def _run(self, app: TenantApp, *, task_status: anyio.abc.TaskStatus[anyio.CancelScope]) -> None:
        with anyio.CancelScope() as scope:
            async with app.running():
                task_status.started(scope)
                await anyio.sleep_forever()
