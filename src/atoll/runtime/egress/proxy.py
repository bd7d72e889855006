"""The egress proxy: HTTP, CONNECT and SOCKS5 on connections from inside a sandbox.

Owns these protocols, DNS lookups, connecting, and the audit record of each attempt. Not here: what is allowed
(`policy.py`), which process serves a sandbox and where its connections come from (`server.py`), HTTP/1.1 itself
(`../http1.py`), and secrets in requests (`../secrets/injection.py`, an `Interceptor`). Used by `server.py`.

Everything that a client sends is hostile: a strict parser reads it or it is refused; sizes and times are bounded. A
connection goes to exactly the address that the policy was evaluated for: a name is resolved once, here, and the proxy
connects to that answer. Each plain HTTP request is decided by itself, whatever came before it on the same connection.
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
from typing import Literal, Protocol, TypeVar

import anyio
import h11
from anyio.abc import ByteStream, SocketStream
from anyio.streams.buffered import BufferedByteStream

from atoll.contract.errors import InvalidRequest
from atoll.contract.network import Address, AuditRecord
from atoll.runtime.egress.audit import AuditLog
from atoll.runtime.egress.policy import PolicyEvaluator, Refusal, read_target
from atoll.runtime.http1 import (
    DISCONNECTED,
    TLS_HANDSHAKE,
    Dial,
    Headers,
    Http1Peer,
    ResponseFilter,
    TunnelHandler,
    exchange,
    join,
    one_line,
    split_authority,
    strip_hop_by_hop,
)

HEAD_TIMEOUT_S = 30.0
"""For a client's first request."""
IDLE_TIMEOUT_S = 90.0
"""Between two requests on one connection."""
DNS_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 15.0
LINGER_S = 60.0
"""For a client to read the rest and close its side, once everything has been sent to it."""
_MAX_LOOKUPS = 8
"""DNS lookups of one sandbox at the same time: each takes a thread until it is answered, and a DNS server may be slow
on purpose."""
_MAX_HOST_CHARS = 255
_SOCKS_CODES = {errno.ECONNREFUSED: 5, errno.EHOSTUNREACH: 4, errno.ENETUNREACH: 3}
_TLS_ACCESS_DENIED = b"\x15\x03\x01\x00\x02\x02\x31"
"""A fatal TLS alert."""
_BROKEN = (*DISCONNECTED, anyio.IncompleteRead)

T = TypeVar("T")


class Interceptor(Protocol):
    """Handles connections that the policy has allowed, before their first byte goes out."""

    def tunnel_handler(self, host: str, port: int) -> TunnelHandler | None:
        """The handler of a tunnel (CONNECT, SOCKS) to `host`. Its `Dial` connects to the address that was allowed and
        raises `ConnectionError`. None: there is none, and `tunnel_filter` decides."""

    def tunnel_filter(self, host: str) -> ResponseFilter | None:
        """The filter for what comes through a tunnel to `host`, in which TLS is then refused. None: the bytes pass
        unchanged."""

    def rewrite(self, method: bytes, host: str, headers: Headers) -> tuple[Headers, ResponseFilter | None]:
        """The headers of a plain HTTP request to `host` as they are sent, and the filter for its response, if any.

        Raises:
            InvalidRequest: it must not be sent.
        """


def resolve(name: str) -> Sequence[Address]:
    """The addresses of a name, by this machine's resolver. Blocks, and cannot be cancelled.

    Raises:
        OSError: the lookup failed, or the name has no address.
    """
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return [ip_address(str(answer[4][0]).partition("%")[0]) for answer in found]


