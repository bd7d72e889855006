"""Previews: ports inside sandboxes as URLs for clients on the host, by a name and a token.

Owns which ports are exposed, under which names, the check of tokens, and the headers that a server inside gets. Not
here: how requests and responses pass (`proxy.py`), ports without a token (`forward.py`), and how a sandbox is connected
to or woken (`sandbox.py`). Used by the engine and `Sandbox.expose`. A preview exists in this process and ends with it;
nothing of it is on disk.

A client without a valid token learns nothing: for an unknown name, a port that is not exposed and a wrong token the
response is the same 404, byte for byte.
"""

from __future__ import annotations

import errno
import hmac
import logging
import re
import secrets
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Protocol
from urllib.parse import unquote_to_bytes

import anyio
import anyio.lowlevel
import h11

from atoll.contract.errors import AtollError, InvalidRequest, PortRefused, SandboxShutdown
from atoll.contract.model import Preview, SandboxInfo
from atoll.contract.names import DEFAULT_NAMESPACE
from atoll.runtime.guest.ports import PortConnection
from atoll.runtime.http1 import Headers, one_line, strip_hop_by_hop
from atoll.runtime.previews.forward import DialPort, dial_either, listen_on, next_client, port_of
from atoll.runtime.previews.pages import page
from atoll.runtime.previews.proxy import PreviewResponse, UpstreamStream, header, serve

if TYPE_CHECKING:
    from atoll.runtime.lifetimes import BackgroundTasks

PARAMETER = "atoll_token"
"""The query parameter that carries the token when a preview is first opened."""
HEADER = "Atoll-Token"
"""The header that may carry the token instead."""
MAX_CONNECTIONS = 512
"""Client connections at the same time. More wait to be accepted."""
MAX_EXCHANGES = 256
"""Requests and WebSockets at the same time, per preview."""

_COOKIE = b"atoll-preview-"
PREFIX = "/preview/"
_HOST = re.compile(rb"([0-9]+-[a-z0-9_-]+)\.localhost(?::[0-9]+)?")
_QUERY_PART = re.compile(rb"^[^&;?]*|[&;?][^&;?]*")
_PATH_PARAMETER = re.compile(rb";[^/;]*")
_MAX_LABEL_CHARS = 63
_LOOPBACK = {
    "localhost": "127.0.0.1",
    "127.0.0.1": "127.0.0.1",
    "0.0.0.0": "127.0.0.1",  # noqa: S104 - only if it is configured
    "::1": "::1",
    "::": "::1",
}
"""Listen addresses that names below `.localhost` resolve to, and the address for clients on this machine."""
_PROBE_S = (0.01, 0.25)
_SAME_PORT_TRIES = 32
_OURS = frozenset(
    b"host content-length cookie referer via forwarded x-forwarded-for x-forwarded-host x-forwarded-proto "
    b"x-forwarded-port x-forwarded-prefix x-real-ip atoll-token".split()
)
"""Headers of a request that are replaced or removed, also when they are written with '_' for '-'."""
_log = logging.getLogger(__name__)


def check_port(port: int, wait_s: float) -> None:
    """
    Raises:
        InvalidRequest: it is not a port, or one cannot wait for it so long.
    """
    if not 1 <= port <= 65535:
        raise InvalidRequest(f"the port is {port}; it must be 1 to 65535")
    if not wait_s >= 0:
        raise InvalidRequest(f"wait_s is {wait_s}; it must be 0 or more")


def label_of(namespace: str, name: str, port: int) -> str:
    """The name of a preview in a host name: one label for any name of a sandbox, behind it the namespace, unless that
    is the default.

    One, because browsers separate the cookies of two hosts only if they differ in the label before `localhost`.
    """
    label = f"{port}-" + name.replace("_", "_u").replace(".", "__")
    return label if namespace == DEFAULT_NAMESPACE else f"{label}_-{namespace}"


@dataclass(eq=False)
class ExposedPort:
    """A port inside that is exposed, and its preview."""

    sandbox_id: str
    name: str
    dial: DialPort
    preview: Preview
    exchanges: set[anyio.CancelScope] = field(default_factory=set)

    def __str__(self) -> str:
        return f"{self.name}:{self.preview.port}"

    async def connect(self) -> PortConnection:
        """Connect to the server, on either address of `localhost`. Wakes the sandbox.

        Raises:
            PortRefused: no server listens.
        """
        return await dial_either(self.dial, self.preview.port)


