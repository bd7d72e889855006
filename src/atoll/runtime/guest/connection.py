"""One connection to a guest, with many streams on it.

Owns waiting for the handshake, the send queue, and the end of the connection. A guest that breaks a rule fails the
connection: every operation on it raises `GuestProtocolError`. Not here: the rules of a connection (`link.py`), what
flows on a stream (`stream.py`), and when to connect (`sandbox.py`). Used by `sandbox.py`, `connections.py` and
`egress/`.

It needs asyncio: what comes is read in the event loop's own callback (see `_receive_eagerly`).
"""

from __future__ import annotations

import asyncio
import socket
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

import anyio
from anyio.abc import ByteStream

from atoll.contract.errors import LaunchFailed, SandboxDied
from atoll.contract.protocol import FrameType, Op, encode_frame
from atoll.drivers.keeper_stream import KeeperStream
from atoll.runtime.guest.flow import WINDOW, Failure, Sink
from atoll.runtime.guest.link import Link, encode_open
from atoll.runtime.guest.stream import Stream

HANDSHAKE_S = 30.0

_RECEIVE_BYTES = 512 * 1024
_buffers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, memoryview] = weakref.WeakKeyDictionary()
_BATCH_BYTES = 256 * 1024
_HIGH_WATER_BYTES = 1024 * 1024
_CONNECTS = frozenset({Op.DIAL, Op.ACCEPT})  # nothing is sent before there is a connection


class DirectStream(ByteStream):
    """A stream that can be used without a task that waits for it: each round of the event loop is a third of what a
    short command costs. `GuestConnection` does the same itself with a socket of this machine."""

    @abstractmethod
    def send_now(self, *parts: bytes | memoryview) -> bool:
        """Send these at once. False: nothing was sent, because there is much to be sent already."""

    @abstractmethod
    def deliver(self, take: Callable[[bytes], None], lose: Callable[[], None]) -> None:
        """From now on call `take` with what comes, as it comes, and `lose` when the other side is gone."""


class OpenStream(Protocol):
    """Starts an operation: `GuestConnection.open`, or a function that connects first and then calls it."""

    async def __call__(
        self,
        op: Op,
        fields: bytes,
        *,
        receive: Iterable[int] = (1,),
        send: Iterable[int] = (),
        dedicated: Iterable[int] = (),
        sink: Sink | None = None,
    ) -> Stream: ...


