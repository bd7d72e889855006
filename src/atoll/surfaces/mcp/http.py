"""MCP over HTTP: an ASGI app with one client session per handshake, and its server.

Owns which client session a request belongs to, and when a session ends: by DELETE, after it was idle for too long, or
with the app. Not here: who may send requests and how the app is served (`surfaces/door/`), and what a session offers
(`session.py`). Used by `atoll mcp --http`, and by programs that mount `app`.

The `Mcp-Session-Id` header names the session: 128 random bits, known to one client. Revisions of the protocol without
sessions have nothing that distinguishes clients; requests of such a revision are answered with an error that asks for
the handshake, as older servers do.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from typing import Any

import anyio
import anyio.abc
import mcp_types as types
import pydantic_core
from mcp.server.lowlevel import Server
from mcp.server.runner import serve_loop
from mcp.server.streamable_http import MCP_SESSION_ID_HEADER, StreamableHTTPServerTransport
from mcp.server.transport_security import RequestBodyLimitMiddleware
from mcp.shared.inbound import MCP_PROTOCOL_VERSION_HEADER
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS
from pydantic import SecretStr, ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from atoll.contract.errors import AtollError
from atoll.runtime.interface import Engine
from atoll.surfaces import door
from atoll.surfaces.door import LOOPBACK, HttpGuard
from atoll.surfaces.mcp.session import DISCONNECTED, ServerConfig, open_session
from atoll.surfaces.mcp.stdio import MAX_LAST_ANSWERS_S, MAX_MESSAGE_BYTES, request_id

PATH = "/mcp"
MAX_SESSIONS = 64
DEFAULT_IDLE_S = 1800.0
TOKEN_VARIABLE = "ATOLL_MCP_TOKEN"  # noqa: S105 - the name of a variable
_METHODS = ("GET", "POST", "DELETE")
_log = logging.getLogger(__name__)


def app(
    engine: Engine,
    config: ServerConfig | None = None,
    *,
    token: SecretStr | None = None,
    hosts: Sequence[str] | None = LOOPBACK,
    sessions: int = MAX_SESSIONS,
    idle_s: float = DEFAULT_IDLE_S,
) -> Starlette:
    """The ASGI app, at `/mcp`. The end of its lifespan ends all sessions: a program that mounts it has to run
    `app.router.lifespan_context(app)`.

    `hosts` and `token` are those of `HttpGuard`. At most `sessions` exist at once. A session ends after `idle_s`
    without an active request.

    Raises:
        InvalidRequest: as `HttpGuard`.
    """
    guard = HttpGuard(hosts, token, token_variable=TOKEN_VARIABLE)
    make = partial(open_session, engine, config or ServerConfig())
    held = HttpSessions(make, guard, max_sessions=sessions, idle_s=idle_s)
    made = Starlette(routes=[Route(PATH, endpoint=held)], lifespan=lambda _app: held.running())
    made.state.sessions = held
    return made


async def listen(
    engine: Engine,
    config: ServerConfig,
    address: str,
    port: int,
    *,
    token: SecretStr | None = None,
    sessions: int = MAX_SESSIONS,
    idle_s: float = DEFAULT_IDLE_S,
    on_ready: Callable[[str], None] = lambda _url: None,
) -> None:
    """Serve MCP at an address until this is cancelled. `on_ready` receives the URL; the rest is as in `app`.

    Raises:
        InvalidRequest: other machines can reach the address, and there is no token.
        OSError: the address or port cannot be listened on.
    """
    address = "127.0.0.1" if address == "localhost" else address
    hosts = door.accepted_hosts(address, token, token_variable=TOKEN_VARIABLE)
    served = app(engine, config, token=token, hosts=hosts, sessions=sessions, idle_s=idle_s)
    await door.listen(
        served,
        address,
        port,
        on_ready=lambda url: on_ready(f"{url}{PATH}"),
        on_stop=served.state.sessions.end_all,
        grace_s=MAX_LAST_ANSWERS_S,
    )


class HttpSessions:
    """The client sessions of an app. It is an ASGI app itself, which answers requests while it is `running`."""

    def __init__(
        self,
        make: Callable[[], AbstractAsyncContextManager[Server[Any]]],
        guard: HttpGuard,
        *,
        max_sessions: int,
        idle_s: float,
    ) -> None:
        self._make = make
        self._guard = guard
        self._max_sessions = max_sessions
        self._idle_s = idle_s
        self._open: dict[str, StreamableHTTPServerTransport] = {}
        self._count = 0
        """Sessions that are open or ending: each may have sandboxes."""
        self._start_lock = anyio.Lock()
        self._tasks: anyio.abc.TaskGroup | None = None
        self._limited = RequestBodyLimitMiddleware(self._route, MAX_MESSAGE_BYTES)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve clients within this context. All sessions have ended when it is left."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            try:
                yield
            finally:
                self._tasks = None
                tasks.cancel_scope.cancel()

    def end_all(self) -> None:
        """Start to end all sessions, and accept no new one."""
        if self._tasks is not None:
            self._tasks.cancel_scope.cancel()
        self._tasks = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._guard.refusal(Request(scope))
        if refusal is not None:
            await _error(refusal.status, refusal.message, headers=dict(refusal.headers))(scope, receive, send)
        else:
            await self._limited(scope, receive, send)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        version = request.headers.get(MCP_PROTOCOL_VERSION_HEADER)
        id = request.headers.get(MCP_SESSION_ID_HEADER)
        if id in self._open and (version is None or version in HANDSHAKE_PROTOCOL_VERSIONS):
            await _forward(self._open[id], scope, receive, send)
            return
        try:
            body = await Request(scope, receive).body()
        except ClientDisconnect:
            return
        if version is not None and version not in HANDSHAKE_PROTOCOL_VERSIONS:
            refused: Response | None = _without_sessions(body, version)
        elif id is not None:
            refused = _error(404, "there is no such session: it has ended, or never existed; begin with initialize")
        else:
            refused = _no_handshake(request.method, body)
        if refused is not None:
            await refused(scope, receive, send)
            return
        read: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return read.pop() if read else await receive()

        await self._start_session(scope, replay, send)

    async def _start_session(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Start a session with this request. If the transport refuses the request, the session is removed again."""
        transport = StreamableHTTPServerTransport(secrets.token_hex(16), idle_timeout=self._idle_s)
        async with self._start_lock:
            if self._tasks is None:
                await _error(503, "the server is stopping, or has not started")(scope, receive, send)
                return
            if self._count >= self._max_sessions:
                why = f"the limit of {self._max_sessions} sessions is reached; end one, or try again later"
                await _error(503, why)(scope, receive, send)
                return
            try:
                await self._tasks.start(self._run_session, transport)
            except (AtollError, OSError):
                _log.exception("starting an MCP session failed")
                await _error(500, "the session could not be started; the server's log has the reason")(
                    scope, receive, send
                )
                return
        status: int | None = None

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await _forward(transport, scope, receive, watch)
        finally:
            if status is None or status >= 400:
                await self._forget(transport)

    async def _run_session(
        self, transport: StreamableHTTPServerTransport, *, task_status: anyio.abc.TaskStatus[None]
    ) -> None:
        id = str(transport.mcp_session_id)
        self._count += 1
        began = False
        try:
            async with self._make() as server, transport.connect() as (read, write):
                self._open[id] = transport
                task_status.started()
                began = True
                try:
                    with transport.idle_scope or anyio.CancelScope():
                        await serve_loop(server, read, write, lifespan_state={}, session_id=id)
                finally:
                    await self._forget(transport)
        except Exception:
            if not began:
                raise
            _log.exception("an MCP session ended with an error")
        finally:
            self._count -= 1

    async def _forget(self, transport: StreamableHTTPServerTransport) -> None:
        self._open.pop(str(transport.mcp_session_id), None)
        if not transport.is_terminated:
            with anyio.CancelScope(shield=True):
                await transport.terminate()


