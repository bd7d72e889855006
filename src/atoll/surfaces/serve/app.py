"""The app of `atoll serve`: which routes there are, and what a request passes on its way to them.

Owns the composition. From the outside: the door (`surfaces/door/`), then requests of E2B's clients (`surfaces/e2b/`),
then the routes: /api (`surfaces/rest/`), /mcp and /v1/messages (`tenant_apps.py`), and those here: /healthz, /readyz,
/metrics, /openapi.json, /docs. Previews are not routes: the door gives their connections to `previews.py`. Used by
`process.py`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, NamedTuple

import anyio
import anyio.to_thread
import sqlalchemy as sa
from fastapi import FastAPI, Request
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

import atoll
from atoll.contract.errors import Forbidden
from atoll.runtime.interface import Engine
from atoll.server.server import Server
from atoll.surfaces import rest
from atoll.surfaces.door import LOOPBACK, OpenGuard
from atoll.surfaces.door.connection import Door
from atoll.surfaces.door.middleware import AcceptedNames, DoneRequest, HttpDoor
from atoll.surfaces.e2b.routing import E2bSurface
from atoll.surfaces.rest.caller import Caller, authenticate
from atoll.surfaces.serve import docs_page
from atoll.surfaces.serve.logs import begin_request, log_request
from atoll.surfaces.serve.metrics import CONTENT_TYPE, ServerMetrics
from atoll.surfaces.serve.settings import ServerSettings
from atoll.surfaces.serve.tenant_apps import TenantApp, TenantApps
from atoll.tools.vocabularies import choose

DESCRIPTION = "Sandboxes for AI agents, on your own hardware. Every request needs a key: `X-API-Key: KEY`, or "
DESCRIPTION += "`Authorization: Bearer KEY`. Errors have one shape: `code`, `message`, `details`, `request_id`."


class _Document(NamedTuple):
    """The OpenAPI document, as programs and as people read it."""

    json: bytes
    page: bytes

    @classmethod
    def of(cls, app: FastAPI) -> _Document:
        document = app.openapi()
        return cls(to_json(document), docs_page.render(document).encode())


class ServerApp:
    """The app, and what ends with it."""

    def __init__(self, server: Server, settings: ServerSettings, door: Door) -> None:
        self.server = server
        self.is_stopping = False
        self._stopping: asyncio.Task[None] | None = None
        self._documenting = anyio.Lock()
        self._made: _Document | None = None
        self._metrics = ServerMetrics(server, door)
        self._mounted = [*_mcp(server, settings), *_messages(server, settings)]
        self.routes = self._make()
        self.e2b = E2bSurface(server, self.routes)
        self.asgi = HttpDoor(
            self.e2b,
            accepted_names(settings),
            trusted_proxies=frozenset(settings.trusted_proxies),
            max_body_bytes=settings.body_bytes,
            on_begin=begin_request,
            on_done=self._done,
        )

    def _make(self) -> FastAPI:
        app = FastAPI(
            title="Atoll",
            version=atoll.__version__,
            description=DESCRIPTION,
            openapi_url=None,
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
            lifespan=self._lifespan,
        )
        rest.install(app, self.server)
        for mounted in self._mounted:
            app.router.routes.append(Route(mounted.path, endpoint=mounted))
        app.add_api_route("/healthz", self._healthz, methods=["GET", "HEAD"], include_in_schema=False)
        app.add_api_route("/readyz", self._readyz, methods=["GET", "HEAD"], include_in_schema=False)
        app.add_api_route("/metrics", self._metrics_text, methods=["GET"], include_in_schema=False)
        app.add_api_route("/", self._root, methods=["GET"], include_in_schema=False)
        app.add_api_route("/openapi.json", self._openapi, methods=["GET"], include_in_schema=False)
        app.add_api_route("/docs", self._docs, methods=["GET"], include_in_schema=False)
        return app

    @asynccontextmanager
    async def _lifespan(self, _app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for mounted in self._mounted:
                await stack.enter_async_context(mounted.running())
            await stack.enter_async_context(self.e2b.running())
            yield

    def _done(self, done: DoneRequest) -> None:
        log_request(done)
        self._metrics.count(done)

    async def _healthz(self) -> Response:
        """This process answers."""
        return JSONResponse({"status": "ok", "version": atoll.__version__})

    async def _readyz(self) -> Response:
        """Requests can be served: the database answers, and the server does not stop."""
        if self.is_stopping:
            raise HTTPException(503, "the server is stopping; try again")
        async with self.server.database.read() as connection:
            await connection.execute(sa.text("SELECT 1"))
        return JSONResponse({"status": "ready", "version": atoll.__version__})

    async def _metrics_text(self, request: Request) -> Response:
        key = await authenticate(request)
        if key.tenant is not None:
            raise Forbidden("metrics name all tenants: they are for a key of the server itself")
        return Response(await self._metrics.text(), media_type=CONTENT_TYPE)

    async def _root(self) -> Response:
        """For a person who opens the server's address in a browser."""
        return RedirectResponse("/docs", 303)

    async def _openapi(self) -> Response:
        return Response((await self._document()).json, media_type="application/json")

    async def _docs(self) -> Response:
        return HTMLResponse((await self._document()).page, headers=docs_page.HEADERS)

    async def _document(self) -> _Document:
        """Made when it is first asked for, while other requests are answered: it takes a second. Both are for clients
        without a key, so no request makes them anew."""
        async with self._documenting:
            if self._made is None:
                self._made = await anyio.to_thread.run_sync(_Document.of, self.routes)
        return self._made

    def begin_stop(self) -> None:
        """Requests that are under way go on; streams end with a reason."""
        self.is_stopping = True
        for mounted in self._mounted:
            mounted.end_all()
        self._stopping = asyncio.get_running_loop().create_task(self.asgi.stop())