class PreviewSite(Protocol):
    """Where previews are served, and which there are. `Previews` is that of an engine; a server has its own."""

    @property
    def scheme(self) -> bytes:
        """http or https, as clients see it."""

    @property
    def cookie(self) -> bytes:
        """The name of the cookie that holds a token."""

    def begin(self) -> Headers:
        """A request begins. Gives headers that its response gets."""

    def label_of_host(self, host: bytes) -> str | None:
        """The name of the preview that a Host header, in lower case, is for. None: it is for none."""

    def find(self, label: str, offered: Iterable[bytes]) -> ExposedPort | None:
        """The preview of this name, if one of the offered tokens is valid. Takes the same time for an unknown name."""


class Previews:
    """The previews of one engine, and the address on which they are served."""

    def __init__(self, tasks: BackgroundTasks, listen: tuple[str, int]) -> None:
        self._tasks = tasks
        self._listen = listen
        self._port: int | None = None
        self._exposed: dict[str, ExposedPort] = {}
        self._slots = anyio.Semaphore(MAX_CONNECTIONS)

    async def expose(self, sandbox: SandboxInfo, port: int, dial: DialPort, *, wait_s: float) -> Preview:
        """See `Sandbox.expose`."""
        check_port(port, wait_s)
        label = label_of(sandbox.namespace, sandbox.name, port)
        listening = await self._listening()
        exposed = self._exposed.get(label)
        if exposed is None or exposed.sandbox_id != sandbox.id:
            self._end(label)
            token = secrets.token_urlsafe(24)
            preview = self._preview(sandbox.name, port, label, token, listening)
            exposed = ExposedPort(sandbox.id, sandbox.name, dial, preview)
        if wait_s > 0:
            await wait_listening(exposed, wait_s)
        return self._exposed.setdefault(label, exposed).preview

    def unexpose(self, sandbox_id: str, port: int | None = None) -> None:
        """End a preview, or all previews of a sandbox, and their exchanges."""
        for label, exposed in list(self._exposed.items()):
            if exposed.sandbox_id == sandbox_id and port in (None, exposed.preview.port):
                self._end(label)

    def of(self, sandbox_id: str) -> list[Preview]:
        found = [exposed.preview for exposed in self._exposed.values() if exposed.sandbox_id == sandbox_id]
        return sorted(found, key=lambda preview: preview.port)

    def _end(self, label: str) -> None:
        exposed = self._exposed.pop(label, None)
        if exposed is not None:
            for scope in list(exposed.exchanges):
                scope.cancel()

    def _preview(self, name: str, port: int, label: str, token: str, listening: int) -> Preview:
        address = self._listen[0]
        here = _LOOPBACK.get(address, address)
        here = f"[{here}]" if ":" in here else here
        by_path = f"http://{here}:{listening}{PREFIX}{label}/?{PARAMETER}={token}"
        by_host = f"http://{label}.localhost:{listening}/?{PARAMETER}={token}"
        # Only a path, if the label is too long for a host name or `.localhost` does not resolve to the listen address.
        url = by_host if address in _LOOPBACK and len(label) <= _MAX_LABEL_CHARS else by_path
        return Preview(sandbox=name, port=port, url=url, path_url=by_path, token=token)

    # --------------------------------------------------------------------------------------------- listening

    async def _listening(self) -> int:
        """The port on which previews are served. The first call begins to listen."""
        if self._port is None:
            listeners = _listen(*self._listen)
            self._port = port_of(listeners[0])
            for listener in listeners:
                self._tasks.start_soon(self._accept, listener)
        await anyio.lowlevel.checkpoint()
        return self._port

    async def _accept(self, listener: socket.socket) -> None:
        with listener:
            while True:
                await self._slots.acquire()
                try:
                    client, address = await next_client(listener)
                except BaseException:
                    self._slots.release()
                    raise
                self._tasks.start_soon(self._serve, client, address)

    async def _serve(self, client: socket.socket, address: str) -> None:
        try:
            await serve(client, PreviewRouter(self, address))
        except Exception:  # noqa: BLE001 - a bug that a client triggers must not end the engine
            _log.exception("serving a preview connection failed; this is a bug")
        finally:
            self._slots.release()

    # ------------------------------------------------------------------------------------------------- tokens

    def find(self, label: str, offered: Iterable[bytes]) -> ExposedPort | None:
        """The preview of this name, if one of the offered tokens is valid. Takes the same time for an unknown name."""
        return find_exposed(self._exposed, label, offered)

    def label_of_host(self, host: bytes) -> str | None:
        named = _HOST.fullmatch(host)
        return named[1].decode() if named else None

    def begin(self) -> Headers:
        return []

    @property
    def scheme(self) -> bytes:
        return b"http"

    @property
    def cookie(self) -> bytes:
        """Contains the port, as all ports of a host share their cookies: two engines may serve the same name."""
        return b"%s%d" % (_COOKIE, self._port or 0)


