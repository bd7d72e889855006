"""A stream: one operation on a connection to a guest, from OPEN to END, with its flow control.

Owns channels, credit, events and the end of a stream. Not here: the connection, which passes on received frames and
sends those of its streams (`connection.py`), and what an operation means (`process.py`, `files.py`, `ports.py`). Used
by those four.

What a guest can make the host hold is bounded: per channel by the window that the host granted, per stream by
`MAX_EVENTS` events, and the number of chunks by `MAX_CHUNKS`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, TypeVar

import anyio
import anyio.lowlevel
from anyio.abc import ByteStream

from atoll.contract.errors import GuestProtocolError, GuestUnresponsive, SandboxError
from atoll.contract.protocol import (
    INITIAL_CREDIT,
    MAX_PAYLOAD,
    EventKind,
    Fields,
    FrameType,
    Problem,
    Tag,
    encode_fields,
    encode_frame,
    encode_header,
)
from atoll.runtime.guest.frames import RecordReader, encode_credit

WINDOW = 1024 * 1024
"""Bytes of a channel that the guest may send before the host has consumed them."""
MAX_EVENTS = 1024
"""Unread events of a stream; the protocol's own bound."""
MAX_CHUNKS = 1024
"""Unread chunks of a stream. Above it chunks are joined, and the order between channels is lost."""
MAX_COLLECT_BYTES = 256 * 1024 * 1024
"""Records that `Stream.collect` accepts."""
ABANDON_S = 10.0
PING_AFTER_S, ANSWER_S = 1.0, 4.0
"""When the end of a killed command is not reported, the guest is pinged after so long, and has so long to answer."""

_JOIN_BYTES = 16 * 1024
_MOST_CREDIT = 2**40
_EVENT_KINDS = frozenset(map(int, EventKind))

Sink = Callable[[int, bytes], None]
_Parsed = TypeVar("_Parsed")


