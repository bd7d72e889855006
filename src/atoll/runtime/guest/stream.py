"""A stream: one operation on a connection to a guest, from OPEN to END, with its flow control.

Owns waiting for a stream, in an event loop. Not here: channels, credit, events and its end (`flow.py`), the connection
(`connection.py`), and what an operation means (`process.py`, `files.py`, `ports.py`). Used by those four.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

import anyio
import anyio.lowlevel
from anyio.abc import ByteStream

from atoll.contract.errors import GuestProtocolError, SandboxError
from atoll.contract.protocol import EventKind, Fields, Problem, Tag
from atoll.runtime.guest.flow import ANSWER_S, PING_AFTER_S, Failure, Sink, StreamState, unanswered
from atoll.runtime.guest.frames import RecordReader

if TYPE_CHECKING:
    from atoll.runtime.guest.connection import GuestConnection

MAX_COLLECT_BYTES = 256 * 1024 * 1024
"""Records that `Stream.collect` accepts."""
ABANDON_S = 10.0

_Parsed = TypeVar("_Parsed")


class ResultLimit(Exception):
    """More results than one call returns. Internal: the caller of `collect` raises an error that says what helps."""

    def __init__(self, limit: int, message: str) -> None:
        super().__init__(message)
        self.limit = limit


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
            link = self._stream.link
            heard = link.heard
            link.ping()
            self._timer = asyncio.get_running_loop().call_later(ANSWER_S, self._judge, heard)

    def _judge(self, heard: int) -> None:
        if self._stream.link.heard == heard:
            self._stream.give_up(unanswered())


class Stream(StreamState):
    """One operation on a connection, from OPEN to END.

    As a context manager it leaves nothing behind: if the stream has not ended by then, it is abandoned.
    """

    def __init__(
        self,
        connection: GuestConnection,
        number: int,
        window: int,
        *,
        receive: Iterable[int],
        send: Iterable[int],
        dedicated: Iterable[int],
        sink: Sink | None,
    ) -> None:
        super().__init__(connection, number, window, receive=receive, send=send, dedicated=dedicated, sink=sink)
        self._drained = connection.drained
        self._records = RecordReader()
        self._given_up: Failure | None = None
        self._waiters: list[asyncio.Future[None]] = []

    # ------------------------------------------------------------------------------------------- for the operation

    async def next(self) -> tuple[int, bytes] | Fields | None:
        """The next bytes of a channel, or event, in the order of arrival. None when the stream has ended.

        Raises:
            SandboxError: the connection failed before END.
        """
        while (item := self.take()) is None:
            if self.result is not None:
                return None
            await self._changed()
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
        ended = incoming.eof or self._abandoned or self.result is not None or self.link.failure is not None
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
            if self.link.failure is not None:
                raise self.link.failure.error()
            piece = view[: self.credit(channel)]
            view = view[len(piece) :]
            self.post_data(piece, channel)
            await self._drained()

    def listen(self, channel: int, listener: Callable[[bytes], None]) -> None:
        """Call a function with what comes on a dedicated channel, as it comes, instead of keeping it for `receive`.
        It must be quick, and must not raise."""
        incoming = self._incoming[channel]
        incoming.listener = listener
        while incoming.inbox.items:
            item = incoming.inbox.take()
            if isinstance(item, tuple):
                listener(item[1])
                self._consume(incoming, *item)

    def discard(self, channel: int) -> None:
        """Drop what a dedicated channel holds and still receives, so that the guest does not wait for credit."""
        incoming = self._incoming[channel]
        incoming.discard = True
        while incoming.inbox.items:
            item = incoming.inbox.take()
            if isinstance(item, tuple):
                self._consume(incoming, *item)

    async def abandon(self, within_s: float = ABANDON_S) -> bool:
        """`reset`, and wait for END, shielded from cancellation, but no longer than `within_s`, and less if the guest
        does not answer a ping either.

        True when END has come or the connection has failed.
        """
        self.reset()
        with anyio.move_on_after(within_s, shield=True), SilenceWatch(self):
            while self.result is None and self.link.failure is None and self._given_up is None:
                await self._changed()
        return self.result is not None or self.link.failure is not None

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
            self.link.fail(Failure(GuestProtocolError, violation.message))
            raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.result is None and self.link.failure is None:
            await self.abandon()

    async def _changed(self) -> None:
        failure = self.link.failure or self._given_up
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


class ProcessChannel(ChannelStream):
    """An extra channel of a process."""

    def listen(self, listener: Callable[[bytes], None]) -> None:
        """Call a function with what the process sends, as it comes: a task that waits in `receive` would get it a round
        of the event loop later. It must be quick, and must not raise."""
        self._stream.listen(self._receive_channel, listener)