def _mcp(server: Server, settings: ServerSettings) -> Iterator[TenantApps]:
    """/mcp, unless there are no tools for it. It is loaded when a client comes: a start should not wait for it."""
    tools = [*filter(None, map(str.strip, settings.mcp_tools.split(",")))]
    if not tools:
        return
    chosen = choose(tools)

    def make(_tenant: str, engine: Engine) -> TenantApp:
        from atoll.surfaces.mcp import http as mcp
        from atoll.surfaces.mcp.session import ServerConfig, open_session

        return mcp.HttpSessions(
            partial(open_session, engine, ServerConfig(chosen)),
            OpenGuard(),
            max_sessions=mcp.MAX_SESSIONS,
            idle_s=mcp.DEFAULT_IDLE_S,
        )

    yield TenantApps("/mcp", server, make)


def _messages(server: Server, settings: ServerSettings) -> Iterator[TenantApps]:
    """/v1/messages, if it is wanted: each request costs tokens of a model."""
    if not settings.messages:
        return
    from atoll.agents import models
    from atoll.agents.loop import DEFAULT_STEPS
    from atoll.code.executor import CodeConfig
    from atoll.surfaces.messages import http as messages
    from atoll.surfaces.messages.containers import Containers

    model = models.resolve(settings.model)

    def make(tenant: str, engine: Engine) -> TenantApp:
        containers = Containers(
            engine,
            CodeConfig(),
            idle_s=messages.DEFAULT_IDLE_S,
            call_timeout_s=messages.CALL_TIMEOUT_S,
            limit=messages.MAX_CONTAINERS,
            limit_per_owner=messages.MAX_CONTAINERS_PER_KEY,
        )

        async def spend(tokens: int) -> None:
            await server.quotas.spend_tokens(tenant, tokens)

        guard = OpenGuard(messages.KEY_HEADER)
        return messages.MessagesEndpoint(model, containers, guard, steps=DEFAULT_STEPS, on_tokens=spend)

    async def check(caller: Caller) -> None:
        await server.quotas.check_tokens(caller.tenant)

    yield TenantApps(messages.PATH, server, make, check=check)


def accepted_names(settings: ServerSettings) -> AcceptedNames:
    """The host names that requests may be for."""
    address, _ = settings.listen_address()
    names = [*LOOPBACK, address, settings.domain, f".{settings.domain}", socket.gethostname(), *settings.hosts]
    if settings.public_url is not None:
        from urllib.parse import urlsplit

        names.append(urlsplit(settings.public_url).hostname or "")
    return AcceptedNames.of(names)


def make_app(server: Server, settings: ServerSettings | None = None, door: Door | None = None) -> ASGIApp:
    """The app of a server, for programs and tests that serve it themselves."""
    return ServerApp(server, settings or ServerSettings(), door or Door()).asgi


def openapi(server: Any = None) -> dict[str, Any]:
    """The OpenAPI document, for tools that make clients from it. It needs no running server."""
    app = FastAPI(title="Atoll", version=atoll.__version__, description=DESCRIPTION)
    rest.install(app, server)
    return app.openapi()
