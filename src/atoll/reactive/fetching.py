"""Requests of `fetch_data`: a URL's content, by a network policy.

Owns HTTP as a client: redirects, sizes, times, text and JSON. Not here: whether a host may be reached, how it is
resolved and connected to. That is the egress proxy's (`runtime/egress/proxy.py`): each request is a tunnel through one,
as of a program in a sandbox, so the same code decides, and a connection goes to exactly the address that it allowed.
Used by `builtins.py`.
"""

from __future__ import annotations

import codecs
import json
import socket
import ssl
from functools import cache
from ipaddress import IPv6Address
from typing import NamedTuple
from urllib.parse import SplitResult, urljoin, urlsplit

import anyio
import h11
from anyio.abc import ByteStream, SocketStream
from anyio.streams.tls import TLSStream

from atoll.contract.errors import FetchFailed, InvalidRequest
from atoll.contract.network import AuditRecord, NetworkPolicy, read_host
from atoll.runtime.egress.audit import AuditLog
from atoll.runtime.egress.policy import PolicyEvaluator
from atoll.runtime.egress.proxy import Connector, EgressProxy
from atoll.runtime.http1 import DISCONNECTED, Http1Peer, one_line

MAX_BODY_BYTES = 16 * 1024 * 1024
"""Of a response, unless `fetch_data(limit_bytes=…)` says otherwise."""
TIMEOUT_S = 60.0
"""From the first connection to the last byte, redirects included, unless `fetch_data(timeout_s=…)` says otherwise."""
MAX_REDIRECTS = 5
_MAX_REASON_BYTES = 2_000
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_PORTS = {"http": 80, "https": 443}


class Fetched(NamedTuple):
    """A response."""

    url: str
    """Where it came from, after redirects."""
    body: bytes
    charset: str | None

    def text(self) -> str:
        """The body as text, in the encoding that the server names, or else UTF-8. Invalid bytes become U+FFFD."""
        try:
            codecs.lookup(self.charset or "utf-8")
            return self.body.decode(self.charset or "utf-8", "replace")
        except (LookupError, ValueError):
            return self.body.decode("utf-8", "replace")

    def json(self) -> object:
        """
        Raises:
            FetchFailed: it is not JSON.
        """
        try:
            return json.loads(self.text())
        except (ValueError, RecursionError) as error:
            raise FetchFailed(f"{self.url} is not JSON: {error}") from None


class _Unrecorded(AuditLog):
    """An audit log that keeps nothing: what a graph fetches is its program's own doing, not a sandbox's."""

    def __init__(self) -> None:
        pass

    def write(self, record: AuditRecord) -> None:
        pass


@cache
def _trust() -> ssl.SSLContext:
    return ssl.create_default_context()