class ResultLimit(Exception):
    """More results than one call returns. Internal: the caller of `collect` raises an error that says what helps."""

    def __init__(self, limit: int, message: str) -> None:
        super().__init__(message)
        self.limit = limit


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a connection or a sandbox has failed. Each waiting task gets an error object of its own."""

    kind: type[SandboxError]
    message: str

    def error(self) -> SandboxError:
        return self.kind(self.message)


class Transport(Protocol):
    """What a stream needs of its connection (`GuestConnection`)."""

    @property
    def failure(self) -> Failure | None: ...

    @property
    def heard(self) -> int: ...

    def fail(self, failure: Failure) -> None: ...

    def ping(self) -> None: ...

    def post(self, *parts: bytes | memoryview) -> None: ...

    def post_now(self, *parts: bytes | memoryview) -> None: ...

    async def drained(self) -> None: ...


class Chunk:
    """Bytes of a channel."""

    __slots__ = ("channel", "data")

    def __init__(self, channel: int, data: bytes | bytearray) -> None:
        self.channel = channel
        self.data = data


class _Inbox:
    """Unread chunks and events, in order. Small adjacent chunks of one channel are joined."""

    __slots__ = ("_last", "items")

    def __init__(self) -> None:
        self.items: deque[Chunk | Fields] = deque()
        self._last: dict[int, Chunk] = {}

    def put(self, channel: int, data: bytes) -> None:
        items = self.items
        last = self._last.get(channel) if items else None
        if last is not None and (
            len(items) >= MAX_CHUNKS or (items[-1] is last and len(last.data) + len(data) <= _JOIN_BYTES)
        ):
            if isinstance(last.data, bytes):
                last.data = bytearray(last.data)
            last.data += data
            return
        chunk = Chunk(channel, data)
        items.append(chunk)
        self._last[channel] = chunk

    def put_event(self, event: Fields) -> None:
        # A chunk after an event must not be joined with one before it.
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


class SilenceWatch:
    """A context around the wait for the END of a stream that was told to end: gives it up if the guest is silent.

    A guest that kills a large process tree takes its time, but answers a ping meanwhile; one that was stopped does not.
    """

    __slots__ = ("_stream", "_timer")

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        self._timer = asyncio.get_running_loop().call_later(PING_AFTER_S, self._ping)
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _ping(self) -> None:
        if self._stream.result is None:
            transport = self._stream.transport
            heard = transport.heard
            transport.ping()
            self._timer = asyncio.get_running_loop().call_later(ANSWER_S, self._judge, heard)

    def _judge(self, heard: int) -> None:
        if self._stream.transport.heard == heard:
            waited_s = PING_AFTER_S + ANSWER_S
            message = f"the sandbox does not answer: an order to end a command had no effect within {waited_s:g} s"
            self._stream.give_up(Failure(GuestUnresponsive, message))


class Stream:
    """One operation on a connection, from OPEN to END.

    As a context manager it leaves nothing behind: if the stream has not ended by then, it is abandoned.
    """

    def __init__(
        self,
        transport: Transport,
        number: int,
        window: int,
        *,
        receive: Iterable[int],
        send: Iterable[int],
        dedicated: Iterable[int],
        sink: Sink | None,
    ) -> None:
        self.number = number
        self.result: Fields | None = None
        """The fields of END. None until it is received."""
        self.taken_bytes = 0
        """Bytes that `next` has returned so far."""
        self.dropped: dict[int, int] = {}
        """Bytes of each channel that were dropped because of `drop_unread`."""
        self._drops_unread = False
        self._unread_bytes = 0  # counted while `_drops_unread`
        self.transport = transport
        """The connection that it is a stream of."""
        self._window = window
        self._inbox = _Inbox()
        self._events = 0
        self._records = RecordReader()
        self._incoming = {channel: _Incoming(window, self._inbox) for channel in receive}
        self._incoming |= {channel: _Incoming(window, _Inbox()) for channel in dedicated}
        self._outgoing = {channel: _Outgoing() for channel in send}
        self.sends = bool(self._outgoing)
        self._sink = sink
        self._abandoned = False
        self._given_up: Failure | None = None
        self._waiters: list[asyncio.Future[None]] = []

    # ------------------------------------------------------------------------------------------- for the operation

    async def next(self) -> tuple[int, bytes] | Fields | None:
        """The next bytes of a channel, or event, in the order of arrival. None when the stream has ended.

        Raises:
            SandboxError: the connection failed before END.
        """
        self.keep_unread()
        while not self._inbox.items:
            if self.result is not None:
                return None
            await self._changed()
        item = self._inbox.take()
        if isinstance(item, Fields):
            self._events -= 1
        else:
            self.taken_bytes += len(item[1])
            self._consume(self._incoming[item[0]], *item)
        return item

    async def next_event(self, expected: EventKind) -> Fields | None:
        """The event that must come next. None when the stream has ended instead.

        Raises:
            SandboxError: the connection failed, or another event or data came (`GuestProtocolError`).
        """
        item = await self.next()
        if item is None:
            return None
        with self.fail_on_violation():
            if isinstance(item, tuple) or item.integer(Tag.EVENT) != expected:
                raise GuestProtocolError(f"the guest did not send the event {expected.name} when it had to")
        return item

    async def next_bytes(self) -> bytes | None:
        """The next bytes of a stream that has one channel and no events. None when it has ended.

        Raises:
            SandboxError: the connection failed, or an event came (`GuestProtocolError`).
        """
        item = await self.next()
        if isinstance(item, Fields):
            with self.fail_on_violation():
                raise GuestProtocolError("the guest sent an event where only data is allowed")
        return None if item is None else item[1]

    async def next_records(self) -> list[Fields] | None:
        """The next records of a stream that has only those, one or more. None when it has ended.

        Raises:
            SandboxError: the connection failed, or a record is malformed (`GuestProtocolError`).
        """
        while (data := await self.next_bytes()) is not None:
            with self.fail_on_violation():
                if records := self._records.feed(data):
                    return records
        with self.fail_on_violation():
            if self.result is not None and self.result.problem() is None:
                self._records.finish()
        return None

    async def collect(self, parse: Callable[[Fields], _Parsed], limit: int) -> list[_Parsed]:
        """All records of a stream, each parsed by `parse`.

        Raises:
            ResultLimit: there are more than `limit`, or more than `MAX_COLLECT_BYTES` of them.
            SandboxError: the connection failed, or `parse` refused a record (`GuestProtocolError`).
        """
        found: list[_Parsed] = []
        while (records := await self.next_records()) is not None:
            with self.fail_on_violation():
                found += map(parse, records)
            if len(found) > limit:
                raise ResultLimit(limit, f"more than {limit} entries")
            if self.taken_bytes > MAX_COLLECT_BYTES:
                raise ResultLimit(MAX_COLLECT_BYTES, f"more than {MAX_COLLECT_BYTES} bytes of entries")
        return found

    async def receive(self, channel: int) -> bytes:
        """The next bytes of a dedicated channel.

        Raises:
            anyio.EndOfStream: no more will come.
            SandboxError: the connection failed.
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
        """The fields of END, once it has come. Reads nothing from the channels: use a sink, or read them to the end.

        Raises:
            SandboxError: the connection failed before END.
        """
        while self.result is None:
            await self._changed()
        return self.result

    def is_quiet(self, channel: int) -> bool:
        """Whether a dedicated channel has no unread bytes and is still open."""
        incoming = self._incoming[channel]
        ended = incoming.eof or self._abandoned or self.result is not None or self.transport.failure is not None
        return not ended and not incoming.inbox.items

    def problem(self) -> Problem | None:
        """The problem that END reports. None: there is none, or END has not come.

        Raises:
            GuestProtocolError: END is malformed.
        """
        with self.fail_on_violation():
            return None if self.result is None else self.result.problem()

    async def send(self, data: bytes | bytearray | memoryview, channel: int = 0) -> None:
        """Send bytes as credit allows. When it returns, all are queued or sent; `data` may be changed.

        Raises:
            anyio.BrokenResourceError: the stream has ended; they will not be read.
            anyio.ClosedResourceError: `send_eof` was called, or the stream was abandoned.
            SandboxError: the connection failed.
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
            if self.transport.failure is not None:
                raise self.transport.failure.error()
            piece = view[: min(outgoing.credit, MAX_PAYLOAD)]
            outgoing.credit -= len(piece)
            view = view[len(piece) :]
            self.transport.post_now(encode_header(FrameType.DATA, self.number, len(piece), channel), piece)
            await self.transport.drained()

    def send_eof(self, channel: int = 0) -> None:
        """Send EOF on a channel. Does nothing the second time."""
        outgoing = self._outgoing[channel]
        if outgoing.closed:
            return
        outgoing.closed = True
        if self.result is None and not self._abandoned:
            self.transport.post(encode_frame(FrameType.EOF, self.number, channel=channel))
        self._wake()

    def control(self, *fields: tuple[Tag, int]) -> None:
        """Send a CONTROL frame, unless the stream has ended."""
        if self.result is None:
            self.transport.post(encode_frame(FrameType.CONTROL, self.number, encode_fields(fields)))

    def discard(self, channel: int) -> None:
        """Drop what a dedicated channel holds and still receives, so that the guest does not wait for credit."""
        incoming = self._incoming[channel]
        incoming.discard = True
        while incoming.inbox.items:
            item = incoming.inbox.take()
            if isinstance(item, tuple):
                self._consume(incoming, *item)

    def reset(self) -> None:
        """Abandon the stream. What it still receives is dropped; its END comes later."""
        if self.result is None and not self._abandoned:
            self._abandoned = True
            self.transport.post(encode_frame(FrameType.RESET, self.number))
            self._inbox.items.clear()
            self._wake()

    async def abandon(self, within_s: float = ABANDON_S) -> bool:
        """`reset`, and wait for END, shielded from cancellation, but no longer than `within_s`, and less if the guest
        does not answer a ping either.

        True when END has come or the connection has failed.
        """
        self.reset()
        with anyio.move_on_after(within_s, shield=True), SilenceWatch(self):
            while self.result is None and self.transport.failure is None and self._given_up is None:
                await self._changed()
        return self.result is not None or self.transport.failure is not None

    def give_up(self, failure: Failure) -> None:
        """Fail this stream alone, without waiting for its END."""
        if self.result is None and self._given_up is None:
            self._given_up = failure
            self._wake()

    @contextlib.contextmanager
    def fail_on_violation(self) -> Iterator[None]:
        """A `GuestProtocolError` raised inside fails the connection, and so all its streams."""
        try:
            yield
        except GuestProtocolError as violation:
            self.transport.fail(Failure(GuestProtocolError, violation.message))
            raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.result is None and self.transport.failure is None:
            await self.abandon()

    async def _changed(self) -> None:
        failure = self.transport.failure or self._given_up
        if failure is not None:
            raise failure.error()
        # Not an `anyio.Event`: a short command waits once, and should not pay for more than a future.
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            raise

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _consume(self, incoming: _Incoming, channel: int, data: bytes) -> None:
        incoming.consumed += len(data)
        if incoming.consumed * 2 >= self._window and self.result is None and not self._abandoned and not incoming.eof:
            incoming.credit += incoming.consumed
            self.transport.post(encode_credit(self.number, channel, incoming.consumed))
            incoming.consumed = 0

    def drop_unread(self) -> None:
        """Until `next` is first called, drop the oldest bytes beyond half a window: the guest never waits for credit.

        Bytes that were received before this call count too.
        """
        self._drops_unread = True
        self._unread_bytes = sum(len(item.data) for item in self._inbox.items if isinstance(item, Chunk))
        self._drop_oldest()

    def keep_unread(self) -> None:
        """Undo `drop_unread`: from now on, unread bytes hold up the sender."""
        self._drops_unread = False

    def _drop_oldest(self) -> None:
        items = self._inbox.items
        while self._unread_bytes * 2 > self._window and len(items) > 1 and isinstance(items[0], Chunk):
            item = self._inbox.take()
            if isinstance(item, tuple):
                channel, data = item
                self._unread_bytes -= len(data)
                self.dropped[channel] = self.dropped.get(channel, 0) + len(data)
                self._consume(self._incoming[channel], channel, data)

    # ------------------------------------------------------------------------------------------- for the connection

    def on_data(self, channel: int, data: bytes) -> None:
        incoming = self._incoming.get(channel)
        if incoming is None or incoming.eof:
            raise GuestProtocolError(f"the guest sent data on channel {channel}, which is not open")
        incoming.credit -= len(data)
        if incoming.credit < 0:
            raise GuestProtocolError(f"the guest sent {-incoming.credit} bytes more than its credit")
        if self._abandoned:
            return
        if incoming.discard:
            self._consume(incoming, channel, data)
        elif self._sink is not None:
            self._sink(channel, data)
            self._consume(incoming, channel, data)
        else:
            incoming.inbox.put(channel, data)
            if self._drops_unread and incoming.inbox is self._inbox:
                self._unread_bytes += len(data)
                self._drop_oldest()
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
            raise GuestProtocolError(f"the guest gave credit for channel {channel}, which is not open or has too much")
        outgoing.credit += amount
        self._wake()

    def on_event(self, event: Fields) -> None:
        kind = event.integer(Tag.EVENT)
        if kind not in _EVENT_KINDS:
            raise GuestProtocolError(f"the guest sent event {kind}")
        if self._abandoned:
            return
        self._events += 1
        if self._events > MAX_EVENTS and kind == EventKind.ACCEPTED:
            # The guest has closed the oldest unaccepted connections by then.
            self._inbox.items.popleft()
            self._events -= 1
        if self._events > MAX_EVENTS:
            raise GuestProtocolError(f"the guest sent more than {MAX_EVENTS} events that were not read")
        self._inbox.put_event(event)
        self._wake()

    def on_end(self, result: Fields) -> None:
        self.result = result
        self._wake()

    def on_failure(self) -> None:
        self._wake()


class ChannelStream(ByteStream):
    """One channel in each direction as a byte stream: an extra channel of a process, or a port (`ports.py`).

    Closing it leaves the operation running: what still comes on its channel is dropped.
    """

    def __init__(self, stream: Stream, *, receive: int, send: int) -> None:
        self._stream = stream
        self._receive_channel = receive
        self._send_channel = send
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
                self._rest = await self._next()
            except SandboxError as error:  # also of a malformed END, which has failed the connection for all streams
                raise anyio.BrokenResourceError from error
        data, self._rest = self._rest[:max_bytes], self._rest[max_bytes:]
        return data

    async def _next(self) -> bytes:
        return await self._stream.receive(self._receive_channel)

    async def send(self, item: bytes) -> None:
        """Send all of it, as fast as the other side reads it.

        Raises:
            anyio.BrokenResourceError: the other side reads no more, or the sandbox is gone (its error is the cause).
        """
        try:
            await self._stream.send(item, self._send_channel)
        except SandboxError as error:
            raise anyio.BrokenResourceError from error

    async def send_eof(self) -> None:
        """Send no more. Receiving goes on."""
        self._stream.send_eof(self._send_channel)

    async def aclose(self) -> None:
        """Close both directions."""
        self.abort()
        await anyio.lowlevel.checkpoint()

    def abort(self) -> None:
        """`aclose`, for a caller that cannot await."""
        self._closed = True
        self._stream.send_eof(self._send_channel)
        self._stream.discard(self._receive_channel)