_UNKNOWN_TOKEN = secrets.token_urlsafe(24)


def find_exposed(exposed: Mapping[str, ExposedPort], label: str, offered: Iterable[bytes]) -> ExposedPort | None:
    """See `PreviewSite.find`."""
    found = exposed.get(label)
    wanted = (found.preview.token if found else _UNKNOWN_TOKEN).encode()
    right = [hmac.compare_digest(wanted, token) for token in offered]
    return found if any(right) else None


class PreviewRouter:
    """Finds the preview that a request is for, checks its token and removes it: the proxy's `Router`."""

    def __init__(self, site: PreviewSite, peer: str) -> None:
        self._site = site
        self._peer = peer

    def refuse(self, status: int, reason: str) -> PreviewResponse:
        added = self._site.begin()
        refusal = page(
            status, HTTPStatus(status).phrase, f"Malformed HTTP request: {one_line(reason)[:200]}.", html=False
        )
        return PreviewResponse(refusal.status, [*refusal.headers, *added, _CLOSE], refusal.body)

    def route(self, request: h11.Request) -> _PreviewUpstream | PreviewResponse:
        added = self._site.begin()
        found = self._find(request)
        if isinstance(found, PreviewResponse):
            return PreviewResponse(found.status, [*found.headers, *added], found.body)
        found.added = added
        return found

    def _find(self, request: h11.Request) -> _PreviewUpstream | PreviewResponse:
        host = header(request.headers, b"host")
        label = self._site.label_of_host(host.lower())
        path, mark, query = request.target.partition(b"?")
        prefix = b""
        if label is None:
            if not path.startswith(PREFIX.encode()):
                return _not_found(request)
            label, _, rest = path[len(PREFIX) :].decode("ascii", "replace").partition("/")
            prefix, path = f"{PREFIX}{label}".encode(), f"/{rest}".encode()
        query, in_query = _without_token(query)
        cookies, in_cookies = self._cookies(request, prefix)
        in_header = [value for name, value in request.headers if name == HEADER.lower().encode()]
        exposed = self._site.find(label, [*in_query, *in_header, *in_cookies])
        if exposed is None:
            return _not_found(request)
        token = exposed.preview.token.encode()
        path = _PATH_PARAMETER.sub(lambda found: b"" if _contains(found[0], token) else found[0], path)
        query = _without_parts(query, token)
        target = path + (mark + query if query else b"")
        cookie = None
        if in_query:
            secure = b"; Secure" if self._site.scheme == b"https" else b""
            cookie = b"%s=%s; Path=%s/; HttpOnly; SameSite=Lax%s" % (self._site.cookie, token, prefix, secure)
            if _is_navigation(request):
                # A URL without the token: it must not be in the browser's history, nor in the Referer for other sites.
                origin = b"" if prefix else b"%s://%s" % (self._site.scheme, host)
                where = origin + prefix + target
                return PreviewResponse(303, [(b"Location", where), (b"Set-Cookie", cookie), *_PRIVATE])
        if len(exposed.exchanges) >= MAX_EXCHANGES:
            text = f"{exposed} has {MAX_EXCHANGES} requests in progress, which is the limit. Try again later."
            return page(503, "Too many requests", text, html=_wants_html(request))
        kept = b"; ".join(each for each in cookies if not _contains(each, token))
        headers = self._headers(request, host or f"localhost:{exposed.preview.port}".encode(), prefix, kept, token)
        return _PreviewUpstream(
            exposed, target, headers, prefix, cookie, html=_wants_html(request), scheme=self._site.scheme
        )

    def _cookies(self, request: h11.Request, prefix: bytes) -> tuple[list[bytes], list[bytes]]:
        """The cookies for the server, and the tokens among the others.

        For a preview below a path only cookies that its server has set: a browser sends the cookies of all servers at
        the same address.
        """
        kept, tokens = [], []
        for name, value in request.headers:
            for cookie in value.split(b";") if name == b"cookie" else ():
                key, _, content = cookie.strip().partition(b"=")
                if key == self._site.cookie:
                    tokens.append(content)
                elif key.lower().startswith(_COOKIE):
                    continue
                elif not prefix:
                    kept.append(cookie.strip())
                elif key.startswith(_mark(prefix)):
                    kept.append(cookie.strip()[len(_mark(prefix)) :])
        return kept, tokens

    def _headers(self, request: h11.Request, host: bytes, prefix: bytes, cookies: bytes, token: bytes) -> Headers:
        headers: Headers = [(b"Host", host)]
        headers += [
            (name, value)
            for name, value in strip_hop_by_hop(request.headers.raw_items())
            if name.lower().replace(b"_", b"-") not in _OURS and not _contains(value, token)
        ]
        if cookies:
            headers.append((b"Cookie", cookies))
        if referer := header(request.headers, b"referer"):
            address, mark, query = referer.partition(b"?")
            query = _without_parts(_without_token(query)[0], token)
            referer = address + (mark + query if query else b"")
            if not _contains(referer, token):
                headers.append((b"Referer", referer))
        headers += [
            (b"X-Forwarded-For", self._peer.encode()),
            (b"X-Forwarded-Host", host),
            (b"X-Forwarded-Proto", self._site.scheme),
            (b"Via", b"1.1 atoll"),
        ]
        if prefix:
            headers.append((b"X-Forwarded-Prefix", prefix))
        return headers


