"""Previews: servers inside sandboxes that clients of the host can reach, by a name and a token.

Knows which ports are exposed, under which names, who may come in, and what the server inside is told of the client.
Refuses to know how requests and responses travel (`proxy.py` below) and how a sandbox is dialled or woken
(`sandbox.py`). A preview lives in this process and ends with it; nothing of it is written down.

Who has no valid token learns nothing: for a name that is not there, a port that is not exposed and a token that is
wrong the answer is the same 404, byte for byte.
"""

from __future__ import annotations

import errno
import hmac
import logging
import re
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import anyio
import anyio.lowlevel
import h11
from anyio.abc import TaskGroup

from atoll.contract.errors import AtollError, InvalidRequest, PortRefused, SandboxAsleep
from atoll.contract.model import Preview
from atoll.runtime.guest.ports import PortConnection
from atoll.runtime.http1 import Headers, strip_hop_by_hop
from atoll.runtime.previews.pages import page
from atoll.runtime.previews.proxy import Answer, header, serve

PARAMETER = "atoll_token"
"""The query parameter that carries the token when a preview is first opened."""
HEADER = "Atoll-Token"
"""The header that may carry it instead."""
MAX_CONNECTIONS = 512
"""Connections of clients at once. More wait to be accepted."""
MAX_EXCHANGES = 256
"""Requests and WebSockets under way at once, per preview."""

_COOKIE = b"atoll-preview-"
_PREFIX = "/preview/"
_HOST = re.compile(rb"([0-9]+-[a-z0-9_-]+)\.localhost(?::[0-9]+)?")
_LABEL_LENGTH = 63
_LOOPBACK = {
    "localhost": "127.0.0.1",
    "127.0.0.1": "127.0.0.1",
    "0.0.0.0": "127.0.0.1",  # noqa: S104 - if it is asked for
    "::1": "::1",
    "::": "::1",
}
"""Where names below `.localhost` lead to a listener, and how it is reached on this machine."""
_PROBE_S = (0.01, 0.25)
_SAME_PORT_TRIES = 32
_BACKLOG = 256
_OURS = frozenset(
    b"host content-length cookie referer via forwarded x-forwarded-for x-forwarded-host x-forwarded-proto "
    b"x-forwarded-port x-forwarded-prefix x-real-ip atoll-token".split()
)
"""Headers of a request that are not passed on as they came, also when they are written with '_' for '-'."""
_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_log = logging.getLogger(__name__)

Dial = Callable[[int, str], Awaitable[PortConnection]]


def label_of(name: str, port: int) -> str:
    """What a preview is called in a host name: one label, whatever the sandbox's name.

    One, because browsers keep the cookies of two hosts apart only if they differ in the label before `localhost`.
    """
    return f"{port}-" + name.replace("_", "_u").replace(".", "__")


@dataclass(eq=False)
class _Exposed:
    """A port that can be reached from outside."""

    sandbox_id: str
    name: str
    dial: Dial
    preview: Preview
    under_way: set[anyio.CancelScope] = field(default_factory=set)

    def __str__(self) -> str:
        return f"{self.name}:{self.preview.port}"

    async def connect(self) -> PortConnection:
        """Connect to whoever listens, on either address that `localhost` has. Wakes the sandbox.

        Raises:
            PortRefused: nobody does.
        """
        try:
            return await self.dial(self.preview.port, "127.0.0.1")
        except PortRefused:
            return await self.dial(self.preview.port, "::1")


