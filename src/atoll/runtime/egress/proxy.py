"""The proxy through which everything leaves a sandbox: HTTP, CONNECT and SOCKS5 on streams from inside.

Knows these protocols, resolves names, connects, and writes down each attempt. Refuses to know what is allowed
(`policy.py`), where connections from inside come from and whose turn it is to serve them (`outlet.py`), and what is
said on a connection once it stands.

Everything that a client says is hostile. It is parsed by a strict parser or refused; sizes and times are bounded. A
connection goes to the very address that was judged: a name is looked up once, here, and the answer is what is dialled.
Each plain request is decided by itself, whatever came before it on the same connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC, datetime
from ipaddress import IPv6Address, ip_address
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import anyio
import h11
from anyio.abc import ByteStream, SocketStream
from anyio.streams.buffered import BufferedByteStream

from atoll.contract.errors import InvalidRequest
from atoll.contract.network import Address, AuditRecord
from atoll.runtime.egress.audit import AuditLog
from atoll.runtime.egress.policy import Gate, Refusal, read_target
from atoll.runtime.http1 import Headers, strip_hop_by_hop

if TYPE_CHECKING:
    from atoll.runtime.secrets.injection import Scrubber

HEAD_S = 30.0
"""How long a client may take to say what it wants."""
IDLE_S = 90.0
"""How long it may take between two requests on one connection."""
RESOLVE_S = 10.0
DIAL_S = 15.0
LINGER_S = 60.0
"""How long a client has, once all has been sent to it, for reading that and closing its side."""
HEAD_BYTES = 64 * 1024
_LOOKUPS = 8
"""Names of one sandbox that are looked up at once: each takes a thread until it is answered, and whoever
answers may be slow on purpose."""
_CHUNK = 256 * 1024
_HOST_CHARACTERS = 255
_REASON_CHARACTERS = 400
_PHRASES = {400: "Bad Request", 403: "Forbidden", 431: "Too Large", 502: "Bad Gateway", 503: "Unavailable"}
_SOCKS_CODES = {errno.ECONNREFUSED: 5, errno.EHOSTUNREACH: 4, errno.ENETUNREACH: 3}

_BROKEN = (
    anyio.BrokenResourceError,
    anyio.ClosedResourceError,
    anyio.EndOfStream,
    anyio.IncompleteRead,
    OSError,
)

T = TypeVar("T")
Dial = Callable[[], Awaitable[ByteStream]]
TunnelHandler = Callable[[ByteStream, str, int, Dial], Awaitable[None]]


class Intercept(Protocol):
    """Who may take a connection over that was allowed, before its first byte goes out."""

    def tunnel_handler(self, host: str, port: int) -> TunnelHandler | None:
        """Who does so for a tunnel (CONNECT, SOCKS) to `host`. It is given the client's bytes and a way to connect to
        the address that was judged, which raises `ConnectionError`. None: nobody; bytes pass as they are."""

    def rewrite(self, method: bytes, host: str, headers: Headers) -> tuple[Headers, Scrubber | None]:
        """The headers of a plain request to `host`, as they are to go out, and what its answer has to pass.

        Raises:
            InvalidRequest: it is not to go out.
        """


def resolve(name: str) -> Sequence[Address]:
    """The addresses of a name, as this machine sees them. Blocks, and cannot be told to stop.

    Raises:
        OSError: it has none, or nobody could say.
    """
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return [ip_address(str(answer[4][0]).partition("%")[0]) for answer in found]


async def dial(address: Address, port: int) -> ByteStream:
    """Connect. As `anyio.connect_tcp`, which takes twice the time for being prepared for names.

    Raises:
        OSError: it cannot be.
    """
    with contextlib.ExitStack() as stack:
        family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
        made = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
        made.setblocking(False)
        error = made.connect_ex((str(address), port))
        if error == errno.EINPROGRESS:
            await anyio.wait_writable(made)
            error = made.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream = await SocketStream.from_socket(made)
        stack.pop_all()
        return stream


@dataclass(frozen=True)
class Outside:
    """How names become addresses, in a thread for each, and addresses connections."""

    resolve: Callable[[str], Sequence[Address]] = resolve
    dial: Callable[[Address, int], Awaitable[ByteStream]] = dial


@dataclass(eq=False)
class _Attempt:
    """A connection that a client wants, and what became of it."""

    protocol: Literal["http", "connect", "socks"]
    asked_host: str
    port: int
    """0: what was said was no request."""
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    time: datetime = field(default_factory=lambda: datetime.now(UTC))
    host: str | Address = ""
    address: Address | None = None
    verdict: Literal["allowed", "denied", "failed"] = "allowed"
    reason: str | None = None
    sent_bytes: int = 0
    received_bytes: int = 0
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    def refuse(self, refused: _Refused) -> None:
        self.verdict, self.reason = refused.verdict, refused.text


class _Refused(ConnectionError):
    """A client does not get what it wants. `status` is HTTP's, `code` that of SOCKS."""

    def __init__(self, status: int, text: str, code: int = 1, verdict: Literal["denied", "failed"] = "denied") -> None:
        super().__init__(text)
        self.status, self.text, self.code, self.verdict = status, text, code, verdict


