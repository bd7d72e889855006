"""A connection to a keeper's socket, as a stream of bytes.

Owns how a Unix socket is waited for, such that any caller may be cancelled, and the stream closed, at any moment. The
stream that anyio has for Unix sockets lets the event loop set the result of a future when the socket is ready. If that
happens in the round of the loop in which the caller is cancelled or the stream is closed, the future has its end
already, and the loop reports an InvalidStateError that belongs to nobody. `anyio.wait_readable` expects it.

Not here: frames (`contract/protocol.py`), and what is said to a keeper (`keeper_client.py`, `runtime/guest/`).
"""

from __future__ import annotations

import socket
from typing import Self

import anyio
import anyio.lowlevel
from anyio.abc import ByteStream

_BUSY_S = 0.001


class KeeperStream(ByteStream):
    """A connected Unix socket."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self.socket = connected
        """For those who read and write without a task that waits."""

    @classmethod
    async def connect(cls, path: str) -> Self:
        """
        Raises:
            OSError: nobody listens there.
        """
        await anyio.lowlevel.checkpoint()
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connected.setblocking(False)
        try:
            while True:
                try:
                    connected.connect(path)
                    return cls(connected)
                except BlockingIOError:  # many connect at once; no event tells when there is room
                    await anyio.sleep(_BUSY_S)
        except BaseException:
            connected.close()
            raise

    async def receive(self, max_bytes: int = 65536) -> bytes:
        await anyio.lowlevel.checkpoint()
        while True:
            try:
                data = self.socket.recv(max_bytes)
            except BlockingIOError:
                await anyio.wait_readable(self.socket)
            except OSError as error:
                raise self._failure() from error
            else:
                if not data:
                    raise anyio.EndOfStream
                return data

    async def send(self, item: bytes) -> None:
        await anyio.lowlevel.checkpoint()
        rest = memoryview(item)
        while rest:
            try:
                rest = rest[self.socket.send(rest) :]
            except BlockingIOError:
                await anyio.wait_writable(self.socket)
            except OSError as error:
                raise self._failure() from error

    def _failure(self) -> Exception:
        return anyio.ClosedResourceError() if self.socket.fileno() < 0 else anyio.BrokenResourceError()

    async def send_eof(self) -> None:
        await anyio.lowlevel.checkpoint()
        self.socket.shutdown(socket.SHUT_WR)

    async def aclose(self) -> None:
        """Whoever waits for the socket gets `ClosedResourceError`."""
        if self.socket.fileno() >= 0:
            anyio.notify_closing(self.socket)
            self.socket.close()
        await anyio.lowlevel.checkpoint()