class Previews:
    """The previews of one runtime, and the address on which they are served."""

    def __init__(self, tasks: TaskGroup, listen: tuple[str, int]) -> None:
        self._tasks = tasks
        self._listen = listen
        self._port: int | None = None
        self._exposed: dict[str, _Exposed] = {}
        self._room = anyio.Semaphore(MAX_CONNECTIONS)
        self._nothing = secrets.token_urlsafe(24)

    async def expose(self, sandbox_id: str, name: str, port: int, dial: Dial, *, wait_s: float) -> Preview:
        """See `Sandbox.expose`."""
        if not 1 <= port <= 65535:
            raise InvalidRequest(f"the port is {port}; it may be 1 to 65535")
        if not wait_s >= 0:
            raise InvalidRequest(f"wait_s is {wait_s}; it must be 0 or more")
        label = label_of(name, port)
        listening = await self._listening()
        exposed = self._exposed.get(label)
        if exposed is None or exposed.sandbox_id != sandbox_id:
            self._end(label)
            token = secrets.token_urlsafe(24)
            preview = self._preview(name, port, label, token, listening)
            exposed = _Exposed(sandbox_id, name, dial, preview)
        if wait_s > 0:
            await _until_listening(exposed, wait_s)
        return self._exposed.setdefault(label, exposed).preview

    def unexpose(self, sandbox_id: str, port: int | None = None) -> None:
        """End a preview, or all of a sandbox, and what is under way on it."""
        for label, exposed in list(self._exposed.items()):
            if exposed.sandbox_id == sandbox_id and port in (None, exposed.preview.port):
                self._end(label)

    def of(self, sandbox_id: str) -> list[Preview]:
        found = [exposed.preview for exposed in self._exposed.values() if exposed.sandbox_id == sandbox_id]
        return sorted(found, key=lambda preview: preview.port)

    def _end(self, label: str) -> None:
        exposed = self._exposed.pop(label, None)
        if exposed is not None:
            for scope in list(exposed.under_way):
                scope.cancel()

    def _preview(self, name: str, port: int, label: str, token: str, listening: int) -> Preview:
        address = self._listen[0]
        here = _LOOPBACK.get(address, address)
        here = f"[{here}]" if ":" in here else here
        by_path = f"http://{here}:{listening}{_PREFIX}{label}/?{PARAMETER}={token}"
        by_host = f"http://{label}.localhost:{listening}/?{PARAMETER}={token}"
        # What cannot be a host name, or would name a loopback that is not listened on, has its path alone.
        url = by_host if address in _LOOPBACK and len(label) <= _LABEL_LENGTH else by_path
        return Preview(sandbox=name, port=port, url=url, path_url=by_path, token=token)

    # --------------------------------------------------------------------------------------------- listening

    async def _listening(self) -> int:
        """The port on which clients are served, from the first call on."""
        if self._port is None:
            listeners = _listen(*self._listen)
            self._port = _port_of(listeners[0])
            for listener in listeners:
                self._tasks.start_soon(self._accept, listener)
        await anyio.lowlevel.checkpoint()
        return self._port

    async def _accept(self, listener: socket.socket) -> None:
        with listener:
            while True:
                await self._room.acquire()
                try:
                    client, address = await _next_client(listener)
                except BaseException:
                    self._room.release()
                    raise
                self._tasks.start_soon(self._serve, client, address)

    async def _serve(self, client: socket.socket, address: str) -> None:
        try:
            await serve(client, _Door(self, address))
        except Exception:  # noqa: BLE001 - a bug that a client finds must not end the runtime and everybody's work
            _log.exception("a connection to a preview ended with an error of ours")
        finally:
            self._room.release()

    # ---------------------------------------------------------------------------------------- who may come in

    def find(self, label: str, offered: Iterable[bytes]) -> _Exposed | None:
        """The preview of this name, if one of the tokens that are offered is its own."""
        exposed = self._exposed.get(label)
        wanted = (exposed.preview.token if exposed else self._nothing).encode()
        right = [hmac.compare_digest(wanted, token) for token in offered]
        return exposed if any(right) else None

    @property
    def cookie(self) -> bytes:
        """Cookies do not know ports, so the name does: two programs may serve previews of the same name."""
        return b"%s%d" % (_COOKIE, self._port or 0)


