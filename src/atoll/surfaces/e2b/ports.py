"""Ports of sandboxes at `{port}-{id}.{domain}`, as E2B's `get_host` names them.

Owns which host names are E2B's, who may reach a port, and the answers of E2B's proxy, word for word where SDKs compare
words. The ports of a sandbox that an E2B client made can be reached by all who know its id, unless it was made with
`allow_public_traffic=False`: then a request has the traffic token. What listens on a port may be told of another host
than the client's (`mask_request_host`), and may itself speak TLS (`https_ports`): its certificate is not verified, as
the connection does not leave the machine. All other sandboxes have previews, with tokens of their own
(`atoll.server.previews`), and nothing here. Not here: how a request is passed on (`runtime/previews/`), and
ports of E2B's own planes (`routing.py`).
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import anyio
import h11
from anyio.abc import ByteStream

from atoll.contract.errors import AtollError, Forbidden, PortRefused
from atoll.runtime.guest.ports import PortConnection
from atoll.runtime.http1 import DISCONNECTED, Headers, strip_hop_by_hop
from atoll.runtime.previews.forward import dial_either
from atoll.runtime.previews.pages import page
from atoll.runtime.previews.proxy import PreviewResponse, UpstreamStream, header
from atoll.runtime.previews.router import cookie_of_host
from atoll.runtime.sandbox import Sandbox
from atoll.server.tenants import Tenant
from atoll.surfaces.e2b.record import E2bRecord
from atoll.surfaces.e2b.tokens import SandboxTokens, sandbox_id

ENVD_PORT = 49983
INTERPRETER_PORT = 49999
PLANE_PORTS = frozenset({ENVD_PORT, INTERPRETER_PORT})
"""Ports that no program in the sandbox listens on: this server answers there."""
TRAFFIC_HEADER = b"e2b-traffic-access-token"
NOT_FOUND = "The sandbox was not found"
PORT_NOT_OPEN = "The sandbox is running but port is not open"
_HANDSHAKE_TIMEOUT_S = 10.0
_HOST = re.compile(rb"([0-9]{1,5})-(atoll[0-9a-f]{16})\.[^:]*(:[0-9]+)?")
_OURS = frozenset({b"host", TRAFFIC_HEADER, b"via", b"forwarded", b"x-forwarded-for", b"x-forwarded-host"})


@dataclass(frozen=True)
class SandboxTarget:
    """A sandbox and a port, as a request names them. Nothing of it is checked yet."""

    public_id: str
    port: int


Reach = Callable[[SandboxTarget], Awaitable[tuple[Tenant, Sandbox]]]
IsEnded = Callable[[SandboxTarget], Awaitable[bool]]
"""Whether what is under way for a sandbox has to end."""
_WATCH_S = 1.0


def host_target(host: bytes) -> SandboxTarget | None:
    """What a Host header names. None: it is not E2B's."""
    found = _HOST.fullmatch(host.lower())
    return SandboxTarget(found[2].decode(), int(found[1])) if found else None


def proxy_answer(target: SandboxTarget, message: str) -> dict[str, Any]:
    """The body of an answer of E2B's proxy."""
    body: dict[str, Any] = {"sandboxId": target.public_id[:64], "message": message, "code": 502}
    return body | ({"port": target.port} if message == PORT_NOT_OPEN else {})


class SandboxPorts:
    """The ports of all sandboxes."""

    def __init__(self, reach: Reach, is_ended: IsEnded, tokens: SandboxTokens) -> None:
        self._reach = reach
        self._is_ended = is_ended
        self._tokens = tokens

    def route(self, request: h11.Request, target: SandboxTarget, peer: str, added: Headers) -> PortUpstream:
        """Where a request goes. Whether it may is found out when it is sent."""
        given = header(request.headers, TRAFFIC_HEADER).decode("latin-1")
        id = sandbox_id(target.public_id)
        has_token = bool(given) and id is not None and self._tokens.matches(id, given, "traffic")
        host = header(request.headers, b"host")
        headers: Headers = [(b"Host", host)]
        headers += [
            (name, value)
            for name, value in strip_hop_by_hop(request.headers.raw_items())
            if name.lower().replace(b"_", b"-") not in _OURS and name.lower() != b"content-length"
        ]
        headers += [(b"X-Forwarded-For", peer.encode()), (b"X-Forwarded-Host", host), (b"Via", b"1.1 atoll")]
        html = b"text/html" in header(request.headers, b"accept")
        return PortUpstream(
            self._reach, self._is_ended, target, has_token, request.target, headers, html, added, has_given=bool(given)
        )


