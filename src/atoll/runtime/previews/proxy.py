"""The preview proxy: HTTP/1.1 between a client on the host and a server inside, one client connection at a time.

Owns exchanges, upgrades to WebSocket, connections that are reused, and how large and how slow each side may be. Not
here: which preview a request is for and whether its token is valid (`router.py`, a `Router`), and the rules for framing
and hop-by-hop headers (`../http1.py`). Used by `router.py`.

h11 parses and writes both sides, so a message that can be read in two ways never reaches the other side as it came. A
server inside is as hostile as a client: nothing is buffered beyond a bound, a response that is not HTTP is a 502, and
one that is cut off is a broken connection, never a short response.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

import anyio
import anyio.lowlevel
import h11

from atoll.contract.errors import AtollError
from atoll.runtime.http1 import (
    CHUNK_BYTES,
    DISCONNECTED,
    MAX_HEAD_BYTES,
    Headers,
    check_head,
    next_event,
    strip_hop_by_hop,
)

HEAD_TIMEOUT_S = 15.0
"""For the head of a request, once it has begun."""
FIRST_BYTE_TIMEOUT_S = 10.0
"""For the first byte of a new connection."""
IDLE_TIMEOUT_S = 60.0
"""Between two requests on one connection."""
STALL_TIMEOUT_S = 120.0
"""For the next bytes of a request's body, or for a client to take bytes of a response."""
MAX_INFORMATIONAL_RESPONSES = 16
"""Responses with a status of 1xx to one request."""

_MAX_READ_AHEAD_BYTES = 1024 * 1024
_MAX_PIECES = 64
"""Pieces of a message that are sent together."""
_LINGER_S = 2.0
_REPEATABLE = frozenset({b"GET", b"HEAD", b"OPTIONS"})
_NO_RESPONSE = "the server closed the connection without a response"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreviewResponse:
    """A response of our own: no server inside is asked."""

    status: int
    headers: Headers
    body: bytes = b""


class UpstreamStream(Protocol):
    """A connection to a server inside: a `PortConnection`, or what is made of one. Errors are those of a
    `ByteStream`."""

    async def receive(self, max_bytes: int = 65536) -> bytes: ...

    async def send(self, item: bytes) -> None: ...

    async def send_eof(self) -> None: ...

    async def aclose(self) -> None: ...

    def is_quiet(self) -> bool:
        """As `PortConnection.is_quiet`."""


class Upstream(Protocol):
    """The server inside that a request is for, and how the request is sent to it."""

    target: bytes

    @property
    def server(self) -> object:
        """Identifies the server. Connections are reused for requests to the same one."""

    async def dial(self) -> UpstreamStream: ...

    def headers_on(self, stream: UpstreamStream) -> Headers:
        """The headers with which the request is sent on a connection that this, or an earlier request to the same
        server, has dialed. Without hop-by-hop headers."""

    def rewrite_response(self, headers: Headers) -> Headers:
        """The headers of a response, for the client."""

    def error_response(self, error: AtollError | str) -> PreviewResponse:
        """The response when the server cannot be reached, or its response is malformed."""

    def track(self) -> AbstractContextManager[anyio.CancelScope]:
        """Counts an exchange while it lasts. Cancelling the scope ends it."""


class ProxyClient(Protocol):
    """The client's end of a connection: a socket (`ClientSocket`), or what a server passes on of one that it has."""

    async def next_request(self) -> bool:
        """Wait for a request that is for the proxy. False: there is none, and the proxy's part has ended."""

    async def receive(self) -> bytes:
        """The next bytes. Empty: the client has closed its direction."""

    async def send(self, data: bytes) -> None: ...

    def cancel_on_disconnect(self, exchange: anyio.CancelScope) -> AbstractContextManager[None]:
        """Cancel the exchange if the client disconnects, or closes its direction, while the context lasts."""

    def allow_half_close(self) -> None:
        """From now on the client may close its direction and still be sent to."""

    def reset_on_close(self) -> None:
        """Let the client see an error when the connection is closed, not an orderly end."""

    async def linger(self) -> None:
        """Let a client that is still sending read its response."""

    def close(self) -> None: ...


