"""One client's connection, below the apps: what it may send, how slowly, and who gets it.

Owns the checks of every request's head before it is parsed (`heads.py`), time limits of heads, bodies and readers, how
many connections there are at once, the limits of WebSockets, and who answers a request: the app, or a `RawHandler` such
as the previews', which is given the bytes as they came. Not here: host names, origins and tokens, which are an app's
(`guard.py`), and listening and TLS (`listening.py`). Used by `listening.py`.

uvicorn speaks ASGI behind it. Its parser gets one request at a time, and the next one when the response is complete: so
each request is decided on by its own head, also on a connection of a reverse proxy, which carries requests of many
clients to many hosts. A request that is refused here is answered in the shape of all errors (`answers.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, cast

import anyio
import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.utils import get_remote_addr
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.frames import Frame, Opcode

from atoll.surfaces.door.answers import error_bytes
from atoll.surfaces.door.heads import MAX_HEAD_BYTES, RequestHead, RequestRefused, check_beginning, parse_head

KEEP_ALIVE_S = 30
"""For the next request on a connection."""
MAX_HELD_BYTES = 1024 * 1024
"""What is read ahead of a connection: of a request that has to wait, or for a server in a sandbox."""
MIN_BODY_BYTES = 1024
"""Of a body that is not complete, within `body_timeout_s`."""
MAX_FRAMING_BYTES = 64 * 1024
"""Of a chunked body: extensions, trailers and sizes, beyond 16 times what the chunks hold."""
WEBSOCKET_BYTES = 4 * 1024 * 1024
"""Of one message."""
MAX_FRAGMENTS = 1024
"""Of one message."""
CONTROL_FRAMES_PER_S = 64
"""Pings, pongs and empty fragments. A connection with more is closed."""
MESSAGES_PER_S = 4000
"""A connection with more is read more slowly."""
DISCONNECT = "atoll.disconnect"
"""An extension of ASGI: `now()` of it ends the connection, so that a response is seen to be cut off."""
_SLICE_BYTES = 16 * 1024
_MAX_QUEUED_MESSAGES = 64
_LINGER_S = 1.0
_STALL_S = 60.0
"""For a client to take bytes of a response."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DoorLimits:
    """What one client may take of the server's time and connections."""

    head_timeout_s: float = 10.0
    """For the whole head of a request, and for a TLS handshake."""
    body_timeout_s: float = 20.0
    """In which a body must bring `MIN_BODY_BYTES`, or its end."""
    connections: int = 2048
    connections_per_client: int = 512
    trusted_proxies: frozenset[str] = frozenset()
    """Addresses of reverse proxies, which have no limit of their own: their connections are those of many clients."""


class RawHandler(Protocol):
    """Answers requests with the bytes of the connection, not as an app."""

    def claims(self, head: RequestHead) -> bool:
        """Whether a request is its own. Decided anew for each request of a connection."""

    async def serve(self, client: RawClient) -> None:
        """Answer requests until `client.next_request` says that there is none, or the connection is lost."""


@dataclass
class Door:
    """What all connections of a server share."""

    limits: DoorLimits = field(default_factory=DoorLimits)
    raw: RawHandler | None = None
    clients: Counter[str] = field(default_factory=Counter)
    """Connections by the address of their client."""
    refused: Counter[str] = field(default_factory=Counter)
    """Requests and connections that were refused, by their code. For metrics."""

    def admit(self, address: str) -> bool:
        """Count a connection. False: there are too many already, and it is not counted."""
        mine = self.clients[address]
        many = mine >= self.limits.connections_per_client and address not in self.limits.trusted_proxies
        if many or self.clients.total() >= self.limits.connections:
            self.refused["too_many_connections"] += 1
            return False
        self.clients[address] += 1
        return True

    def release(self, address: str) -> None:
        self.clients[address] -= 1
        if self.clients[address] <= 0:
            del self.clients[address]


