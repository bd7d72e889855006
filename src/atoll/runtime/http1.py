"""HTTP/1.1 on h11, for the three proxies: egress, secret injection and previews.

Owns what is the same in all of them: the limits on a head, the one rule for ambiguous framing, hop-by-hop headers,
reading and sending events, passing a body on, bytes in both directions, authorities (`example.com:443`) and replies in
plain text. Not here: which requests are allowed and how they are changed (`egress/proxy.py`, `secrets/injection.py`,
`previews/proxy.py`).

Ambiguous framing is refused, never repaired: where two readers could disagree on the end of a message, one of them may
see a second message in it (request smuggling). h11 refuses different lengths, unknown codings and malformed heads;
`check_head` refuses what h11 lets pass, and `next_event` what is too large to be parsed. Every head that a proxy reads
goes through both, requests and responses alike.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

import anyio
import h11
from anyio.abc import ByteStream

MAX_HEAD_BYTES = 64 * 1024
"""Of the head of a request or a response."""
MAX_HEADER_LINES = 200
"""Of a request or a response. This process parses them for a sandbox, whose processor limit does not cover it: 4,000
lines take 10 ms to parse, and 0.1 ms to refuse."""
MAX_REASON_CHARS = 400
CHUNK_BYTES = 256 * 1024
"""Read from a stream at a time."""
HOLD_BACK_S = 0.25
"""How long `join` holds back bytes that a filter wants to see more of: the other end may wait for them."""
TLS_HANDSHAKE = b"\x16"
"""The first byte of a connection with TLS."""
DISCONNECTED = (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, OSError)

_HEAD_END = re.compile(rb"\n\r?\n")
_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer transfer-encoding "
    b"upgrade http2-settings".split()
)

Headers = list[tuple[bytes, bytes]]
Dial = Callable[[], Awaitable[ByteStream]]
"""Connects to a server whose address has been checked."""
TunnelHandler = Callable[[ByteStream, str, int, Dial], Awaitable[None]]
"""Serves a tunnel: the client's bytes, the host and port that it asked for, and the connection to them."""


class ResponseFilter(Protocol):
    """Rewrites a response on its way to the client, without changing its length."""

    def all(self, data: bytes) -> bytes: ...

    def pairs(self, headers: Iterable[tuple[bytes, bytes]]) -> Headers: ...

    def feed(self, data: bytes) -> bytes:
        """What can be sent now. The rest is held back until more has come."""

    def flush(self) -> bytes:
        """What was held back, because nothing more has come for some time. More may follow."""

    def end(self) -> bytes:
        """What was held back."""


class RefusedHead(h11.RemoteProtocolError):
    """`check_head` or `next_event` refuses a message. Its text holds nothing of the message."""


# ------------------------------------------------------------------------------------------------------------ heads


def next_event(http: h11.Connection) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
    """As `http.next_event`, but a head that is too large is refused before it is parsed, which takes much longer.

    Raises:
        h11.RemoteProtocolError: the message is malformed; a `RefusedHead`, if its head is larger than `MAX_HEAD_BYTES`
            or has more than `MAX_HEADER_LINES`.
    """
    if http.their_state in (h11.IDLE, h11.SEND_RESPONSE):
        unparsed = http.trailing_data[0]
        if len(unparsed) > MAX_HEAD_BYTES or unparsed.count(b"\n") > MAX_HEADER_LINES:  # with what comes after the head
            end = _HEAD_END.search(unparsed)
            size = end.start() if end else len(unparsed)
            if size > MAX_HEAD_BYTES:
                raise RefusedHead(f"the head is larger than {MAX_HEAD_BYTES} bytes", error_status_hint=431)
            if unparsed.count(b"\n", 0, size) > MAX_HEADER_LINES:
                raise RefusedHead(f"the head has more than {MAX_HEADER_LINES} header lines", error_status_hint=431)
    return http.next_event()