class _Counted(ByteStream):
    """A connection to the outside that knows what went over it."""

    def __init__(self, stream: ByteStream, attempt: _Attempt) -> None:
        self._stream, self._attempt = stream, attempt

    async def receive(self, max_bytes: int = 65536) -> bytes:
        data = await self._stream.receive(max_bytes)
        self._attempt.received_bytes += len(data)
        return data

    async def send(self, item: bytes) -> None:
        self._attempt.sent_bytes += len(item)  # before: of what is cut short, too much is said rather than too little
        await self._stream.send(item)

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        await self._stream.aclose()


class Proxy:
    """The proxy of one sandbox. `gate` is asked for the policy that holds now, for each decision anew."""

    def __init__(
        self,
        sandbox: str,
        gate: Callable[[], Gate],
        trail: AuditLog,
        outside: Outside,
        intercept: Intercept | None = None,
    ) -> None:
        self._sandbox = sandbox
        self._gate = gate
        self._trail = trail
        self._outside = outside
        self._intercept = intercept
        self._open: set[_Attempt] = set()
        self._lookups = anyio.Semaphore(_LOOKUPS)

    async def serve(self, client: ByteStream) -> bool:
        """Serve one connection from inside. Returns whether it came to an orderly end: then what was sent to the client
        is to reach it before the connection is closed; otherwise the client is to see that something broke."""
        stream = BufferedByteStream(client)
        with contextlib.suppress(*_BROKEN):
            with anyio.move_on_after(HEAD_S):
                stream.feed_data(await client.receive())
            if stream.buffer[:1] == b"\x05":
                return await self._socks(stream)
            if stream.buffer:
                return await self._http(stream)
        return False

    def recheck(self) -> None:
        """Cut the connections that the policy does not allow any more."""
        gate = self._gate()
        for attempt in self._open:
            if attempt.address is not None:
                judged = gate.among(attempt.host, attempt.port, [attempt.address])
                if isinstance(judged, Refusal):
                    attempt.reason = f"cut, because the policy has changed: {judged}"
                    attempt.scope.cancel()

    # ------------------------------------------------------------------------------------------------- deciding

    @contextlib.asynccontextmanager
    async def _allowed(self, attempt: _Attempt) -> AsyncIterator[Dial]:
        """A connection for as long as it is allowed, with the way to make it. Whatever becomes of it is written down.

        When the policy changes and it is cut, the body is cancelled and the context ends without an error.

        Raises:
            _Refused: it is not allowed, or cannot be made.
        """
        try:
            addresses = await self._admit(attempt)
            attempt.address = addresses[0]
            self._open.add(attempt)
            try:
                self._note(attempt)
            except OSError as error:
                text = f"it cannot be written down: {error.strerror}"
                raise _Refused(503, text, verdict="failed") from error
            with attempt.scope:
                yield lambda: self._dial(attempt, addresses)
        except _Refused as refused:
            attempt.refuse(refused)
            raise
        finally:
            self._open.discard(attempt)
            with contextlib.suppress(OSError):  # what was refused stays so, what was allowed is written down already
                self._note(attempt, ended=datetime.now(UTC))

    async def _admit(self, attempt: _Attempt) -> list[Address]:
        """The addresses that may be connected to for what the client wants.

        Raises:
            _Refused: there are none.
        """
        try:
            attempt.host, port = read_target(attempt.asked_host, attempt.port)
        except ValueError as error:
            raise _Refused(400, f"that is no host to connect to: {error}", 8) from None
        if refusal := self._gate().asked(attempt.host, port):
            attempt.address = refusal.address
            raise _Refused(403, str(refusal), 2)
        addresses = await self._look_up(attempt.host) if isinstance(attempt.host, str) else [attempt.host]
        judged = self._gate().among(attempt.host, port, addresses)
        if isinstance(judged, Refusal):
            attempt.address = judged.address
            raise _Refused(403, str(judged), 2)
        return judged

    async def _look_up(self, name: str) -> Sequence[Address]:
        try:
            with anyio.fail_after(RESOLVE_S):
                await self._lookups.acquire()
                found = await _in_thread(lambda: self._outside.resolve(name), self._lookups.release)
        except TimeoutError:
            text = f"nobody said within {RESOLVE_S:g} s where {name} is"
            raise _Refused(504, text, 4, "failed") from None
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or "its name cannot be looked up"
            raise _Refused(502, f"it is not known where {name} is: {why}", 4, "failed") from None
        if not found:
            raise _Refused(502, f"{name} has no address", 4, "failed")
        return found

    async def _dial(self, attempt: _Attempt, addresses: Sequence[Address]) -> ByteStream:
        """Connect to the first of the addresses that answers, of those that are still allowed when it is their turn.

        Raises:
            _Refused: none does.
        """
        refused = _Refused(502, f"{attempt.asked_host} has no address", 4, "failed")
        for address in addresses:
            attempt.address = address
            judged = self._gate().among(attempt.host, attempt.port, [address])
            if isinstance(judged, Refusal):  # since it was admitted, the policy has changed
                refused = _Refused(403, str(judged), 2)
                continue
            where = f"{attempt.asked_host}:{attempt.port} at {address}"
            try:
                with anyio.fail_after(DIAL_S):
                    return _Counted(await self._outside.dial(address, attempt.port), attempt)
            except TimeoutError:
                refused = _Refused(504, f"{where} did not answer within {DIAL_S:g} s", 4, "failed")
            except OSError as error:
                code = _SOCKS_CODES.get(error.errno or 0, 1)
                refused = _Refused(502, f"{where} cannot be connected to: {error.strerror or error}", code, "failed")
        attempt.refuse(refused)  # also for who takes the connection over, and tells the client itself
        raise refused

    def _note(self, attempt: _Attempt, ended: datetime | None = None) -> None:
        self._trail.write(
            AuditRecord(
                id=attempt.id,
                time=attempt.time,
                sandbox=self._sandbox,
                protocol=attempt.protocol,
                host=attempt.asked_host[:_HOST_CHARACTERS],
                port=attempt.port or None,
                address=None if attempt.address is None else str(attempt.address),
                verdict=attempt.verdict,
                reason=None if attempt.reason is None else _shown(attempt.reason),
                sent_bytes=attempt.sent_bytes,
                received_bytes=attempt.received_bytes,
                ended=ended,
            )
        )

    def _note_nonsense(self, protocol: Literal["http", "socks"], reason: str) -> None:
        attempt = _Attempt(protocol, "", 0, verdict="denied", reason=reason)
        with contextlib.suppress(OSError):
            self._note(attempt, ended=attempt.time)

    # -------------------------------------------------------------------------------------------------- tunnels

    async def _tunnel(self, attempt: _Attempt, client: BufferedByteStream, answer: bytes) -> bool:
        """Pass bytes both ways, once the client has been given `answer`.

        Raises:
            _Refused: it is not allowed, or cannot be made. The client has been told nothing.
        """
        orderly = False
        async with self._allowed(attempt) as connect:
            host, port = str(attempt.host), attempt.port
            tunnel_handler = self._intercept.tunnel_handler(host, port) if self._intercept else None
            if tunnel_handler is not None:
                await client.send(answer)
                try:
                    await tunnel_handler(client, host, port, connect)
                    orderly = True
                except _Refused as refused:  # which comes too late for the client to be told
                    attempt.refuse(refused)
            else:
                async with await connect() as outside:
                    await client.send(answer)
                    orderly = await _pipe(client, outside)
        return orderly

    async def _socks(self, client: BufferedByteStream) -> bool:
        attempt = None
        try:
            with anyio.fail_after(HEAD_S):
                attempt = await _read_socks(client)
            return await self._tunnel(attempt, client, _socks_reply(0))
        except _Refused as refused:
            if attempt is None:
                self._note_nonsense("socks", refused.text)
            await client.send(_socks_reply(refused.code))
            return True
        except TimeoutError:
            return False

    # ------------------------------------------------------------------------------------------------ HTTP

    async def _http(self, client: BufferedByteStream) -> bool:
        near = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES)
        try:
            return await self._requests(near, client)
        except h11.RemoteProtocolError as error:
            refused = _Refused(error.error_status_hint, f"that is no HTTP: {error}")
            self._note_nonsense("http", refused.text)
        except _Refused as error:
            refused = error
        if near.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:
            return False  # an answer has begun
        await client.send(_http_reply(refused))
        return True

    async def _requests(self, near: h11.Connection, client: BufferedByteStream) -> bool:
        """Serve one request after another. Returns as `serve` does.

        Raises:
            _Refused, h11.RemoteProtocolError: the last is not served.
        """
        patience_s = HEAD_S
        while True:
            request = None
            with anyio.move_on_after(patience_s):
                request = await _next(near, client)
            if not isinstance(request, h11.Request):
                return True  # it has nothing more to say, or takes too long
            try:
                attempt, path = _read_request(request)
            except _Refused as refused:
                self._note_nonsense("http", refused.text)
                raise
            if attempt.protocol == "connect":
                client.feed_data(near.trailing_data[0])
                return await self._tunnel(attempt, client, b"HTTP/1.1 200 Connection established\r\n\r\n")
            if not await self._exchange(attempt, path, request, near, client):
                return False
            if near.our_state is not h11.DONE or near.their_state is not h11.DONE:
                return True
            near.start_next_cycle()
            patience_s = IDLE_S

    async def _exchange(
        self, attempt: _Attempt, path: bytes, request: h11.Request, near: h11.Connection, client: ByteStream
    ) -> bool:
        """One request and its answer, on a connection of their own. Returns whether the client got all of it.

        Raises:
            _Refused: it is not allowed, or nobody answered. The client has been told nothing.
        """
        whole = False
        async with self._allowed(attempt) as connect:
            headers = _forwarded(request.headers)
            if any(name == b"transfer-encoding" for name, _ in request.headers):
                headers.append((b"transfer-encoding", b"chunked"))
            scrubber = None
            if self._intercept is not None:
                try:
                    headers, scrubber = self._intercept.rewrite(request.method, str(attempt.host), headers)
                except InvalidRequest as error:
                    raise _Refused(403, error.message) from error
            authority = _authority(attempt.host, attempt.port)
            headers = [(b"host", authority), *headers, (b"connection", b"close")]
            far = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES)
            async with await connect() as outside:
                head = far.send(h11.Request(method=request.method, target=path, headers=headers))
                await outside.send(head or b"")
                async with anyio.create_task_group() as group:
                    group.start_soon(_send_body, near, client, far, outside, group.cancel_scope)
                    whole = await _answer(near, client, far, outside, scrubber)
                    group.cancel_scope.cancel()
                if not whole and near.our_state is h11.SEND_RESPONSE:
                    text = f"{attempt.asked_host}:{attempt.port} gave no answer that is HTTP"
                    raise _Refused(502, text, verdict="failed")
        return whole


