"""How a secret gets from outside to the hosts that it is for, and nowhere else.

Knows HTTP/1.1 as a man in the middle: which requests may have a secret, where in them it stands, and what must not come
back. Refuses to know who may connect where (`egress.py`, which hands over connections that it has allowed), how values
are kept (`vault.py`) and certificates (`authority.py`).

A connection to a secret's host is terminated here, and a second one is made to the real host, whose certificate is
checked as by any client of this machine. Both speak HTTP/1.1, and requests pass one by one: each has to be for that
very host, and in each the placeholder is replaced in the one header that it belongs in. All else is passed on as it
came: a placeholder in a path, a body or another header is only a placeholder. What is read is written anew by the same
library, so that both ends agree on where a message ends.

What comes back, without TLS too, is searched for the values, which are overwritten with asterisks. That is a net and
not a wall: a host that answers with the secret in another form (compressed, encoded, cut in pieces) tells it to the
sandbox. Secrets are for hosts that do not.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import logging
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import anyio
import h11
from anyio.abc import ByteStream

from atoll.contract.errors import AtollError, InvalidRequest
from atoll.contract.secret import PLAIN_HTTP
from atoll.runtime.secrets.authority import Issuer
from atoll.runtime.secrets.vault import Contents, Kept

if TYPE_CHECKING:
    from anyio.streams.tls import TLSStream

Headers = Sequence[tuple[bytes, bytes]]
Dial = Callable[[], Awaitable[ByteStream]]
TunnelHandler = Callable[[ByteStream, str, int, Dial], Awaitable[None]]

_HEAD_LIMIT_BYTES = 64 * 1024
_CHUNK_BYTES = 64 * 1024
_HANDSHAKE_S = 30.0
_IDLE_S = 300.0
"""How long a connection may wait for its next request."""
_PARTING_S = 2.0
_TLS_HANDSHAKE = b"\x16"
_GONE = (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, OSError)
_log = logging.getLogger(__name__)


# ---- what is replaced, and where ----


@dataclass(frozen=True, slots=True)
class Rule:
    """One placeholder in one header."""

    header: bytes
    placeholder: bytes
    value: bytes = field(repr=False)


def rules(secrets: Iterable[Kept], host: str) -> list[Rule]:
    """What may be replaced on the way to `host`, which stands as in `Secret.hosts`."""
    return [
        Rule(kept.header.encode(), kept.placeholder.encode(), kept.value.encode())
        for kept in secrets
        if host.lower() in kept.hosts
    ]


def substitute(rules: Iterable[Rule], headers: Headers) -> list[tuple[bytes, bytes]]:
    """`headers` with values in place of placeholders, once in each header that a rule names, and nowhere else.

    The user and password of basic authentication are looked at decoded.
    """
    filled = []
    for name, content in headers:
        for rule in rules:
            if name.lower() == rule.header:
                content = _fill(rule, content)
        filled.append((name, content))
    return filled


def _fill(rule: Rule, content: bytes) -> bytes:
    if _is_basic(content):
        scheme, _, token = content.partition(b" ")
        with contextlib.suppress(binascii.Error):
            pair = base64.b64decode(token.strip(), validate=True)
            if rule.placeholder in pair:
                return scheme + b" " + base64.b64encode(pair.replace(rule.placeholder, rule.value, 1))
    return content.replace(rule.placeholder, rule.value, 1)


def _is_basic(content: bytes) -> bool:
    return content[:6].lower() == b"basic "


def _encoded(headers: Headers, filled: Headers) -> set[bytes]:
    """Values that were encoded as they were filled in: a host that says what it was sent says them so."""
    pairs = (new for (_, old), (_, new) in zip(headers, filled, strict=True) if new != old)
    return {new.partition(b" ")[2] for new in pairs if _is_basic(new)}


def _uncompressed(headers: Headers) -> list[tuple[bytes, bytes]]:
    """`headers` that ask for an answer which can be searched."""
    return [*_without(b"accept-encoding", headers), (b"Accept-Encoding", b"identity")]


def _without(dropped: bytes, headers: Headers) -> list[tuple[bytes, bytes]]:
    return [pair for pair in headers if pair[0].lower() != dropped]


class Scrubber:
    """Overwrites what must not come back, also where it comes in pieces. What passes stays as long as it was."""

    def __init__(self, values: Iterable[bytes]) -> None:
        self._values = tuple(values)
        self._held = b""
        self._shown = b""
        """What is held, as it would be passed on."""

    def all(self, data: bytes) -> bytes:
        return self._overwritten(data, data)

    def pairs(self, headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        return [(self.all(name), self.all(content)) for name, content in headers]

    def feed(self, data: bytes) -> bytes:
        """What can be passed on now. What may be the beginning of a value is held until more is known."""
        came = self._held + data
        shown = self._overwritten(came, self._shown + data)
        cut = min((self._begins(value, came) for value in self._values), default=len(came))
        self._held, self._shown = came[cut:], shown[cut:]
        return shown[:cut]

    def end(self) -> bytes:
        shown, self._held, self._shown = self._shown, b"", b""
        return shown

    def _overwritten(self, came: bytes, shown: bytes) -> bytes:
        """`shown` with asterisks wherever a value is in `came`, in which nothing was overwritten: a longer value may
        have a shorter one in it, and would not be known without that."""
        result = bytearray(shown)
        for value in self._values:
            at = came.find(value)
            while at >= 0:
                result[at : at + len(value)] = b"*" * len(value)
                at = came.find(value, at + 1)
        return bytes(result)

    @staticmethod
    def _begins(value: bytes, data: bytes) -> int:
        """Where, at the end of `data`, `value` may begin. Its length: nowhere."""
        at = data.find(value[:1], max(0, len(data) - len(value) + 1))
        while at >= 0 and not value.startswith(data[at:]):
            at = data.find(value[:1], at + 1)
        return at if at >= 0 else len(data)


# ---- connections ----


class SecretInjector:
    """The secrets of one sandbox on their way. `trust` says which servers are who they say."""

    def __init__(self, contents: Contents, trust: Callable[[], ssl.SSLContext]) -> None:
        self._secrets = tuple(contents.secrets.values())
        self._values = frozenset(kept.value.encode() for kept in self._secrets)
        self._issuer = Issuer(contents.authority) if contents.authority else None
        self._trust = trust

    def tunnel_handler(self, host: str, port: int) -> TunnelHandler | None:  # noqa: ARG002 - a host is itself on every port
        """Who takes over connections to `host`. None: nobody does, and they are passed on untouched."""
        return self.intercept if rules(self._secrets, host) else None

    def rewrite(self, method: bytes, host: str, headers: Headers) -> tuple[list[tuple[bytes, bytes]], Scrubber | None]:
        """The headers of a request that goes to `host` without TLS, and what its answer has to pass, if anything.

        Raises:
            InvalidRequest: it asks for a secret that is for this host, but not without TLS, or for having one back.
        """
        plain = rules(self._secrets, PLAIN_HTTP + host)
        if plain:
            headers = _uncompressed(headers)
        filled = substitute(plain, headers)
        if filled != headers and method == b"TRACE":
            raise InvalidRequest(f"a secret for {host} is not sent with TRACE, which asks for having it back; use GET")
        if substitute(rules(self._secrets, host), filled) != filled:
            raise InvalidRequest(
                f"a secret for {host} is not sent without TLS; use https, "
                f"or give the secret the host '{PLAIN_HTTP}{host}'"
            )
        return filled, Scrubber(self._values | _encoded(headers, filled)) if plain else None

    async def intercept(self, client: ByteStream, host: str, port: int, dial: Dial) -> None:
        """Take over a connection from inside to `host`, until there is nothing more to say on it.

        `dial` makes one to the real host. What does not begin as TLS is passed on as it is: in it, a placeholder stays
        one. `client` is the caller's to close.
        """
        host = host.lower()
        with contextlib.suppress(*_GONE):
            begun = _Begun(client, await client.receive(_CHUNK_BYTES))
            if begun.first[:1] == _TLS_HANDSHAKE and self._issuer is not None:
                await self._terminate(begun, self._issuer.context(host), host, port, dial)
            else:
                async with await dial() as server:
                    await _join(begun, server)

    async def _terminate(self, client: ByteStream, as_host: ssl.SSLContext, host: str, port: int, dial: Dial) -> None:
        from anyio.streams.tls import TLSStream

        try:
            with anyio.fail_after(_HANDSHAKE_S):
                inner = await TLSStream.wrap(client, server_side=True, ssl_context=as_host, standard_compatible=False)
        except (ssl.SSLError, TimeoutError) as error:
            _log.info("a connection from inside to %s did not come about: %s", host, error)
            return
        conversation = _Conversation(inner, host, port, rules(self._secrets, host), self._values)
        await conversation.hold(partial(self._reach, host, dial))

    async def _reach(self, host: str, dial: Dial) -> ByteStream:
        """A connection to the real host, which has proved that it is."""
        from anyio.streams.tls import TLSStream

        try:
            with anyio.fail_after(_HANDSHAKE_S):
                stream = await dial()
        except (AtollError, OSError, anyio.BrokenResourceError) as error:
            raise _Refused(502, f"{host} cannot be reached") from error
        try:
            with anyio.fail_after(_HANDSHAKE_S):
                return await TLSStream.wrap(
                    _Begun(stream, b""), hostname=host, ssl_context=self._trust(), standard_compatible=False
                )
        except BaseException as error:
            await anyio.aclose_forcefully(stream)
            if isinstance(error, ssl.SSLCertVerificationError):
                raise _Refused(502, f"{host} has not proved that it is: {error.verify_message}") from error
            if isinstance(error, _GONE):
                raise _Refused(502, f"{host} does not speak TLS as it should") from error
            raise


class _Refused(Exception):
    """A request that gets an answer of ours."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