def check_head(event: object) -> None:
    """Refuse the head of a message that h11 accepts and that is ambiguous or too large. Other events pass.

    Raises:
        RefusedHead: it has both Transfer-Encoding and Content-Length, or Transfer-Encoding in HTTP/1.0; or it is larger
            than `MAX_HEAD_BYTES`, which h11 checks only for one that comes in pieces.
    """
    if not isinstance(event, h11.Request | h11.InformationalResponse | h11.Response):
        return
    size = sum(len(name) + len(value) + len(": \r\n") for name, value in event.headers)
    if size + (len(event.target) if isinstance(event, h11.Request) else 0) > MAX_HEAD_BYTES:
        raise RefusedHead(f"the head is larger than {MAX_HEAD_BYTES} bytes", error_status_hint=431)
    names = {name for name, _ in event.headers}
    if b"transfer-encoding" in names and b"content-length" in names:
        raise RefusedHead("ambiguous framing: it has both Transfer-Encoding and Content-Length")
    if b"transfer-encoding" in names and event.http_version < b"1.1":
        raise RefusedHead("ambiguous framing: it has Transfer-Encoding, which HTTP/1.0 does not have")


def strip_hop_by_hop(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """The headers without those for one hop only, by RFC 9110 or because `Connection` names them.

    Content-Length stays, even if `Connection` names it: without it, two readers could disagree on the length.
    """
    found = list(headers)
    named = {
        word.strip().lower() for name, value in found if name.lower() == b"connection" for word in value.split(b",")
    }
    dropped = _HOP_BY_HOP | (named - {b"content-length"})
    return [(name, value) for name, value in found if name.lower() not in dropped]


def split_authority(text: str) -> tuple[str, int | None]:
    """The host and the port of `example.com:443`, `[2001:db8::1]:443` and the like. Does not check the host.

    Raises:
        ValueError: it is ambiguous.
    """
    if "@" in text:
        raise ValueError("a request target must not contain a user name or a password")
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or ":" not in host or (rest and not rest.startswith(":")):
            raise ValueError("brackets must enclose an IPv6 address, as in [2001:db8::1]:443")
        colon, port = rest[:1], rest[1:]
    else:
        host, colon, port = text.partition(":")
    if not colon:
        return host, None
    if not (port.isascii() and port.isdigit() and len(port) <= 5):
        raise ValueError("the port must be a number from 1 to 65535")
    return host, int(port)


def one_line(reason: str) -> str:
    """A reason as one short line of printable ASCII: it may contain what a client sent."""
    text = reason[:MAX_REASON_CHARS].encode("ascii", errors="replace").decode()
    return "".join(character if character.isprintable() else "?" for character in text)


# ------------------------------------------------------------------------------------------------------ connections


class Http1Peer:
    """One end of an HTTP/1.1 connection: h11 on a stream."""

    def __init__(self, stream: ByteStream, role: type[h11.CLIENT | h11.SERVER]) -> None:
        """`role` is ours: SERVER, if the other end is a client."""
        self.stream = stream
        self.http = h11.Connection(role, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._method = b""

    async def next_event(self) -> h11.Event:
        """
        Raises:
            h11.RemoteProtocolError: the message is malformed; a `RefusedHead`, if `next_event` or `check_head` refuses
                its head.
            BrokenResourceError, OSError: the connection is lost.
        """
        if self.http.their_state is h11.IDLE:
            self._method = b""
        while (event := next_event(self.http)) is h11.NEED_DATA:
            try:
                data = await self.stream.receive(CHUNK_BYTES)
            except anyio.EndOfStream:
                data = b""
            self.http.receive_data(data)
        if not isinstance(event, h11.Event):
            raise h11.RemoteProtocolError("more was sent than was asked for")
        if isinstance(event, h11.Request):
            self._method = event.method
        check_head(event)
        return event

    async def send(self, event: h11.Event) -> None:
        if data := self.http.send(event):
            await self.stream.send(data)

    async def refuse(self, status: int, reason: str) -> bool:
        """Answer the request with `reason` as plain text; the connection is to be closed then. False: a response has
        begun, and nothing was sent.

        The status line has the reason too: of an answer to CONNECT many clients show nothing else.
        """
        if not self.can_respond:
            return False
        shown = one_line(reason)
        body = f"atoll: {shown}\n"
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}: {shown}\r\n"
            f"Content-Type: text/plain; charset=utf-8\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        await self.stream.send((head + ("" if self._method == b"HEAD" else body)).encode())
        return True

    @property
    def can_respond(self) -> bool:
        """Whether no response to the present request has begun."""
        return self.http.our_state in (h11.IDLE, h11.SEND_RESPONSE)

    @property
    def is_done(self) -> bool:
        """Whether a request and its response are complete, and another may follow."""
        return self.http.our_state is h11.DONE and self.http.their_state is h11.DONE


@dataclass(frozen=True, slots=True)
class ExchangeFailure:
    """Why an exchange did not complete. `reason` holds nothing of the response, which may contain a secret."""

    status: int
    """For the client, if no response has begun."""
    reason: str


async def exchange(
    client: Http1Peer,
    server: Http1Peer,
    name: str,
    rewrite: Callable[[h11.InformationalResponse | h11.Response], h11.Event],
    response_filter: ResponseFilter | None = None,
    *,
    trailers: bool = False,
) -> ExchangeFailure | None:
    """Pass the body of a request on to the server called `name`, and the response back, both at the same time. The head
    of the request has been sent; `rewrite` gives the heads of responses for the client. Ends after a 101.

    A server that responds before it has read the whole body may do so: the rest is read and dropped.
    """
    failure: ExchangeFailure | None = None

    async def upload() -> None:
        nonlocal failure
        while True:
            try:
                event = await client.next_event()
            except h11.RemoteProtocolError as error:
                failure = ExchangeFailure(error.error_status_hint, f"malformed HTTP request: {error}")
                break
            except DISCONNECTED:
                failure = ExchangeFailure(400, "the client closed the connection")
                break
            is_data = isinstance(event, h11.Data)
            with contextlib.suppress(h11.LocalProtocolError, *DISCONNECTED):
                await server.send(event if is_data or trailers else h11.EndOfMessage())
            if not is_data:
                return
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(upload)
        try:
            await _pass_response(server, client, rewrite, response_filter, trailers=trailers)
        except RefusedHead as error:
            failure = failure or ExchangeFailure(502, f"{name} sent a malformed HTTP response: {error}")
        except (h11.ProtocolError, *DISCONNECTED):
            failure = failure or ExchangeFailure(502, f"{name} sent no complete HTTP response")
        group.cancel_scope.cancel()
    return failure


async def _pass_response(
    server: Http1Peer,
    client: Http1Peer,
    rewrite: Callable[[h11.InformationalResponse | h11.Response], h11.Event],
    response_filter: ResponseFilter | None,
    *,
    trailers: bool,
) -> None:
    event: object = None
    while not isinstance(event, h11.Response):
        event = await server.next_event()
        if not isinstance(event, h11.InformationalResponse | h11.Response):
            raise h11.RemoteProtocolError("the connection was closed before a response")
        await client.send(rewrite(event))
        if event.status_code == 101:
            return
    while isinstance(event := await server.next_event(), h11.Data):
        data = response_filter.feed(bytes(event.data)) if response_filter else event.data
        if data:
            await client.send(h11.Data(data=data))
    if not isinstance(event, h11.EndOfMessage):
        raise h11.RemoteProtocolError("the connection was closed before the end of the response")
    if response_filter and (rest := response_filter.end()):
        await client.send(h11.Data(data=rest))
    headers = event.headers.raw_items() if trailers else []
    await client.send(h11.EndOfMessage(headers=response_filter.pairs(headers) if response_filter else headers))


async def join(
    client: ByteStream, server: ByteStream, response_filter: ResponseFilter | None = None, linger_s: float = math.inf
) -> bool:
    """Pass bytes in both directions until both ends have closed theirs. Returns whether no connection broke.

    Once the server has closed its direction, the client has `linger_s` to close its own. What `response_filter` holds
    back is sent after `HOLD_BACK_S`: in many protocols the client has to answer before more comes.
    """
    orderly = True
    async with anyio.create_task_group() as group:

        async def copy(source: ByteStream, target: ByteStream, to_client: ResponseFilter | None) -> None:
            nonlocal orderly
            try:
                with contextlib.suppress(anyio.EndOfStream):
                    wait_s = math.inf
                    while True:
                        data = b""
                        with anyio.move_on_after(wait_s):
                            data = await source.receive(CHUNK_BYTES)
                        wait_s = HOLD_BACK_S if to_client and data else math.inf
                        if to_client:
                            data = to_client.feed(data) if data else to_client.flush()
                        if data:
                            await target.send(data)
                if to_client and (rest := to_client.end()):
                    await target.send(rest)
                await target.send_eof()
            except NotImplementedError:  # TLS cannot close one direction alone
                group.cancel_scope.cancel()
            except DISCONNECTED:
                orderly = False
                group.cancel_scope.cancel()
            if source is server:
                group.cancel_scope.deadline = anyio.current_time() + linger_s

        group.start_soon(copy, client, server, None)
        await copy(server, client, response_filter)
    return orderly