async def dial(address: Address, port: int) -> ByteStream:
    """Connect. As `anyio.connect_tcp`, which takes twice the time because it is prepared for names.

    Raises:
        OSError: the connection failed.
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
class Connector:
    """How names are resolved, each in a thread of its own, and addresses connected to."""

    resolve: Callable[[str], Sequence[Address]] = resolve
    dial: Callable[[Address, int], Awaitable[ByteStream]] = dial


@dataclass(eq=False)
class _Attempt:
    """A connection that a client asks for, and its outcome."""

    protocol: Literal["http", "connect", "socks"]
    asked_host: str
    port: int
    """0: the request was malformed."""
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    time: datetime = field(default_factory=lambda: datetime.now(UTC))
    host: str | Address = ""
    address: Address | None = None
    verdict: Literal["allowed", "denied", "failed"] = "allowed"
    reason: str | None = None
    sent_bytes: int = 0
    received_bytes: int = 0
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    def refuse(self, refused: _EgressRefused) -> None:
        self.verdict, self.reason = refused.verdict, refused.text


class _EgressRefused(ConnectionError):
    """A client's request is refused or has failed. `status` is HTTP's, `code` that of SOCKS."""

    def __init__(self, status: int, text: str, code: int = 1, verdict: Literal["denied", "failed"] = "denied") -> None:
        super().__init__(text)
        self.status, self.text, self.code, self.verdict = status, text, code, verdict


class _CountedStream(ByteStream):
    """A connection to a server that counts its bytes for the audit record."""

    def __init__(self, stream: ByteStream, attempt: _Attempt) -> None:
        self._stream, self._attempt = stream, attempt

    async def receive(self, max_bytes: int = 65536) -> bytes:
        data = await self._stream.receive(max_bytes)
        self._attempt.received_bytes += len(data)
        return data

    async def send(self, item: bytes) -> None:
        self._attempt.sent_bytes += len(
            item
        )  # before: if sending is interrupted, too much is counted, never too little
        await self._stream.send(item)

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        await self._stream.aclose()


class _WithoutTls(ByteStream):
    """A client's side of a tunnel whose responses are searched: a TLS handshake is refused, because what comes after it
    could not be."""

    def __init__(self, stream: ByteStream, attempt: _Attempt) -> None:
        self._stream, self._attempt = stream, attempt
        self._begun = False
        self.refused = False

    async def receive(self, max_bytes: int = 65536) -> bytes:
        data = await self._stream.receive(max_bytes)
        if not self._begun and data[:1] == TLS_HANDSHAKE:
            self.refused = True
            host = self._attempt.asked_host
            text = f"TLS to {host} is refused, because a secret is for http://{host} only; add the host {host} to it"
            self._attempt.refuse(_EgressRefused(403, text))
            await self._stream.send(_TLS_ACCESS_DENIED)
            raise anyio.BrokenResourceError
        self._begun = True
        return data

    async def send(self, item: bytes) -> None:
        await self._stream.send(item)

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        await self._stream.aclose()


class EgressProxy:
    """The proxy of one sandbox. `evaluator` gives the current policy, and is called for each decision."""

    def __init__(
        self,
        sandbox: str,
        evaluator: Callable[[], PolicyEvaluator],
        audit_log: AuditLog,
        connector: Connector,
        interceptor: Interceptor | None = None,
    ) -> None:
        self._sandbox = sandbox
        self._evaluator = evaluator
        self._audit_log = audit_log
        self._connector = connector
        self._interceptor = interceptor
        self._open: set[_Attempt] = set()
        self._lookups = anyio.Semaphore(_MAX_LOOKUPS)

    async def serve(self, client: ByteStream) -> bool:
        """Serve one connection from inside. Returns whether it ended in order: then what was sent to the client has to
        reach it before the connection is closed; otherwise the client has to see a broken connection."""
        stream = BufferedByteStream(client)
        with contextlib.suppress(*_BROKEN):
            with anyio.move_on_after(HEAD_TIMEOUT_S):
                stream.feed_data(await client.receive())
            if stream.buffer[:1] == b"\x05":
                return await self._socks(stream)
            if stream.buffer:
                return await self._http(stream)
        return False

    def intercept_with(self, interceptor: Interceptor | None) -> None:
        """Use another interceptor from now on. Open connections that either of the two handles are cut."""
        before, self._interceptor = self._interceptor, interceptor
        for attempt in self._open:
            host = str(attempt.host)
            if any(each and each.tunnel_handler(host, attempt.port) for each in (before, interceptor)):
                attempt.reason = "cut, because what is put into its requests has changed"
                attempt.scope.cancel()

    def recheck(self) -> None:
        """Cut the open connections that the policy no longer allows."""
        evaluator = self._evaluator()
        for attempt in self._open:
            if attempt.address is not None:
                allowed = evaluator.allowed_addresses(attempt.host, attempt.port, [attempt.address])
                if isinstance(allowed, Refusal):
                    attempt.reason = f"cut, because the policy has changed: {allowed}"
                    attempt.scope.cancel()

    # ------------------------------------------------------------------------------------------------- deciding

    @contextlib.asynccontextmanager
    async def _allowed(self, attempt: _Attempt) -> AsyncIterator[Dial]:
        """An allowed attempt, with the function that connects. Its outcome is written to the audit log in every case.

        When the policy changes and it is cut, the body is cancelled and the context ends without an error.

        Raises:
            _EgressRefused: it is not allowed, or it failed.
        """
        try:
            addresses = await self._check(attempt)
            attempt.address = addresses[0]
            self._open.add(attempt)
            try:
                self._audit(attempt)
            except OSError as error:
                text = f"cannot write the audit log: {error.strerror}"
                raise _EgressRefused(503, text, verdict="failed") from error
            with attempt.scope:
                yield lambda: self._dial(attempt, addresses)
        except _EgressRefused as refused:
            attempt.refuse(refused)
            raise
        finally:
            self._open.discard(attempt)
            with contextlib.suppress(OSError):  # a refusal needs no record, and an allowed attempt has one already
                self._audit(attempt, ended=datetime.now(UTC))

    async def _check(self, attempt: _Attempt) -> list[Address]:
        """The addresses that this attempt may connect to.

        Raises:
            _EgressRefused: there are none.
        """
        try:
            attempt.host, port = read_target(attempt.asked_host, attempt.port)
        except ValueError as error:
            raise _EgressRefused(400, f"invalid host: {error}", 8) from None
        if refusal := self._evaluator().check_host(attempt.host, port):
            attempt.address = refusal.address
            raise _EgressRefused(403, str(refusal), 2)
        addresses = await self._look_up(attempt.host) if isinstance(attempt.host, str) else [attempt.host]
        allowed = self._evaluator().allowed_addresses(attempt.host, port, addresses)
        if isinstance(allowed, Refusal):
            attempt.address = allowed.address
            raise _EgressRefused(403, str(allowed), 2)
        return allowed

    async def _look_up(self, name: str) -> Sequence[Address]:
        try:
            with anyio.fail_after(DNS_TIMEOUT_S):
                await self._lookups.acquire()
                found = await _in_thread(lambda: self._connector.resolve(name), self._lookups.release)
        except TimeoutError:
            text = f"DNS lookup of {name} timed out after {DNS_TIMEOUT_S:g} s"
            raise _EgressRefused(504, text, 4, "failed") from None
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or "the name is not valid in DNS"
            raise _EgressRefused(502, f"cannot resolve {name}: {why}", 4, "failed") from None
        if not found:
            raise _EgressRefused(502, f"cannot resolve {name}: it has no address", 4, "failed")
        return found

    async def _dial(self, attempt: _Attempt, addresses: Sequence[Address]) -> ByteStream:
        """Connect to the first of the addresses that answers. Each is checked again before it is tried.

        Raises:
            _EgressRefused: none does.
        """
        refused = _EgressRefused(502, f"cannot resolve {attempt.asked_host}: it has no address", 4, "failed")
        for address in addresses:
            attempt.address = address
            allowed = self._evaluator().allowed_addresses(attempt.host, attempt.port, [address])
            if isinstance(allowed, Refusal):  # the policy has changed meanwhile
                refused = _EgressRefused(403, str(allowed), 2)
                continue
            where = f"{attempt.asked_host}:{attempt.port} at {address}"
            try:
                with anyio.fail_after(CONNECT_TIMEOUT_S):
                    return _CountedStream(await self._connector.dial(address, attempt.port), attempt)
            except TimeoutError:
                text = f"connecting to {where} timed out after {CONNECT_TIMEOUT_S:g} s"
                refused = _EgressRefused(504, text, 4, "failed")
            except OSError as error:
                code = _SOCKS_CODES.get(error.errno or 0, 1)
                refused = _EgressRefused(502, f"cannot connect to {where}: {error.strerror or error}", code, "failed")
        attempt.refuse(refused)  # here too: a tunnel handler answers the client itself
        raise refused

    def _audit(self, attempt: _Attempt, ended: datetime | None = None) -> None:
        self._audit_log.write(
            AuditRecord(
                id=attempt.id,
                time=attempt.time,
                sandbox=self._sandbox,
                protocol=attempt.protocol,
                host=attempt.asked_host[:_MAX_HOST_CHARS],
                port=attempt.port or None,
                address=None if attempt.address is None else str(attempt.address),
                verdict=attempt.verdict,
                reason=None if attempt.reason is None else one_line(attempt.reason),
                sent_bytes=attempt.sent_bytes,
                received_bytes=attempt.received_bytes,
                ended=ended,
            )
        )

    def _audit_malformed(self, protocol: Literal["http", "socks"], reason: str) -> None:
        attempt = _Attempt(protocol, "", 0, verdict="denied", reason=reason)
        with contextlib.suppress(OSError):
            self._audit(attempt, ended=attempt.time)

    # -------------------------------------------------------------------------------------------------- tunnels

    async def _tunnel(self, attempt: _Attempt, client: BufferedByteStream, reply: bytes) -> bool:
        """Pass bytes both ways, after sending `reply` to the client.

        Raises:
            _EgressRefused: it is not allowed, or it failed. Nothing was sent to the client.
        """
        orderly = False
        async with self._allowed(attempt) as connect:
            host, port = str(attempt.host), attempt.port
            handler = self._interceptor.tunnel_handler(host, port) if self._interceptor else None
            if handler is not None:
                await client.send(reply)
                try:
                    await handler(client, host, port, connect)
                    orderly = True
                except _EgressRefused as refused:  # the client has its reply already
                    attempt.refuse(refused)
            else:
                async with await connect() as server:
                    await client.send(reply)
                    response_filter = self._interceptor.tunnel_filter(host) if self._interceptor else None
                    if response_filter is None:
                        orderly = await join(client, server, linger_s=LINGER_S)
                    else:
                        guarded = _WithoutTls(client, attempt)
                        orderly = await join(guarded, server, response_filter, LINGER_S) or guarded.refused
        return orderly

    async def _socks(self, client: BufferedByteStream) -> bool:
        attempt = None
        try:
            with anyio.fail_after(HEAD_TIMEOUT_S):
                attempt = await _read_socks(client)
            return await self._tunnel(attempt, client, _socks_reply(0))
        except _EgressRefused as refused:
            if attempt is None:
                self._audit_malformed("socks", refused.text)
            await client.send(_socks_reply(refused.code))
            return True
        except TimeoutError:
            return False

    # ------------------------------------------------------------------------------------------------ HTTP

    async def _http(self, stream: BufferedByteStream) -> bool:
        client = Http1Peer(stream, h11.SERVER)
        try:
            return await self._requests(client, stream)
        except h11.RemoteProtocolError as error:
            refused = _EgressRefused(error.error_status_hint, f"malformed HTTP request: {error}")
            self._audit_malformed("http", refused.text)
        except _EgressRefused as error:
            refused = error
        return await client.refuse(refused.status, refused.text)

    async def _requests(self, client: Http1Peer, stream: BufferedByteStream) -> bool:
        """Serve one request after another. Returns as `serve` does.

        Raises:
            _EgressRefused, h11.RemoteProtocolError: the last is not served.
        """
        timeout_s = HEAD_TIMEOUT_S
        while True:
            request = None
            with anyio.move_on_after(timeout_s):
                request = await client.next_event()
            if not isinstance(request, h11.Request):
                return True  # the client has closed its side, or timed out
            try:
                attempt, path = _read_request(request)
            except ValueError as error:
                raise h11.RemoteProtocolError(str(error)) from None
            if attempt.protocol == "connect":
                stream.feed_data(client.http.trailing_data[0])
                return await self._tunnel(attempt, stream, b"HTTP/1.1 200 Connection established\r\n\r\n")
            if not await self._exchange(attempt, path, request, client):
                return False
            if not client.is_done:
                return True
            client.http.start_next_cycle()
            timeout_s = IDLE_TIMEOUT_S

    async def _exchange(self, attempt: _Attempt, path: bytes, request: h11.Request, client: Http1Peer) -> bool:
        """One request and its response, on a connection of their own. Returns whether the client got all of it.

        Raises:
            _EgressRefused: it is not allowed, or it failed. Nothing was sent to the client.
        """
        complete = False
        async with self._allowed(attempt) as connect:
            headers = _end_to_end(request.headers)
            if any(name == b"transfer-encoding" for name, _ in request.headers):
                headers.append((b"transfer-encoding", b"chunked"))
            response_filter: ResponseFilter | None = None
            if self._interceptor is not None:
                try:
                    headers, response_filter = self._interceptor.rewrite(request.method, str(attempt.host), headers)
                except InvalidRequest as error:
                    raise _EgressRefused(403, error.message) from error
            authority = _authority(attempt.host, attempt.port)
            headers = [(b"host", authority), *headers, (b"connection", b"close")]

            def rewrite(head: h11.InformationalResponse | h11.Response) -> h11.Event:
                if head.status_code == 101:
                    raise h11.RemoteProtocolError("an upgrade that was not requested")
                if isinstance(head, h11.InformationalResponse):
                    return h11.InformationalResponse(status_code=head.status_code, headers=[])
                headers, reason = _end_to_end(head.headers), head.reason
                if response_filter:
                    headers, reason = response_filter.pairs(headers), response_filter.all(reason)
                return h11.Response(status_code=head.status_code, headers=headers, reason=reason)

            async with await connect() as stream:
                server = Http1Peer(stream, h11.CLIENT)
                await server.send(h11.Request(method=request.method, target=path, headers=headers))
                name = f"{attempt.asked_host}:{attempt.port}"
                failure = await exchange(client, server, name, rewrite, response_filter)
                if failure and client.can_respond:
                    raise _EgressRefused(failure.status, failure.reason, verdict="failed")
                complete = failure is None
        return complete


async def _in_thread(work: Callable[[], T], ended: Callable[[], None]) -> T:
    """What `work` returns or raises, in a thread of its own, which no other work shares and no exit waits for.

    A cancelled caller does not wait for it. `ended` is called when the thread has ended, however long that takes.
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
        except Exception as error:  # noqa: BLE001 - it is raised in the caller
            done.set_exception(error)
        with contextlib.suppress(RuntimeError):  # the event loop is closed, and no caller waits
            loop.call_soon_threadsafe(conclude, done.result)

    try:
        threading.Thread(target=run, name="atoll-lookup", daemon=True).start()
    except RuntimeError as error:  # there are too many threads
        ended()
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from error
    return (await outcome)()