class _Peer:
    """One end of a conversation in HTTP/1.1."""

    def __init__(self, stream: ByteStream, role: type[h11.CLIENT | h11.SERVER]) -> None:
        self.stream = stream
        self.http = h11.Connection(role, max_incomplete_event_size=_HEAD_LIMIT_BYTES)

    async def next(self) -> h11.Event:
        while (event := self.http.next_event()) is h11.NEED_DATA:
            try:
                data = await self.stream.receive(_CHUNK_BYTES)
            except anyio.EndOfStream:
                data = b""
            self.http.receive_data(data)
        if not isinstance(event, h11.Event):
            raise h11.RemoteProtocolError("more came than was asked for")
        return event

    async def send(self, event: h11.Event) -> None:
        data = self.http.send(event)
        if data:
            await self.stream.send(data)

    @property
    def is_done(self) -> bool:
        return self.http.our_state is h11.DONE and self.http.their_state is h11.DONE


class _Conversation:
    """Requests from inside over one connection, one after another, and their answers."""

    def __init__(
        self, client: TLSStream, host: str, port: int, rules: Sequence[Rule], values: frozenset[bytes]
    ) -> None:
        self._inner = client
        self._client = _Peer(client, h11.SERVER)
        self._server: _Peer | None = None
        self._host = host
        self._port = port
        self._rules = rules
        self._values = values
        self._scrubbed = values
        """What must not come back from the present request."""
        self._cut_short = False

    async def hold(self, reach: Callable[[], Awaitable[ByteStream]]) -> None:
        try:
            while await self._exchange(reach):
                pass
        except _Refused as refusal:
            _log.info("a request from inside to %s was refused: %s", self._host, refusal.text)
            await self._answer(refusal)
        finally:
            if self._server is not None:
                await anyio.aclose_forcefully(self._server.stream)
        if not self._cut_short:
            await self._part()

    async def _exchange(self, reach: Callable[[], Awaitable[ByteStream]]) -> bool:
        """One request and its answer. Returns whether there may be another."""
        request = await self._next_request()
        if request is None:
            return False
        headers = self._check(request)
        if self._server is None:
            self._server = _Peer(await reach(), h11.CLIENT)
        client, server = self._client, self._server
        failed = False
        async with anyio.create_task_group() as tasks:
            try:
                await server.send(h11.Request(method=request.method, target=request.target, headers=headers))
                tasks.start_soon(self._upload, server, tasks.cancel_scope)
                await self._download(server)
            except (h11.ProtocolError, *_GONE):
                failed = True
            tasks.cancel_scope.cancel()
        if client.http.our_state is h11.SWITCHED_PROTOCOL:
            await self._switched(server)
        elif failed and client.http.our_state is h11.SEND_RESPONSE:
            raise _Refused(502, f"{self._host} closed the connection, or did not answer as HTTP/1.1 wants it")
        self._cut_short = failed
        if not (client.is_done and server.is_done):
            return False
        client.http.start_next_cycle()
        server.http.start_next_cycle()
        return True

    async def _next_request(self) -> h11.Request | None:
        """None: there is none, or the host has closed the connection: a request would only be lost."""
        found: h11.Event | h11.RemoteProtocolError | None = None

        async def watch(server: _Peer) -> None:
            with contextlib.suppress(*_GONE):
                await server.stream.receive(1)
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.cancel_scope.deadline = anyio.current_time() + _IDLE_S
            if self._server is not None:
                tasks.start_soon(watch, self._server)
            try:
                found = await self._client.next()
            except h11.RemoteProtocolError as error:
                found = error
            except _GONE:
                pass
            tasks.cancel_scope.cancel()
        if isinstance(found, h11.RemoteProtocolError):
            raise _Refused(
                found.error_status_hint, "what came is no request in HTTP/1.1, which is all that is spoken here"
            )
        return found if isinstance(found, h11.Request) else None

    def _check(self, request: h11.Request) -> list[tuple[bytes, bytes]]:
        """The headers that a request goes on with: it is for this host and nobody else, and reads the same to all."""
        fields: dict[bytes, list[bytes]] = {}
        for name, content in request.headers:
            fields.setdefault(name, []).append(content)
        names = (self._host.encode(), f"{self._host}:{self._port}".encode())
        if [name.lower() in names for name in fields.get(b"host", [])] != [True]:
            raise _Refused(421, f"this connection is to {self._host}, and the request is for another host")
        if request.method in (b"CONNECT", b"TRACE") or not (request.target[:1] == b"/" or request.target == b"*"):
            raise _Refused(400, "a request here names a path, and neither CONNECT nor TRACE")
        if b"transfer-encoding" in fields and b"content-length" in fields:
            raise _Refused(400, "the request has two lengths")
        headers = _uncompressed(request.headers.raw_items())
        filled = substitute(self._rules, headers)
        self._scrubbed = self._values | _encoded(headers, filled)
        if filled == headers:
            return filled
        upgrades = b",".join(fields.get(b"upgrade", [b"websocket"])).lower().split(b",")
        if any(protocol.strip() != b"websocket" for protocol in upgrades):
            raise _Refused(400, "with a secret, a request can change to the protocol websocket alone")
        return _without(b"sec-websocket-extensions", filled)  # which would compress what comes back

    async def _upload(self, server: _Peer, scope: anyio.CancelScope) -> None:
        """The request's body. A host that does not want all of it may have answered already."""
        while True:
            try:
                event = await self._client.next()
            except (h11.RemoteProtocolError, *_GONE):
                scope.cancel()
                return
            with contextlib.suppress(h11.LocalProtocolError, *_GONE):
                await server.send(event)
            if not isinstance(event, h11.Data):
                return

    async def _download(self, server: _Peer) -> None:
        scrubber = Scrubber(self._scrubbed)
        while True:
            event = await server.next()
            if isinstance(event, h11.InformationalResponse | h11.Response):
                headers = scrubber.pairs(event.headers.raw_items())
                reason, kind = scrubber.all(event.reason), type(event)
                await self._client.send(kind(status_code=event.status_code, headers=headers, reason=reason))
                if event.status_code == 101:
                    return
            elif isinstance(event, h11.Data):
                if data := scrubber.feed(bytes(event.data)):
                    await self._client.send(h11.Data(data=data))
            elif isinstance(event, h11.EndOfMessage):
                if data := scrubber.end():
                    await self._client.send(h11.Data(data=data))
                await self._client.send(h11.EndOfMessage(headers=scrubber.pairs(event.headers.raw_items())))
                return
            else:
                raise h11.RemoteProtocolError("the connection was closed")

    async def _switched(self, server: _Peer) -> None:
        """Both have agreed on another protocol. In what comes from here on, a placeholder stays one."""
        scrubber = Scrubber(self._scrubbed)
        early, late = self._client.http.trailing_data[0], server.http.trailing_data[0]
        if early:
            await server.stream.send(early)
        if late := scrubber.feed(late):
            await self._client.stream.send(late)
        await _join(self._client.stream, server.stream, scrubber)

    async def _answer(self, refusal: _Refused) -> None:
        if self._client.http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        text = f"atoll: {refusal.text}\n".encode()
        headers = [("Content-Type", "text/plain"), ("Content-Length", str(len(text))), ("Connection", "close")]
        with contextlib.suppress(h11.LocalProtocolError, *_GONE):
            await self._client.send(h11.Response(status_code=refusal.status, headers=headers))
            await self._client.send(h11.Data(data=text))
            await self._client.send(h11.EndOfMessage())

    async def _part(self) -> None:
        """Say that this was all: who hears of an end by TLS knows that nobody cut it short."""
        with anyio.move_on_after(_PARTING_S), contextlib.suppress(*_GONE):
            await self._inner.unwrap()


