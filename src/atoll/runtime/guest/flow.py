"""The state of a stream: its channels, their credit, its events and its end, without waiting for any of them.

Owns flow control, what a guest may send on a stream, and how much of it is kept. Does no input or output, and needs no
event loop: `Stream` (`stream.py`) waits in one, and `atoll exec` may wait in `poll` (`surfaces/cli/direct_exec.py`).
Not here: the connection, which passes on received frames and sends those of its streams (`link.py`).

What a guest can make the host hold is bounded: per channel by the window that the host granted, per stream by
`MAX_EVENTS` events, and the number of chunks by `MAX_CHUNKS`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from atoll.contract.errors import GuestProtocolError, GuestUnresponsive, SandboxError
from atoll.contract.protocol import (
    INITIAL_CREDIT,
    MAX_PAYLOAD,
    EventKind,
    Fields,
    FrameType,
    Tag,
    encode_fields,
    encode_frame,
    encode_header,
)
from atoll.runtime.guest.frames import encode_credit

if TYPE_CHECKING:
    from atoll.runtime.guest.link import Link

WINDOW = 1024 * 1024
"""Bytes of a channel that the guest may send before the host has consumed them."""
MAX_EVENTS = 1024
"""Unread events of a stream; the protocol's own bound."""
MAX_CHUNKS = 1024
"""Unread chunks of a stream. Above it chunks are joined, and the order between channels is lost."""
PING_AFTER_S, ANSWER_S = 1.0, 4.0
"""When the end of a killed command is not reported, the guest is pinged after so long, and has so long to answer."""

_JOIN_BYTES = 16 * 1024
_MOST_CREDIT = 2**40
_EVENT_KINDS = frozenset(map(int, EventKind))

Sink = Callable[[int, bytes], None]


class Failure:
    """Why a connection or a sandbox has failed. Each waiting task gets an error object of its own."""

    __slots__ = ("kind", "message")

    def __init__(self, kind: type[SandboxError], message: str) -> None:
        self.kind = kind
        self.message = message

    def error(self) -> SandboxError:
        return self.kind(self.message)


def unanswered() -> Failure:
    """Of a guest that has answered neither an order to end a command nor a ping."""
    waited_s = PING_AFTER_S + ANSWER_S
    message = f"the sandbox does not answer: an order to end a command had no effect within {waited_s:g} s"
    return Failure(GuestUnresponsive, message)


class Chunk:
    """Bytes of a channel."""

    __slots__ = ("channel", "data")

    def __init__(self, channel: int, data: bytes | bytearray) -> None:
        self.channel = channel
        self.data = data


class Inbox:
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


class Incoming:
    """One channel towards the host."""

    __slots__ = ("consumed", "credit", "discard", "eof", "inbox", "listener")

    def __init__(self, credit: int, inbox: Inbox) -> None:
        self.credit = credit
        self.inbox = inbox
        self.consumed = 0
        self.eof = False
        self.discard = False
        self.listener: Callable[[bytes], None] | None = None


class Outgoing:
    """One channel towards the guest."""

    __slots__ = ("closed", "credit")

    def __init__(self) -> None:
        self.credit = INITIAL_CREDIT
        self.closed = False


class StreamState:
    """One operation on a connection, from OPEN to END. The methods `on_…` are for the connection."""

    def __init__(
        self,
        link: Link,
        number: int,
        window: int,
        *,
        receive: Iterable[int],
        send: Iterable[int] = (),
        dedicated: Iterable[int] = (),
        sink: Sink | None = None,
    ) -> None:
        self.number = number
        self.result: Fields | None = None
        """The fields of END. None until it is received."""
        self.taken_bytes = 0
        """Bytes that `take` has returned so far."""
        self.dropped: dict[int, int] = {}
        """Bytes of each channel that were dropped because of `drop_unread`."""
        self._drops_unread = False
        self._unread_bytes = 0  # counted while `_drops_unread`
        self.link = link
        """The connection that it is a stream of."""
        self._window = window
        self._inbox = Inbox()
        self._events = 0
        self._incoming = {channel: Incoming(window, self._inbox) for channel in receive}
        self._incoming |= {channel: Incoming(window, Inbox()) for channel in dedicated}
        self._outgoing = {channel: Outgoing() for channel in send}
        self.sends = bool(self._outgoing)
        self._sink = sink
        self._abandoned = False

    # ------------------------------------------------------------------------------------------- for the operation

    def take(self) -> tuple[int, bytes] | Fields | None:
        """The next bytes of a channel, or event, in the order of arrival. None: there is nothing now."""
        self.keep_unread()
        if not self._inbox.items:
            return None
        item = self._inbox.take()
        if isinstance(item, Fields):
            self._events -= 1
        else:
            self.taken_bytes += len(item[1])
            self._consume(self._incoming[item[0]], *item)
        return item

    @property
    def unread(self) -> bool:
        """Whether `take` would return something."""
        return bool(self._inbox.items)

    def credit(self, channel: int = 0) -> int:
        """How many bytes may be sent now. 0 for a channel that is closed."""
        outgoing = self._outgoing[channel]
        closed = outgoing.closed or self._abandoned or self.result is not None
        return 0 if closed else min(outgoing.credit, MAX_PAYLOAD)

    def post_data(self, data: bytes | memoryview, channel: int = 0) -> None:
        """Send bytes, not more than `credit` allows."""
        self._outgoing[channel].credit -= len(data)
        self.link.post_now(encode_header(FrameType.DATA, self.number, len(data), channel), data)

    def send_eof(self, channel: int = 0) -> None:
        """Send EOF on a channel. Does nothing the second time."""
        outgoing = self._outgoing[channel]
        if outgoing.closed:
            return
        outgoing.closed = True
        if self.result is None and not self._abandoned:
            self.link.post(encode_frame(FrameType.EOF, self.number, channel=channel))
        self._wake()

    def control(self, *fields: tuple[Tag, int]) -> None:
        """Send a CONTROL frame, unless the stream has ended."""
        if self.result is None:
            self.link.post(encode_frame(FrameType.CONTROL, self.number, encode_fields(fields)))

    def reset(self) -> None:
        """Abandon the stream. What it still receives is dropped; its END comes later."""
        if self.result is None and not self._abandoned:
            self._abandoned = True
            self.link.post(encode_frame(FrameType.RESET, self.number))
            self._inbox.items.clear()
            self._wake()

    def _wake(self) -> None:
        """Something has changed that a caller may wait for."""

    def _consume(self, incoming: Incoming, channel: int, data: bytes) -> None:
        incoming.consumed += len(data)
        if incoming.consumed * 2 >= self._window and self.result is None and not self._abandoned and not incoming.eof:
            incoming.credit += incoming.consumed
            self.link.post(encode_credit(self.number, channel, incoming.consumed))
            incoming.consumed = 0

    def drop_unread(self) -> None:
        """Until `take` is first called, drop the oldest bytes beyond half a window: the guest never waits for credit.

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
        elif incoming.listener is not None:
            incoming.listener(data)
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
