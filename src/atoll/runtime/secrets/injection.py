"""Secret injection: a secret's value goes into requests to its own hosts, and nowhere else.

Owns HTTP/1.1 as a man in the middle: which requests may have a secret, in which header it is put, and what is removed
from responses. Not here: which connections are allowed (`egress/proxy.py`, whose `Interceptor` this is), how values are
stored (`vault.py`), certificates (`authority.py`), and HTTP/1.1 itself (`../http1.py`). Used by the engine.

A TLS connection to a secret's host is terminated here, and a second one is made to the real host, whose certificate is
verified as by any client of this machine. Both speak HTTP/1.1, and requests pass one by one: each has to be for exactly
that host, and in each the placeholder is replaced in the one header that it belongs in. Everything else passes
unchanged: a placeholder in a path, a body or another header stays a placeholder. h11 parses and writes every message,
so both ends agree on where it ends; ambiguous framing is refused.

What comes from a host that any secret is for is searched for the values, which are overwritten with asterisks: over
TLS, in responses without TLS, and in tunnels without TLS. A host that is named only as `http://NAME` cannot be searched
over TLS, so TLS to it is refused. This is best effort: a host that responds with the secret in another form
(compressed, encoded, in pieces) gives it to the sandbox. Use secrets only for hosts that do not.

Headers that are to be set (`SandboxSecrets.headers`) take the place of those that a program sends, in every request to
their hosts. They are not searched for in what comes back: a host that echoes them shows them.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import logging
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import anyio
import h11
from anyio.abc import ByteStream

from atoll.contract.errors import AtollError, InvalidRequest
from atoll.contract.secret import PLAIN_HTTP
from atoll.runtime.http1 import DISCONNECTED, TLS_HANDSHAKE, Dial, Headers, Http1Peer, TunnelHandler, exchange, join
from atoll.runtime.secrets import ca_bundle
from atoll.runtime.secrets.authority import Issuer
from atoll.runtime.secrets.vault import SandboxSecrets, StoredSecret

if TYPE_CHECKING:
    from anyio.streams.tls import TLSStream

    from atoll.runtime.guest.files import Files

_CHUNK_BYTES = 64 * 1024
_HANDSHAKE_TIMEOUT_S = 30.0
_IDLE_TIMEOUT_S = 300.0
"""Between two requests on one connection."""
_CLOSE_TIMEOUT_S = 2.0
_log = logging.getLogger(__name__)


# ---- replacing placeholders ----


@dataclass(frozen=True, slots=True)
class InjectionRule:
    """Replace one placeholder in one header."""

    header: bytes
    placeholder: bytes
    value: bytes = field(repr=False)


def rules(secrets: Iterable[StoredSecret], host: str) -> list[InjectionRule]:
    """The rules for requests to `host`, which is written as in `Secret.hosts`."""
    return [
        InjectionRule(secret.header.encode(), secret.placeholder.encode(), secret.value.encode())
        for secret in secrets
        if host.lower() in secret.hosts
    ]


def substitute(rules: Iterable[InjectionRule], headers: Headers) -> Headers:
    """`headers` with values in place of placeholders, once in each header that a rule names, and nowhere else.

    The user and password of basic authentication are decoded, replaced and encoded again.
    """
    filled = []
    for name, content in headers:
        for rule in rules:
            if name.lower() == rule.header:
                content = _fill(rule, content)
        filled.append((name, content))
    return filled


def set_headers(given: Headers, headers: Headers) -> Headers:
    """`headers` with those in `given`, which take the place of what has the same name."""
    names = {name.lower() for name, _ in given}
    return [*(pair for pair in headers if pair[0].lower() not in names), *given] if given else headers


def _fill(rule: InjectionRule, content: bytes) -> bytes:
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
    """Values that were encoded when they were filled in: a host that echoes a request echoes them in this form."""
    pairs = (new for (_, old), (_, new) in zip(headers, filled, strict=True) if new != old)
    return {new.partition(b" ")[2] for new in pairs if _is_basic(new)}


def _uncompressed(headers: Headers) -> Headers:
    """`headers` that ask for a response without compression, which can be searched."""
    return [*_without(b"accept-encoding", headers), (b"Accept-Encoding", b"identity")]


def _without(dropped: bytes, headers: Headers) -> Headers:
    return [pair for pair in headers if pair[0].lower() != dropped]


class Scrubber:
    """Overwrites values in responses with asterisks, also where they come in pieces. Lengths stay the same."""

    def __init__(self, values: Iterable[bytes]) -> None:
        self._values = tuple(values)
        self._held = b""
        """The end of what came, in which a value may begin."""
        self._shown = b""
        """The same bytes as they are sent."""
        self._sent = 0
        """How many of them have been sent, by `flush`."""

    def all(self, data: bytes) -> bytes:
        return self._overwritten(data, data)

    def pairs(self, headers: Iterable[tuple[bytes, bytes]]) -> Headers:
        return [(self.all(name), self.all(content)) for name, content in headers]

    def feed(self, data: bytes) -> bytes:
        """The bytes that can be sent now. The possible beginning of a value is held back until more has come."""
        came = self._held + data
        shown = self._overwritten(came, self._shown + data)
        cut = min((self._begins(value, came) for value in self._values), default=len(came))
        passed = shown[self._sent : cut]
        self._held, self._shown, self._sent = came[cut:], shown[cut:], max(0, self._sent - cut)
        return passed

    def flush(self) -> bytes:
        """The bytes that are held back. If they are the beginning of a value, its rest is still overwritten."""
        shown, self._sent = self._shown[self._sent :], len(self._shown)
        return shown

    def end(self) -> bytes:
        shown = self.flush()
        self._held, self._shown, self._sent = b"", b"", 0
        return shown

    def _overwritten(self, came: bytes, shown: bytes) -> bytes:
        """`shown` with asterisks wherever a value is in `came`, in which nothing is overwritten: a longer value may
        contain a shorter one, and would not be found once that is overwritten."""
        result = bytearray(shown)
        for value in self._values:
            at = came.find(value)
            while at >= 0:
                result[at : at + len(value)] = b"*" * len(value)
                at = came.find(value, at + 1)
        return bytes(result)

    @staticmethod
    def _begins(value: bytes, data: bytes) -> int:
        """The index at the end of `data` where `value` may begin. The length of `data`: nowhere."""
        at = data.find(value[:1], max(0, len(data) - len(value) + 1))
        while at >= 0 and not value.startswith(data[at:]):
            at = data.find(value[:1], at + 1)
        return at if at >= 0 else len(data)


# ---- connections ----


class SecretInjector:
    """Injects the secrets of one sandbox: an `Interceptor` of its egress proxy. `trust` gives the TLS context that
    verifies servers."""

    def __init__(self, secrets: SandboxSecrets, trust: Callable[[], ssl.SSLContext]) -> None:
        self._secrets = tuple(secrets.secrets.values())
        self._values = frozenset(secret.value.encode() for secret in self._secrets)
        self._issuer = Issuer(secrets.authority) if secrets.authority else None
        self._headers = secrets.headers
        self._header_authority = secrets.header_authority
        self._header_issuer = Issuer(secrets.header_authority) if secrets.header_authority else None
        self._trust = trust

    @property
    def variables(self) -> Mapping[str, str]:
        """Variables for programs inside, so that they trust what headers are set with. Those of secrets have them."""
        return ca_bundle.VARIABLES if self._header_authority else {}

    async def install(self, files: Files) -> None:
        """Have programs inside trust the authority for the hosts whose headers are set, if they do not yet.

        Raises:
            what `ca_bundle.install` raises.
        """
        authority = self._header_authority
        if authority is not None and not await files.exists(ca_bundle.hashed(authority), user="root"):
            await ca_bundle.install(files, authority)

    def headers_for(self, host: str) -> Headers:
        """The headers that are set in requests to `host`, which is written as in `SandboxSecrets.headers`: those for
        exactly this host, else those for all below another, the nearest. They are not merged."""
        host = host.lower()
        scheme = PLAIN_HTTP if host.startswith(PLAIN_HTTP) else ""
        labels = host.removeprefix(scheme).split(".")
        wild = (f"{scheme}*.{'.'.join(labels[i:])}" for i in range(1, len(labels)))
        found = next((self._headers[pattern] for pattern in (host, *wild) if pattern in self._headers), {})
        return [(name.encode(), value.encode()) for name, value in found.items()]

    def tunnel_handler(self, host: str, port: int) -> TunnelHandler | None:  # noqa: ARG002 - a secret's host is on every port
        """The handler of tunnels to `host`. None: neither a secret nor a header is for it with TLS."""
        return self.intercept if rules(self._secrets, host) or self.headers_for(host) else None

    def tunnel_filter(self, host: str) -> Scrubber | None:
        """The filter for what comes through a tunnel to `host` without TLS. None: no secret is for it."""
        return Scrubber(self._values) if self._is_for(host) else None

    def rewrite(self, method: bytes, host: str, headers: Headers) -> tuple[Headers, Scrubber | None]:
        """The headers of a request to `host` without TLS as they are sent, and the filter for its response. None: no
        secret is for it.

        Raises:
            InvalidRequest: it asks for a secret that is for this host only with TLS, or asks to have one echoed.
        """
        given = self.headers_for(PLAIN_HTTP + host)
        if not self._is_for(host):
            return set_headers(given, headers), None
        headers = _uncompressed(headers)
        filled = substitute(rules(self._secrets, PLAIN_HTTP + host), headers)
        if filled != headers and method == b"TRACE":
            raise InvalidRequest(f"a secret for {host} is not sent with TRACE, which echoes the request; use GET")
        if substitute(rules(self._secrets, host), filled) != filled:
            raise InvalidRequest(
                f"a secret for {host} is not sent without TLS; use https, "
                f"or add the host '{PLAIN_HTTP}{host}' to the secret"
            )
        return set_headers(given, filled), Scrubber(self._values | _encoded(headers, filled))

    def _is_for(self, host: str) -> bool:
        """Whether a secret is for `host`, with TLS or without: it may repeat what it was sent in any response."""
        return bool(rules(self._secrets, host) or rules(self._secrets, PLAIN_HTTP + host))

    async def intercept(self, client: ByteStream, host: str, port: int, dial: Dial) -> None:
        """Serve a tunnel from inside to `host`, to its end.

        `dial` connects to the real host. In a connection that does not begin with a TLS handshake a placeholder stays a
        placeholder, and what comes back is searched. The caller closes `client`.
        """
        host = host.lower()
        with contextlib.suppress(*DISCONNECTED):
            stream = _PrefixedStream(client, await client.receive(_CHUNK_BYTES))
            issuer = self._issuer if rules(self._secrets, host) else self._header_issuer
            if stream.first[:1] == TLS_HANDSHAKE and issuer is not None:
                await self._terminate(stream, issuer.context(host), host, port, dial)
            else:
                async with await dial() as server:
                    await join(stream, server, self.tunnel_filter(host))

    async def _terminate(self, client: ByteStream, as_host: ssl.SSLContext, host: str, port: int, dial: Dial) -> None:
        from anyio.streams.tls import TLSStream

        try:
            with anyio.fail_after(_HANDSHAKE_TIMEOUT_S):
                inner = await TLSStream.wrap(client, server_side=True, ssl_context=as_host, standard_compatible=False)
        except (ssl.SSLError, TimeoutError) as error:
            _log.info("TLS handshake of a client inside for %s failed: %s", host, error)
            return
        given = self.headers_for(host)
        connection = _InterceptedConnection(inner, host, port, rules(self._secrets, host), self._values, given)
        await connection.serve(partial(self._connect, host, dial))

    async def _connect(self, host: str, dial: Dial) -> ByteStream:
        """A TLS connection to the real host, whose certificate is verified."""
        from anyio.streams.tls import TLSStream

        try:
            with anyio.fail_after(_HANDSHAKE_TIMEOUT_S):
                stream = await dial()
        except (AtollError, OSError, anyio.BrokenResourceError) as error:
            raise _InjectionRefused(502, f"cannot connect to {host}") from error
        try:
            with anyio.fail_after(_HANDSHAKE_TIMEOUT_S):
                return await TLSStream.wrap(
                    _PrefixedStream(stream, b""), hostname=host, ssl_context=self._trust(), standard_compatible=False
                )
        except BaseException as error:
            await anyio.aclose_forcefully(stream)
            if isinstance(error, ssl.SSLCertVerificationError):
                text = f"the certificate of {host} is not valid: {error.verify_message}"
                raise _InjectionRefused(502, text) from error
            if isinstance(error, DISCONNECTED):
                raise _InjectionRefused(502, f"TLS handshake with {host} failed") from error
            raise


class _InjectionRefused(Exception):
    """A request that is answered here, with an error."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