@dataclass
class _PreviewUpstream:
    """A request with a valid token, and the server that it is for: the proxy's `Upstream`."""

    server: ExposedPort
    target: bytes
    headers: Headers
    """`Host` first."""
    prefix: bytes
    cookie: bytes | None
    html: bool
    scheme: bytes
    added: Headers = field(default_factory=list)
    """Headers of ours that the response gets."""

    async def dial(self) -> PortConnection:
        return await self.server.connect()

    def headers_on(self, _stream: UpstreamStream) -> Headers:
        return self.headers

    @contextmanager
    def track(self) -> Iterator[anyio.CancelScope]:
        with anyio.CancelScope() as scope:
            self.server.exchanges.add(scope)
            try:
                yield scope
            finally:
                self.server.exchanges.discard(scope)

    def rewrite_response(self, headers: Headers) -> Headers:
        if self.prefix:
            headers = [self._below_prefix(name, value) for name, value in headers if name.lower() != _SCOPE]
        else:
            headers = [
                (name, cookie_of_host(value) if name.lower() == b"set-cookie" else value) for name, value in headers
            ]
        if self.cookie is not None:
            headers = [*headers, (b"Set-Cookie", self.cookie)]
        return [*headers, *self.added]

    def _below_prefix(self, name: bytes, value: bytes) -> tuple[bytes, bytes]:
        if name.lower() == b"set-cookie":
            return name, _cookie_below(value, self.prefix)
        if name.lower() == b"location":
            path = value.removeprefix(b"%s://%s" % (self.scheme, self.headers[0][1]))
            if path.startswith(b"/") and not path.startswith((b"//", self.prefix + b"/")):
                return name, self.prefix + path
        return name, value

    def error_response(self, error: AtollError | str) -> PreviewResponse:
        port, name = self.server.preview.port, self.server.name
        if isinstance(error, PortRefused):
            title = f"Nothing listens on port {port}"
            text = f"The sandbox {name} is running, but no program in it listens on this port. Start one and try again."
        elif isinstance(error, SandboxShutdown):
            title, text = f"The sandbox {name} is shut down", f"{error.message}."
        elif isinstance(error, AtollError):
            title, text = f"The sandbox {name} does not respond", f"{error.message}."
        else:
            title = f"Port {port} sent a malformed HTTP response"
            text = f"The server that listens on it does not speak valid HTTP: {error[:200]}."
        shown = page(503 if isinstance(error, SandboxShutdown) else 502, title, text, html=self.html)
        return PreviewResponse(shown.status, [*shown.headers, *self.added], shown.body)


_SCOPE = b"service-worker-allowed"
"""Removed below a path: a service worker must not control the pages of other previews."""
_CLOSE = (b"Connection", b"close")
_PRIVATE: Headers = [(b"Cache-Control", b"no-store"), (b"Referrer-Policy", b"no-referrer")]


