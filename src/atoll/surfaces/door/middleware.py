"""The door of `atoll serve` above HTTP's parser: what every request passes before any route is chosen.

Owns request ids, accepted host names and origins, the limit of bodies, the addresses that a reverse proxy names, and
the end of event streams when the server stops. Not here: what is below (`connection.py`), and API keys, which are the
routes' (`surfaces/rest/caller.py`): a web page that points a name of its own here has none. Used by `serve/app.py`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any

import anyio
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atoll.surfaces.door.answers import REQUEST_ID_HEADER, error_body, new_request_id
from atoll.surfaces.door.guard import origin_of, split_host

MAX_BODY_BYTES = 16 * 1024 * 1024
"""Of a request whose route does not call `take_any_body`."""
_LAST_EVENTS_S = 2.0
"""For clients to take the last event of a stream."""
_BODY_LIMIT = "body_limit"
_NO_SNIFFING = (b"x-content-type-options", b"nosniff")
"""A browser must not take a file of a sandbox for a page."""
_START = ("http.response.start", "websocket.http.response.start")


class BodyTooLarge(HTTPException):
    """A body that is larger than its route takes."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(413, f"the body may have {limit_bytes} bytes")


def take_any_body(scope: MutableMapping[str, Any]) -> None:
    """Let the route of this request read a body of any size, piece by piece. It is bounded by what it is written to."""
    scope.setdefault("state", {})[_BODY_LIMIT] = None


@dataclass(frozen=True)
class DoneRequest:
    """One request that was answered, for logs and metrics."""

    scope: Scope
    status: int
    """Zero: the client left before there was an answer."""
    seconds: float


@dataclass(frozen=True)
class AcceptedNames:
    """The host names of a server. A name with a leading dot stands for all names below it; `*` for any name."""

    names: frozenset[str]

    @classmethod
    def of(cls, names: Iterable[str]) -> AcceptedNames:
        return cls(frozenset(name.lower() for name in names))

    def accepts(self, host: str, server: str | None) -> bool:
        """`server` is the address at which the request came in, which is a name too."""
        if host in self.names or "*" in self.names or host == server:
            return True
        return any(host.endswith(name) for name in self.names if name.startswith("."))


class HttpDoor:
    """The outermost app."""

    def __init__(
        self,
        app: ASGIApp,
        accepted: AcceptedNames,
        *,
        trusted_proxies: frozenset[str] = frozenset(),
        max_body_bytes: int = MAX_BODY_BYTES,
        on_begin: Callable[[str], Callable[[], None]] | None = None,
        on_done: Callable[[DoneRequest], None] = lambda _done: None,
    ) -> None:
        """`on_begin` is told the id of a request, in its task, and returns what ends that."""
        self._app = app
        self._accepted = accepted
        self._trusted = trusted_proxies
        self._max_body_bytes = max_body_bytes
        self._on_begin = on_begin
        self._on_done = on_done
        self._streams: set[_AnswerStream] = set()
        self._is_stopping = False

    async def stop(self) -> None:
        """Begin to end event streams: each gets a last event that says why."""
        self._is_stopping = True
        with anyio.move_on_after(_LAST_EVENTS_S):
            async with anyio.create_task_group() as tasks:
                for stream in self._streams:
                    tasks.start_soon(stream.close)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        request_id = state["request_id"] = new_request_id()
        state[_BODY_LIMIT] = self._max_body_bytes
        self._believe_proxy(scope)
        began = time.perf_counter()
        ended = self._on_begin(request_id) if self._on_begin is not None else None
        answer = _ClientAnswer(send, request_id)
        try:
            refusal = self._refusal(scope)
            if refusal is not None:
                status, code, message = refusal
                await _refuse(scope, receive, answer.send, status, code, message, request_id)
            elif scope["type"] == "websocket":
                await self._app(scope, receive, answer.send)
            else:
                await self._answer(scope, receive, answer)
        finally:
            self._on_done(DoneRequest(scope, answer.status, time.perf_counter() - began))
            if ended is not None:
                ended()

    async def _answer(self, scope: Scope, receive: Receive, answer: _ClientAnswer) -> None:
        limited = _LimitedBody(scope, receive)
        stream = _AnswerStream(answer)
        answer.on_stream = lambda: self._opened(stream)
        try:
            with stream.scope:
                await self._app(scope, limited.receive, answer.send)
        except BodyTooLarge as error:
            if answer.status:
                raise
            body = error_body("too_large", str(error.detail), answer.request_id)
            await JSONResponse(body, 413, {"connection": "close"})(scope, receive, answer.send)
        finally:
            self._streams.discard(stream)

    def _opened(self, stream: _AnswerStream) -> None:
        self._streams.add(stream)

    def _refusal(self, scope: Scope) -> tuple[int, str, str] | None:
        headers = Headers(scope=scope)
        host, port = split_host(headers.get("host", ""))
        server = scope.get("server")
        if host is None or not self._accepted.accepts(host, server[0] if server else None):
            message = "this server does not have this host name; add it to the server's setting `hosts`"
            return 421, "misdirected_request", message
        origin = headers.get("origin")
        # A reverse proxy may speak TLS for us: an https page of this very name is ours.
        if origin is not None and origin.lower() not in {origin_of(each, host, port) for each in ("http", "https")}:
            return 403, "forbidden", "requests from web pages of other sites are refused"
        if self._is_stopping:
            return 503, "unavailable", "the server is stopping; try again"
        return None

    def _believe_proxy(self, scope: Scope) -> None:
        client = scope.get("client")
        if not client or client[0] not in self._trusted:
            return
        headers = Headers(scope=scope)
        for address in reversed([each.strip() for each in headers.get("x-forwarded-for", "").split(",") if each]):
            scope["client"] = (address[:64], 0)
            if address not in self._trusted:
                break
        if headers.get("x-forwarded-proto", "").lower() == "https":
            scope["scheme"] = "wss" if scope["type"] == "websocket" else "https"