async def _in_thread(work: Callable[[], T], ended: Callable[[], None]) -> T:
    """What `work` returns or raises, in a thread of its own: none that others share, and none that an exit waits for.

    Who is cancelled does not wait for it. `ended` is called once it is over, however long that takes.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Callable[[], T]] = loop.create_future()

    def conclude(result: Callable[[], T]) -> None:
        ended()
        if not outcome.done():
            outcome.set_result(result)

    def run() -> None:
        done: Future[T] = Future()
        try:
            done.set_result(work())
        except Exception as error:  # noqa: BLE001 - it is raised where it is waited for
            done.set_exception(error)
        with contextlib.suppress(RuntimeError):  # the event loop is over, and with it whoever waited
            loop.call_soon_threadsafe(conclude, done.result)

    try:
        threading.Thread(target=run, name="atoll-lookup", daemon=True).start()
    except RuntimeError as error:  # there are too many
        ended()
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from error
    return (await outcome)()


async def _pipe(client: ByteStream, outside: ByteStream) -> bool:
    """Pass bytes both ways until both ends have said all. Returns whether nothing broke."""
    orderly = True
    async with anyio.create_task_group() as group:

        async def copy(source: ByteStream, target: ByteStream) -> None:
            nonlocal orderly
            try:
                with contextlib.suppress(anyio.EndOfStream):
                    while True:
                        await target.send(await source.receive(_CHUNK))
                await target.send_eof()
            except _BROKEN:
                orderly = False
                group.cancel_scope.cancel()
            if source is outside:  # a client that has heard all is not waited for without end
                group.cancel_scope.deadline = anyio.current_time() + LINGER_S

        group.start_soon(copy, client, outside)
        await copy(outside, client)
    return orderly


# ------------------------------------------------------------------------------------------------------------- HTTP


async def _next(connection: h11.Connection, stream: ByteStream) -> object:
    """The next event of an HTTP connection, with what is read from `stream` for it.

    Raises:
        h11.RemoteProtocolError: the other side does not speak HTTP.
    """
    while (event := connection.next_event()) is h11.NEED_DATA:
        try:
            connection.receive_data(await stream.receive(_CHUNK))
        except anyio.EndOfStream:
            connection.receive_data(b"")
    return event


async def _send_body(
    near: h11.Connection, client: ByteStream, far: h11.Connection, outside: ByteStream, scope: anyio.CancelScope
) -> None:
    """Pass the body of a request on. If it is none, the exchange ends."""
    try:
        while isinstance(event := await _next(near, client), h11.Data):
            await outside.send(far.send(event) or b"")
        if isinstance(event, h11.EndOfMessage):
            await outside.send(far.send(h11.EndOfMessage()) or b"")
    except h11.RemoteProtocolError:
        scope.cancel()
    except _BROKEN:
        pass  # who answered already need not hear the rest; that nobody answers is seen by who waits for it


async def _answer(
    near: h11.Connection, client: ByteStream, far: h11.Connection, outside: ByteStream, scrubber: Scrubber | None
) -> bool:
    """Pass an answer on, through `scrubber`. Returns whether all of it came and went."""
    try:
        while True:
            event = await _next(far, outside)
            if isinstance(event, h11.InformationalResponse) and event.status_code != 101:
                told: h11.Event = h11.InformationalResponse(status_code=event.status_code, headers=[])
            elif isinstance(event, h11.Response):
                headers, reason = _forwarded(event.headers), event.reason
                if scrubber:
                    headers, reason = scrubber.pairs(headers), scrubber.all(reason)
                told = h11.Response(status_code=event.status_code, headers=headers, reason=reason)
            elif isinstance(event, h11.Data):
                told = h11.Data(data=scrubber.feed(bytes(event.data)) if scrubber else event.data)
            elif isinstance(event, h11.EndOfMessage):
                if scrubber and (rest := scrubber.end()):
                    await client.send(near.send(h11.Data(data=rest)) or b"")
                await client.send(near.send(h11.EndOfMessage()) or b"")
                return True
            else:
                return False
            if data := near.send(told):  # nothing, of what is held back
                await client.send(data)
    except (h11.ProtocolError, *_BROKEN):
        return False


def _read_request(request: h11.Request) -> tuple[_Attempt, bytes]:
    """What a request is for, and the path to ask for there.

    Raises:
        _Refused: it is not one to a proxy, or it is ambiguous.
    """
    if request.http_version not in {b"1.0", b"1.1"}:
        raise _Refused(400, "of HTTP there are the versions 1.0 and 1.1")
    if len(request.target) + sum(len(name) + len(value) for name, value in request.headers) > HEAD_BYTES:
        raise _Refused(431, f"the head of a request takes {HEAD_BYTES} bytes at most")  # h11 lets pass what comes whole
    target = request.target.decode("ascii", errors="replace")
    if request.method == b"CONNECT":
        host, port = _split_authority(target)
        if port is None:
            raise _Refused(400, "CONNECT names a host and a port: CONNECT example.com:443")
        if any(name in {b"transfer-encoding", b"content-length"} for name, _ in request.headers):
            raise _Refused(400, "CONNECT has no body")
        return _Attempt("connect", host, port), b""
    scheme, separator, rest = target.partition("://")
    if not separator or "/" in scheme:
        raise _Refused(400, "this is a proxy: it takes GET http://example.com/path, CONNECT and SOCKS5")
    if scheme.lower() != "http":
        raise _Refused(400, f"{scheme[:20]!r} is not passed on as a request; use CONNECT")
    end = next((index for index, character in enumerate(rest) if character in "/?#"), len(rest))
    host, port = _split_authority(rest[:end])
    path = rest[end:]
    if "#" in path:
        raise _Refused(400, "the target of a request has no fragment")
    return _Attempt("http", host, 80 if port is None else port), (path if path[:1] == "/" else f"/{path}").encode()


def _split_authority(text: str) -> tuple[str, int | None]:
    """`example.com:443` and the like. Whether the host can be one is seen later; here nothing may be ambiguous.

    Raises:
        _Refused: it is.
    """
    if "@" in text:
        raise _Refused(400, "the target of a request has no user name and no password")
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or ":" not in host or (rest and not rest.startswith(":")):
            raise _Refused(400, "in brackets stands an IPv6 address: [2001:db8::1]:443")
        colon, port = rest[:1], rest[1:]
    else:
        host, colon, port = text.partition(":")
    if not colon:
        return host, None
    if not (port.isascii() and port.isdigit() and len(port) <= 5):
        raise _Refused(400, "after the colon stands a port from 1 to 65535")
    return host, int(port)


def _forwarded(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Headers that pass, without `Host`, which the target decides."""
    ours = {b"host"}
    if any(name == b"transfer-encoding" for name, _ in headers):
        ours.add(b"content-length")
    return [(name, value) for name, value in strip_hop_by_hop(headers) if name not in ours]


