"""One connection to a guest, with many streams on it.

Owns the handshake, stream numbers, the send queue, and the end of the connection. A guest that breaks a rule fails the
connection: every operation on it raises `GuestProtocolError`. Not here: what flows on a stream (`stream.py`), how
frames are encoded (`frames.py`), and when to connect (`sandbox.py`). Used by `sandbox.py`, `connections.py` and
`egress/`.

It needs asyncio: what comes is read in the event loop's own callback (see `_receive_eagerly`).
"""

from __future__ import annotations

import asyncio
import os
import socket
import weakref
from collections import deque
from collections.abc import Iterable
from functools import cache
from typing import Protocol

import anyio
from anyio.abc import ByteStream, SocketAttribute, UNIXSocketStream

from atoll.contract.errors import GuestProtocolError, GuestUnresponsive, InvalidRequest, LaunchFailed, SandboxDied
from atoll.contract.protocol import (
    MAX_PAYLOAD,
    PROTOCOL_VERSION,
    Fields,
    FrameType,
    Op,
    Tag,
    decode_fields,
    encode_fields,
    encode_frame,
)
from atoll.runtime.guest.frames import FrameReader, decode_credit
from atoll.runtime.guest.stream import WINDOW, Failure, Sink, Stream

HANDSHAKE_S = 30.0

_RECEIVE_BYTES = 512 * 1024
_buffers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, memoryview] = weakref.WeakKeyDictionary()
_BATCH_BYTES = 256 * 1024
_HIGH_WATER_BYTES = 1024 * 1024
_MAX_EVENT_BYTES = 4096  # far above any real one; unread events are kept in memory
_MAX_STREAM_NUMBER = 2**20 - 1  # the keeper uses the other bits itself
_DATA = int(FrameType.DATA)
_PING = encode_fields(((Tag.OP, Op.SIGNAL), (Tag.WINDOW, WINDOW), (Tag.PROC, 0), (Tag.SIGNAL, 0)))
_CONNECTS = frozenset({Op.DIAL, Op.ACCEPT})  # nothing is sent before there is a connection


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


