"""Which requests are E2B's, and which sandbox they are for.

Owns the choice, on the server's one port. A request is for a sandbox's own plane if it names one: with the headers
E2b-Sandbox-Id and E2b-Sandbox-Port, with a host name PORT-ID below the server's domain, or with a signature in its URL,
which is tried with the token of each sandbox. It is for the control plane by its path. All others are Atoll's own. The
answers of E2B's proxy are word for word where SDKs compare words. Not here: what the planes do.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio.to_thread
from fastapi.exceptions import RequestValidationError
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from atoll.contract.errors import (
    AtollError,
    DatabaseUnavailable,
    Forbidden,
    SandboxDied,
    SandboxNotFound,
    TenantNotFound,
    UserNotFound,
)
from atoll.runtime.sandbox import Sandbox
from atoll.server.audit import AuditEvent
from atoll.server.previews import PreviewAddress
from atoll.server.server import Server
from atoll.server.tenants import Tenant
from atoll.surfaces.door.connection import DISCONNECT
from atoll.surfaces.e2b.accounts import SandboxAccounts
from atoll.surfaces.e2b.connect import RpcError
from atoll.surfaces.e2b.control import error_response, not_supported, route
from atoll.surfaces.e2b.filesystem import FilesystemService
from atoll.surfaces.e2b.interpreter import CodeInterpreter
from atoll.surfaces.e2b.ports import (
    ENVD_PORT,
    INTERPRETER_PORT,
    NOT_FOUND,
    PLANE_PORTS,
    PORT_NOT_OPEN,
    TRAFFIC_HEADER,
    SandboxPorts,
    SandboxTarget,
    host_target,
    proxy_answer,
)
from atoll.surfaces.e2b.processes import ProcessService
from atoll.surfaces.e2b.record import E2bRecord
from atoll.surfaces.e2b.sandboxes import SandboxRoutes, port_domain, resume, state_of
from atoll.surfaces.e2b.snapshots import SnapshotRoutes
from atoll.surfaces.e2b.templates import TemplateRoutes
from atoll.surfaces.e2b.tokens import TOKEN_HEADER, SandboxTokens, public_id, sandbox_id
from atoll.surfaces.e2b.transfer import FileTransfer
from atoll.surfaces.e2b.watches import WatchService
from atoll.surfaces.rest.errors import request_id

ID_HEADER = "e2b-sandbox-id"
PORT_HEADER = "e2b-sandbox-port"
FILES_PATH = "/files"
COMPOSE_PATH = "/files/compose"
_WATCH_S = 1.0
_WATCH_AFTER_S = 0.1
_FORGET_S = 60.0
_RECORDED = {
    ("POST", "/process.Process/Start"): "e2b_process_start",
    ("POST", "/process.Process/SendInput"): "e2b_process_input",
    ("POST", "/process.Process/StreamInput"): "e2b_process_input",
    ("POST", "/process.Process/SendSignal"): "e2b_process_signal",
    ("POST", "/filesystem.Filesystem/MakeDir"): "e2b_files_mkdir",
    ("POST", "/filesystem.Filesystem/Move"): "e2b_files_move",
    ("POST", "/filesystem.Filesystem/Remove"): "e2b_files_remove",
    ("POST", FILES_PATH): "e2b_files_write",
    ("POST", COMPOSE_PATH): "e2b_files_compose",
    ("POST", "/execute"): "e2b_execute",
}
"""What is in the audit log, and how it is called there."""
_CONTROL = re.compile(r"/(v[23]/)?(sandboxes|snapshots|templates|volumes|secrets|teams|default-templates)(/.*)?")


class E2bSurface:
    """The ASGI app around the server's own."""

    def __init__(self, server: Server, inner: ASGIApp) -> None:
        self._server = server
        self._inner = inner
        self._tokens = SandboxTokens.load(server.directory)
        self._sandboxes = SandboxRoutes(self._tokens)
        self._accounts = accounts = SandboxAccounts()
        self._processes = ProcessService()
        self._filesystem = FilesystemService(accounts)
        self._watches = WatchService(accounts, self._filesystem)
        self._rpc = self._processes.methods() | self._filesystem.methods() | self._watches.methods()
        self._interpreter = CodeInterpreter(accounts)
        self._files = FileTransfer(self._tokens, accounts, self._filesystem)
        routes = [*TemplateRoutes(self._tokens).upload_routes(), *control_routes(self._tokens, self._sandboxes)]
        self._control = Starlette(routes=routes, exception_handlers={Exception: _failed})
        self._control.state.server = server

    @property
    def ports(self) -> SandboxPorts:
        """The ports of all sandboxes, for what serves host names."""
        return SandboxPorts(self._reach, self._is_ended, self._tokens)

    def listens_at(self, address: PreviewAddress) -> None:
        """The server listens: answers name this domain from now on."""
        self._sandboxes.domain = port_domain(address)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """While this is entered, sandboxes' own planes are served."""
        forgetting = asyncio.create_task(self._forget_gone(), name="atoll e2b")
        try:
            yield
        finally:
            forgetting.cancel()
            self._processes.aclose()
            self._watches.aclose()
            await self._interpreter.aclose()

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
        elif scope["path"] == FILES_PATH:
            scope["state"]["mounted"] = "e2b"
            await self._serve_signed(scope, receive, send)
        else:
            await self._inner(scope, receive, send)

    # -------------------------------------------------------------------------------------- a sandbox's own plane

    async def _serve_sandbox(self, target: SandboxTarget, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            tenant, sandbox = await self._find(target)
            if target.port not in PLANE_PORTS:
                await _proxied(target, PORT_NOT_OPEN)(scope, receive, send)
                return
            if scope["path"] == "/health":
                _require_running(sandbox)
                await Response(status_code=204)(scope, receive, send)
                return
            # Nothing is counted, woken or written for a request that may not be made.
            if target.port == INTERPRETER_PORT:
                self._require_allowed_code(request, sandbox)
            else:
                self._require_allowed(request, sandbox)
            self._server.quotas.check_rate(tenant)
            await self._wake(tenant, sandbox)
            await self._record(request, tenant, sandbox)
            async with self._while_allowed(tenant, scope, receive):
                await self._serve_allowed(request, target, sandbox, send)
            return
        except (SandboxNotFound, SandboxDied):
            response = _proxied(target, NOT_FOUND)
        except (AtollError, RpcError, HTTPException) as error:
            response = _envd_answer(error, request)
        await response(scope, receive, send)

    async def _serve_allowed(self, request: Request, target: SandboxTarget, sandbox: Sandbox, send: Send) -> None:
        scope, receive = request.scope, request.receive
        try:
            if target.port == INTERPRETER_PORT:
                response = await self._interpreter.answer(request, sandbox)
            elif scope["path"] in self._rpc and scope["method"] == "POST":
                await self._rpc.serve(sandbox, scope, receive, send)
                return
            else:
                response = await self._answer(request, sandbox)
        except (SandboxNotFound, SandboxDied):
            response = _proxied(target, NOT_FOUND)
        except (AtollError, RpcError, HTTPException, RequestValidationError) as error:
            response = _envd_answer(error, request)
        await response(scope, receive, send)

    @asynccontextmanager
    async def _while_allowed(self, tenant: Tenant, scope: Scope, receive: Receive) -> AsyncIterator[None]:
        """The block is cancelled within two seconds when its client has left, and also when its tenant is disabled: its
        connection is then cut off. What no client waits for would be held for as long as the sandbox likes."""
        connection = scope["extensions"][DISCONNECT]
        watching: list[asyncio.Task[None]] = []
        loop = asyncio.get_running_loop()
        with anyio.CancelScope() as cancelling:

            async def watch() -> None:
                has_to_end = False
                while not has_to_end:
                    await anyio.sleep(_WATCH_S)
                    has_to_end = connection["is_lost"]() or await self._is_disabled(tenant.name)
                connection["now"]()
                cancelling.cancel()

            timer = loop.call_later(_WATCH_AFTER_S, lambda: watching.append(loop.create_task(watch())))
            try:
                yield
            finally:
                timer.cancel()
                for task in watching:
                    task.cancel()
        while cancelling.cancelled_caught and (await receive())["type"] != "http.disconnect":
            pass

    async def _is_ended(self, target: SandboxTarget) -> bool:
        try:
            await self._server.find_sandbox(sandbox_id(target.public_id) or "")
        except Forbidden:
            return True
        except AtollError:  # what becomes of a connection to a sandbox that has ended, it says itself
            pass
        return False

    async def _is_disabled(self, tenant: str) -> bool:
        try:
            return (await self._server.tenants.get(tenant)).disabled
        except TenantNotFound:
            return True
        except DatabaseUnavailable:  # it is asked again; what is under way need not end for it
            return False

    async def _forget_gone(self) -> None:
        """Forget what is kept of sandboxes that are gone, until this is cancelled."""
        while True:
            await anyio.sleep(_FORGET_S)
            with suppress(OSError):
                await self.forget_gone()

    async def forget_gone(self) -> None:
        """Forget what is kept of sandboxes that are gone."""
        ids = frozenset(await anyio.to_thread.run_sync(self._server.sandbox_ids))
        self._accounts.forget_gone(ids)
        self._processes.forget_gone(ids)
        self._watches.forget_gone(ids)
        await self._interpreter.forget_gone(ids)

    async def _find(self, target: SandboxTarget) -> tuple[Tenant, Sandbox]:
        """The sandbox that a request is for, as it is now.

        Raises:
            SandboxNotFound: there is none, it has failed, or its tenant is disabled.
        """
        try:
            tenant, sandbox = await self._server.find_sandbox(sandbox_id(target.public_id) or "")
            await sandbox.status()
        except Forbidden:
            raise SandboxNotFound(target.public_id, []) from None
        if sandbox.info.status == "error":
            raise SandboxNotFound(target.public_id, [])
        return tenant, sandbox

    async def _wake(self, tenant: Tenant, sandbox: Sandbox) -> None:
        """Resume a paused sandbox, if requests resume it.

        Raises:
            SandboxNotFound: it is paused, and they do not.
        """
        if state_of(sandbox.info) == "paused":
            record = E2bRecord.of(sandbox.info)
            if not record.auto_resume:
                _require_running(sandbox)
            await resume(self._server, tenant, sandbox, record.timeout_s)

    async def _reach(self, target: SandboxTarget) -> tuple[Tenant, Sandbox]:
        """The sandbox whose port a request is for, resumed if requests resume it."""
        tenant, sandbox = await self._find(target)
        await self._wake(tenant, sandbox)
        return tenant, sandbox

    def _require_allowed(self, request: Request, sandbox: Sandbox) -> None:
        """
        Raises:
            HTTPException: the request has neither the sandbox's token nor, for a file, a signature made with it.
        """
        given = request.headers.get(TOKEN_HEADER)
        if given is not None and self._tokens.matches(sandbox.id, given):
            return
        if given is None and request.scope["path"] == FILES_PATH:
            self._files.require_signed(request, sandbox.id)
            return
        raise HTTPException(
            401, "unauthorized access, please provide a valid access token or method signing if supported"
        )

    def _require_allowed_code(self, request: Request, sandbox: Sandbox) -> None:
        """Code runs for those who have the sandbox's token. SDKs do not send it with requests about contexts: these are
        for all who may reach the sandbox's ports.

        Raises:
            HTTPException: the request may not.
        """
        if TOKEN_HEADER in request.headers or request.scope["path"] == "/execute":
            self._require_allowed(request, sandbox)
        elif not E2bRecord.of(sandbox.info).public_ports:
            given = request.headers.get(TRAFFIC_HEADER.decode(), "")
            if not self._tokens.matches(sandbox.id, given, "traffic"):
                raise HTTPException(403, "Sandbox is secured with traffic access token. It is missing or invalid")

    async def _record(self, request: Request, tenant: Tenant, sandbox: Sandbox) -> None:
        """Write to the audit log what changes something. It is known by which sandbox's token, not by which key."""
        action = _RECORDED.get((request.method, request.scope["path"]))
        if action is None:
            return
        client = request.scope.get("client")
        await self._server.audit.record(
            AuditEvent(
                request_id=request_id(request.scope),
                tenant=tenant.name,
                client=client[0] if client else None,
                action=action,
                resource=f"sandboxes/{sandbox.name}",
                status=200,
            )
        )

    async def _answer(self, request: Request, sandbox: Sandbox) -> Response:
        path, method = request.scope["path"], request.method
        if path == FILES_PATH and method in ("GET", "HEAD"):
            return await self._files.read(request, sandbox)
        if path == FILES_PATH and method == "POST":
            return await self._files.write(request, sandbox)
        if path == COMPOSE_PATH and method == "POST":
            return await self._files.compose(request, sandbox)
        if path == "/envs" and method == "GET":
            return await self._files.envs(request, sandbox)
        if path == "/metrics" and method == "GET":
            return await self._files.metrics(request, sandbox)
        raise HTTPException(501, f"{method} {path[:256]} is not supported by this server")

    async def _serve_signed(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A file's URL that names no sandbox: the one whose token it was signed with."""
        request = Request(scope, receive)
        try:
            id = await self._signer(request)
        except (AtollError, HTTPException) as error:
            await _envd_answer(error, request)(scope, receive, send)
            return
        await self._serve_sandbox(SandboxTarget(public_id(id), ENVD_PORT), scope, receive, send)

    async def _signer(self, request: Request) -> str:
        signature = self._files.signature(request)
        ids = await anyio.to_thread.run_sync(self._server.sandbox_ids)
        id = next((each for each in ids if self._tokens.signed(each, signature)), None)
        if id is None:
            raise HTTPException(401, "invalid signature")
        return id


def _require_running(sandbox: Sandbox) -> None:
    if state_of(sandbox.info) == "paused":
        raise SandboxNotFound(public_id(sandbox.id), [])


def target_of(scope: Scope) -> SandboxTarget | None:
    """What a request names by its headers or its host name. None: no sandbox."""
    headers = Headers(scope=scope)
    if (named := headers.get(ID_HEADER)) is not None:
        port = headers.get(PORT_HEADER, str(ENVD_PORT))
        return SandboxTarget(named, int(port) if port.isdecimal() and len(port) <= 5 else 0)
    return host_target(headers.get("host", "").encode("latin-1"))


async def _failed(request: Request, error: Exception) -> Response:
    """What no route expects is an error in E2B's shape too; the server's log has it."""
    return error_response(error, request)


def _proxied(target: SandboxTarget, message: str) -> JSONResponse:
    return JSONResponse(proxy_answer(target, message), 502)


def _envd_answer(
    error: AtollError | RpcError | HTTPException | RequestValidationError, request: Request
) -> JSONResponse:
    """An error of a sandbox's own plane, over plain HTTP."""
    if isinstance(error, RpcError):
        error = HTTPException(401 if error.code == "unauthenticated" else 400, error.message)
    elif isinstance(error, UserNotFound):
        error = HTTPException(401, error.message)
    if isinstance(error, HTTPException):
        return JSONResponse({"code": error.status_code, "message": str(error.detail)}, error.status_code)
    return error_response(error, request)


def control_routes(tokens: SandboxTokens, sandboxes: SandboxRoutes | None = None) -> list[Route]:
    """All routes of the control plane. The last say to those who have a key that there is no such call here."""
    sandboxes = sandboxes or SandboxRoutes(tokens)
    unsupported = [
        route("/{path:path}", method, "unsupported", "sandboxes:read", not_supported("this call is"))
        for method in ("GET", "POST", "PUT", "PATCH", "DELETE")
    ]
    return [*sandboxes.routes(), *TemplateRoutes(tokens).routes(), *SnapshotRoutes(sandboxes).routes(), *unsupported]