class _ClientAnswer:
    """Sends an answer with its request id, and knows how far it is."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self.request_id = request_id
        self.status = 0
        self.is_closed = False
        self.on_stream: Callable[[], None] = lambda: None

    async def send(self, message: Message) -> None:
        if self.is_closed:
            return
        if message["type"] in _START:
            self.status = message["status"]
            name = REQUEST_ID_HEADER.lower().encode()
            others = [each for each in message.get("headers", ()) if each[0].lower() != name]
            message["headers"] = [*others, (name, self.request_id.encode()), _NO_SNIFFING]
            if any(key.lower() == b"content-type" and value[:17] == b"text/event-stream" for key, value in others):
                self.on_stream()
        elif message["type"] == "websocket.accept":
            self.status = 101
            name = REQUEST_ID_HEADER.lower().encode()
            message["headers"] = [*message.get("headers", ()), (name, self.request_id.encode())]
        await self._send(message)


class _AnswerStream:
    """An answer of server-sent events that may have to end before its app ends it."""

    def __init__(self, answer: _ClientAnswer) -> None:
        self._answer = answer
        self.scope = anyio.CancelScope()

    async def close(self) -> None:
        data = json.dumps(error_body("unavailable", "the server is stopping; connect again", self._answer.request_id))
        last = f"event: error\ndata: {data}\n\n".encode()
        await self._answer.send({"type": "http.response.body", "body": last, "more_body": True})
        await self._answer.send({"type": "http.response.body", "body": b"", "more_body": False})
        self._answer.is_closed = True
        self.scope.cancel()


class _LimitedBody:
    """The body of a request, up to the limit that its route has."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._scope = scope
        self._receive = receive
        self._size = 0

    async def receive(self) -> Message:
        limit: int | None = self._scope["state"].get(_BODY_LIMIT)
        if limit is not None and self._size == 0:
            for name, value in self._scope["headers"]:
                if name == b"content-length" and int(value) > limit:
                    raise BodyTooLarge(limit)
        message = await self._receive()
        if message["type"] == "http.request":
            self._size += len(message.get("body", b""))
            if limit is not None and self._size > limit:
                raise BodyTooLarge(limit)
        return message


async def _refuse(
    scope: Scope, receive: Receive, send: Send, status: int, code: str, message: str, request_id: str
) -> None:
    response = JSONResponse(error_body(code, message, request_id), status, {"connection": "close"})
    if scope["type"] == "http":
        await response(scope, receive, send)
        return
    kind = "websocket.http.response"
    await send({"type": f"{kind}.start", "status": status, "headers": response.raw_headers})
    await send({"type": f"{kind}.body", "body": bytes(response.body)})
