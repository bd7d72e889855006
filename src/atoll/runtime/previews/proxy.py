"""HTTP/1.1 between a client of the host and a server inside: one connection of a client, request by request.

Knows framing, what belongs to one hop only, upgrades, and how large and how slow each side may be. Both sides are
parsed and written anew by h11, so that what one of them reads in two ways never reaches the other as it came. Refuses
to know what is served and to whom: `ports.py` above says of each request what it is answered, or how it passes.

What comes from inside is as hostile as what comes from outside: neither is ever held beyond a bound, an answer that is
no HTTP is a 502, and one that breaks off is a broken connection, never a short answer.
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
import h11

from atoll.contract.errors import AtollError
from atoll.runtime.guest.ports import PortConnection
from atoll.runtime.http1 import Headers, strip_hop_by_hop

HEAD_BYTES = 64 * 1024
"""What the head of a request, or of a response, may take."""
HEAD_S = 15.0
"""How long a client may take for the head of a request, once it has begun."""
FIRST_S = 10.0
"""How long a client may say nothing that has just come."""
IDLE_S = 60.0
"""How long a connection may stand unused between requests."""
STALL_S = 120.0
"""How long a client may send nothing of a body that it has begun, or take nothing of a response."""
MAX_HINTS = 16
"""Informational responses (1xx) to one request."""

_CHUNK_BYTES = 256 * 1024
_AHEAD_BYTES = 1024 * 1024
_PIECES = 64
_LINGER_S = 2.0
_REPEATABLE = frozenset({b"GET", b"HEAD", b"OPTIONS"})
_NO_ANSWER = "it closed the connection without an answer"
_GONE = (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answer:
    """What a client is told without anybody inside being asked."""

    status: int
    headers: Headers
    body: bytes = b""


class Passage(Protocol):
    """A request's way to a server inside."""

    target: bytes
    headers: Headers
    """Without those that belong to one hop."""

    @property
    def server(self) -> object:
        """Which server it is. Connections are kept for requests to the same one."""

    async def dial(self) -> PortConnection: ...

    def returned(self, headers: Headers) -> Headers:
        """The headers of a response, for the client."""

    def explain(self, error: AtollError | str) -> Answer:
        """What to say when the server cannot be reached, or answers what is no answer."""

    def entered(self) -> AbstractContextManager[anyio.CancelScope]:
        """The time of one exchange, which the owner can end."""


class Gate(Protocol):
    def admit(self, request: h11.Request) -> Passage | Answer: ...

    def refuse(self, status: int, reason: str) -> Answer: ...


class _Spoiled(Exception):
    """The exchange cannot be completed. `answer` is for the client, if it has not been told anything yet."""

    def __init__(self, answer: Answer | None = None) -> None:
        super().__init__()
        self.answer = answer


class _Stale(Exception):
    """A connection that was kept was closed by the server just when it was used again."""


class Client:
    """A client's socket, read ahead up to a bound: so it is seen when one leaves who waits for a response.

    What can be read and sent at once is, without a round through the event loop: those would take longer than all else.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._exchange: anyio.CancelScope | None = None
        self._socket = connected
        self._loop = asyncio.get_running_loop()
        self._held: deque[bytes] = deque()
        self._size = 0
        self._reads = False
        self._ended = False
        self._came: anyio.Event | None = None
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._read_on()

    @contextmanager
    def waiting(self, exchange: anyio.CancelScope) -> Iterator[None]:
        """While it waits for a response. If it leaves meanwhile, or closes its direction, the exchange is cancelled."""
        self._exchange = exchange
        if self._ended:
            exchange.cancel()
        try:
            yield
        finally:
            self._exchange = None

    def stays(self) -> None:
        """From now on it may close its direction and still be sent to."""
        self._exchange = None

    def break_off(self) -> None:
        """Have it see an error when it is closed, not an end."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def close(self) -> None:
        self._read_no_more()
        self._socket.close()

    def _read_on(self) -> None:
        if not self._reads and not self._ended:
            self._reads = True
            self._loop.add_reader(self._socket.fileno(), self._on_readable)

    def _read_no_more(self) -> None:
        if self._reads:
            self._reads = False
            self._loop.remove_reader(self._socket.fileno())

    def _on_readable(self) -> None:
        try:
            data = self._socket.recv(_CHUNK_BYTES)
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
        if not data or self._size >= _AHEAD_BYTES:
            self._read_no_more()
        if self._came is not None:
            self._came.set()

    async def receive(self) -> bytes:
        """What came next. Empty: the client has sent all."""
        while not self._held:
            if self._ended:
                return b""
            self._came = anyio.Event()
            await self._came.wait()
            self._came = None
        data = self._held.popleft()
        self._size -= len(data)
        if self._size < _AHEAD_BYTES // 2:
            self._read_on()
        return data

    async def send(self, data: bytes) -> None:
        """Send all of it.

        Raises:
            TimeoutError: the client took nothing for `STALL_S`.
            OSError: it is gone.
        """
        rest = memoryview(data)
        while True:
            with suppress(BlockingIOError):
                rest = rest[self._socket.send(rest) :]
            if not rest:
                return
            with anyio.fail_after(STALL_S):
                await anyio.wait_writable(self._socket.fileno())

    async def linger(self) -> None:
        """Let a client that is still sending read what it was told: closing at once would destroy that on its way."""
        with suppress(OSError), anyio.move_on_after(_LINGER_S):
            self._socket.shutdown(socket.SHUT_WR)
            while await self.receive():
                pass