class Router(Protocol):
    def route(self, request: h11.Request) -> Upstream | PreviewResponse: ...

    def refuse(self, status: int, reason: str) -> PreviewResponse: ...


class _ExchangeFailed(Exception):
    """The exchange cannot be completed. `response` is for the client, if no response has begun."""

    def __init__(self, response: PreviewResponse | None = None) -> None:
        super().__init__()
        self.response = response


class _StaleConnection(Exception):
    """The server closed a reused connection before it responded."""


class ClientSocket:
    """A client's socket, read ahead up to a bound: so it is noticed when a client disconnects before its response.

    Bytes are read and sent at once where possible, without a round through the event loop, which would take longer than
    everything else.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._exchange: anyio.CancelScope | None = None
        self._socket = connected
        self._loop = asyncio.get_running_loop()
        self._held: deque[bytes] = deque()
        self._size = 0
        self._reads = False
        self._ended = False
        self._received: anyio.Event | None = None
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._start_reading()

    async def next_request(self) -> bool:
        await anyio.lowlevel.checkpoint()
        return True  # all requests are for the proxy

    @contextmanager
    def cancel_on_disconnect(self, exchange: anyio.CancelScope) -> Iterator[None]:
        """Cancel the exchange if the client disconnects, or closes its direction, while the context lasts."""
        self._exchange = exchange
        if self._ended:
            exchange.cancel()
        try:
            yield
        finally:
            self._exchange = None

    def allow_half_close(self) -> None:
        """From now on the client may close its direction and still be sent to."""
        self._exchange = None

    def reset_on_close(self) -> None:
        """Let the client see an error when the socket is closed, not an orderly end."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def close(self) -> None:
        self._stop_reading()
        self._socket.close()

    def _start_reading(self) -> None:
        if not self._reads and not self._ended:
            self._reads = True
            self._loop.add_reader(self._socket.fileno(), self._on_readable)

    def _stop_reading(self) -> None:
        if self._reads:
            self._reads = False
            self._loop.remove_reader(self._socket.fileno())

    def _on_readable(self) -> None:
        try:
            data = self._socket.recv(CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._held.append(data)
            self._size += len(data)
        else:
            self._ended = True
            if self._exchange is not None:
                self._exchange.cancel()
        if not data or self._size >= _MAX_READ_AHEAD_BYTES:
            self._stop_reading()
        if self._received is not None:
            self._received.set()

    async def receive(self) -> bytes:
        """The next bytes. Empty: the client has closed its direction."""
        while not self._held:
            if self._ended:
                return b""
            self._received = anyio.Event()
            await self._received.wait()
            self._received = None
        data = self._held.popleft()
        self._size -= len(data)
        if self._size < _MAX_READ_AHEAD_BYTES // 2:
            self._start_reading()
        return data

    async def send(self, data: bytes) -> None:
        """Send all of it.

        Raises:
            TimeoutError: the client took no byte for `STALL_TIMEOUT_S`.
            OSError: the connection is lost.
        """
        rest = memoryview(data)
        while True:
            with suppress(BlockingIOError):
                rest = rest[self._socket.send(rest) :]
            if not rest:
                return
            with anyio.fail_after(STALL_TIMEOUT_S):
                await anyio.wait_writable(self._socket.fileno())

    async def linger(self) -> None:
        """Let a client that is still sending read its response: closing at once would discard it on its way."""
        with suppress(OSError), anyio.move_on_after(_LINGER_S):
            self._socket.shutdown(socket.SHUT_WR)
            while await self.receive():
                pass


class _UpstreamConnection:
    """A connection to a server inside."""

    def __init__(self, stream: UpstreamStream, server: object) -> None:
        self.http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        self.server = server
        self.stream = stream
        self.silent = True
        """Nothing has been received since the last request."""

    def is_reusable(self, upstream: Upstream) -> bool:
        """Whether another request can be sent on it. Not, if the server has sent anything without a request."""
        return self.server == upstream.server and self.http.our_state is h11.IDLE and self.stream.is_quiet()

    async def receive(self) -> None:
        try:
            data = await self.stream.receive(CHUNK_BYTES)
        except DISCONNECTED:
            data = b""
        if data:
            self.silent = False
        self.http.receive_data(data)

    def finish(self) -> bool:
        """Prepare for the next request. False: the connection cannot be reused."""
        if self.http.our_state is not h11.DONE or self.http.their_state is not h11.DONE or self.http.trailing_data[0]:
            return False
        self.http.start_next_cycle()
        self.silent = True
        return True


async def serve(connected: socket.socket, router: Router) -> None:
    """Serve one client's connection to its end. Closes it."""
    with connected, suppress(OSError):
        await serve_client(ClientSocket(connected), router)


async def serve_client(client: ProxyClient, router: Router) -> None:
    """Serve a client as long as its requests are for the proxy.

    Raises:
        OSError: the connection is lost.
    """
    try:
        await _ClientConnection(client, router).run()
    finally:
        client.close()


class _ClientConnection:
    """One client's connection: its requests, one after another."""

    def __init__(self, client: ProxyClient, router: Router) -> None:
        self._client = client
        self._router = router
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._upstream: _UpstreamConnection | None = None
        self._method = b""
        self._served = False

    async def run(self) -> None:
        try:
            while (request := await self._next_request()) is not None:
                await self._serve(request)
            if self._http.our_state in (h11.DONE, h11.MUST_CLOSE):
                await self._client.linger()
        except DISCONNECTED:
            pass
        finally:
            if self._http.our_state is h11.SEND_BODY and self._http.their_http_version == b"1.0":
                self._client.reset_on_close()  # in HTTP/1.0 an orderly end would be the end of the response
            await self._drop_upstream()

    async def _next_request(self) -> h11.Request | None:
        """None: there is none. A malformed one has been answered."""
        http = self._http
        self._method = b""
        if http.our_state is not h11.IDLE:
            if http.our_state is not h11.DONE or http.their_state is not h11.DONE:
                return None
            http.start_next_cycle()
        if not http.trailing_data[0] and not await self._client.next_request():
            return None
        begun = False
        try:
            with anyio.move_on_after(IDLE_TIMEOUT_S if self._served else FIRST_BYTE_TIMEOUT_S) as timeout:
                while (event := next_event(http)) is h11.NEED_DATA:
                    if not begun and http.trailing_data[0]:
                        begun = True
                        timeout.deadline = anyio.current_time() + HEAD_TIMEOUT_S
                    http.receive_data(await self._client.receive())
                if not isinstance(event, h11.Request):
                    return None
                self._method = event.method
                check_head(event)
                return event
        except h11.RemoteProtocolError as error:
            await self._send_response(self._router.refuse(error.error_status_hint, str(error)))
            return None
        if begun:
            reason = f"the head of the request timed out after {HEAD_TIMEOUT_S:g} s"
            await self._send_response(self._router.refuse(408, reason))
        return None

    async def _serve(self, request: h11.Request) -> None:
        """Answer one request."""
        self._served = True
        started = time.monotonic()
        if request.target.startswith(b"/"):
            upstream = self._router.route(request)
        else:
            upstream = self._router.refuse(400, "the request target must be a path that begins with '/'")
        if isinstance(upstream, PreviewResponse):
            await self._send_response(upstream)
            return
        status = None
        with upstream.track() as scope, self._client.cancel_on_disconnect(scope):
            try:
                status = await self._forward(request, upstream)
            except _ExchangeFailed as failed:
                await self._drop_upstream()
                if failed.response is not None and self._can_respond():
                    status = failed.response.status
                    await self._send_response(failed.response)
        taken_ms = (time.monotonic() - started) * 1000
        path = upstream.target.decode("ascii", "replace")
        outcome = status or "connection closed"
        _log.info("%s %s %s → %s, %.0f ms", upstream.server, request.method.decode(), path, outcome, taken_ms)

    # ------------------------------------------------------------------------------------------- one exchange

    async def _forward(self, request: h11.Request, upstream: Upstream) -> int:
        """Send a request to the server and its response to the client. Returns the status.

        Raises:
            _ExchangeFailed: it could not be completed.
        """
        try:
            first = self._http.next_event()  # the first bytes of the body, or its end
        except h11.RemoteProtocolError as error:
            raise _ExchangeFailed(self._router.refuse(error.error_status_hint, str(error))) from None
        upgrades = type(first) is h11.EndOfMessage and _wants_websocket(request)
        framing = [
            (name, value) for name, value in request.headers if name in (b"content-length", b"transfer-encoding")
        ]
        if upgrades:
            framing += [(b"Connection", b"Upgrade"), (b"Upgrade", b"websocket")]

        def head(server: _UpstreamConnection) -> h11.Request:
            headers = [*upstream.headers_on(server.stream), *framing]
            return h11.Request(method=request.method, target=upstream.target, headers=headers)

        if type(first) is not h11.EndOfMessage:
            server = await self._connect(upstream)
            return await self._with_body(server, upstream, head(server), first)
        repeatable = request.method in _REPEATABLE
        while True:
            reused = self._upstream
            server = await self._connect(upstream)
            try:
                await _send_upstream(server, [server.http.send(head(server)), server.http.send(h11.EndOfMessage())])
                return await self._respond(server, upstream)
            except _StaleConnection:
                await self._drop_upstream()
                if server is not reused or not repeatable:
                    raise _ExchangeFailed(upstream.error_response(_NO_RESPONSE)) from None

    async def _connect(self, upstream: Upstream) -> _UpstreamConnection:
        if self._upstream is not None and not self._upstream.is_reusable(upstream):
            await self._drop_upstream()
        if self._upstream is None:
            try:
                self._upstream = _UpstreamConnection(await upstream.dial(), upstream.server)
            except AtollError as error:
                raise _ExchangeFailed(upstream.error_response(error)) from None
        return self._upstream

    async def _with_body(
        self, server: _UpstreamConnection, upstream: Upstream, head: h11.Request, first: object
    ) -> int:
        """An exchange in which the body and the response pass at the same time."""
        status = 0
        failure: _ExchangeFailed | None = None

        async def upload() -> None:
            nonlocal failure
            try:
                await self._upload(server, head, first)
            except h11.RemoteProtocolError as error:
                failure = _ExchangeFailed(self._router.refuse(error.error_status_hint, str(error)))
            except TimeoutError:
                reason = f"the body of the request stalled for {STALL_TIMEOUT_S:g} s"
                failure = _ExchangeFailed(self._router.refuse(408, reason))
            if failure is not None:
                group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(upload)
            try:
                status = await self._respond(server, upstream)
            except _ExchangeFailed as failed:
                failure = failed
            except _StaleConnection:
                failure = _ExchangeFailed(upstream.error_response(_NO_RESPONSE))
            except DISCONNECTED:
                failure = _ExchangeFailed()
            group.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return status

    async def _upload(self, server: _UpstreamConnection, head: h11.Request, event: object) -> None:
        out = [server.http.send(head)]
        while True:
            if event is h11.NEED_DATA or len(out) > _MAX_PIECES:
                if not await _send_upstream(server, out):
                    return  # the server reads no more, but may still respond
                out = []
            if event is h11.NEED_DATA:
                with anyio.fail_after(STALL_TIMEOUT_S):
                    self._http.receive_data(await self._client.receive())
            elif isinstance(event, h11.Data):
                out += server.http.send_with_data_passthrough(h11.Data(data=event.data)) or []
            else:
                out.append(server.http.send(h11.EndOfMessage()))
                await _send_upstream(server, out)
                return
            event = self._http.next_event()

    async def _respond(self, server: _UpstreamConnection, upstream: Upstream) -> int:
        """Pass a response on to the client. Returns its status.

        Raises:
            _ExchangeFailed: it is malformed, or cut off.
            _StaleConnection: the server closed the connection before it sent anything.
        """
        out: list[bytes] = []
        informational = status = 0
        try:
            while True:
                event = next_event(server.http)
                check_head(event)
                if out and (event is h11.NEED_DATA or len(out) > _MAX_PIECES):
                    await self._send(out)
                    out = []
                if event is h11.NEED_DATA:
                    await server.receive()
                elif isinstance(event, h11.Data):
                    out += self._http.send_with_data_passthrough(h11.Data(data=event.data)) or []
                elif isinstance(event, h11.EndOfMessage):
                    out.append(self._http.send(h11.EndOfMessage()))
                    await self._send(out)
                    break
                elif isinstance(event, h11.Response):
                    status = event.status_code
                    headers = upstream.rewrite_response(strip_hop_by_hop(event.headers.raw_items()))
                    response = h11.Response(status_code=status, headers=headers, reason=event.reason)
                    out.append(self._http.send(response))
                elif isinstance(event, h11.InformationalResponse) and event.status_code == 101:
                    await self._tunnel(server, event, upstream)
                    return 101
                elif isinstance(event, h11.InformationalResponse):
                    informational += 1
                    if informational > MAX_INFORMATIONAL_RESPONSES:
                        reason = f"more than {MAX_INFORMATIONAL_RESPONSES} informational responses"
                        raise h11.RemoteProtocolError(reason)
                    if self._http.their_http_version != b"1.0":
                        hint = h11.InformationalResponse(
                            status_code=event.status_code, headers=strip_hop_by_hop(event.headers.raw_items())
                        )
                        out.append(self._http.send(hint))
                else:
                    raise h11.RemoteProtocolError("the connection was closed before the end of the response")
        except h11.ProtocolError as error:
            if server.silent:
                raise _StaleConnection from None
            raise _ExchangeFailed(upstream.error_response(str(error))) from None
        except TimeoutError:
            raise _ExchangeFailed from None
        if not server.finish():
            await self._drop_upstream()
        return status

    async def _tunnel(self, server: _UpstreamConnection, event: h11.InformationalResponse, upstream: Upstream) -> None:
        """After a 101 pass bytes in both directions, until one side closes."""
        headers = upstream.rewrite_response(strip_hop_by_hop(event.headers.raw_items()))
        headers += [(b"Connection", b"Upgrade"), (b"Upgrade", b"websocket")]
        head = self._http.send(h11.InformationalResponse(status_code=101, headers=headers))
        await self._send([head, server.http.trailing_data[0]])
        self._client.allow_half_close()
        async with anyio.create_task_group() as group:

            async def to_server() -> None:
                data = self._http.trailing_data[0] or await self._client.receive()
                with suppress(*DISCONNECTED):
                    while data:
                        await server.stream.send(data)
                        data = await self._client.receive()
                    await server.stream.send_eof()
                    await anyio.sleep(_LINGER_S)
                group.cancel_scope.cancel()

            group.start_soon(to_server)
            with suppress(TimeoutError, *DISCONNECTED):
                while True:
                    await self._send([await server.stream.receive(CHUNK_BYTES)])
            group.cancel_scope.cancel()
        await self._client.linger()

    # ------------------------------------------------------------------------------------------------- parts

    def _can_respond(self) -> bool:
        return self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE)

    async def _send_response(self, response: PreviewResponse) -> None:
        headers = [*response.headers, (b"Content-Length", b"%d" % len(response.body))]
        if self._http.their_state is h11.SEND_BODY:
            with suppress(h11.RemoteProtocolError):
                self._http.next_event()
        if self._http.their_state in (h11.SEND_BODY, h11.ERROR):  # the client is still sending, and has to stop
            headers.append((b"Connection", b"close"))
        reason = HTTPStatus(response.status).phrase.encode()
        out = [self._http.send(h11.Response(status_code=response.status, headers=headers, reason=reason))]
        if self._method != b"HEAD":
            out.append(self._http.send(h11.Data(data=response.body)))
        out.append(self._http.send(h11.EndOfMessage()))
        with suppress(TimeoutError):
            await self._send(out)

    async def _send(self, out: list[bytes]) -> None:
        await self._client.send(out[0] if len(out) == 1 else b"".join(out))

    async def _drop_upstream(self) -> None:
        server, self._upstream = self._upstream, None
        if server is not None:
            with anyio.CancelScope(shield=True):
                await server.stream.aclose()


async def _send_upstream(server: _UpstreamConnection, out: list[bytes]) -> bool:
    """Send to a server. False: it has closed the connection."""
    try:
        await server.stream.send(b"".join(out))
    except DISCONNECTED:
        return False
    return True


def header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes:
    """The first header of this name, in lower case. Empty: there is none."""
    return next((value for found, value in headers if found == name), b"")


def _wants_websocket(request: h11.Request) -> bool:
    return request.method == b"GET" and header(request.headers, b"upgrade").lower() == b"websocket"