class _Door:
    """Where a client comes in: finds the preview that a request is for, and takes the token from it."""

    def __init__(self, previews: Previews, peer: str) -> None:
        self._previews = previews
        self._peer = peer

    def refuse(self, status: int, reason: str) -> Answer:
        answer = page(status, "This request cannot be served", f"It was refused: {reason[:200]}.", html=False)
        return Answer(answer.status, [*answer.headers, _CLOSE], answer.body)

    def admit(self, request: h11.Request) -> _Admitted | Answer:
        host = header(request.headers, b"host")
        named = _HOST.fullmatch(host.lower())
        path, mark, query = request.target.partition(b"?")
        prefix = b""
        if named:
            label = named[1].decode()
        elif path.startswith(_PREFIX.encode()):
            label, _, rest = path[len(_PREFIX) :].decode("ascii", "replace").partition("/")
            prefix, path = f"{_PREFIX}{label}".encode(), f"/{rest}".encode()
        else:
            return _nothing_here(request)
        query, in_query = _without_token(query)
        cookies, in_cookies = self._cookies(request, prefix)
        in_header = [value for name, value in request.headers if name == HEADER.lower().encode()]
        exposed = self._previews.find(label, [*in_query, *in_header, *in_cookies])
        if exposed is None:
            return _nothing_here(request)
        target = path + (mark + query if query else b"")
        cookie = None
        if in_query:
            cookie = b"%s=%s; Path=%s/; HttpOnly; SameSite=Lax" % (
                self._previews.cookie,
                exposed.preview.token.encode(),
                prefix,
            )
            if _is_navigation(request):
                # The address that stays in the browser, in its history and in what it tells other sites has no token.
                origin = b"" if prefix else b"http://" + host
                where = origin + prefix + target
                return Answer(303, [(b"Location", where), (b"Set-Cookie", cookie), *_PRIVATE])
        if len(exposed.under_way) >= MAX_EXCHANGES:
            text = f"{MAX_EXCHANGES} requests are under way to {exposed} already. Try again when some have ended."
            return page(503, "Too many requests at once", text, html=_wants_html(request))
        headers = self._headers(request, host or f"localhost:{exposed.preview.port}".encode(), prefix, cookies)
        return _Admitted(exposed, target, headers, prefix, cookie, html=_wants_html(request))

    def _cookies(self, request: h11.Request, prefix: bytes) -> tuple[bytes, list[bytes]]:
        """The cookies that are the server's, and the tokens among the others.

        Below a path, only those that it set itself: a browser sends what any program on the same address has set.
        """
        kept, tokens = [], []
        for name, value in request.headers:
            for cookie in value.split(b";") if name == b"cookie" else ():
                key, _, content = cookie.strip().partition(b"=")
                if key == self._previews.cookie:
                    tokens.append(content)
                elif key.startswith(_COOKIE):
                    continue
                elif not prefix:
                    kept.append(cookie.strip())
                elif key.startswith(_mark(prefix)):
                    kept.append(cookie.strip()[len(_mark(prefix)) :])
        return b"; ".join(kept), tokens

    def _headers(self, request: h11.Request, host: bytes, prefix: bytes, cookies: bytes) -> Headers:
        headers: Headers = [(b"Host", host)]
        headers += [
            (name, value)
            for name, value in strip_hop_by_hop(request.headers.raw_items())
            if name.lower().replace(b"_", b"-") not in _OURS
        ]
        if cookies:
            headers.append((b"Cookie", cookies))
        if referer := header(request.headers, b"referer"):
            address, mark, query = referer.partition(b"?")
            query, _ = _without_token(query)
            headers.append((b"Referer", address + (mark + query if query else b"")))
        headers += [
            (b"X-Forwarded-For", self._peer.encode()),
            (b"X-Forwarded-Host", host),
            (b"X-Forwarded-Proto", b"http"),
            (b"Via", b"1.1 atoll"),
        ]
        if prefix:
            headers.append((b"X-Forwarded-Prefix", prefix))
        return headers


@dataclass
class _Admitted:
    """A request that may pass to its server."""

    server: _Exposed
    target: bytes
    headers: Headers
    """`Host` first."""
    prefix: bytes
    cookie: bytes | None
    html: bool

    async def dial(self) -> PortConnection:
        return await self.server.connect()

    @contextmanager
    def entered(self) -> Iterator[anyio.CancelScope]:
        with anyio.CancelScope() as scope:
            self.server.under_way.add(scope)
            try:
                yield scope
            finally:
                self.server.under_way.discard(scope)

    def returned(self, headers: Headers) -> Headers:
        if self.prefix:
            headers = [self._below_prefix(name, value) for name, value in headers if name.lower() != _SCOPE]
        if self.cookie is not None:
            headers = [*headers, (b"Set-Cookie", self.cookie)]
        return headers

    def _below_prefix(self, name: bytes, value: bytes) -> tuple[bytes, bytes]:
        if name.lower() == b"set-cookie":
            return name, _cookie_below(value, self.prefix)
        if name.lower() == b"location":
            path = value.removeprefix(b"http://" + self.headers[0][1])
            if path.startswith(b"/") and not path.startswith((b"//", self.prefix + b"/")):
                return name, self.prefix + path
        return name, value

    def explain(self, error: AtollError | str) -> Answer:
        port, name = self.server.preview.port, self.server.name
        if isinstance(error, PortRefused):
            title = f"Nothing listens on port {port}"
            text = f"The sandbox {name} runs, but no program in it listens there. Start one, then try again."
        elif isinstance(error, SandboxAsleep):
            title, text = f"The sandbox {name} was shut down", f"{error.message}."
        elif isinstance(error, AtollError):
            title, text = f"The sandbox {name} does not answer", f"{error.message}."
        else:
            title = f"Port {port} gave no proper answer"
            text = f"What the program that listens there said is not HTTP: {error[:200]}."
        return page(503 if isinstance(error, SandboxAsleep) else 502, title, text, html=self.html)