@dataclass
class PortUpstream:
    """A request for a port: the proxy's `Upstream`."""

    reach: Reach
    is_ended: IsEnded
    wanted: SandboxTarget
    has_token: bool
    target: bytes
    headers: Headers
    html: bool
    added: Headers = field(default_factory=list)
    has_given: bool = False

    @property
    def server(self) -> object:
        """A request without the token is not sent on a connection that was made for one with it, and none on an old
        one: whether the sandbox may be reached is found out when a connection is made."""
        return self.wanted, self.has_token, int(time.monotonic() / _WATCH_S)

    async def dial(self) -> UpstreamStream:
        _, sandbox = await self.reach(self.wanted)
        record = E2bRecord.of(sandbox.info)
        if not self.has_token and not record.public_ports:
            is_what = "invalid" if self.has_given else "missing"
            raise Forbidden(f"Sandbox is secured with traffic access token. Token header '{_NAME}' is {is_what}")
        connection = await dial_either(sandbox.dial, self.wanted.port)
        mask, https_ports = record.network.get("maskRequestHost"), record.network.get("httpsPorts") or ()
        if mask is None and self.wanted.port not in https_ports:
            return connection
        host = None if mask is None else mask.replace("${PORT}", str(self.wanted.port)).encode()
        stream: ByteStream = connection
        if self.wanted.port in https_ports:
            stream = await _over_tls(connection, self.wanted.port)
        return _ChangedPort(connection, stream, host)

    def headers_on(self, stream: UpstreamStream) -> Headers:
        if isinstance(stream, _ChangedPort) and stream.host is not None:
            return [(b"Host", stream.host), *self.headers[1:]]
        return self.headers

    @contextmanager
    def track(self) -> Iterator[anyio.CancelScope]:
        with anyio.CancelScope() as scope:
            watching = asyncio.create_task(self._watch(scope))
            try:
                yield scope
            finally:
                watching.cancel()

    async def _watch(self, exchange: anyio.CancelScope) -> None:
        """End an exchange, such as a WebSocket, when its tenant is disabled."""
        is_ended = False
        while not is_ended:
            await anyio.sleep(_WATCH_S)
            is_ended = await self.is_ended(self.wanted)
        exchange.cancel()

    def rewrite_response(self, headers: Headers) -> Headers:
        kept = [(name, cookie_of_host(value) if name.lower() == b"set-cookie" else value) for name, value in headers]
        return [*kept, *self.added]

    def error_response(self, error: AtollError | str) -> PreviewResponse:
        if isinstance(error, Forbidden):
            status, body = 403, {"sandboxId": self.wanted.public_id, "message": error.message, "code": 403}
        elif isinstance(error, PortRefused):
            status, body = 502, proxy_answer(self.wanted, PORT_NOT_OPEN)
        elif isinstance(error, AtollError):
            status, body = 502, proxy_answer(self.wanted, NOT_FOUND)
        else:
            status, body = 502, proxy_answer(self.wanted, f"the port sent a malformed HTTP response: {error[:200]}")
        if self.html:
            shown = page(
                status, str(body["message"]), f"Port {self.wanted.port} of {self.wanted.public_id}.", html=True
            )
            return PreviewResponse(shown.status, [*shown.headers, *self.added], shown.body)
        data = json.dumps(body).encode()
        return PreviewResponse(status, [(b"Content-Type", b"application/json"), *self.added], data)


class _ChangedPort:
    """A connection to a port that is told of another host, or that speaks TLS."""

    def __init__(self, connection: PortConnection, stream: ByteStream, host: bytes | None) -> None:
        self.host = host
        self._connection = connection
        self._stream = stream

    async def receive(self, max_bytes: int = 65536) -> bytes:
        return await self._stream.receive(max_bytes)

    async def send(self, item: bytes) -> None:
        await self._stream.send(item)

    async def send_eof(self) -> None:
        if self._stream is self._connection:  # TLS cannot close one direction
            await self._connection.send_eof()

    async def aclose(self) -> None:
        await self._connection.aclose()

    def is_quiet(self) -> bool:
        return self._connection.is_quiet()


class _SerialSends(ByteStream):
    """TLS sends while it receives, too."""

    def __init__(self, connection: PortConnection) -> None:
        self._connection = connection
        self._sending = anyio.Lock()

    async def receive(self, max_bytes: int = 65536) -> bytes:
        return await self._connection.receive(max_bytes)

    async def send(self, item: bytes) -> None:
        async with self._sending:
            await self._connection.send(item)

    async def send_eof(self) -> None:
        await self._connection.send_eof()

    async def aclose(self) -> None:
        await self._connection.aclose()


async def _over_tls(connection: PortConnection, port: int) -> ByteStream:
    """
    Raises:
        PortRefused: the port does not speak TLS.
    """
    from anyio.streams.tls import TLSStream

    try:
        with anyio.fail_after(_HANDSHAKE_TIMEOUT_S):
            return await TLSStream.wrap(
                _SerialSends(connection), server_side=False, ssl_context=_unverified(), standard_compatible=False
            )
    except BaseException as error:
        with anyio.CancelScope(shield=True):
            await connection.aclose()
        if isinstance(error, (*DISCONNECTED, TimeoutError)):
            raise PortRefused(f"port {port} does not speak TLS, and is one of the sandbox's httpsPorts") from error
        raise


@lru_cache(maxsize=1)
def _unverified() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["http/1.1"])
    return context


_NAME = TRAFFIC_HEADER.decode()
