"""One operation on a connection to a guest, from OPEN to END, and how much of it may be under way.

Knows channels, credit, events and the end of a stream. Refuses to know the connection (`link.py`, which hands it the
frames and sends its own) and what the operation means (`process.py`, `files.py` and `sandbox.py` above).

What a guest can make the host hold is bounded: per channel by the window that the host granted, per stream by
`EVENT_LIMIT` events, and the number of pieces by `BACKLOG`.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, TypeVar

import anyio
import anyio.lowlevel
from anyio.abc import ByteStream

from atoll.contract.errors import GuestProtocolError, SandboxError
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
"""Bytes of a channel that may be under way to the host."""
EVENT_LIMIT = 1024
"""Events of a stream that nobody has taken yet; the protocol's own bound."""
BACKLOG = 1024
"""Pieces of a stream that nobody has taken yet. Above it they are joined, and the order between channels gives way."""
COLLECT_BYTES = 256 * 1024 * 1024
"""Records that `Stream.collect` takes."""
ABANDON_S = 10.0

_JOIN_BYTES = 16 * 1024
_MOST_CREDIT = 2**40
_EVENT_KINDS = frozenset(map(int, EventKind))

Sink = Callable[[int, bytes], None]
T = TypeVar("T")


class ResultLimit(Exception):
    """More results than a caller is given at once. Never leaves the runtime: who asked says what would help."""

    def __init__(self, limit: int, message: str) -> None:
        super().__init__(message)
        self.limit = limit


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a link or a sandbox is of no use any more. Everyone who waits gets an error of their own."""

    kind: type[SandboxError]
    message: str

    def error(self) -> SandboxError:
        return self.kind(self.message)


class Transport(Protocol):
    """What a stream needs of the link that it is on."""

    @property
    def failure(self) -> Failure | None: ...

    def fail(self, failure: Failure) -> None: ...

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
        link: Transport,
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
        self.taken_bytes = 0
        """What `next` has given out so far."""
        self._link = link
        self._window = window
        self._inbox = _Inbox()
        self._events = 0
        self._records = RecordReader()
        self._incoming = {channel: _Incoming(window, self._inbox) for channel in receive}
        self._incoming |= {channel: _Incoming(window, _Inbox()) for channel in apart}
        self._outgoing = {channel: _Outgoing() for channel in send}
        self.sends = bool(self._outgoing)
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
            self.taken_bytes += len(item[1])
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
        with self.fail_on_violation():
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
            with self.fail_on_violation():
                raise GuestProtocolError("the guest sent an event where only bytes can be")
        return None if item is None else item[1]

    async def next_records(self) -> list[Fields] | None:
        """The next records of a stream that has only those, one or more. None when it has ended.

        Raises:
            SandboxError: the link failed, or a record is malformed (`GuestProtocolError`).
        """
        while (data := await self.next_bytes()) is not None:
            with self.fail_on_violation():
                if records := self._records.feed(data):
                    return records
        with self.fail_on_violation():
            if self.result is not None and self.result.problem() is None:
                self._records.finish()
        return None

    async def collect(self, read: Callable[[Fields], T], limit: int) -> list[T]:
        """What `read` makes of all records of a stream.

        Raises:
            TooMuch: there are more than `limit`, or more than `COLLECT_BYTES` of them.
            SandboxError: the link failed, or `read` found a record wrong (`GuestProtocolError`).
        """
        found: list[T] = []
        while (records := await self.next_records()) is not None:
            with self.fail_on_violation():
                found += map(read, records)
            if len(found) > limit:
                raise ResultLimit(limit, f"more than {limit} entries")
            if self.taken_bytes > COLLECT_BYTES:
                raise ResultLimit(COLLECT_BYTES, f"more than {COLLECT_BYTES} bytes of entries")
        return found

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

    def is_quiet(self, channel: int) -> bool:
        """Whether a channel that stands apart has brought nothing that was not taken, and can bring more."""
        incoming = self._incoming[channel]
        ended = incoming.eof or self._abandoned or self.result is not None or self._link.failure is not None
        return not ended and not incoming.inbox.items

    def problem(self) -> Problem | None:
        """What END says went wrong. None: nothing did, or it has not come.

        Raises:
            GuestProtocolError: END is malformed.
        """
        with self.fail_on_violation():
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
            if self._link.failure is not None:
                raise self._link.failure.error()
            piece = view[: min(outgoing.credit, MAX_PAYLOAD)]
            outgoing.credit -= len(piece)
            view = view[len(piece) :]
            self._link.post_now(encode_header(FrameType.DATA, self.number, len(piece), channel), piece)
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

    @contextlib.contextmanager
    def fail_on_violation(self) -> Iterator[None]:
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
        kind = event.integer(Tag.EVENT)
        if kind not in _EVENT_KINDS:
            raise GuestProtocolError(f"the guest sent event {kind}")
        if self._abandoned:
            return
        self._events += 1
        if self._events > EVENT_LIMIT and kind == EventKind.ACCEPTED:
            # Of connections that nobody took, the oldest have been closed again by then.
            self._inbox.items.popleft()
            self._events -= 1
        if self._events > EVENT_LIMIT:
            raise GuestProtocolError(f"the guest sent more than {EVENT_LIMIT} events that nobody had taken")
        self._inbox.put_event(event)
        self._wake()

    def on_end(self, result: Fields) -> None:
        self.result = result
        self._wake()

    def on_failure(self) -> None:
        self._wake()


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
                try:
                    self._rest = await self._stream.receive(self._receive_channel)
                except anyio.EndOfStream:
                    if self._owner and self._stream.problem() is not None:
                        raise anyio.BrokenResourceError from None
                    raise
            except SandboxError as error:  # also of an END that is malformed, which has failed the link for all
                raise anyio.BrokenResourceError from error
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

    def is_quiet(self) -> bool:
        """Whether it is open both ways as far as is known here, and nothing has come that was not received."""
        return not self._closed and not self._rest and self._stream.is_quiet(self._receive_channel)

    async def send_eof(self) -> None:
        """Say that no more will be sent. Receiving goes on."""
        self._stream.send_eof(self._send_channel)

    async def finish(self, within_s: float) -> None:
        """Close it once the other side has taken all that was sent and has closed its own direction, or after so long.

        What the other side still sends is dropped.
        """
        with anyio.move_on_after(within_s):
            try:
                await self.send_eof()
                while True:
                    await self.receive()
            except anyio.EndOfStream:
                if self._owner:
                    with contextlib.suppress(SandboxError):
                        await self._stream.ended()
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                pass
        await self.aclose()

    async def aclose(self) -> None:
        """Close both directions."""
        self.abort()
        await anyio.lowlevel.checkpoint()

    def abort(self) -> None:
        """`aclose`, for who cannot wait."""
        self._closed = True
        self._stream.send_eof(self._send_channel)
        if self._owner:
            self._stream.reset()
        else:
            self._stream.discard(self._receive_channel)