class DoorProtocol(HttpToolsProtocol):
    """A connection with HTTP/1.1. Made by `listening.py`, for a connection that was admitted."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        door: Door,
        address: str,
    ) -> None:
        """`address` is what the door counted the connection as."""
        super().__init__(config, server_state, app_state, _loop)
        self.door = door
        self._address = address
        self._buffer = bytearray()
        """Bytes that no one has been given."""
        self._rest = 0
        """Bytes of the present body that the parser has not got."""
        self._chunked = False
        self._framing = self._content = 0
        """Of a chunked body: bytes that were received, and those that are its content."""
        self._waiting = False
        """A request is complete, and its response is not."""
        self._in_head = True
        self._head_done = self._overrun = False
        self._closing = False
        self._raw: RawClient | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._stalled_at = 0

    # --------------------------------------------------------------------------------------------- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_timer(self.door.limits.head_timeout_s, self._head_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_timer(None)
        self._stop_stall()
        self.door.release(self._address)
        super().connection_lost(exc)
        if self._raw is not None:
            self._raw.lost()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        if self._raw is not None:
            self._raw.ended()
            return self.scheme == "http"  # what is under way may still be sent; TLS cannot close one direction
        return None

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._closing:
            return
        self._buffer += data
        if self._raw is not None:
            self._raw.received()
            if len(self._buffer) >= MAX_HELD_BYTES:
                self.flow.pause_reading()
        else:
            self._proceed()

    def _proceed(self) -> None:
        """Pass on what is there, as far as it may be."""
        try:
            while self._buffer and not self._closing and self._raw is None:
                if self._waiting:
                    self._hold()
                    return
                if self._in_head:
                    if not self._take_head():
                        return
                else:
                    self._take_body()
        except RequestRefused as refused:
            self.refuse(refused)

    def _hold(self) -> None:
        """A next request, while one is answered: kept up to a bound, else the connection ends with this response."""
        if len(self._buffer) > MAX_HELD_BYTES:
            self._buffer.clear()
            self.cycle.keep_alive = False
            self._closing = True
        elif len(self._buffer) > MAX_HEAD_BYTES:
            self.flow.pause_reading()

    # -------------------------------------------------------------------------------------------------- requests

    def peek_head(self) -> RequestHead | None:
        """The next head, if all of it is there; it stays.

        Raises:
            RequestRefused: it is malformed or too large.
        """
        if self._timer is None:
            self._set_timer(self.door.limits.head_timeout_s, self._head_late)
        while self._buffer.startswith(b"\r\n"):  # RFC 9112: an empty line before a request is to be ignored
            del self._buffer[:2]
        end = self._buffer.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES + 4)
        if end < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                message = f"the request line and the headers have more than {MAX_HEAD_BYTES} bytes"
                raise RequestRefused(431, "headers_too_large", message)
            if b"\n\n" in self._buffer:
                raise RequestRefused(400, "invalid_request", "malformed HTTP request: a line does not end with CR LF")
            check_beginning(bytes(self._buffer[:64]))
            return None
        return parse_head(bytes(self._buffer[: end + 4]))

    def _take_head(self) -> bool:
        head = self.peek_head()
        if head is None:
            return False
        self._set_timer(None)
        raw = self.door.raw
        if raw is not None and raw.claims(head):
            self._raw = RawClient(self)
            task = self.loop.create_task(self._serve_raw(raw, self._raw))
            task.add_done_callback(self.tasks.discard)
            self.tasks.add(task)
            return False
        head.check_ours()
        del self._buffer[: head.size]
        self._head_done = self._overrun = False
        self._in_head = False
        self._rest, self._chunked = head.length, head.is_chunked
        self._framing = self._content = 0
        self._feed(head.encode(upgrade=self.ws_protocol_class is not None))
        if not head.has_body:
            self._waiting = True
        elif not self._closing and not head.has_slow_body:
            self._set_timer(self.door.limits.body_timeout_s, self._check_body)
        return True

    def _take_body(self) -> None:
        if self._chunked:
            data = bytes(self._buffer)
            self._buffer.clear()
            self._framing += len(data)
            self._feed(data)
            if self._framing > MAX_FRAMING_BYTES + 17 * self._content:
                message = "malformed HTTP request: its chunks are mostly extensions, or too small"
                raise RequestRefused(400, "invalid_request", message)
        else:
            data = bytes(memoryview(self._buffer)[: self._rest])
            del self._buffer[: len(data)]
            self._rest -= len(data)
            self._content += len(data)
            self._feed(data)

    def _feed(self, data: bytes) -> None:
        """Let the parser take bytes of one request.

        Raises:
            RequestRefused: they are malformed, after all.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._begin_websocket()
        except httptools.HttpParserError as error:
            cause = error.__context__
            if isinstance(cause, Exception) and not isinstance(cause, httptools.HttpParserError):
                raise cause from None
            message = "malformed HTTP request: the body's chunks cannot be read"
            raise RequestRefused(400, "invalid_request", message) from None

    def _begin_websocket(self) -> None:
        self._set_timer(None)
        early = bytes(self._buffer)
        self._buffer.clear()
        self._closing = True  # nothing more is this object's
        self.handle_websocket_upgrade()
        websocket = cast("DoorWebSocket", self.transport.get_protocol())
        websocket.on_lost = partial(self.door.release, self._address)
        if early:
            websocket.data_received(early)

    def on_message_begin(self) -> None:
        if self._head_done:
            self._overrun = True  # a request in the same piece as the end of a chunked body: it is not answered
        else:
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._overrun:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._head_done:  # not a trailer, which must not become a header
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._overrun:
            self._head_done = True
            self.scope["extensions"] = {DISCONNECT: {"now": self.transport.abort, "is_lost": self._is_lost}}
            super().on_headers_complete()

    def _is_lost(self) -> bool:
        """Whether the client has left. That is seen by reading, which pauses after a large body; nothing is read ahead
        of what waits already."""
        if not self.cycle.body:
            self.flow.resume_reading()
        return self.transport.is_closing()

    def on_body(self, body: bytes) -> None:
        if not self._overrun:
            self._content += len(body) if self._chunked else 0
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and self._should_upgrade():
            return
        if self._overrun:
            self.cycle.keep_alive = False
            return
        self._set_timer(None)
        super().on_message_complete()
        self._waiting = True
        if self.cycle.response_complete:
            self._next_cycle()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if not self._waiting:
            # The app did not want the rest of the body. It is read and dropped, up to a bound.
            if self._chunked or self._rest > MAX_HELD_BYTES:
                self._linger()
            return
        self._next_cycle()

    def _next_cycle(self) -> None:
        self._waiting = False
        self._in_head = True
        self._head_done = False
        if self._buffer:
            self._unset_keepalive_if_required()
            self.loop.call_soon(self._proceed)

    # -------------------------------------------------------------------------------------------------- refusing

    def refuse(self, refused: RequestRefused) -> None:
        """Answer and close. While a response is under way, or after one, close only."""
        self._set_timer(None)
        if self._closing or self.transport.is_closing():
            return
        self.door.refused[refused.code] += 1
        _log.info("refused a request of %s: %s", self.client[0] if self.client else "?", refused.message)
        begun = self._raw is None and not self._in_head and not self.cycle.response_complete
        if begun and not self.cycle.response_started:
            self.cycle.disconnected = True  # the app gets http.disconnect, and its response is dropped
            self.cycle.message_event.set()
        elif begun:
            self.transport.abort()
            return
        self.transport.write(error_bytes(refused.status, refused.code, refused.message))
        self._linger()

    def _linger(self) -> None:
        """Close, but let a client that is still sending read its response: closing at once would discard it."""
        self._closing = True
        self._buffer.clear()
        self._set_timer(None)
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.flow.resume_reading()
            self._timer = self.loop.call_later(_LINGER_S, self.transport.abort)
        else:
            self.transport.close()

    def _head_late(self) -> None:
        seconds = self.door.limits.head_timeout_s
        if self._buffer:
            self.refuse(RequestRefused(408, "request_timeout", f"the head did not arrive within {seconds:g} s"))
        else:
            self.transport.close()

    def _check_body(self) -> None:
        """Each `body_timeout_s` of a body. It does not count while we do not read."""
        seconds = self.door.limits.body_timeout_s
        if self._content < MIN_BODY_BYTES and not self.flow.read_paused:
            message = f"the body brought fewer than {MIN_BODY_BYTES} bytes in {seconds:g} s"
            self.refuse(RequestRefused(408, "request_timeout", message))
            return
        if self._chunked:
            self._framing = max(0, self._framing - 17 * self._content)
        self._content = 0
        self._set_timer(seconds, self._check_body)

    def _set_timer(self, seconds: float | None, then: Any = None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, then)

    # ------------------------------------------------------------------------------------------- slow readers, end

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_stall()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_stall()

    def _watch_stall(self) -> None:
        self._stalled_at = self.transport.get_write_buffer_size()
        self._stall = self.loop.call_later(_STALL_S, self._check_stall)

    def _check_stall(self) -> None:
        if self.transport.get_write_buffer_size() >= self._stalled_at:
            self.transport.abort()
        else:
            self._watch_stall()

    def _stop_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def shutdown(self) -> None:
        """The server stops: end after the response that is under way."""
        if self._raw is not None:
            self._raw.stop()
        elif self._in_head and not self._waiting:
            self.transport.close()
        else:
            super().shutdown()

    # ------------------------------------------------------------------------------------------------------- raw

    async def _serve_raw(self, handler: RawHandler, client: RawClient) -> None:
        try:
            await handler.serve(client)
        except OSError:
            pass  # the connection is lost
        except Exception:  # noqa: BLE001 - a bug that a client triggers must not end the server
            _log.exception("serving a connection failed; this is a bug")
        finally:
            self._raw = None
            if not client.is_given_back:
                self.transport.close()
        if client.is_given_back:
            self._proceed()

    def take_raw(self, size: int) -> bytes:
        """Bytes for the handler."""
        data = bytes(memoryview(self._buffer)[:size])
        del self._buffer[: len(data)]
        if len(self._buffer) < MAX_HELD_BYTES // 2:
            self.flow.resume_reading()
        return data

    @property
    def held(self) -> int:
        return len(self._buffer)

    def forget_timer(self) -> None:
        self._set_timer(None)


