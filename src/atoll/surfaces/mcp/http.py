"""MCP over HTTP: an ASGI app with one session for each client that shakes hands.

Knows who is let in, which session a request belongs to, and when one ends: by DELETE, when it was idle for too long, or
with the app. Refuses to know what is served (`session`) and how bytes become requests.

A session is what the server's `Mcp-Session-Id` names: 128 bits at random, known to one client. Revisions of the
protocol that have no sessions say nothing that tells one client from another, and clients that speak them are told to
shake hands instead, as they do with any older server.
"""

from __future__ import annotations

import hmac
import logging
import re
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit

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

from atoll.contract.errors import AtollError, InvalidRequest
from atoll.runtime.engine import Engine
from atoll.settings import SHORTEST_TOKEN
from atoll.surfaces.mcp.session import DISCONNECTED, ServerConfig, open_session
from atoll.surfaces.mcp.stdio import MAX_MESSAGE_BYTES, request_id

PATH = "/mcp"
MAX_SESSIONS = 64
DEFAULT_IDLE_S = 1800.0
LOOPBACK = ("localhost", "127.0.0.1", "::1")
_TOKEN = re.compile(rf"[^\s\x00-\x1f\x7f]{{{SHORTEST_TOKEN},}}")
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
    """The app, at `/mcp`. Its lifespan ends all sessions; who mounts it runs `app.router.lifespan_context(app)`.

    `hosts` are the names that it is called by: a request for another one, or from a page of another one, is refused.
    None is any name, and needs a `token`, which requests then have to bear. There are at most so many `sessions`, and
    one ends that has had no request under way for `idle_s`.

    Raises:
        InvalidRequest: neither hosts nor a token say who may come in, or what they say cannot be sent.
    """
    if hosts is None and token is None:
        raise InvalidRequest("an app that answers to any name needs a token; give one, or say which hosts it has")
    for host in hosts or ():
        if host.lower() not in (_hostname(f"//{host}"), _hostname(f"//[{host}]")):
            raise InvalidRequest(f"{host!r} is not the name of a host; write it without a port, such as localhost")
    if token is not None and not _TOKEN.fullmatch(token.get_secret_value()):
        raise InvalidRequest(
            f"a token has {SHORTEST_TOKEN} characters or more, none of them a space or a line break, which clients "
            "could not send"
        )
    held = HttpSessions(
        partial(open_session, engine, config or ServerConfig()), _Door(hosts, token), most=sessions, idle_s=idle_s
    )
    made = Starlette(routes=[Route(PATH, endpoint=held)], lifespan=lambda _app: held.running())
    made.state.sessions = held
    return made


class _Door:
    """Who may come in. A page in a browser may not, unless it is this server's own: it can make a browser ask for a
    name that it has had point here, and the name then is not ours."""

    def __init__(self, hosts: Sequence[str] | None, token: SecretStr | None) -> None:
        self._hosts = None if hosts is None else frozenset(host.lower() for host in hosts)
        self._token = None if token is None else token.get_secret_value().encode()

    def refusal(self, request: Request) -> Response | None:
        """What is answered to a request that may not come in."""
        host = _hostname(f"//{request.headers.get('host', '')}")
        known = {host} if self._hosts is None else self._hosts
        if host is None or host not in known:
            return _error(421, f"this server is called {', '.join(sorted(self._hosts or ())) or 'by a name'}; use that")
        origin = request.headers.get("origin")
        if origin is not None and _hostname(origin) not in known:
            return _error(403, "pages of other sites may not use this server")
        if self._token is not None:
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("latin-1"), self._token):
                why = "this server wants a token: Authorization: Bearer, and what ATOLL_MCP_TOKEN is where it runs"
                return _error(401, why, headers={"WWW-Authenticate": "Bearer"})
        return None


def _hostname(url: str) -> str | None:
    with suppress(ValueError):
        return urlsplit(url).hostname
    return None