async def _forward(transport: StreamableHTTPServerTransport, scope: Scope, receive: Receive, send: Send) -> None:
    """Pass a request to its session. A client that disconnects cancels its call: there is no way to fetch the response
    later."""
    disconnected = anyio.Event()
    # Without an event store the transport does not answer a request to resume, so it is treated as a new one.
    headers = [each for each in scope["headers"] if each[0] != b"last-event-id"]
    try:
        await transport.handle_request({**scope, "headers": headers, DISCONNECTED: disconnected}, receive, send)
    finally:
        disconnected.set()


def _no_handshake(method: str, body: bytes) -> Response | None:
    """The error for a request without a session, unless it is a valid handshake. Checked first, because a session is
    expensive."""
    if method not in _METHODS:
        return _error(405, f"the method {method} is not allowed", headers={"Allow": ", ".join(_METHODS)})
    first = "begin with initialize, and send the Mcp-Session-Id of its response with every further request"
    if method != "POST":
        return _error(400, first)
    try:
        message = types.jsonrpc_message_adapter.validate_json(body, by_name=False)
    except ValidationError:
        return _error(400, f"not a JSON-RPC message; {first}", code=types.PARSE_ERROR)
    if not isinstance(message, types.JSONRPCRequest) or message.method != "initialize":
        return _error(400, first, id=getattr(message, "id", None))
    try:
        types.InitializeRequestParams.model_validate(message.params or {}, by_name=False)
    except ValidationError as error:
        wrong = ", ".join(".".join(map(str, each["loc"])) for each in error.errors()[:8])
        return _error(400, f"the params of initialize are invalid: {wrong}", code=types.INVALID_PARAMS, id=message.id)
    return None


def _without_sessions(body: bytes, version: str) -> Response:
    id = None
    with suppress(ValueError):
        id = request_id(pydantic_core.from_json(body))
    why = f"this server needs a session for each client, and revision {version!r} of the protocol has none; "
    why += f"begin with initialize and one of the revisions {', '.join(HANDSHAKE_PROTOCOL_VERSIONS)}"
    data = {"supported": list(HANDSHAKE_PROTOCOL_VERSIONS), "requested": version}
    return _error(400, why, code=types.UNSUPPORTED_PROTOCOL_VERSION, id=id, data=data)


def _error(
    status: int,
    message: str,
    *,
    code: int = types.INVALID_REQUEST,
    id: str | int | None = None,
    data: dict[str, Any] | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    error = types.ErrorData(code=code, message=message, **({} if data is None else {"data": data}))
    body = types.JSONRPCError(jsonrpc="2.0", id=id, error=error)
    return Response(
        body.model_dump_json(by_alias=True, exclude_unset=True), status, headers=headers, media_type="application/json"
    )