_SCOPE = b"service-worker-allowed"
"""Below a path, a script must not come to stand before the pages of others."""
_CLOSE = (b"Connection", b"close")
_PRIVATE: Headers = [(b"Cache-Control", b"no-store"), (b"Referrer-Policy", b"no-referrer")]


def _nothing_here(request: h11.Request) -> Answer:
    text = "If you were given an address, open it whole, as it is: it may have been cut short, or its time is over."
    answer = page(404, "There is nothing here", text, html=_wants_html(request))
    return Answer(answer.status, [*answer.headers, _CLOSE], answer.body)  # who has no token does not stay


def _wants_html(request: h11.Request) -> bool:
    return b"text/html" in header(request.headers, b"accept")


def _is_navigation(request: h11.Request) -> bool:
    """Whether a person opens a page, who keeps cookies. A program such as curl does not, and needs no redirect."""
    mode = header(request.headers, b"sec-fetch-mode")
    return request.method == b"GET" and (mode == b"navigate" if mode else _wants_html(request))


def _without_token(query: bytes) -> tuple[bytes, list[bytes]]:
    """A query without our parameter, otherwise as it was, and the tokens that it held."""
    ours = PARAMETER.encode() + b"="
    parts = query.split(b"&")
    return (
        b"&".join(part for part in parts if not part.startswith(ours)),
        [part[len(ours) :] for part in parts if part.startswith(ours)],
    )


def _mark(prefix: bytes) -> bytes:
    """How the names of cookies begin that a server below a path has set."""
    return prefix.rpartition(b"/")[2] + b"~"


def _cookie_below(cookie: bytes, prefix: bytes) -> bytes:
    """A cookie that a server sets, for its own path alone."""
    first, *attributes = cookie.split(b";")
    path, kept = b"/", []
    for attribute in attributes:
        key, _, value = attribute.strip().partition(b"=")
        if key.lower() == b"path" and value.startswith(b"/"):
            path = value.removeprefix(prefix) or b"/"
        elif key.lower() not in (b"domain", b"path"):
            kept.append(attribute.strip())
    return b"; ".join([_mark(prefix) + first.strip(), *kept, b"Path=" + prefix + path])


async def _until_listening(exposed: _Exposed, wait_s: float) -> None:
    """Wait until something listens.

    Raises:
        PortRefused: nothing does within `wait_s`.
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
        "or expose the port without wait_s"
    )


def _listen(address: str, port: int) -> list[socket.socket]:
    """Listen on an address, or on all that `localhost` has: else somebody else could, and be taken for us.

    Raises:
        InvalidRequest: it cannot be listened on.
    """
    addresses = ("127.0.0.1", "::1") if address == "localhost" else (address,)
    tries = _SAME_PORT_TRIES
    while True:
        listeners: list[socket.socket] = []
        try:
            for each in addresses:
                try:
                    listeners.append(_listen_on(each, _port_of(listeners[0]) if listeners else port))
                except OSError as error:
                    if not listeners or error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                        raise
            return listeners
        except OSError as error:
            for listener in listeners:
                listener.close()
            tries -= 1
            if port == 0 and listeners and tries:  # the port is free on one of both only
                continue
            raise InvalidRequest(
                f"previews cannot be served on {address}:{port}: {error.strerror}; "
                "name another address with ATOLL_PREVIEW_LISTEN=ADDRESS:PORT, where port 0 is any that is free"
            ) from error


def _listen_on(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family, backlog=_BACKLOG)
    listener.setblocking(False)
    return listener


def _port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


async def _next_client(listener: socket.socket) -> tuple[socket.socket, str]:
    while True:
        await anyio.wait_readable(listener)
        try:
            client, address = listener.accept()
        except BlockingIOError:
            continue
        except OSError as error:
            if error.errno in _NO_ROOM:  # until some are closed again
                await anyio.sleep(0.1)
            continue
        return client, str(address[0])