class PolicyFetcher:
    """Fetches by one policy. Without a policy nothing is allowed."""

    def __init__(
        self, policy: NetworkPolicy | None, *, connector: Connector | None = None, trust: ssl.SSLContext | None = None
    ) -> None:
        evaluator = PolicyEvaluator(policy)
        self._proxy = EgressProxy("fetch_data", lambda: evaluator, _Unrecorded(), connector or Connector())
        self._trust = trust

    async def fetch(self, url: str, *, limit_bytes: int = MAX_BODY_BYTES, timeout_s: float = TIMEOUT_S) -> Fetched:
        """The content at a URL, after at most `MAX_REDIRECTS` redirects, each of which the policy has to allow.

        Raises:
            InvalidRequest: it is not an http or https URL.
            FetchFailed: the policy does not allow it, the server cannot be reached in time, its answer is an error, or
                the content is larger than `limit_bytes`.
        """
        try:
            with anyio.fail_after(timeout_s):
                for _ in range(MAX_REDIRECTS + 1):
                    found = await self._once(url, _target(url), limit_bytes)
                    if isinstance(found, Fetched):
                        return found
                    url = found
        except TimeoutError:
            raise FetchFailed(f"{_shown(url)} did not answer within {timeout_s:g} s") from None
        raise FetchFailed(f"{_shown(url)}: more than {MAX_REDIRECTS} redirects")

    async def _once(self, url: str, target: SplitResult, limit_bytes: int) -> Fetched | str:
        """The content, or the URL of a redirect."""
        failure: Exception | None = None
        answer: Fetched | str = ""
        ours, theirs = socket.socketpair()
        async with (
            await SocketStream.from_socket(ours) as near,
            await SocketStream.from_socket(theirs) as far,
            anyio.create_task_group() as group,
        ):
            group.start_soon(self._proxy.serve, far)
            try:
                answer = await self._through(near, url, target, limit_bytes)
            except (FetchFailed, InvalidRequest) as error:  # raised below, and not as a group
                failure = error
            except ssl.SSLError as error:
                failure = FetchFailed(f"TLS with {target.hostname} failed: {error.reason or error}")
            except h11.RemoteProtocolError as error:
                failure = FetchFailed(f"{_shown(url)}: the answer is not HTTP: {one_line(str(error))}")
            except DISCONNECTED:
                failure = FetchFailed(f"{_shown(url)}: the connection was lost")
            group.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return answer

    async def _through(self, near: ByteStream, url: str, target: SplitResult, limit_bytes: int) -> Fetched | str:
        host, port = _authority(target)
        tunnel = Http1Peer(near, h11.CLIENT)
        await tunnel.send(h11.Request(method="CONNECT", target=f"{host}:{port}", headers=[("Host", f"{host}:{port}")]))
        reply = await _response(tunnel)
        if reply.status_code != 200:
            await tunnel.send(h11.EndOfMessage())
            reason = await _body(tunnel, _MAX_REASON_BYTES, url)
            raise FetchFailed(f"{_shown(url)}: {reason.decode('utf-8', 'replace').strip()}")
        stream = near
        if target.scheme == "https":
            stream = await TLSStream.wrap(
                near, hostname=target.hostname, ssl_context=self._trust or _trust(), standard_compatible=False
            )
        server = Http1Peer(stream, h11.CLIENT)
        path = target._replace(scheme="", netloc="", fragment="").geturl() or "/"
        headers = [
            ("Host", host if port == _PORTS[target.scheme] else f"{host}:{port}"),
            ("User-Agent", "atoll"),
            ("Accept", "*/*"),
            ("Accept-Encoding", "identity"),
            ("Connection", "close"),
        ]
        await server.send(h11.Request(method="GET", target=path, headers=headers))
        await server.send(h11.EndOfMessage())
        response = await _response(server)
        given = {name.decode("latin-1"): value.decode("latin-1") for name, value in response.headers}
        if response.status_code in _REDIRECTS and "location" in given:
            return urljoin(url, given["location"])
        if not 200 <= response.status_code < 300:
            raise FetchFailed(f"{_shown(url)} answered {response.status_code}", status=response.status_code)
        if given.get("content-encoding", "identity").lower() != "identity":
            raise FetchFailed(f"{_shown(url)}: the content is compressed, though it was not asked to be")
        body = await _body(server, limit_bytes, url)
        charset = given.get("content-type", "").partition("charset=")[2].partition(";")[0].strip(" \"'")
        return Fetched(url, body, charset or None)


def _target(url: str) -> SplitResult:
    try:
        target = urlsplit(url)
        if target.scheme not in _PORTS or not target.hostname:
            raise ValueError("it needs http:// or https:// and a host")  # noqa: TRY301 - one message for all
        if target.username is not None or target.password is not None:
            raise ValueError("it must not contain a user name or a password")  # noqa: TRY301
        _authority(target)
    except ValueError as error:
        raise InvalidRequest(f"{url!r} is not a URL that can be fetched: {error}") from None
    if not url.isascii() or not url.isprintable() or " " in url:
        raise InvalidRequest(f"{url!r} is not a URL that can be fetched: other characters than ASCII are to be encoded")
    return target


def _authority(target: SplitResult) -> tuple[str, int]:
    host = read_host(target.hostname or "")
    port = target.port
    return f"[{host}]" if isinstance(host, IPv6Address) else str(host), _PORTS[target.scheme] if port is None else port


def _shown(url: str) -> str:
    """A URL in a message: without its query, which may hold a key."""
    return one_line(url.partition("?")[0])


async def _response(peer: Http1Peer) -> h11.Response:
    while True:
        try:
            event = await peer.next_event()
        except h11.RemoteProtocolError as error:
            if peer.http.trailing_data == (b"", True):
                raise h11.RemoteProtocolError("the connection was closed before it") from None
            raise error from None
        if isinstance(event, h11.Response):
            return event
        if not isinstance(event, h11.InformationalResponse):
            raise h11.RemoteProtocolError("it has no head")


async def _body(peer: Http1Peer, limit_bytes: int, url: str) -> bytes:
    body = bytearray()
    while isinstance(event := await peer.next_event(), h11.Data):
        body += event.data
        if len(body) > limit_bytes:
            raise FetchFailed(f"{_shown(url)} is larger than {limit_bytes} bytes; set limit_bytes to allow more")
    return bytes(body)