class GuestConnection:
    """A connection to a guest, through its keeper. Many streams at once, none of which can block another.

    `handshake` comes first, then `run` in a task of its own; `open` may be called from then on. When `run` returns,
    `failure` says why.
    """

    def __init__(self, stream: ByteStream, name: str, *, is_ready: bool = False) -> None:
        """`is_ready`: HELLO was received on the stream already."""
        self.failure: Failure | None = None
        self.heard = 0
        """How often something has arrived."""
        self._stream = stream
        self._name = name
        self._reader = FrameReader()
        self._ready = is_ready
        self._streams: dict[int, Stream] = {}
        self._number = 0
        self._queue: deque[bytes | memoryview] = deque()
        self._queued_bytes = 0
        self._work = anyio.Event()
        self._room: anyio.Event | None = None
        self._sending = False
        # A Unix socket is written to directly, without a round through the event loop.
        self._socket: socket.socket | None = None
        if isinstance(stream, UNIXSocketStream):
            self._socket = stream.extra(SocketAttribute.raw_socket)  # noqa: S610
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
                while not self._ready and self.failure is None:
                    await self._receive()
            if not self._ready:
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
        self.failure = failure
        self._queue.clear()
        self._queued_bytes = 0
        for stream in self._streams.values():
            stream.on_failure()
        self._streams.clear()
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
        payload = _operation(op, window) + fields
        if len(payload) > MAX_PAYLOAD:
            raise InvalidRequest(
                f"the request takes {len(payload)} bytes; arguments, environment and paths together may take "
                f"{MAX_PAYLOAD}. Write what is long to a file first, or send it through stdin"
            )
        if self._queued_bytes > _HIGH_WATER_BYTES:
            await self.drained()
        if self.failure is not None:
            raise self.failure.error()
        number = self._new_number()
        stream = Stream(self, number, window, receive=receive, send=send, dedicated=dedicated, sink=sink)
        self._streams[number] = stream
        frame = encode_frame(FrameType.OPEN, number, payload)
        if stream.sends and op not in _CONNECTS:
            self.post(frame)  # and so is sent together with the data that follows
        else:
            self.post_now(frame)
        return stream

    def _new_number(self) -> int:
        number = self._number
        while True:
            number = number % _MAX_STREAM_NUMBER + 1
            if number not in self._streams:
                break
        self._number = number
        return number

    def ping(self) -> None:
        """Ask the guest for an answer, after which `heard` is higher: a signal for a process that does not exist."""
        if self.failure is None:
            number = self._new_number()
            self._streams[number] = Stream(self, number, WINDOW, receive=(), send=(), dedicated=(), sink=None)
            self.post_now(encode_frame(FrameType.OPEN, number, _PING))

    def post(self, *parts: bytes | memoryview) -> None:
        """Queue whole frames to be sent, in order. Once queued they are sent, even if the caller is cancelled."""
        if self.failure is not None:
            return
        self._queue.extend(parts)
        self._queued_bytes += sum(map(len, parts))
        self._work.set()

    def post_now(self, *parts: bytes | memoryview) -> None:
        """`post`, but as much as the socket accepts is sent at once."""
        if self._socket is None or self._queue or self._sending or self.failure is not None:
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
            self._lose()
        else:
            self._take(chunk)

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
                self._take(buffer[:size])
            else:
                self._lose()

        loop.add_reader(connection.fileno(), on_readable)
        try:
            await anyio.sleep_forever()
        finally:
            loop.remove_reader(connection.fileno())

    def _take(self, chunk: bytes | memoryview) -> None:
        self.heard += 1
        try:
            for frame in self._reader.feed(chunk):
                self._dispatch(*frame)
        except GuestProtocolError as violation:
            self.fail(Failure(GuestProtocolError, violation.message))

    def _lose(self) -> None:
        self.fail(
            Failure(SandboxDied, f"connection lost to {self._name}; if it still runs, the next call connects again")
        )

    def _dispatch(self, kind: int, channel: int, number: int, payload: bytes) -> None:
        if number and self._ready:
            stream = self._streams.get(number)
            if stream is None:
                if self.failure is not None:
                    return
                raise GuestProtocolError(
                    f"the guest sent a frame of type {kind} for stream {number}, which is not open"
                )
            if kind == _DATA:
                stream.on_data(channel, payload)
            elif kind == FrameType.CREDIT:
                stream.on_credit(channel, decode_credit(payload))
            elif kind == FrameType.EOF:
                stream.on_eof(channel)
            elif kind == FrameType.EVENT:
                if len(payload) > _MAX_EVENT_BYTES:
                    raise GuestProtocolError(f"the guest sent an event of {len(payload)} bytes")
                stream.on_event(decode_fields(payload))
            elif kind == FrameType.END:
                result = decode_fields(payload)
                del self._streams[number]
                stream.on_end(result)
            return
        if kind == FrameType.GONE:
            self.fail(_gone(decode_fields(payload), self._name))
        elif kind == FrameType.HELLO and not self._ready:
            version = decode_fields(payload).integer(Tag.VERSION)
            if version != PROTOCOL_VERSION:
                raise GuestProtocolError(f"the guest speaks version {version} of the protocol, not {PROTOCOL_VERSION}")
            self._ready = True
        elif kind == FrameType.FAILED and not self._ready:
            fields = decode_fields(payload)
            reason = fields.text(Tag.MESSAGE, 8192).strip() or os.strerror(fields.within(Tag.ERRNO, 1, 4095))
            self.fail(Failure(LaunchFailed, f"{self._name} did not start: {reason}"))
        else:
            raise GuestProtocolError(f"the guest sent a frame of type {kind}, which is not allowed here")


@cache
def _operation(op: Op, window: int) -> bytes:
    """The fields that every OPEN of an operation begins with. A process uses few windows."""
    return encode_fields(((Tag.OP, op), (Tag.WINDOW, window)))


def _gone(fields: Fields, name: str) -> Failure:
    message = fields.text(Tag.MESSAGE).strip()
    if message.startswith("protocol:"):
        return Failure(GuestProtocolError, f"{name} broke the protocol and was ended: {message[9:].strip()}")
    if message.startswith("stalled:"):
        return Failure(
            GuestUnresponsive,
            f"{name} does not answer: {message[8:].strip()}; try again later, or destroy it",
        )
    if not message and Tag.SIGNAL in fields:
        message = f"its first process was ended by signal {fields.integer(Tag.SIGNAL)}"
    elif not message and Tag.EXIT_CODE in fields:
        message = f"its first process exited with status {fields.integer(Tag.EXIT_CODE)}"
    return Failure(SandboxDied, f"{name} has ended: {message or 'no reason was given'}")