# ------------------------------------------------------------------------------------------------------------- HTTP


def _read_request(request: h11.Request) -> tuple[_Attempt, bytes]:
    """The connection that a request asks for, and the path to request there.

    Raises:
        ValueError: it is not a request to a proxy, or its target is ambiguous.
    """
    if request.http_version not in {b"1.0", b"1.1"}:
        raise ValueError("the version must be HTTP/1.0 or HTTP/1.1")
    target = request.target.decode("ascii", errors="replace")
    if request.method == b"CONNECT":
        host, port = split_authority(target)
        if port is None:
            raise ValueError("CONNECT needs a host and a port, as in CONNECT example.com:443")
        if any(name in {b"transfer-encoding", b"content-length"} for name, _ in request.headers):
            raise ValueError("CONNECT must not have a body")
        return _Attempt("connect", host, port), b""
    scheme, separator, rest = target.partition("://")
    if not separator or "/" in scheme:
        raise ValueError("this is a proxy; it accepts GET http://example.com/path, CONNECT and SOCKS5")
    if scheme.lower() != "http":
        raise ValueError(f"the scheme {scheme[:20]!r} is not supported in a plain request; use CONNECT")
    end = next((index for index, character in enumerate(rest) if character in "/?#"), len(rest))
    host, port = split_authority(rest[:end])
    path = rest[end:]
    if "#" in path:
        raise ValueError("a request target must not contain a fragment (#)")
    return _Attempt("http", host, 80 if port is None else port), (path if path[:1] == "/" else f"/{path}").encode()