class _Server:
    """A connection to a server inside."""

    def __init__(self, stream: PortConnection, whose: object) -> None:
        self.http = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES)
        self.whose = whose
        self.stream = stream
        self.silent = True
        """Nothing has come since the last request."""

    def serves(self, passage: Passage) -> bool:
        """Whether another request can be sent on it. One that has said something unasked is not trusted."""
        return self.whose == passage.server and self.http.our_state is h11.IDLE and self.stream.is_quiet()

    async def receive(self) -> None:
        try:
            data = await self.stream.receive(_CHUNK_BYTES)
        except (anyio.EndOfStream, *_GONE):
            data = b""
        if data:
            self.silent = False
        self.http.receive_data(data)

    def finish(self) -> bool:
        """Make it ready for the next request. False: it cannot be."""
        if self.http.our_state is not h11.DONE or self.http.their_state is not h11.DONE or self.http.trailing_data[0]:
            return False
        self.http.start_next_cycle()
        self.silent = True
        return True


async def serve(connected: socket.socket, gate: Gate) -> None:
    """Serve one client's connection to its end. Closes it."""
    with connected, suppress(OSError):
        client = Client(connected)
        try:
            await _Visit(client, gate).run()
        finally:
            client.close()


class _Visit:
    """One client's connection."""

    def __init__(self, client: Client, gate: Gate) -> None:
        self._client = client
        self._gate = gate
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES)
        self._server: _Server | None = None
        self._method = b""
        self._served = False

    async def run(self) -> None:
        try:
            while (request := await self._next_request()) is not None:
                await self._serve(request)
            if self._http.our_state in (h11.DONE, h11.MUST_CLOSE):
                await self._client.linger()
        except _GONE:
            pass
        finally:
            if self._http.our_state is h11.SEND_BODY and self._http.their_http_version == b"1.0":
                self._client.break_off()  # its end of the connection is the end of a response, whatever is missing
            await self._drop_server()

    async def _next_request(self) -> h11.Request | None:
        """None: there is none, and if that is the client's fault it has been told."""
        http = self._http
        self._method = b""
        if http.our_state is not h11.IDLE:
            if http.our_state is not h11.DONE or http.their_state is not h11.DONE:
                return None
            http.start_next_cycle()
        begun = False
        try:
            with anyio.move_on_after(IDLE_S if self._served else FIRST_S) as patience:
                while (event := http.next_event()) is h11.NEED_DATA:
                    if not begun and http.trailing_data[0]:
                        begun = True
                        patience.deadline = anyio.current_time() + HEAD_S
                    http.receive_data(await self._client.receive())
                return event if isinstance(event, h11.Request) else None
        except h11.RemoteProtocolError as error:
            await self._answer(self._gate.refuse(error.error_status_hint, str(error)))
            return None
        if begun:
            await self._answer(self._gate.refuse(408, f"the head of the request did not come within {HEAD_S:g} s"))
        return None

    async def _serve(self, request: h11.Request) -> None:
        """Have one request answered."""
        self._served = True
        started = time.monotonic()
        self._method = request.method
        wrong = _wrong(request)
        passage = self._gate.refuse(*wrong) if wrong else self._gate.admit(request)
        if isinstance(passage, Answer):
            await self._answer(passage)
            return
        status = None
        with passage.entered() as scope, self._client.waiting(scope):
            try:
                status = await self._pass(request, passage)
            except _Spoiled as spoiled:
                await self._drop_server()
                if spoiled.answer is not None and self._can_answer():
                    status = spoiled.answer.status
                    await self._answer(spoiled.answer)
        taken_ms = (time.monotonic() - started) * 1000
        path = passage.target.decode("ascii", "replace")
        _log.info(
            "%s %s %s → %s, %.0f ms", passage.server, request.method.decode(), path, status or "broken off", taken_ms
        )

    # ------------------------------------------------------------------------------------------- one exchange

    async def _pass(self, request: h11.Request, passage: Passage) -> int:
        """Send a request inside and its response back. Returns the status.

        Raises:
            _Spoiled: it could not be completed.
        """
        try:
            first = self._http.next_event()  # what has come of the body, or that there is none
        except h11.RemoteProtocolError as error:
            raise _Spoiled(self._gate.refuse(error.error_status_hint, str(error))) from None
        upgrades = type(first) is h11.EndOfMessage and _wants_websocket(request)
        framing = [
            (name, value) for name, value in request.headers if name in (b"content-length", b"transfer-encoding")
        ]
        if upgrades:
            framing += [(b"Connection", b"Upgrade"), (b"Upgrade", b"websocket")]
        head = h11.Request(method=request.method, target=passage.target, headers=[*passage.headers, *framing])
        if type(first) is not h11.EndOfMessage:
            server = await self._reach(passage)
            return await self._with_body(server, passage, head, first)
        repeatable = request.method in _REPEATABLE
        while True:
            kept = self._server
            server = await self._reach(passage)
            try:
                await _post(server, [server.http.send(head), server.http.send(h11.EndOfMessage())])
                return await self._respond(server, passage)
            except _Stale:
                await self._drop_server()
                if server is not kept or not repeatable:
                    raise _Spoiled(passage.explain(_NO_ANSWER)) from None

    async def _reach(self, passage: Passage) -> _Server:
        if self._server is not None and not self._server.serves(passage):
            await self._drop_server()
        if self._server is None:
            try:
                self._server = _Server(await passage.dial(), passage.server)
            except AtollError as error:
                raise _Spoiled(passage.explain(error)) from None
        return self._server

    async def _with_body(self, server: _Server, passage: Passage, head: h11.Request, first: object) -> int:
        """An exchange in which both sides may speak at the same time."""
        status = 0
        failure: _Spoiled | None = None

        async def upload() -> None:
            nonlocal failure
            try:
                await self._upload(server, head, first)
            except h11.RemoteProtocolError as error:
                failure = _Spoiled(self._gate.refuse(error.error_status_hint, str(error)))
            except TimeoutError:
                failure = _Spoiled(self._gate.refuse(408, f"nothing of the body came for {STALL_S:g} s"))
            if failure is not None:
                group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(upload)
            try:
                status = await self._respond(server, passage)
            except _Spoiled as spoiled:
                failure = spoiled
            except _Stale:
                failure = _Spoiled(passage.explain(_NO_ANSWER))
            except _GONE:
                failure = _Spoiled()
            group.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return status

    async def _upload(self, server: _Server, head: h11.Request, event: object) -> None:
        out = [server.http.send(head)]
        while True:
            if event is h11.NEED_DATA or len(out) > _PIECES:
                if not await _post(server, out):
                    return  # it reads no more; what it answers is another matter
                out = []
            if event is h11.NEED_DATA:
                with anyio.fail_after(STALL_S):
                    self._http.receive_data(await self._client.receive())
            elif isinstance(event, h11.Data):
                out += server.http.send_with_data_passthrough(h11.Data(data=event.data)) or []
            else:
                out.append(server.http.send(h11.EndOfMessage()))
                await _post(server, out)
                return
            event = self._http.next_event()

    async def _respond(self, server: _Server, passage: Passage) -> int:
        """Pass a response on as it comes. Returns its status.

        Raises:
            _Spoiled: it is none, or breaks off.
            _Stale: the server closed the connection before it said anything.
        """
        out: list[bytes] = []
        hints = status = 0
        try:
            while True:
                event = server.http.next_event()
                if out and (event is h11.NEED_DATA or len(out) > _PIECES):
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
                    out.append(self._http.send(_response(event, passage)))
                elif isinstance(event, h11.InformationalResponse) and event.status_code == 101:
                    await self._tunnel(server, event, passage)
                    return 101
                elif isinstance(event, h11.InformationalResponse):
                    hints += 1
                    if hints > MAX_HINTS:
                        raise h11.RemoteProtocolError(f"more than {MAX_HINTS} informational responses")
                    if self._http.their_http_version != b"1.0":
                        hint = h11.InformationalResponse(
                            status_code=event.status_code, headers=strip_hop_by_hop(event.headers.raw_items())
                        )
                        out.append(self._http.send(hint))
                else:
                    raise h11.RemoteProtocolError("it ended before the answer was complete")
        except h11.ProtocolError as error:
            if server.silent:
                raise _Stale from None
            raise _Spoiled(passage.explain(str(error))) from None
        except TimeoutError:
            raise _Spoiled from None
        if not server.finish():
            await self._drop_server()
        return status

    async def _tunnel(self, server: _Server, event: h11.InformationalResponse, passage: Passage) -> None:
        """After a 101 both sides speak as they like, until one of them ends."""
        headers = passage.returned(strip_hop_by_hop(event.headers.raw_items()))
        headers += [(b"Connection", b"Upgrade"), (b"Upgrade", b"websocket")]
        said = self._http.send(h11.InformationalResponse(status_code=101, headers=headers))
        await self._send([said, server.http.trailing_data[0]])
        self._client.stays()
        async with anyio.create_task_group() as group:

            async def inward() -> None:
                data = self._http.trailing_data[0] or await self._client.receive()
                with suppress(*_GONE):
                    while data:
                        await server.stream.send(data)
                        data = await self._client.receive()
                    await server.stream.send_eof()
                    await anyio.sleep(_LINGER_S)
                group.cancel_scope.cancel()

            group.start_soon(inward)
            with suppress(anyio.EndOfStream, TimeoutError, *_GONE):
                while True:
                    await self._send([await server.stream.receive(_CHUNK_BYTES)])
            group.cancel_scope.cancel()
        await self._client.linger()

    # ------------------------------------------------------------------------------------------------- parts

    def _can_answer(self) -> bool:
        return self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE)

    async def _answer(self, answer: Answer) -> None:
        headers = [*answer.headers, (b"Content-Length", b"%d" % len(answer.body))]
        if self._http.their_state is h11.SEND_BODY:
            with suppress(h11.RemoteProtocolError):
                self._http.next_event()
        if self._http.their_state in (h11.SEND_BODY, h11.ERROR):  # who is still sending does better to stop
            headers.append((b"Connection", b"close"))
        reason = HTTPStatus(answer.status).phrase.encode()
        out = [self._http.send(h11.Response(status_code=answer.status, headers=headers, reason=reason))]
        if self._method != b"HEAD":
            out.append(self._http.send(h11.Data(data=answer.body)))
        out.append(self._http.send(h11.EndOfMessage()))
        with suppress(TimeoutError):
            await self._send(out)

    async def _send(self, out: list[bytes]) -> None:
        await self._client.send(out[0] if len(out) == 1 else b"".join(out))

    async def _drop_server(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            with anyio.CancelScope(shield=True):
                await server.stream.aclose()


async def _post(server: _Server, out: list[bytes]) -> bool:
    """Send to a server. False: it reads no more."""
    try:
        await server.stream.send(b"".join(out))
    except _GONE:
        return False
    return True


def header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes:
    """The first header of this name, in lower case. Empty: there is none."""
    return next((value for found, value in headers if found == name), b"")


def _size(headers: Iterable[tuple[bytes, bytes]]) -> int:
    return sum(len(name) + len(value) + len(": \r\n") for name, value in headers)


def _wrong(request: h11.Request) -> tuple[int, str] | None:
    """What is wrong with a request that h11 takes. Where two readers could disagree, nobody gets to read it."""
    if len(request.target) + _size(request.headers) > HEAD_BYTES:
        return 431, f"its head takes more than {HEAD_BYTES} bytes"
    names = [name for name, _ in request.headers]
    if b"transfer-encoding" in names and (b"content-length" in names or request.http_version < b"1.1"):
        return 400, "Transfer-Encoding cannot be together with Content-Length, nor in HTTP/1.0"
    if not request.target.startswith(b"/"):
        return 400, "the target of a request has to be a path that begins with '/'"
    return None


def _wants_websocket(request: h11.Request) -> bool:
    return request.method == b"GET" and header(request.headers, b"upgrade").lower() == b"websocket"


def _response(event: h11.Response, passage: Passage) -> h11.Response:
    names = [name for name, _ in event.headers]
    if b"transfer-encoding" in names and b"content-length" in names:
        raise h11.RemoteProtocolError("the answer has both Transfer-Encoding and Content-Length")
    if _size(event.headers) > HEAD_BYTES:
        raise h11.RemoteProtocolError(f"the head of the answer takes more than {HEAD_BYTES} bytes")
    headers = passage.returned(strip_hop_by_hop(event.headers.raw_items()))
    return h11.Response(status_code=event.status_code, headers=headers, reason=event.reason)