class GuestConnection(Link):
    """A connection to a guest, through its keeper. Many streams at once, none of which can block another.

    `handshake` comes first, then `run` in a task of its own; `open` may be called from then on. When `run` returns,
    `failure` says why.
    """

    def __init__(
        self,
        stream: ByteStream,
        name: str,
        *,
        is_ready: bool = False,
        why_ended: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`is_ready`: HELLO was received on the stream already."""
        super().__init__(name, why_ended)
        self.ready = is_ready
        self._stream = stream
        self._queue: deque[bytes | memoryview] = deque()
        self._queued_bytes = 0
        self._work = anyio.Event()
        self._room: anyio.Event | None = None
        self._sending = False
        # A Unix socket is written to directly, without a round through the event loop.
        self._socket: socket.socket | None = None
        if isinstance(stream, KeeperStream):
            self._socket = stream.socket
        self._direct = stream if isinstance(stream, DirectStream) else None
        self._scope: anyio.CancelScope | None = None

    async def handshake(self) -> None:
        """Wait for the guest's HELLO. Closes the connection if it does not come within `HANDSHAKE_S`.

        Raises:
            LaunchFailed: the sandbox did not start; the message holds the reason.
            SandboxDied: it has ended, or the connection broke.
            GuestProtocolError: it sent another frame.
        """
        try:
            with anyio.move_on_after(HANDSHAKE_S):
                while not self.ready and self.failure is None:
                    await self._receive()
            if not self.ready:
                self.fail(
                    Failure(
                        LaunchFailed, f"{self._name} did not start: the handshake timed out after {HANDSHAKE_S:g} s"
                    )
                )
        except anyio.get_cancelled_exc_class():
            self.fail(Failure(SandboxDied, f"connection lost to {self._name}: the handshake was cancelled"))
            raise
        finally:
            if self.failure is not None:
                with anyio.CancelScope(shield=True):
                    await anyio.aclose_forcefully(self._stream)
        if self.failure is not None:
            raise self.failure.error()

    async def run(self) -> None:
        """Serve the streams until the connection ends or `fail` is called; then all its streams have failed."""
        try:
            async with anyio.create_task_group() as group:
                self._scope = group.cancel_scope
                group.start_soon(self._write)
                if self.failure is None and self._socket is not None:
                    await self._receive_eagerly(self._socket, asyncio.get_running_loop())
                elif self.failure is None and self._direct is not None:
                    self._direct.deliver(self.take, self.lose)
                    await anyio.sleep_forever()
                while self.failure is None:
                    await self._receive()
                group.cancel_scope.cancel()
        finally:
            self.close()
            with anyio.CancelScope(shield=True):
                await anyio.aclose_forcefully(self._stream)

    def close(self) -> None:
        """End the connection from this side. Commands on it that are not kept are killed."""
        self.fail(Failure(SandboxDied, f"connection lost to {self._name}: it was closed on this side"))

    def fail(self, failure: Failure) -> None:
        """End the connection for this reason. The first reason stays."""
        if self.failure is not None:
            return
        self._queue.clear()
        self._queued_bytes = 0
        super().fail(failure)
        if self._room is not None:
            self._room.set()
        if self._scope is not None:
            self._scope.cancel()

    async def open(
        self,
        op: Op,
        fields: bytes,
        *,
        receive: Iterable[int] = (1,),
        send: Iterable[int] = (),
        dedicated: Iterable[int] = (),
        sink: Sink | None = None,
        window: int = WINDOW,
    ) -> Stream:
        """Start an operation.

        `receive` are the channels that `Stream.next` reads, or that `sink` is called for; `dedicated` those that
        `Stream.receive` reads one by one; `send` those that may be sent on. `sink` is called as bytes come, so it
        must be quick and may raise only `GuestProtocolError`.

        Raises:
            InvalidRequest: the fields do not fit into one frame.
            SandboxError: the connection has failed.
        """
        payload = encode_open(op, fields, window)
        if self._queued_bytes > _HIGH_WATER_BYTES:
            await self.drained()
        if self.failure is not None:
            raise self.failure.error()
        number = self.new_number()
        stream = Stream(self, number, window, receive=receive, send=send, dedicated=dedicated, sink=sink)
        self.add(stream)
        frame = encode_frame(FrameType.OPEN, number, payload)
        if stream.sends and op not in _CONNECTS:
            self.post(frame)  # and so is sent together with the data that follows
        else:
            self.post_now(frame)
        return stream

    def post(self, *parts: bytes | memoryview) -> None:
        """Queue whole frames to be sent, in order. Once queued they are sent, even if the caller is cancelled."""
        if self.failure is not None:
            return
        self._queue.extend(parts)
        self._queued_bytes += sum(map(len, parts))
        self._work.set()

    def post_now(self, *parts: bytes | memoryview) -> None:
        """`post`, but as much as the socket accepts is sent at once."""
        if self._queue or self._sending or self.failure is not None:
            self.post(*parts)
            return
        if self._socket is None:
            if self._direct is None or not self._direct.send_now(*parts):
                self.post(*parts)
            return
        try:
            sent = self._socket.sendmsg(parts)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # the reader finds out why the connection ended
        for part in parts:
            if sent < len(part):
                self.post(memoryview(part)[sent:])
            sent = max(0, sent - len(part))

    async def drained(self) -> None:
        """Wait until the queue is below its high-water mark. Returns also when the connection fails."""
        while self._queued_bytes > _HIGH_WATER_BYTES:
            if self._room is None:
                self._room = anyio.Event()
            await self._room.wait()

    async def _write(self) -> None:
        queue = self._queue
        while True:
            if not queue:
                self._work = anyio.Event()
                await self._work.wait()
                continue
            parts: list[bytes | memoryview] = []
            size = 0
            while queue and size < _BATCH_BYTES:
                part = queue.popleft()
                parts.append(part)
                size += len(part)
            self._sending = True
            try:
                await self._stream.send(b"".join(parts))
            except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
                # The last frames of the other side may still be unread: the reader finds out why the connection ended.
                return
            self._sending = False
            self._queued_bytes -= size
            if self._room is not None and self._queued_bytes <= _HIGH_WATER_BYTES:
                self._room.set()
                self._room = None

    async def _receive(self) -> None:
        try:
            chunk = await self._stream.receive(_RECEIVE_BYTES)
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            self.lose()
        else:
            self.take(chunk)

    async def _receive_eagerly(self, connection: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        """Read in the event loop's own callback, until `fail` ends it.

        A task that waits for the socket costs two system calls and two rounds of the loop each time. That is as much
        as everything else that this process does for a short command.
        """
        # One for all connections of a loop: the callback consumes its content before it returns.
        buffer = _buffers.get(loop) or _buffers.setdefault(loop, memoryview(bytearray(_RECEIVE_BYTES)))

        def on_readable() -> None:
            if self.failure is not None:
                return
            try:
                size = connection.recv_into(buffer)
            except BlockingIOError:
                return
            except OSError:
                size = 0
            if size:
                self.take(buffer[:size])
            else:
                self.lose()

        loop.add_reader(connection.fileno(), on_readable)
        try:
            await anyio.sleep_forever()
        finally:
            loop.remove_reader(connection.fileno())