def _not_found(request: h11.Request) -> PreviewResponse:
    text = "No preview has this URL, or its token is missing or not valid. Open the complete URL that you were given."
    response = page(404, "Preview not found", text, html=_wants_html(request))
    return PreviewResponse(response.status, [*response.headers, _CLOSE], response.body)  # no connection without a token


def _wants_html(request: h11.Request) -> bool:
    return b"text/html" in header(request.headers, b"accept")


def _is_navigation(request: h11.Request) -> bool:
    """Whether a browser opens a page, and keeps cookies. A program such as curl does not, and needs no redirect."""
    mode = header(request.headers, b"sec-fetch-mode")
    return request.method == b"GET" and (mode == b"navigate" if mode else _wants_html(request))


def _without_token(query: bytes) -> tuple[bytes, list[bytes]]:
    """A query without the token parameter, otherwise unchanged, and its tokens."""
    ours = PARAMETER.encode() + b"="
    parts = query.split(b"&")
    return (
        b"&".join(part for part in parts if not part.startswith(ours)),
        [part[len(ours) :] for part in parts if part.startswith(ours)],
    )


def _contains(text: bytes, token: bytes) -> bool:
    """Whether a client has written the token there, though it is not read from there. Percent-encoded, too."""
    return token in text or (b"%" in text and token in unquote_to_bytes(text))


def _without_parts(query: bytes, token: bytes) -> bytes:
    """A query without the parts that contain the token, whatever separates them."""
    if not _contains(query, token):
        return query
    kept = b"".join(part for part in _QUERY_PART.findall(query) if not _contains(part, token))
    return kept[1:] if kept[:1] in (b"&", b";", b"?") else kept


def _mark(prefix: bytes) -> bytes:
    """The prefix of the names of cookies that a server below a path has set."""
    return prefix.rpartition(b"/")[2] + b"~"


def cookie_of_host(cookie: bytes) -> bytes:
    """A cookie that a server sets, limited to its own host: previews may be neighbours below one domain."""
    parts = [part for part in cookie.split(b";") if part.strip().partition(b"=")[0].lower() != b"domain"]
    return b";".join(parts)


def _cookie_below(cookie: bytes, prefix: bytes) -> bytes:
    """A cookie that a server sets, limited to its own path."""
    first, *attributes = cookie.split(b";")
    path, kept = b"/", []
    for attribute in attributes:
        key, _, value = attribute.strip().partition(b"=")
        if key.lower() == b"path" and value.startswith(b"/"):
            path = value.removeprefix(prefix) or b"/"
        elif key.lower() not in (b"domain", b"path"):
            kept.append(attribute.strip())
    return b"; ".join([_mark(prefix) + first.strip(), *kept, b"Path=" + prefix + path])


async def wait_listening(exposed: ExposedPort, wait_s: float) -> None:
    """Wait until a server listens.

    Raises:
        PortRefused: none does within `wait_s`.
    """
    pause_s, longest_s = _PROBE_S
    with anyio.move_on_after(wait_s):
        while True:
            with suppress(PortRefused):
                connection = await exposed.connect()
                await connection.aclose()
                return
            await anyio.sleep(pause_s)
            pause_s = min(pause_s * 2, longest_s)
    raise PortRefused(
        f"nothing listened on port {exposed.preview.port} of {exposed.name!r} within {wait_s:g} s; start a server, "
        "or expose the port without waiting for one"
    )


def _listen(address: str, port: int) -> list[socket.socket]:
    """Listen on an address, or on all addresses of `localhost`: another program could listen on the other one, and get
    the requests.

    Raises:
        InvalidRequest: listening failed.
    """
    addresses = ("127.0.0.1", "::1") if address == "localhost" else (address,)
    tries = _SAME_PORT_TRIES
    while True:
        listeners: list[socket.socket] = []
        try:
            for each in addresses:
                try:
                    listeners.append(listen_on(each, port_of(listeners[0]) if listeners else port))
                except OSError as error:
                    if not listeners or error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                        raise
            return listeners
        except OSError as error:
            for listener in listeners:
                listener.close()
            tries -= 1
            if port == 0 and listeners and tries:  # the port is free on one of the addresses only
                continue
            raise InvalidRequest(
                f"cannot listen on {address}:{port} for previews: {error.strerror}; "
                "set another address with ATOLL_PREVIEW_LISTEN=ADDRESS:PORT, where port 0 is any free port"
            ) from error
