"""One connection to a guest, with many streams on it.

Knows the greeting, stream numbers, the queue of what is to be sent, and the end of the connection. Refuses to know
what flows on a stream (`stream.py`) and how frames are written (`wire.py` below). A guest that breaks a rule fails the
link: everything under way on it raises `GuestProtocolError`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Protocol

import anyio
from anyio.abc import ByteStream, SocketAttribute, UNIXSocketStream

from atoll.contract.errors import GuestProtocolError, InvalidRequest, LaunchFailed, SandboxDied
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

GREETING_S = 30.0

_RECEIVE_BYTES = 512 * 1024
_buffers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, memoryview] = weakref.WeakKeyDictionary()
_BATCH_BYTES = 256 * 1024
_HIGH_WATER_BYTES = 1024 * 1024
_EVENT_BYTES = 4096  # far above any; what nobody has taken is kept
_LAST_NUMBER = 2**20 - 1  # the keeper has the other bits for itself
_DATA = int(FrameType.DATA)
_CONNECTS = frozenset({Op.DIAL, Op.ACCEPT})  # nothing is sent before there is a connection


class OpenStream(Protocol):
    """Starts an operation on a link that works: `Link.open`, with the connecting before it."""

    async def __call__(
        self,
        op: Op,
        fields: bytes,
        *,
        receive: Iterable[int] = (1,),
        send: Iterable[int] = (),
        apart: Iterable[int] = (),
        sink: Sink | None = None,
    ) -> Stream: ...


class Link:
    """A connection to a guest, through its keeper. Many streams at once, none of which can hold up another.

    `greet` comes first, then `run` in a task of its own; `open` may be called from then on. When `run` returns,
    `failure` says why.
    """

    def __init__(self, stream: ByteStream, name: str) -> None:
        self.failure: Failure | None = None
        self.gone = False
        """True: the keeper said that the sandbox has ended; no other connection will find it alive."""
        self._stream = stream
        self._name = name
        self._reader = FrameReader()
        self._greeted = False
        self._streams: dict[int, Stream] = {}
        self._number = 0
        self._queue: deque[bytes | memoryview] = deque()
        self._queued_bytes = 0
        self._work = anyio.Event()
        self._room: anyio.Event | None = None
        self._sending = False
        # On a Unix socket, what can be sent at once is, without a round through the event loop.
        self._socket: socket.socket | None = None
        if isinstance(stream, UNIXSocketStream):
            self._socket = stream.extra(SocketAttribute.raw_socket)  # noqa: S610
        self._scope: anyio.CancelScope | None = None

    async def greet(self) -> None:
        """Wait for the guest's HELLO. Closes the connection if it does not come.

        Raises:
            LaunchFailed: the sandbox did not start, with what was said about it.
            SandboxDied: it has ended, or the connection broke.
            GuestProtocolError: it said something else.
        """
        try:
            with anyio.move_on_after(GREETING_S):
                while not self._greeted and self.failure is None:
                    await self._receive()
            if not self._greeted:
                self.fail(Failure(LaunchFailed, f"{self._name} did not say hello within {GREETING_S:g} s"))
        except anyio.get_cancelled_exc_class():
            self.fail(Failure(SandboxDied, f"connection lost to {self._name}: it was given up"))
            raise
        finally:
            if self.failure is not None:
                with anyio.CancelScope(shield=True):
                    await anyio.aclose_forcefully(self._stream)
        if self.failure is not None:
            raise self.failure.error()

    async def run(self) -> None:
        """Serve the streams until the connection ends or `fail` is called; then everything on it has failed."""
        try:
            async with anyio.create_task_group() as group:
                self._scope = group.cancel_scope
                group.start_soon(self._write)
                if self.failure is None and self._socket is not None and (loop := _asyncio_loop()) is not None:
                    await self._receive_eagerly(self._socket, loop)
                while self.failure is None:
                    await self._receive()
                group.cancel_scope.cancel()
        finally:
            self.close()
            with anyio.CancelScope(shield=True):
                await anyio.aclose_forcefully(self._stream)

    def close(self) -> None:
        """End the link from this side, and with it what runs on it and is not kept."""
        self.fail(Failure(SandboxDied, f"connection lost to {self._name}: it was closed on this side"))

    def fail(self, failure: Failure) -> None:
        """End the link for this reason. The first reason stays."""
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
        apart: Iterable[int] = (),
        sink: Sink | None = None,
        window: int = WINDOW,
    ) -> Stream:
        """Start an operation.

        `receive` are the channels that `Stream.next` reads, or that `sink` is called for; `apart` those that
        `Stream.receive` reads one by one; `send` those that may be sent on. `sink` is called as bytes come, so it
        must be quick and must not raise anything but `GuestProtocolError`.

        Raises:
            InvalidRequest: the fields are too many for one frame.
            SandboxError: the link has failed.
        """
        payload = encode_fields(((Tag.OP, op), (Tag.WINDOW, window))) + fields
        if len(payload) > MAX_PAYLOAD:
            raise InvalidRequest(
                f"the request takes {len(payload)} bytes; arguments, environment and paths together may take "
                f"{MAX_PAYLOAD}. Write what is long to a file first, or send it through stdin"
            )
        await self.drained()
        if self.failure is not None:
            raise self.failure.error()
        number = self._number
        while True:
            number = number % _LAST_NUMBER + 1
            if number not in self._streams:
                break
        self._number = number
        stream = Stream(self, number, window, receive=receive, send=send, apart=apart, sink=sink)
        self._streams[number] = stream
        frame = encode_frame(FrameType.OPEN, number, payload)
        if stream.sends and op not in _CONNECTS:
            self.post(frame)  # and so goes out together with what is sent next
        else:
            self.post_now(frame)
        return stream

    def post(self, *parts: bytes | memoryview) -> None:
        """Queue whole frames to be sent, in order. Once queued they are sent, whoever is cancelled."""
        if self.failure is not None:
            return
        self._queue.extend(parts)
        self._queued_bytes += sum(map(len, parts))
        self._work.set()

    def post_now(self, *parts: bytes | memoryview) -> None:
        """`post`, but what can be sent at once is."""
        if self._socket is None or self._queue or self._sending or self.failure is not None:
            self.post(*parts)
            return
        try:
            sent = self._socket.sendmsg(parts)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # who reads says why the link ended
        for part in parts:
            if sent < len(part):
                self.post(memoryview(part)[sent:])
            sent = max(0, sent - len(part))

    async def drained(self) -> None:
        """Wait until little enough is queued that more may be. Returns also when the link fails."""
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
                # The last words of the other side may still be unread. Who reads says why the link ended.
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
        """Take what comes in the event loop's own callback, until `fail` ends it.

        A task that waits for the socket costs two system calls and two rounds of the loop each time. That is as much
        as all else that the host does for a short command.
        """
        # One for all links of a loop: what is in it is taken before the callback returns.
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
        if number and self._greeted:
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
                if len(payload) > _EVENT_BYTES:
                    raise GuestProtocolError(f"the guest sent an event of {len(payload)} bytes")
                stream.on_event(decode_fields(payload))
            elif kind == FrameType.END:
                result = decode_fields(payload)
                del self._streams[number]
                stream.on_end(result)
            return
        if kind == FrameType.GONE:
            self.gone = self.failure is None
            self.fail(_gone(decode_fields(payload), self._name))
        elif kind == FrameType.HELLO and not self._greeted:
            version = decode_fields(payload).integer(Tag.VERSION)
            if version != PROTOCOL_VERSION:
                raise GuestProtocolError(f"the guest speaks version {version} of the protocol, not {PROTOCOL_VERSION}")
            self._greeted = True
        elif kind == FrameType.FAILED and not self._greeted:
            fields = decode_fields(payload)
            reason = fields.text(Tag.MESSAGE, 8192).strip() or os.strerror(fields.within(Tag.ERRNO, 1, 4095))
            self.fail(Failure(LaunchFailed, f"{self._name} did not start: {reason}"))
        else:
            raise GuestProtocolError(f"the guest sent a frame of type {kind} when it must not")


def _asyncio_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None  # trio


def _gone(fields: Fields, name: str) -> Failure:
    message = fields.text(Tag.MESSAGE).strip()
    if message.startswith("protocol:"):
        return Failure(GuestProtocolError, f"{name} broke the protocol and was ended: {message[9:].strip()}")
    if not message and Tag.SIGNAL in fields:
        message = f"its first process was ended by signal {fields.integer(Tag.SIGNAL)}"
    elif not message and Tag.EXIT_CODE in fields:
        message = f"its first process exited with status {fields.integer(Tag.EXIT_CODE)}"
    return Failure(SandboxDied, f"{name} has ended: {message or 'it did not say why'}")