class _Begun(ByteStream):
    """A stream of which some was read already. Who sends waits for who sends: TLS does so in both directions."""

    def __init__(self, stream: ByteStream, first: bytes) -> None:
        self.first = first
        self._stream = stream
        self._sending = anyio.Lock()

    async def receive(self, max_bytes: int = 65536) -> bytes:
        if not self.first:
            return await self._stream.receive(max_bytes)
        first, self.first = self.first[:max_bytes], self.first[max_bytes:]
        return first

    async def send(self, item: bytes) -> None:
        async with self._sending:
            await self._stream.send(item)

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        await self._stream.aclose()


async def _join(client: ByteStream, server: ByteStream, scrubber: Scrubber | None = None) -> None:
    """Pass on what comes from either until both have said all, or one is gone."""

    async def carry(source: ByteStream, target: ByteStream, scrubber: Scrubber | None) -> None:
        try:
            while True:
                data = await source.receive(_CHUNK_BYTES)
                if data := scrubber.feed(data) if scrubber else data:
                    await target.send(data)
        except anyio.EndOfStream:
            with contextlib.suppress(*_GONE):
                if scrubber and (rest := scrubber.end()):
                    await target.send(rest)
                with contextlib.suppress(NotImplementedError):  # TLS has no such thing, and ends altogether
                    await target.send_eof()
                    return
        except _GONE:
            pass
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(carry, client, server, None)
        await carry(server, client, scrubber)
