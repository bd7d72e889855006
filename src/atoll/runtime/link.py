"""One connection to a guest, and the streams on it.

Knows who may send what when: greeting, stream numbers, credit, the end of a stream and the end of the connection.
Refuses to know what an operation means (`process.py`, `files.py`, `sandbox.py` above) and how frames are written
(`wire.py` below). A guest that breaks a rule fails the link: everything under way on it raises `GuestProtocolError`.

What a guest can make the host hold is bounded: per channel by the window that the host granted, per stream by
`EVENT_LIMIT` events, and the number of pieces by `BACKLOG`.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

import anyio
import anyio.lowlevel
from anyio.abc import ByteStream

from atoll.contract.errors import (
    GuestProtocolError,
    InvalidRequest,
    LaunchFailed,
    SandboxDied,
    SandboxError,
)
from atoll.runtime.wire import (
    INITIAL_CREDIT,
    MAX_PAYLOAD,
    PROTOCOL_VERSION,
    EventKind,
    Fields,
    FrameReader,
    FrameType,
    Op,
    Problem,
    RecordReader,
    Tag,
    decode_credit,
    decode_fields,
    encode_credit,
    encode_fields,
    encode_frame,
    encode_header,
)

WINDOW = 1024 * 1024
"""Bytes of a channel that may be under way to the host."""
EVENT_LIMIT = 1024
"""Events of a stream that nobody has taken yet; the protocol's own bound."""
BACKLOG = 1024
"""Pieces of a stream that nobody has taken yet. Above it they are joined, and the order between channels gives way."""
GREETING_S = 30.0
ABANDON_S = 10.0

_RECEIVE_BYTES = 512 * 1024
_BATCH_BYTES = 256 * 1024
_HIGH_WATER_BYTES = 1024 * 1024
_JOIN_BYTES = 16 * 1024
_LAST_NUMBER = 2**20 - 1  # the keeper has the other bits for itself
_MOST_CREDIT = 2**40

_DATA = int(FrameType.DATA)
_EVENT_KINDS = frozenset(map(int, EventKind))

Sink = Callable[[int, bytes], None]