class _InterceptedConnection:
    """Requests from inside over one connection, one after another, and their responses."""

    def __init__(
        self,
        client: TLSStream,
        host: str,
        port: int,
        rules: Sequence[InjectionRule],
        values: frozenset[bytes],
        given: Headers,
    ) -> None:
        self._tls = client
        self._client = Http1Peer(client, h11.SERVER)
        self._server: Http1Peer | None = None
        self._host = host
        self._port = port
        self._rules = rules
        self._values = values
        self._given = given
        self._scrubbed = values
        """What is overwritten in the response to the present request."""
        self._cut_short = False

    async def serve(self, connect: Callable[[], Awaitable[ByteStream]]) -> None:
        try:
            while await self._exchange(connect):
                pass
        except _InjectionRefused as refused:
            _log.info("a request from inside to %s was refused: %s", self._host, refused.text)
            with contextlib.suppress(*DISCONNECTED):
                await self._client.refuse(refused.status, refused.text)
        finally:
            if self._server is not None:
                await anyio.aclose_forcefully(self._server.stream)
        if not self._cut_short:
            await self._close_tls()

    async def _exchange(self, connect: Callable[[], Awaitable[ByteStream]]) -> bool:
        """One request and its response. Returns whether there may be another."""
        request = await self._next_request()
        if request is None:
            return False
        headers = self._check(request)
        if self._server is None:
            self._server = Http1Peer(await connect(), h11.CLIENT)
        client, server = self._client, self._server
        scrubber = Scrubber(self._scrubbed)

        def rewrite(head: h11.InformationalResponse | h11.Response) -> h11.Event:
            headers, reason = scrubber.pairs(head.headers.raw_items()), scrubber.all(head.reason)
            return type(head)(status_code=head.status_code, headers=headers, reason=reason)

        try:
            await server.send(h11.Request(method=request.method, target=request.target, headers=headers))
        except (h11.ProtocolError, *DISCONNECTED):
            raise _InjectionRefused(502, f"{self._host} closed the connection") from None
        failure = await exchange(client, server, self._host, rewrite, scrubber, trailers=True)
        if client.http.our_state is h11.SWITCHED_PROTOCOL:
            await self._switched(server)
        elif failure and client.can_respond:
            raise _InjectionRefused(failure.status, failure.reason)
        self._cut_short = failure is not None
        if not (client.is_done and server.is_done):
            return False
        client.http.start_next_cycle()
        server.http.start_next_cycle()
        return True

    async def _next_request(self) -> h11.Request | None:
        """None: the client has closed the connection, or the host has, where a request would be lost."""
        found: h11.Event | h11.RemoteProtocolError | None = None

        async def watch(server: Http1Peer) -> None:
            with contextlib.suppress(*DISCONNECTED):
                await server.stream.receive(1)
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.cancel_scope.deadline = anyio.current_time() + _IDLE_TIMEOUT_S
            if self._server is not None:
                tasks.start_soon(watch, self._server)
            try:
                found = await self._client.next_event()
            except h11.RemoteProtocolError as error:
                found = error
            except DISCONNECTED:
                pass
            tasks.cancel_scope.cancel()
        if isinstance(found, h11.RemoteProtocolError):
            text = f"malformed HTTP request: {found}; only HTTP/1.1 is supported here"
            raise _InjectionRefused(found.error_status_hint, text)
        return found if isinstance(found, h11.Request) else None

    def _check(self, request: h11.Request) -> Headers:
        """The headers with which a request is sent: it is for this host and no other.

        Raises:
            _InjectionRefused: it is not.
        """
        fields: dict[bytes, list[bytes]] = {}
        for name, content in request.headers:
            fields.setdefault(name, []).append(content)
        names = (self._host.encode(), f"{self._host}:{self._port}".encode())
        if [name.lower() in names for name in fields.get(b"host", [])] != [True]:
            raise _InjectionRefused(421, f"this connection is to {self._host}, but the request is for another host")
        if request.method in (b"CONNECT", b"TRACE") or not (request.target[:1] == b"/" or request.target == b"*"):
            raise _InjectionRefused(400, "the request target must be a path; CONNECT and TRACE are not supported")
        headers: Headers = request.headers.raw_items()
        if self._values:
            headers = _uncompressed(headers)
        filled = substitute(self._rules, headers)
        self._scrubbed = self._values | _encoded(headers, filled)
        if filled == headers:
            return set_headers(self._given, filled)
        upgrades = b",".join(fields.get(b"upgrade", [b"websocket"])).lower().split(b",")
        if any(protocol.strip() != b"websocket" for protocol in upgrades):
            raise _InjectionRefused(400, "a request with a secret can be upgraded to websocket only")
        # Extensions would compress what comes back.
        return set_headers(self._given, _without(b"sec-websocket-extensions", filled))

    async def _switched(self, server: Http1Peer) -> None:
        """After an upgrade bytes pass in both directions. A placeholder in them stays a placeholder."""
        scrubber = Scrubber(self._scrubbed)
        early, late = self._client.http.trailing_data[0], server.http.trailing_data[0]
        if early:
            await server.stream.send(early)
        if late := scrubber.feed(late):
            await self._client.stream.send(late)
        await join(self._client.stream, server.stream, scrubber)

    async def _close_tls(self) -> None:
        """Close TLS in order, so that the client knows that nothing was cut off."""
        with anyio.move_on_after(_CLOSE_TIMEOUT_S), contextlib.suppress(*DISCONNECTED):
            await self._tls.unwrap()


class _PrefixedStream(ByteStream):
    """A stream of which `first` was read already. Sends are serialised: TLS sends while it receives, too."""

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