def _authority(host: str | Address, port: int) -> bytes:
    shown = f"[{host}]" if isinstance(host, IPv6Address) else str(host)
    return (shown if port == 80 else f"{shown}:{port}").encode()


def _http_reply(refused: _Refused) -> bytes:
    """Many clients show of an answer to CONNECT the first line alone, so that says it all."""
    shown = _shown(refused.text)
    body = f"atoll: {shown}\n"
    return (
        f"HTTP/1.1 {refused.status} {_PHRASES.get(refused.status, 'Refused')}: {shown}\r\n"
        f"Content-Type: text/plain; charset=utf-8\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}"
    ).encode()


def _shown(reason: str) -> str:
    """A reason in one line that is not long: it may hold what a client said."""
    text = reason[:_REASON_CHARACTERS].encode("ascii", errors="replace").decode()
    return "".join(character if character.isprintable() else "?" for character in text)


# ------------------------------------------------------------------------------------------------------------ SOCKS


async def _read_socks(client: BufferedByteStream) -> _Attempt:
    """What a SOCKS client wants, after the greeting.

    Raises:
        _Refused: nothing that there is.
    """
    _, count = await client.receive_exactly(2)
    if 0 not in await client.receive_exactly(count):
        await client.send(b"\x05\xff")
        raise _Refused(400, "SOCKS with a password is not for this proxy, which has none", code=-1)
    await client.send(b"\x05\x00")
    version, command, _, kind = await client.receive_exactly(4)
    if version != 5 or command != 1:
        raise _Refused(400, "of SOCKS there is version 5, and of that CONNECT", 7)
    if kind == 3:
        (size,) = await client.receive_exactly(1)
        host = (await client.receive_exactly(size)).decode("ascii", errors="replace")
    elif kind in {1, 4}:
        host = str(ip_address(await client.receive_exactly(4 if kind == 1 else 16)))
    else:
        raise _Refused(400, "SOCKS knows names and addresses of IPv4 and IPv6", 8)
    return _Attempt("socks", host, int.from_bytes(await client.receive_exactly(2), "big"))


def _socks_reply(code: int) -> bytes:
    return b"" if code < 0 else bytes((5, code, 0, 1, 0, 0, 0, 0, 0, 0))