class Opener(Protocol):
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


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a link or a sandbox is of no use any more. Everyone who waits gets an error of their own."""

    kind: type[SandboxError]
    message: str

    def error(self) -> SandboxError:
        return self.kind(self.message)


class Chunk:
    """Bytes of a channel."""

    __slots__ = ("channel", "data")

    def __init__(self, channel: int, data: bytes | bytearray) -> None:
        self.channel = channel
        self.data = data


class _Inbox:
    """What has come and was not taken, in order. Small neighbours of one channel are joined."""

    __slots__ = ("_last", "items")

    def __init__(self) -> None:
        self.items: deque[Chunk | Fields] = deque()
        self._last: dict[int, Chunk] = {}

    def put(self, channel: int, data: bytes) -> None:
        items = self.items
        last = self._last.get(channel) if items else None
        if last is not None and (
            len(items) >= BACKLOG or (items[-1] is last and len(last.data) + len(data) <= _JOIN_BYTES)
        ):
            if isinstance(last.data, bytes):
                last.data = bytearray(last.data)
            last.data += data
            return
        chunk = Chunk(channel, data)
        items.append(chunk)
        self._last[channel] = chunk

    def put_event(self, event: Fields) -> None:
        # What comes after an event must not be joined with what came before it.
        self._last.clear()
        self.items.append(event)

    def take(self) -> tuple[int, bytes] | Fields:
        item = self.items.popleft()
        if isinstance(item, Fields):
            return item
        if self._last.get(item.channel) is item:
            del self._last[item.channel]
        return item.channel, bytes(item.data)


class _Incoming:
    """One channel towards the host."""

    __slots__ = ("consumed", "credit", "discard", "eof", "inbox")

    def __init__(self, credit: int, inbox: _Inbox) -> None:
        self.credit = credit
        self.inbox = inbox
        self.consumed = 0
        self.eof = False
        self.discard = False


class _Outgoing:
    """One channel towards the guest."""

    __slots__ = ("closed", "credit")

    def __init__(self) -> None:
        self.credit = INITIAL_CREDIT
        self.closed = False


class Stream:
    """One operation on a link, from OPEN to END.

    As a context manager it leaves nothing behind: if the stream has not ended by then, it is abandoned.
    """

    def __init__(
        self,
        link: Link,
        number: int,
        window: int,
        *,
        receive: Iterable[int],
        send: Iterable[int],
        apart: Iterable[int],
        sink: Sink | None,
    ) -> None:
        self.number = number
        self.result: Fields | None = None
        """What END said. None until then."""
        self._link = link
        self._window = window
        self._inbox = _Inbox()
        self._events = 0
        self._records = RecordReader()
        self._incoming = {channel: _Incoming(window, self._inbox) for channel in receive}
        self._incoming |= {channel: _Incoming(window, _Inbox()) for channel in apart}
        self._outgoing = {channel: _Outgoing() for channel in send}
        self._sink = sink
        self._abandoned = False
        self._change: anyio.Event | None = None

    # ------------------------------------------------------------------------------------------ for those who use it

    async def next(self) -> tuple[int, bytes] | Fields | None:
        """The next bytes of a channel, or event, in the order in which they came. None when the stream has ended.

        Raises:
            SandboxError: the link failed before END came.
        """
        while not self._inbox.items:
            if self.result is not None:
                return None
            await self._changed()
        item = self._inbox.take()
        if isinstance(item, Fields):
            self._events -= 1
        else:
            self._consume(self._incoming[item[0]], *item)
        return item

    async def next_event(self, expected: EventKind) -> Fields | None:
        """The event that must come next. None when the stream has ended instead.

        Raises:
            SandboxError: the link failed, or something else came (`GuestProtocolError`).
        """
        item = await self.next()
        if item is None:
            return None
        with self.judging():
            if isinstance(item, tuple) or item.integer(Tag.EVENT) != expected:
                raise GuestProtocolError(f"the guest did not say {expected.name} when it had to")
        return item

    async def next_bytes(self) -> bytes | None:
        """The next bytes of a stream that has one channel and no events. None when it has ended.

        Raises:
            SandboxError: the link failed, or an event came (`GuestProtocolError`).
        """
        item = await self.next()
        if isinstance(item, Fields):
            with self.judging():
                raise GuestProtocolError("the guest sent an event where only bytes can be")
        return None if item is None else item[1]

    async def next_records(self) -> list[Fields] | None:
        """The next records of a stream that has only those, one or more. None when it has ended.

        Raises:
            SandboxError: the link failed, or a record is malformed (`GuestProtocolError`).
        """
        while (data := await self.next_bytes()) is not None:
            with self.judging():
                if records := self._records.feed(data):
                    return records
        with self.judging():
            if self.result is not None and self.result.problem() is None:
                self._records.finish()
        return None

    async def receive(self, channel: int) -> bytes:
        """The next bytes of a channel that stands apart.

        Raises:
            anyio.EndOfStream: no more will come.
            SandboxError: the link failed.
        """
        incoming = self._incoming[channel]
        while not incoming.inbox.items:
            if incoming.eof or self.result is not None or self._abandoned:
                raise anyio.EndOfStream
            await self._changed()
        item = incoming.inbox.take()
        if isinstance(item, Fields):
            raise TypeError("events are never put into the inbox of a channel")
        self._consume(incoming, *item)
        return item[1]

    async def ended(self) -> Fields:
        """What END says, once it has come. Takes nothing from the channels: use a sink, or read them to the end.

        Raises:
            SandboxError: the link failed before.
        """
        while self.result is None:
            await self._changed()
        return self.result

    def problem(self) -> Problem | None:
        """What END says went wrong. None: nothing did, or it has not come.

        Raises:
            GuestProtocolError: END is malformed.
        """
        with self.judging():
            return None if self.result is None else self.result.problem()

    async def send(self, data: bytes | bytearray | memoryview, channel: int = 0) -> None:
        """Send bytes as credit allows. When it returns, they are on their way; `data` may be changed.

        Raises:
            anyio.BrokenResourceError: the stream has ended; nobody will read them.
            anyio.ClosedResourceError: `send_eof` was called, or the stream was abandoned.
            SandboxError: the link failed.
        """
        view = memoryview(data if isinstance(data, bytes) else bytes(data))
        outgoing = self._outgoing[channel]
        while view:
            while not outgoing.credit and self.result is None and not outgoing.closed and not self._abandoned:
                await self._changed()
            if outgoing.closed or self._abandoned:
                raise anyio.ClosedResourceError
            if self.result is not None:
                raise anyio.BrokenResourceError
            piece = view[: min(outgoing.credit, MAX_PAYLOAD)]
            outgoing.credit -= len(piece)
            view = view[len(piece) :]
            self._link.post(encode_header(FrameType.DATA, self.number, len(piece), channel), piece)
            await self._link.drained()

    def send_eof(self, channel: int = 0) -> None:
        """Say that no more is sent on a channel. The second time it does nothing."""
        outgoing = self._outgoing[channel]
        if outgoing.closed:
            return
        outgoing.closed = True
        if self.result is None and not self._abandoned:
            self._link.post(encode_frame(FrameType.EOF, self.number, channel=channel))
        self._wake()

    def control(self, *fields: tuple[Tag, int]) -> None:
        """Send a CONTROL frame, unless the stream has ended."""
        if self.result is None:
            self._link.post(encode_frame(FrameType.CONTROL, self.number, encode_fields(fields)))

    def discard(self, channel: int) -> None:
        """Drop what a channel that stands apart holds and still brings, so that nothing waits for it to be read."""
        incoming = self._incoming[channel]
        incoming.discard = True
        while incoming.inbox.items:
            item = incoming.inbox.take()
            if isinstance(item, tuple):
                self._consume(incoming, *item)

    def reset(self) -> None:
        """Abandon the stream. What it still brings is dropped; its END comes later."""
        if self.result is None and not self._abandoned:
            self._abandoned = True
            self._link.post(encode_frame(FrameType.RESET, self.number))
            self._inbox.items.clear()
            self._wake()

    async def abandon(self, within_s: float = ABANDON_S) -> bool:
        """`reset`, and wait for END whatever is cancelled meanwhile, but no longer than `within_s`.

        True when END has come or the link is gone.
        """
        self.reset()
        with anyio.move_on_after(within_s, shield=True):
            while self.result is None and self._link.failure is None:
                await self._changed()
        return self.result is not None or self._link.failure is not None

    @contextmanager
    def judging(self) -> Iterator[None]:
        """What is found wrong inside with what the guest sent fails the link for all."""
        try:
            yield
        except GuestProtocolError as violation:
            self._link.fail(Failure(GuestProtocolError, violation.message))
            raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.result is None and self._link.failure is None:
            await self.abandon()

    async def _changed(self) -> None:
        failure = self._link.failure
        if failure is not None:
            raise failure.error()
        if self._change is None:
            self._change = anyio.Event()
        await self._change.wait()

    def _wake(self) -> None:
        if self._change is not None:
            self._change.set()
            self._change = None

    def _consume(self, incoming: _Incoming, channel: int, data: bytes) -> None:
        incoming.consumed += len(data)
        if incoming.consumed * 2 >= self._window and self.result is None and not self._abandoned and not incoming.eof:
            incoming.credit += incoming.consumed
            self._link.post(encode_credit(self.number, channel, incoming.consumed))
            incoming.consumed = 0

    # ------------------------------------------------------------------------------------------------- for the link

    def on_data(self, channel: int, data: bytes) -> None:
        incoming = self._incoming.get(channel)
        if incoming is None or incoming.eof:
            raise GuestProtocolError(f"the guest sent data on channel {channel}, which is not open")
        incoming.credit -= len(data)
        if incoming.credit < 0:
            raise GuestProtocolError(f"the guest sent {-incoming.credit} bytes more than it was given credit for")
        if self._abandoned:
            return
        if incoming.discard:
            self._consume(incoming, channel, data)
        elif self._sink is not None:
            self._sink(channel, data)
            self._consume(incoming, channel, data)
        else:
            incoming.inbox.put(channel, data)
            self._wake()

    def on_eof(self, channel: int) -> None:
        incoming = self._incoming.get(channel)
        if incoming is None or incoming.eof:
            raise GuestProtocolError(f"the guest ended channel {channel}, which is not open")
        incoming.eof = True
        self._wake()

    def on_credit(self, channel: int, amount: int) -> None:
        outgoing = self._outgoing.get(channel)
        if outgoing is None or outgoing.credit + amount > _MOST_CREDIT:
            raise GuestProtocolError(f"the guest gave credit for channel {channel}, which it cannot")
        outgoing.credit += amount
        self._wake()

    def on_event(self, event: Fields) -> None:
        if event.integer(Tag.EVENT) not in _EVENT_KINDS:
            raise GuestProtocolError(f"the guest sent event {event.integer(Tag.EVENT)}")
        if self._abandoned:
            return
        self._events += 1
        if self._events > EVENT_LIMIT:
            raise GuestProtocolError(f"the guest sent more than {EVENT_LIMIT} events that nobody had taken")
        self._inbox.put_event(event)
        self._wake()

    def on_end(self, result: Fields) -> None:
        self.result = result
        self._wake()

    def on_failure(self) -> None:
        self._wake()


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
        self.post(encode_frame(FrameType.OPEN, number, payload))
        return stream

    def post(self, *parts: bytes | memoryview) -> None:
        """Queue whole frames to be sent, in order. Once queued they are sent, whoever is cancelled."""
        if self.failure is not None:
            return
        self._queue.extend(parts)
        self._queued_bytes += sum(map(len, parts))
        self._work.set()

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
            try:
                await self._stream.send(b"".join(parts))
            except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
                # The last words of the other side may still be unread. Who reads says why the link ended.
                return
            self._queued_bytes -= size
            if self._room is not None and self._queued_bytes <= _HIGH_WATER_BYTES:
                self._room.set()
                self._room = None

    async def _receive(self) -> None:
        try:
            chunk = await self._stream.receive(_RECEIVE_BYTES)
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            self.fail(
                Failure(SandboxDied, f"connection lost to {self._name}; if it still runs, the next call connects again")
            )
            return
        try:
            for frame in self._reader.feed(chunk):
                self._dispatch(*frame)
        except GuestProtocolError as violation:
            self.fail(Failure(GuestProtocolError, violation.message))

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


class Connection(ByteStream):
    """Two channels of a stream as a byte stream.

    `aclose` of one that owns its stream abandons it: what was sent and not yet taken by the other side may be lost.
    To be sure that all arrived, `send_eof` and receive to the end first.
    """

    def __init__(self, stream: Stream, *, receive: int, send: int, owner: bool) -> None:
        self._stream = stream
        self._receive_channel = receive
        self._send_channel = send
        self._owner = owner
        self._rest = b""
        self._closed = False

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """At least one byte.

        Raises:
            anyio.EndOfStream: the other side has sent all.
            anyio.BrokenResourceError: the connection was reset, or the sandbox is gone (its error is the cause).
        """
        if self._closed:
            raise anyio.ClosedResourceError
        if not self._rest:
            try:
                self._rest = await self._stream.receive(self._receive_channel)
            except SandboxError as error:
                raise anyio.BrokenResourceError from error
            except anyio.EndOfStream:
                if self._owner and self._stream.problem() is not None:
                    raise anyio.BrokenResourceError from None
                raise
        data, self._rest = self._rest[:max_bytes], self._rest[max_bytes:]
        return data

    async def send(self, item: bytes) -> None:
        """Send all of it, as fast as the other side takes it.

        Raises:
            anyio.BrokenResourceError: nobody reads any more, or the sandbox is gone (its error is the cause).
        """
        try:
            await self._stream.send(item, self._send_channel)
        except SandboxError as error:
            raise anyio.BrokenResourceError from error

    async def send_eof(self) -> None:
        """Say that no more will be sent. Receiving goes on."""
        self._stream.send_eof(self._send_channel)

    async def aclose(self) -> None:
        """Close both directions."""
        self._closed = True
        self._stream.send_eof(self._send_channel)
        if self._owner:
            self._stream.reset()
        else:
            self._stream.discard(self._receive_channel)
        await anyio.lowlevel.checkpoint()


def _gone(fields: Fields, name: str) -> Failure:
    message = fields.text(Tag.MESSAGE).strip()
    if message.startswith("protocol:"):
        return Failure(GuestProtocolError, f"{name} broke the protocol and was ended: {message[9:].strip()}")
    if not message and Tag.SIGNAL in fields:
        message = f"its first process was ended by signal {fields.integer(Tag.SIGNAL)}"
    elif not message and Tag.EXIT_CODE in fields:
        message = f"its first process exited with status {fields.integer(Tag.EXIT_CODE)}"
    return Failure(SandboxDied, f"{name} has ended: {message or 'it did not say why'}")