def _end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Headers without those for one hop, and without `Host`, which the target decides."""
    return [(name, value) for name, value in strip_hop_by_hop(headers) if name != b"host"]


def _authority(host: str | Address, port: int) -> bytes:
    shown = f"[{host}]" if isinstance(host, IPv6Address) else str(host)
    return (shown if port == 80 else f"{shown}:{port}").encode()


# ------------------------------------------------------------------------------------------------------------ SOCKS


async def _read_socks(client: BufferedByteStream) -> _Attempt:
    """The connection that a SOCKS client asks for, after the greeting.

    Raises:
        _EgressRefused: it asks for something else, or is malformed.
    """
    _, count = await client.receive_exactly(2)
    if 0 not in await client.receive_exactly(count):
        await client.send(b"\x05\xff")
        raise _EgressRefused(400, "SOCKS authentication is not supported; connect without a password", code=-1)
    await client.send(b"\x05\x00")
    version, command, _, kind = await client.receive_exactly(4)
    if version != 5 or command != 1:
        raise _EgressRefused(400, "unsupported SOCKS request; only CONNECT of SOCKS5 is supported", 7)
    if kind == 3:
        (size,) = await client.receive_exactly(1)
        host = (await client.receive_exactly(size)).decode("ascii", errors="replace")
    elif kind in {1, 4}:
        host = str(ip_address(await client.receive_exactly(4 if kind == 1 else 16)))
    else:
        raise _EgressRefused(400, "unsupported SOCKS address type; use a name, an IPv4 or an IPv6 address", 8)
    return _Attempt("socks", host, int.from_bytes(await client.receive_exactly(2), "big"))


def _socks_reply(code: int) -> bytes:
    return b"" if code < 0 else bytes((5, code, 0, 1, 0, 0, 0, 0, 0, 0))
