"""Forwarded ports: a TCP port on the host's loopback whose bytes go to a port inside, without a token.

Owns listening TCP sockets of the host, and passing bytes of forwarded ports. Not here: previews, which need a token and
speak HTTP (`router.py`, `proxy.py`), and connecting to a port inside (`../guest/ports.py`). Used by `router.py`.

A forwarded port listens on 127.0.0.1 and nowhere else. Every program on this machine may connect to it, those of other
users too, and nothing checks what passes.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
from anyio.abc import ByteStream

from atoll.contract.errors import AtollError, InvalidRequest, PortRefused
from atoll.runtime.guest.ports import PortConnection
from atoll.runtime.http1 import join

if TYPE_CHECKING:
    from atoll.runtime.lifetimes import BackgroundTasks

MAX_CONNECTIONS = 256
"""Of one forwarded port at the same time. More wait to be accepted."""
_LOCALHOST = "127.0.0.1"
_LINGER_S = 60.0
"""For the server inside to read what was sent to it, once both sides have closed theirs."""
_BACKLOG = 256
_OUT_OF_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_log = logging.getLogger(__name__)

DialPort = Callable[[int, str], Awaitable[PortConnection]]


async def dial_either(dial: DialPort, port: int) -> PortConnection:
    """Connect to a port inside, on either address of `localhost`.

    Raises:
        PortRefused: no server listens.
    """
    try:
        return await dial(port, "127.0.0.1")
    except PortRefused:
        return await dial(port, "::1")


class ForwardedPort:
    """A port inside that clients on this machine reach. `tasks` is the engine's: forwarding ends with it."""

    def __init__(self, tasks: BackgroundTasks, port: int, dial: DialPort) -> None:
        if not 1 <= port <= 65535:
            raise InvalidRequest(f"the port is {port}; it must be 1 to 65535")
        self._tasks = tasks
        self._port = port
        self._dial = dial
        self._slots = anyio.Semaphore(MAX_CONNECTIONS)

    @asynccontextmanager
    async def listening(self, local_port: int) -> AsyncIterator[int]:
        """Forward as long as the context lasts. Gives the port on the host."""
        if not 0 <= local_port <= 65535:
            raise InvalidRequest(f"local_port is {local_port}; it must be 0, which is any free port, to 65535")
        try:
            listener = listen_on(_LOCALHOST, local_port)
        except OSError as error:
            why = os.strerror(error.errno or 0)
            raise InvalidRequest(
                f"cannot listen on {_LOCALHOST}:{local_port}: {why}; "
                "choose another local port, or 0, which is any free port"
            ) from error
        scope, ended = anyio.CancelScope(), anyio.Event()
        self._tasks.start_soon(self._accept, listener, scope, ended)
        try:
            yield port_of(listener)
        finally:
            scope.cancel()
            with anyio.CancelScope(shield=True):
                await ended.wait()

    async def _accept(self, listener: socket.socket, scope: anyio.CancelScope, ended: anyio.Event) -> None:
        try:
            with listener, scope:
                async with anyio.create_task_group() as group:
                    while True:
                        await self._slots.acquire()
                        client, _ = await next_client(listener)
                        group.start_soon(self._serve, client)
        finally:
            ended.set()

    async def _serve(self, client: socket.socket) -> None:
        """Pass the bytes of one connection. Where the other side is lost, the client sees an error and not an end."""
        with client:
            orderly = False
            try:
                orderly = await self._pass(client)
            except AtollError as error:
                _log.info("a connection to the forwarded port %d failed: %s", self._port, error)
            except Exception:  # noqa: BLE001 - a bug that a client triggers must not end the engine
                _log.exception("serving a connection to a forwarded port failed; this is a bug")
            finally:
                if not orderly:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                self._slots.release()

    async def _pass(self, client: socket.socket) -> bool:
        client.setblocking(False)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server = await dial_either(self._dial, self._port)
        try:
            orderly = await join(_ClientStream(client), server)
            if orderly:
                await server.finish(_LINGER_S)
            return orderly
        finally:
            server.abort()


class _ClientStream(ByteStream):
    """A client's socket as a stream. Unlike those of anyio, it can be closed without telling the client that all was
    sent."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    async def receive(self, max_bytes: int = 65536) -> bytes:
        while True:
            await anyio.wait_readable(self._socket)
            with suppress(BlockingIOError):
                if data := self._socket.recv(max_bytes):
                    return data
                raise anyio.EndOfStream

    async def send(self, item: bytes) -> None:
        rest = memoryview(item)
        while rest:
            await anyio.wait_writable(self._socket)
            with suppress(BlockingIOError):
                rest = rest[self._socket.send(rest) :]

    async def send_eof(self) -> None:
        await anyio.lowlevel.checkpoint()
        self._socket.shutdown(socket.SHUT_WR)

    async def aclose(self) -> None:
        await anyio.lowlevel.checkpoint()
        self._socket.close()


# ------------------------------------------------------------------------------------------------- listening sockets


def listen_on(address: str, port: int) -> socket.socket:
    """
    Raises:
        OSError: the address or the port cannot be used.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family, backlog=_BACKLOG)
    listener.setblocking(False)
    return listener


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


async def next_client(listener: socket.socket) -> tuple[socket.socket, str]:
    """The next connection, and the address of its client."""
    while True:
        await anyio.wait_readable(listener)
        try:
            client, address = listener.accept()
        except BlockingIOError:
            continue
        except OSError as error:
            if error.errno in _OUT_OF_RESOURCES:  # try again when some connections are closed
                await anyio.sleep(0.1)
            continue
        return client, str(address[0])
