"""Which requests are E2B's, and which sandbox they are for.

Owns the choice, on the server's one port. A request is for a sandbox's own plane if it names one: with the headers
E2b-Sandbox-Id and E2b-Sandbox-Port, with a host name PORT-ID below the server's domain, or with a signature in its URL,
which is tried with the token of each sandbox. It is for the control plane by its path. All others are Atoll's own. The
answers of E2B's proxy are word for word where SDKs compare words. Not here: what the planes do.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from atoll.contract.errors import AtollError, Forbidden, SandboxNotFound
from atoll.runtime.sandbox import Sandbox
from atoll.server.previews import PreviewAddress
from atoll.server.server import Server
from atoll.server.tenants import Tenant
from atoll.surfaces.e2b.control import error_response, not_supported, route
from atoll.surfaces.e2b.sandboxes import SandboxRoutes, port_domain, state_of
from atoll.surfaces.e2b.snapshots import SnapshotRoutes
from atoll.surfaces.e2b.tokens import SandboxTokens, public_id, sandbox_id

ENVD_PORT = 49983
INTERPRETER_PORT = 49999
ID_HEADER = "e2b-sandbox-id"
PORT_HEADER = "e2b-sandbox-port"
_CONTROL = re.compile(r"/(v[23]/)?(sandboxes|snapshots|templates|volumes|secrets|teams|default-templates)(/.*)?")
_HOST = re.compile(r"([0-9]{1,5})-(atoll[0-9a-f]{16})\..*")
_NOT_FOUND = "The sandbox was not found"
_PORT_NOT_OPEN = "The sandbox is running but port is not open"


@dataclass(frozen=True)
class SandboxTarget:
    """What a request for a sandbox's own plane names. Nothing of it is checked yet."""

    public_id: str
    port: int


class E2bSurface:
    """The ASGI app around the server's own."""

    def __init__(self, server: Server, inner: ASGIApp) -> None:
        self._server = server
        self._inner = inner
        self._tokens = SandboxTokens.load(server.directory)
        self._sandboxes = SandboxRoutes(self._tokens)
        self._control = Starlette(
            routes=[*self._sandboxes.routes(), *SnapshotRoutes(self._sandboxes).routes(), *_rest()]
        )
        self._control.state.server = server

    def listens_at(self, address: PreviewAddress) -> None:
        """The server listens: answers name this domain from now on."""
        self._sandboxes.domain = port_domain(address)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """While this is entered, sandboxes' own planes are served."""
        yield

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        target = target_of(scope)
        if target is not None:
            scope["state"]["mounted"] = "e2b"
            await self._serve_sandbox(target, scope, receive, send)
        elif _CONTROL.fullmatch(scope["path"]):
            scope["state"]["mounted"] = "e2b"
            await self._control(scope, receive, send)
        else:
            await self._inner(scope, receive, send)

    async def _serve_sandbox(self, target: SandboxTarget, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            _tenant, _sandbox = await self._reach(target)
        except (SandboxNotFound, Forbidden):
            await proxy_answer(target, _NOT_FOUND)(scope, receive, send)
            return
        except AtollError as error:
            await error_response(error, request)(scope, receive, send)
            return
        if scope["path"] == "/health":
            await Response(status_code=204)(scope, receive, send)
            return
        await proxy_answer(target, _PORT_NOT_OPEN)(scope, receive, send)

    async def _reach(self, target: SandboxTarget) -> tuple[Tenant, Sandbox]:
        """The sandbox that a request is for.

        Raises:
            SandboxNotFound: there is none, or it is paused and requests do not resume it.
        """
        id = sandbox_id(target.public_id)
        if id is None:
            raise SandboxNotFound(target.public_id[:64], [])
        tenant, sandbox = await self._server.find_sandbox(id)
        await sandbox.status()
        if state_of(sandbox.info) == "paused" or sandbox.info.status == "error":
            raise SandboxNotFound(public_id(id), [])
        return tenant, sandbox


def target_of(scope: Scope) -> SandboxTarget | None:
    """What a request names by its headers or its host name. None: no sandbox."""
    headers = Headers(scope=scope)
    if (named := headers.get(ID_HEADER)) is not None:
        port = headers.get(PORT_HEADER, str(ENVD_PORT))
        return SandboxTarget(named, int(port) if port.isdecimal() and len(port) <= 5 else 0)
    found = _HOST.fullmatch(headers.get("host", "").lower())
    return SandboxTarget(found[2], int(found[1])) if found else None


def proxy_answer(target: SandboxTarget, message: str) -> JSONResponse:
    """An answer of E2B's proxy. SDKs look for the words."""
    body: dict[str, object] = {"sandboxId": target.public_id[:64], "message": message, "code": 502}
    if message == _PORT_NOT_OPEN:
        body["port"] = target.port
    return JSONResponse(body, 502)


def _rest() -> list[Route]:
    """Paths of E2B's control plane that nothing here answers: they say so, to those who have a key."""
    refuse = not_supported("this call is")
    return [
        route("/{path:path}", method, "unsupported", "sandboxes:read", refuse)
        for method in ("GET", "POST", "PUT", "PATCH", "DELETE")
    ]