class RawClient:
    """A connection as a `RawHandler` sees it: the client of a preview's exchanges (`ProxyClient` in
    `runtime/previews/proxy.py`)."""

    def __init__(self, connection: DoorProtocol) -> None:
        self._connection = connection
        self._transport = connection.transport
        self._changed = anyio.Event()
        self._ended = False
        self._stopping = False
        self._lost = False
        self._head = 0
        """Bytes of a head that are to be received first, alone."""
        self._exchange: anyio.CancelScope | None = None
        self.is_given_back = False
        """The next request is another's."""

    @property
    def peer(self) -> str:
        """The address of the client."""
        client = self._connection.client
        return client[0] if client else ""

    @property
    def is_tls(self) -> bool:
        return self._connection.scheme == "https"

    # Of the connection

    def received(self) -> None:
        self._changed.set()

    def ended(self) -> None:
        self._ended = True
        if self._exchange is not None:
            self._exchange.cancel()
        self._changed.set()

    def lost(self) -> None:
        self._lost = True
        self.ended()

    def stop(self) -> None:
        self._stopping = True
        self._changed.set()

    # Of the handler

    async def next_request(self) -> bool:
        """Wait for a request that is the handler's. False: none comes; the connection has ended, or another serves it
        from now on."""
        connection = self._connection
        raw = connection.door.raw
        if connection.held == 0:
            connection.timeout_keep_alive_task = connection.loop.call_later(KEEP_ALIVE_S, self._transport.close)
        while not self._stopping and not self._ended:
            if connection.held:
                try:
                    head = connection.peek_head()
                except RequestRefused as refused:
                    connection.refuse(refused)
                    return False
                if head is not None:
                    connection.forget_timer()
                    if raw is None or not raw.claims(head):
                        self.is_given_back = True
                        return False
                    self._head = head.size
                    return True
            self._changed = anyio.Event()
            await self._changed.wait()
        return False

    async def receive(self) -> bytes:
        """The next bytes. Empty: the client has closed its direction."""
        connection = self._connection
        while not connection.held:
            if self._ended:
                return b""
            self._changed = anyio.Event()
            await self._changed.wait()
        size, self._head = self._head or connection.held, 0
        return connection.take_raw(size)

    async def send(self, data: bytes) -> None:
        """Send all of it, or nearly: what one client has not taken is bounded by the transport.

        Raises:
            OSError: the connection is lost.
        """
        if self._lost or self._transport.is_closing():
            raise BrokenPipeError
        self._transport.write(data)
        flow = self._connection.flow
        if flow.write_paused:
            await flow.drain()

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
        """Let the client see an error, not an orderly end."""
        self._transport.abort()

    async def linger(self) -> None:
        """Let a client that is still sending read its response."""
        if not self._transport.is_closing() and self._transport.can_write_eof():
            self._transport.write_eof()
            with anyio.move_on_after(_LINGER_S):
                while await self.receive():
                    pass

    def close(self) -> None:
        if not self.is_given_back:
            self._transport.close()


