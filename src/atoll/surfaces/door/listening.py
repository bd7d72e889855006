"""Serving an app at addresses: listening sockets, TLS, and an orderly end.

Owns how connections are accepted, counted and encrypted before they are read (`connection.py` reads them), and the
start and end of uvicorn. Certificates are read for each connection anew from what `tls` gives, so they can change while
the server runs. Used by every HTTP surface.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import anyio
import uvicorn
from starlette.types import ASGIApp

from atoll.surfaces.door.answers import error_bytes
from atoll.surfaces.door.connection import (
    KEEP_ALIVE_S,
    WEBSOCKET_BYTES,
    Door,
    DoorProtocol,
    DoorWebSocket,
    address_of,
)

_BACKLOG = 512
_log = logging.getLogger(__name__)


def open_sockets(address: str, port: int) -> list[socket.socket]:
    """Listening sockets at an IP address, or at both addresses of `localhost`, if there are both. Port 0: any free one.

    Raises:
        OSError: the address or the port cannot be listened on.
    """
    first, *others = ("127.0.0.1", "::1") if address == "localhost" else (address,)
    sockets = [_listening(first, port)]
    try:
        sockets += [_listening(each, sockets[0].getsockname()[1]) for each in others]
    except OSError as error:
        if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            sockets[0].close()
            raise
    return sockets


def _listening(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, port), family=family, backlog=_BACKLOG)
    # Connections inherit it. asyncio would not set it on these, and a response in two pieces would wait for 40 ms.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


async def listen(
    app: ASGIApp,
    address: str,
    port: int,
    *,
    on_ready: Callable[[str], None],
    on_stop: Callable[[], None],
    grace_s: int,
    door: Door | None = None,
    tls: Callable[[], ssl.SSLContext] | None = None,
    websockets: bool = False,
    sockets: Sequence[socket.socket] | None = None,
) -> None:
    """Serve an app at an IP address, or at `localhost`, until this is cancelled. Signals are left to the caller.

    `on_ready` receives the URL of the server, without a path, when it answers. On cancellation `on_stop` is called
    first, to end streams that would stay open; then connections have `grace_s` to finish. `tls` gives the certificate
    of each new connection. `sockets` are listening already, in place of the address.

    Raises:
        OSError: the address or port cannot be listened on.
    """
    listening = list(sockets) if sockets is not None else open_sockets(address, port)
    door = door or Door()
    config = uvicorn.Config(
        app,
        lifespan="on",
        log_config=None,
        http=cast("Any", DoorProtocol),
        ws=cast("Any", DoorWebSocket) if websockets else "none",
        ws_max_size=WEBSOCKET_BYTES,
        ws_per_message_deflate=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=grace_s,
        server_header=False,
        proxy_headers=False,  # the door knows which proxies are believed (`HttpDoor`)
        access_log=False,
    )
    host = f"[{address}]" if ":" in address else address
    url = f"{'http' if tls is None else 'https'}://{host}:{listening[0].getsockname()[1]}"
    server = _UvicornServer(config, door, tls, on_started=lambda: on_ready(url))
    stopping = False

    async def serve() -> None:
        # The server ends by `should_exit` and not by cancellation, so that the app's lifespan ends properly.
        with anyio.CancelScope(shield=True):
            await server.serve(listening)
        if not stopping:
            raise RuntimeError("the HTTP server ended unexpectedly")

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve)
            try:
                await anyio.sleep_forever()
            finally:
                stopping = True
                on_stop()
                server.should_exit = True
    finally:
        for each in listening:
            each.close()


class _UvicornServer(uvicorn.Server):
    """Accepts connections through the door, and leaves signals to the caller."""

    def __init__(
        self,
        config: uvicorn.Config,
        door: Door,
        tls: Callable[[], ssl.SSLContext] | None,
        *,
        on_started: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self.door = door
        self.tls = tls
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            raise RuntimeError("the app did not start; the log has the reason")
        loop = asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(lambda: _Accepted(self), sock=each, backlog=_BACKLOG) for each in sockets or ()
        ]
        self.started = True
        self._on_started()

    def protocol(self, address: str) -> DoorProtocol:
        return DoorProtocol(self.config, self.server_state, self.lifespan.state, door=self.door, address=address)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Accepted(asyncio.Protocol):
    """A new connection: counted, refused if there are too many, and encrypted. Then a `DoorProtocol` has it."""

    def __init__(self, server: _UvicornServer) -> None:
        self._server = server
        self._early: list[bytes] = []
        """What was decrypted before the handshake's end was noticed."""
        self._is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        door, tls = self._server.door, self._server.tls
        connected = cast("asyncio.Transport", transport)
        address = address_of(transport)
        if not door.admit(address):
            if tls is None:
                message = "too many connections are open, of this client or in all; try again later"
                connected.write(error_bytes(503, "too_many_connections", message))
            connected.close()
        elif tls is None:
            protocol = self._server.protocol(address)
            connected.set_protocol(protocol)
            protocol.connection_made(connected)
        else:
            tasks = self._server.server_state.tasks
            task = asyncio.get_running_loop().create_task(self._encrypt(connected, address, tls))
            task.add_done_callback(tasks.discard)
            tasks.add(task)

    async def _encrypt(self, transport: asyncio.Transport, address: str, tls: Callable[[], ssl.SSLContext]) -> None:
        door = self._server.door
        try:
            encrypted = await asyncio.get_running_loop().start_tls(
                transport, self, tls(), server_side=True, ssl_handshake_timeout=door.limits.head_timeout_s
            )
        except (OSError, asyncio.CancelledError):  # ssl.SSLError is an OSError
            encrypted = None
        if encrypted is None or self._is_lost:
            door.release(address)
            transport.abort()
            return
        protocol = self._server.protocol(address)
        encrypted.set_protocol(protocol)
        protocol.connection_made(encrypted)
        for data in self._early:
            protocol.data_received(data)

    def data_received(self, data: bytes) -> None:
        self._early.append(data)

    def connection_lost(self, _error: Exception | None) -> None:
        self._is_lost = True
