"""The rules of one connection to a guest: its handshake, the numbers of its streams, which frame may come when.

Owns what frames mean for a connection, and why one has ended. Does no input or output, and needs no event loop: what
comes is given to `Link.take`, and a subclass sends (`connection.py`, `surfaces/cli/direct_exec.py`). Not here: what
flows on a stream (`flow.py`), how frames are encoded (`frames.py`).
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache

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
from atoll.runtime.guest.flow import WINDOW, Failure, StreamState
from atoll.runtime.guest.frames import FrameReader, decode_credit

_MAX_EVENT_BYTES = 4096  # far above any real one; unread events are kept in memory
_MAX_STREAM_NUMBER = 2**20 - 1  # the keeper uses the other bits itself
_DATA = int(FrameType.DATA)
_PING = encode_fields(((Tag.OP, Op.SIGNAL), (Tag.WINDOW, WINDOW), (Tag.PROC, 0), (Tag.SIGNAL, 0)))


class Link(ABC):
    """A connection to a guest, through its keeper, as a state. Subclasses wait and send."""

    def __init__(self, name: str, why_ended: Callable[[], str | None] = lambda: None) -> None:
        """`why_ended` is asked when the other side has ended: what was done to the sandbox, if that is known."""
        self.failure: Failure | None = None
        """Why the connection has ended. None: it has not."""
        self.heard = 0
        """How often something has arrived."""
        self.ready = False
        """Whether the guest has said HELLO. Nothing may be sent before."""
        self._name = name
        self._why_ended = why_ended
        self._reader = FrameReader()
        self._streams: dict[int, StreamState] = {}
        self._number = 0

    @abstractmethod
    def post(self, *parts: bytes | memoryview) -> None:
        """Queue whole frames to be sent, in order. Once queued they are sent, even if the caller is cancelled."""

    @abstractmethod
    def post_now(self, *parts: bytes | memoryview) -> None:
        """`post`, but as much as the socket accepts is sent at once."""

    # ---- streams ----

    def new_number(self) -> int:
        """A number for a stream that no open stream has."""
        number = self._number
        while True:
            number = number % _MAX_STREAM_NUMBER + 1
            if number not in self._streams:
                break
        self._number = number
        return number

    def add(self, stream: StreamState) -> None:
        """Pass on to `stream` what comes for its number, until its END."""
        self._streams[stream.number] = stream

    def ping(self) -> None:
        """Ask the guest for an answer, after which `heard` is higher: a signal for a process that does not exist."""
        if self.failure is None:
            number = self.new_number()
            self.add(StreamState(self, number, WINDOW, receive=()))
            self.post_now(encode_frame(FrameType.OPEN, number, _PING))

    # ---- what comes ----

    def fail(self, failure: Failure) -> None:
        """End the connection for this reason. The first reason stays."""
        if self.failure is not None:
            return
        self.failure = failure
        for stream in self._streams.values():
            stream.on_failure()
        self._streams.clear()

    def lose(self) -> None:
        """The other side has closed the connection."""
        lost = f"connection lost to {self._name}; if it still runs, the next call connects again"
        self.fail(self._explained(Failure(SandboxDied, lost)))

    def _explained(self, failure: Failure) -> Failure:
        """With what was done to the sandbox as its reason, instead of how its processes ended."""
        why = self._why_ended() if failure.kind is SandboxDied else None
        return failure if why is None else Failure(SandboxDied, f"{self._name} {why}")

    def take(self, chunk: bytes | memoryview) -> None:
        """Take what has arrived. A guest that breaks a rule fails the connection."""
        self.heard += 1
        try:
            for frame in self._reader.feed(chunk):
                self._dispatch(*frame)
        except GuestProtocolError as violation:
            self.fail(Failure(GuestProtocolError, violation.message))

    def _dispatch(self, kind: int, channel: int, number: int, payload: bytes) -> None:
        if number and self.ready:
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
            self.fail(self._explained(_gone(decode_fields(payload), self._name)))
        elif kind == FrameType.HELLO and not self.ready:
            version = decode_fields(payload).integer(Tag.VERSION)
            if version != PROTOCOL_VERSION:
                raise GuestProtocolError(f"the guest speaks version {version} of the protocol, not {PROTOCOL_VERSION}")
            self.ready = True
        elif kind == FrameType.FAILED and not self.ready:
            fields = decode_fields(payload)
            reason = fields.text(Tag.MESSAGE, 8192).strip() or os.strerror(fields.within(Tag.ERRNO, 1, 4095))
            self.fail(Failure(LaunchFailed, f"{self._name} did not start: {reason}"))
        else:
            raise GuestProtocolError(f"the guest sent a frame of type {kind}, which is not allowed here")


def encode_open(op: Op, fields: bytes, window: int = WINDOW) -> bytes:
    """The payload of an OPEN.

    Raises:
        InvalidRequest: the fields do not fit into one frame.
    """
    payload = _operation(op, window) + fields
    if len(payload) > MAX_PAYLOAD:
        raise InvalidRequest(
            f"the request takes {len(payload)} bytes; arguments, environment and paths together may take "
            f"{MAX_PAYLOAD}. Write what is long to a file first, or send it through stdin"
        )
    return payload


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