class HttpSessions:
    """The sessions of an app. As an ASGI app it answers requests, while it is `running`."""

    def __init__(
        self, make: Callable[[], AbstractAsyncContextManager[Server[Any]]], door: _Door, *, most: int, idle_s: float
    ) -> None:
        self._make = make
        self._door = door
        self._most = most
        self._idle_s = idle_s
        self._open: dict[str, StreamableHTTPServerTransport] = {}
        self._count = 0
        """Of those that are open or being ended: each may have sandboxes."""
        self._beginning = anyio.Lock()
        self._tasks: anyio.abc.TaskGroup | None = None
        self._limited = RequestBodyLimitMiddleware(self._answer, MAX_MESSAGE_BYTES)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """While this lasts, clients are served. All sessions have ended when it has."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            try:
                yield
            finally:
                self._tasks = None
                tasks.cancel_scope.cancel()

    def end_all(self) -> None:
        """Begin to end all sessions, and begin no other."""
        if self._tasks is not None:
            self._tasks.cancel_scope.cancel()
        self._tasks = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = self._door.refusal(Request(scope))
        await (refused or self._limited)(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
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
            refused = _error(404, "there is no such session; it has ended, or never was. Shake hands anew")
        else:
            refused = _no_handshake(request.method, body)
        if refused is not None:
            await refused(scope, receive, send)
            return
        read: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def anew() -> Message:
            return read.pop() if read else await receive()

        await self._begin(scope, anew, send)

    async def _begin(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A new session, if the transport takes this request for what begins one: else there is none when this ends."""
        transport = StreamableHTTPServerTransport(secrets.token_hex(16), idle_timeout=self._idle_s)
        async with self._beginning:
            if self._tasks is None:
                await _error(503, "this server is ending, or has not begun")(scope, receive, send)
                return
            if self._count >= self._most:
                why = f"there are {self._most} sessions already, and no more can be; end one, or try again later"
                await _error(503, why)(scope, receive, send)
                return
            try:
                await self._tasks.start(self._serve, transport)
            except (AtollError, OSError):
                _log.exception("a session could not be begun")
                await _error(500, "no session could be begun; the server's operator finds why")(scope, receive, send)
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

    async def _serve(
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
            _log.exception("a session ended with an error")
        finally:
            self._count -= 1

    async def _forget(self, transport: StreamableHTTPServerTransport) -> None:
        self._open.pop(str(transport.mcp_session_id), None)
        if not transport.is_terminated:
            with anyio.CancelScope(shield=True):
                await transport.terminate()


async def _forward(transport: StreamableHTTPServerTransport, scope: Scope, receive: Receive, send: Send) -> None:
    """Let a session answer. Who is at work on it learns when nobody is there any more to take the answer: there is no
    way to fetch it later."""
    gone = anyio.Event()
    # Whoever asks for what came after some event begins anew: the transport gives no answer where nothing is kept.
    headers = [each for each in scope["headers"] if each[0] != b"last-event-id"]
    try:
        await transport.handle_request({**scope, "headers": headers, DISCONNECTED: gone}, receive, send)
    finally:
        gone.set()


def _no_handshake(method: str, body: bytes) -> Response | None:
    """What is answered to a request without a session, unless it begins one. To make one for it costs far more."""
    if method not in _METHODS:
        return _error(405, f"there is no {method} here", headers={"Allow": ", ".join(_METHODS)})
    first = "begin with initialize, and send the Mcp-Session-Id of its answer with all that follows"
    if method != "POST":
        return _error(400, first)
    try:
        message = types.jsonrpc_message_adapter.validate_json(body, by_name=False)
    except ValidationError:
        return _error(400, f"this is no message of the protocol; {first}", code=types.PARSE_ERROR)
    if not isinstance(message, types.JSONRPCRequest) or message.method != "initialize":
        return _error(400, first, id=getattr(message, "id", None))
    try:
        types.InitializeRequestParams.model_validate(message.params or {}, by_name=False)
    except ValidationError as error:
        wrong = ", ".join(".".join(map(str, each["loc"])) for each in error.errors()[:8])
        return _error(400, f"these are no params of initialize: {wrong}", code=types.INVALID_PARAMS, id=message.id)
    return None


def _without_sessions(body: bytes, version: str) -> Response:
    id = None
    with suppress(ValueError):
        id = request_id(pydantic_core.from_json(body))
    why = f"this server keeps a session for each client, and revision {version!r} of the protocol has none; "
    why += f"begin with initialize, and one of {', '.join(HANDSHAKE_PROTOCOL_VERSIONS)}"
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