# --------------------------------------------------------------------------------------------------------- WebSockets


class DoorWebSocket(WebSocketsSansIOProtocol):
    """A connection that became a WebSocket: as uvicorn serves it, with a bound on what is read ahead of the app, and on
    how many frames a client may send that cost us and bring nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held = bytearray()
        self._second = 0.0
        self._messages = self._control = 0
        self._resume: asyncio.TimerHandle | None = None
        self.on_lost: Callable[[], None] = lambda: None

    def connection_lost(self, exc: Exception | None) -> None:
        self.on_lost()
        if self._resume is not None:
            self._resume.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._held += data
        self._parse_held()

    def _parse_held(self) -> None:
        """Parse what the app has room for. Before it has accepted the connection nothing is parsed but the request."""
        while self._held and not self.transport.is_closing():
            waits = self.handshake_initiated and not self.handshake_complete
            if waits or self.queue.qsize() >= _MAX_QUEUED_MESSAGES or self._resume is not None:
                self._pause()
                if waits and len(self._held) > MAX_HELD_BYTES:
                    self.transport.abort()
                return
            piece = bytes(memoryview(self._held)[:_SLICE_BYTES])
            if not self.handshake_initiated:
                piece = bytes(self._held)
            del self._held[: len(piece)]
            super().data_received(piece)
            self._limit_rate()

    def _pause(self) -> None:
        if not self.read_paused:
            self.read_paused = True
            self.transport.pause_reading()

    def _limit_rate(self) -> None:
        now = self.loop.time()
        if now - self._second >= 1:
            self._second, self._messages, self._control = now, 0, 0
        if self._control > CONTROL_FRAMES_PER_S or len(self.frames) > MAX_FRAGMENTS:
            self._held.clear()
            self._refuse(1008, "too many control frames or fragments")
        elif self._messages > MESSAGES_PER_S:
            self._resume = self.loop.call_later(self._second + 1 - now, self._go_on)

    def _go_on(self) -> None:
        self._resume = None
        self._parse_held()
        if not self._held and self.read_paused and self.queue.empty() and not self.transport.is_closing():
            self.read_paused = False
            self.transport.resume_reading()

    def _refuse(self, code: int, reason: str) -> None:
        if not self.close_sent and not self.transport.is_closing():
            self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
            self.conn.fail(code, reason)
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.close_sent = True
            self.transport.close()

    def handle_ping(self) -> None:
        self._control += 1
        if not self.writable.is_set():
            self.transport.abort()  # it sends pings and does not read the answers
        else:
            super().handle_ping()

    def handle_pong(self, event: Frame) -> None:
        self._control += 1
        super().handle_pong(event)

    def handle_cont(self, event: Frame) -> None:
        if event.opcode is Opcode.CONT and not event.data and not event.fin:
            self._control += 1
        super().handle_cont(event)

    def send_receive_event_to_app(self) -> None:
        self._messages += 1
        super().send_receive_event_to_app()

    async def receive(self) -> Any:
        message = await super().receive()
        if self._held:
            self._parse_held()
        return message

    async def send(self, message: Any) -> None:
        await super().send(message)
        if message["type"] == "websocket.accept" and self._held:
            self._parse_held()


def address_of(transport: asyncio.BaseTransport) -> str:
    """The address of a client, for counting: of an IPv6 client its network, all of which is one client's."""
    found = get_remote_addr(cast("asyncio.Transport", transport))
    address = found[0] if found else ""
    if ":" in address and "." not in address:
        import ipaddress

        return str(ipaddress.ip_network((address.partition("%")[0], 64), strict=False))
    return address
