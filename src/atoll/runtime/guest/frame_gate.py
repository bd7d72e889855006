"""The gate between a client on another machine and a sandbox's keeper: which frames may pass.

Owns what a server checks of a remote client before its keeper sees it: `FrameGate`. The keeper ends a client that
breaks a rule, and the guest ends its sandbox; neither is to happen because of what came from the network, and a remote
client may ask for less than a local one: no freezing, no shutdown, no stream that does not count as use, no field that
an operation does not have. Does no input or output. Not here: the WebSocket that frames come through
(`surfaces/rest/tunnel.py`), the client's end (`client/tunnel.py`), what operations mean (`guest/PROTOCOL.md`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

from atoll.contract.errors import GuestProtocolError, InvalidRequest
from atoll.contract.protocol import (
    FIRST_CHANNEL,
    HEADER,
    HEADER_SIZE,
    INITIAL_CREDIT,
    MAX_CHANNELS,
    MAX_PAYLOAD,
    Action,
    FrameType,
    Op,
    Tag,
    decode_fields,
    encode_frame,
)
from atoll.runtime.guest.exec_request import Environment

MAX_STREAMS = 65536
"""Streams that one client may have open; the guest refuses more before."""
MAX_CREDIT = 16 * 1024 * 1024
"""What a client may give the guest for one channel at a time, as the keeper says too."""
SIGKILLED = 128 + 9

_CHANNELS = FIRST_CHANNEL + MAX_CHANNELS
_MAX_STREAM_NUMBER = 2**20 - 1
_FIELD = struct.Struct("<HI")
_UINT32 = struct.Struct("<I")
_OPEN, _DATA, _EOF, _CREDIT, _RESET, _CONTROL, _END, _GONE = map(
    int,
    (
        FrameType.OPEN,
        FrameType.DATA,
        FrameType.EOF,
        FrameType.CREDIT,
        FrameType.RESET,
        FrameType.CONTROL,
        FrameType.END,
        FrameType.GONE,
    ),
)


def _fields(names: str) -> frozenset[int]:
    return frozenset(int(getattr(Tag, name)) for name in ("OP", "WINDOW", *names.split()))


_FIELDS: dict[int, frozenset[int]] = {
    Op.SPAWN: _fields("USER ARGV SHELL ENV CWD STDIN PTY_ROWS PTY_COLS KEEP CHANNELS RING MERGE QUIET"),
    Op.ATTACH: _fields("PROC OUT_OFFSET ERR_OFFSET LOSSLESS STDIN"),
    Op.SIGNAL: _fields("PROC SIGNAL TREE"),
    Op.PROCS: _fields(""),
    Op.PS: _fields(""),
    Op.READ: _fields("USER PATH OFFSET LIMIT"),
    Op.WRITE: _fields("USER PATH MODE APPEND ATOMIC PARENTS EXCLUSIVE XATTR_PREFIX XATTRS"),
    Op.STAT: _fields("USER PATH FOLLOW XATTR_PREFIX"),
    Op.LIST: _fields("USER PATH XATTR_PREFIX"),
    Op.MKDIR: _fields("USER PATH PARENTS MODE"),
    Op.REMOVE: _fields("USER PATH RECURSIVE MISSING_OK"),
    Op.RENAME: _fields("USER PATH TO PARENTS"),
    Op.SYMLINK: _fields("USER PATH TARGET"),
    Op.CHMOD: _fields("USER PATH MODE"),
    Op.CHOWN: _fields("USER PATH OWNER RECURSIVE"),
    Op.TAR_OUT: _fields("USER PATH INSIDE EXCLUDE"),
    Op.TAR_IN: _fields("USER PATH"),
    Op.GLOB: _fields("USER PATH PATTERN HIDDEN LIMIT"),
    Op.GREP: _fields("USER PATH PATTERN IGNORE_CASE INCLUDE HIDDEN LIMIT CONTEXT"),
    Op.WATCH: _fields("USER PATH RECURSIVE"),
    Op.DIAL: _fields("PORT HOST"),
    Op.LISTEN: _fields("PORT HOST"),
    Op.ACCEPT: _fields("CONN"),
}
"""The operations that a remote client may start, and the fields that each may have."""
_CONTROLS: dict[int, frozenset[int]] = {
    Action.SIGNAL: frozenset(map(int, (Tag.ACTION, Tag.SIGNAL, Tag.TREE))),
    Action.RESIZE: frozenset(map(int, (Tag.ACTION, Tag.PTY_ROWS, Tag.PTY_COLS))),
}
_PROCESS = frozenset({int(Op.SPAWN), int(Op.ATTACH)})


class FrameRefused(ValueError):
    """A client sent what it may not send. Its connection ends; the message says why."""


class SpawnFrame(NamedTuple):
    """An OPEN with SPAWN, which gets the sandbox's environment before it is passed on."""

    stream: int
    fields: bytes
    """All but the variables, encoded."""
    env: dict[str, str]
    """The command's own variables."""
    user: str
    terminal: bool

    def encode(self, environment: Environment) -> bytes:
        """The frame for the keeper.

        Raises:
            InvalidRequest: with the environment it does not fit into a frame, or a variable is not allowed.
        """
        payload = self.fields + environment.encode(self.env, user=self.user, terminal=self.terminal)
        if len(payload) > MAX_PAYLOAD:
            raise InvalidRequest(
                f"the request takes {len(payload)} bytes with the sandbox's environment; {MAX_PAYLOAD} is the most"
            )
        return encode_frame(FrameType.OPEN, self.stream, payload)


class _GatedStream:
    """A stream that was opened and has not ended."""

    __slots__ = ("allowed", "credit", "eof", "op")

    def __init__(self, op: int, window: int) -> None:
        self.op = op
        self.credit = [window] * _CHANNELS  # what the guest may send
        self.allowed = [INITIAL_CREDIT] * _CHANNELS  # what the client may send
        self.eof = 0  # a bit for each channel


class FrameGate:
    """Checks the frames of one remote client. Holds at most one that is incomplete, in each direction."""

    def __init__(self) -> None:
        self._streams: dict[int, _GatedStream] = {}
        self._held = b""
        self._returning = b""
        self._passing = 0

    # ---- from the client ----

    def admit(self, chunk: bytes) -> list[bytes | memoryview | SpawnFrame]:
        """What may be sent to the keeper now, in order: whole frames. Frames of a stream that has ended are dropped.

        Raises:
            FrameRefused: it sent what it may not send. The gate cannot be used afterwards.
        """
        if self._held:
            chunk, self._held = self._held + chunk, b""
        view = memoryview(chunk)
        passed: list[bytes | memoryview | SpawnFrame] = []
        start = position = 0  # from `start` to `position` all may pass as it is
        size = len(chunk)
        while size - position >= HEADER_SIZE:
            length, kind, channel, reserved, number = HEADER.unpack_from(chunk, position)
            _check_header(length, kind, channel, reserved, number)
            end = position + HEADER_SIZE + length
            if end > size:
                break
            payload = view[position + HEADER_SIZE : end]
            spawn = None
            if kind == _OPEN:
                spawn = self._open(number, bytes(payload))
                keep = spawn is None
            else:
                stream = self._streams.get(number)
                keep = stream is not None and self._is_allowed(stream, kind, channel, payload)
            if not keep:
                if position > start:
                    passed.append(view[start:position])
                if spawn is not None:
                    passed.append(spawn)
                start = end
            position = end
        if position > start:
            passed.append(view[start:position])
        self._held = bytes(view[position:])
        return passed

    def _open(self, number: int, payload: bytes) -> SpawnFrame | None:
        """Note a new stream. Returns what is passed on in its place; None: it is passed on as it is."""
        if number in self._streams:
            raise FrameRefused(f"stream {number} is open already")
        if len(self._streams) >= MAX_STREAMS:
            raise FrameRefused(f"more than {MAX_STREAMS} streams are open")
        try:
            fields = decode_fields(payload)
            op, window = fields.integer(Tag.OP), fields.count(Tag.WINDOW, 0)
            allowed = _FIELDS.get(op)
            if allowed is None:
                raise FrameRefused(f"operation {op} does not exist, or is not for remote clients")
            if window > MAX_CREDIT:
                raise FrameRefused(f"the window is {window} bytes; {MAX_CREDIT} is the most")
            _check_tags(payload, allowed, f"operation {op}")
        except GuestProtocolError as error:
            raise FrameRefused(f"malformed fields: {error.message}") from None
        spawn = None
        if op == Op.SPAWN:
            others, env = _without_env(payload)
            user = fields.raw(Tag.USER).decode("utf-8", "surrogateescape") if Tag.USER in fields else "root"
            spawn = SpawnFrame(number, others, env, user, Tag.PTY_ROWS in fields)
        self._streams[number] = _GatedStream(op, window)
        return spawn

    def _is_allowed(self, stream: _GatedStream, kind: int, channel: int, payload: memoryview) -> bool:
        if kind == _DATA:
            if stream.eof >> channel & 1:
                raise FrameRefused(f"DATA after EOF on channel {channel}")
            stream.allowed[channel] -= len(payload)
            if stream.allowed[channel] < 0:
                raise FrameRefused(f"{-stream.allowed[channel]} bytes more than the credit of channel {channel}")
        elif kind == _EOF:
            stream.eof |= 1 << channel
        elif kind == _CREDIT:
            more = _UINT32.unpack(payload)[0]
            if not 0 < more <= MAX_CREDIT - stream.credit[channel]:
                raise FrameRefused(f"a credit of {more} bytes; a channel may have {MAX_CREDIT} at a time")
            stream.credit[channel] += more
        elif kind == _CONTROL:
            _check_control(stream, bytes(payload))
        return True

    def forget(self, number: int) -> None:
        """The stream was refused, and the keeper has not seen it."""
        self._streams.pop(number, None)

    # ---- from the keeper, which has checked it ----

    def returned(self, chunk: bytes) -> tuple[bool, bool]:
        """Note what is passed on to the client. Returns whether a process may have been killed, and whether the keeper
        said that it is the end."""
        killed = gone = False
        position = min(self._passing, len(chunk))
        self._passing -= position
        if self._returning:
            chunk, self._returning = self._returning + chunk, b""
        size = len(chunk)
        while size - position >= HEADER_SIZE:
            length, kind, channel, _, number = HEADER.unpack_from(chunk, position)
            end = position + HEADER_SIZE + length
            stream = self._streams.get(number)
            if kind == _DATA:
                if stream is not None and channel < _CHANNELS:
                    stream.credit[channel] -= length
                self._passing = max(0, end - size)
                position = min(end, size)
                continue
            if end > size:
                break
            if kind == _CREDIT and stream is not None and length == _UINT32.size and channel < _CHANNELS:
                stream.allowed[channel] += _UINT32.unpack_from(chunk, position + HEADER_SIZE)[0]
            elif kind == _END and stream is not None:
                del self._streams[number]
                killed |= stream.op in _PROCESS and _was_killed(bytes(chunk[position + HEADER_SIZE : end]))
            gone |= kind == _GONE
            position = end
        self._returning = bytes(chunk[position:])
        return killed, gone


def _check_header(length: int, kind: int, channel: int, reserved: int, number: int) -> None:
    if length > MAX_PAYLOAD:
        raise FrameRefused(f"a frame of {length} bytes; {MAX_PAYLOAD} is the most")
    if not _OPEN <= kind <= _CONTROL:
        raise FrameRefused(f"frame type {kind} is not for remote clients")
    if not 1 <= number <= _MAX_STREAM_NUMBER:
        raise FrameRefused(f"stream number {number}; allowed are 1 to {_MAX_STREAM_NUMBER}")
    if reserved or channel >= (_CHANNELS if kind in (_DATA, _EOF, _CREDIT) else 1):
        raise FrameRefused(f"a frame of type {kind} with channel {channel} and reserved bits {reserved}")
    if (
        (kind == _DATA and not length)
        or (kind in (_EOF, _RESET) and length)
        or (kind == _CREDIT and length != _UINT32.size)
    ):
        raise FrameRefused(f"a frame of type {kind} with {length} bytes")


def _check_control(stream: _GatedStream, payload: bytes) -> None:
    try:
        allowed = _CONTROLS.get(decode_fields(payload).integer(Tag.ACTION))
    except GuestProtocolError as error:
        raise FrameRefused(f"malformed fields: {error.message}") from None
    if stream.op not in _PROCESS or allowed is None:
        raise FrameRefused(f"this CONTROL is not one of operation {stream.op}")
    _check_tags(payload, allowed, "CONTROL")


def _split(payload: bytes) -> Iterable[tuple[int, int, int]]:
    """The tag, beginning and end of each field, of fields that are well-formed."""
    position = 0
    while position < len(payload):
        tag, length = _FIELD.unpack_from(payload, position)
        yield tag, position, position + _FIELD.size + length
        position += _FIELD.size + length


def _check_tags(payload: bytes, allowed: frozenset[int], what: str) -> None:
    for tag, _, _ in _split(payload):
        if tag not in allowed:
            raise FrameRefused(f"field {tag} is not one of {what}")


def _without_env(payload: bytes) -> tuple[bytes, dict[str, str]]:
    others: list[bytes] = []
    env: dict[str, str] = {}
    for tag, begin, end in _split(payload):
        if tag != Tag.ENV:
            others.append(payload[begin:end])
            continue
        name, equals, value = payload[begin + _FIELD.size : end].decode("utf-8", "surrogateescape").partition("=")
        if not equals or not name:
            raise FrameRefused("a variable without a name or a value")
        env[name] = value
    return b"".join(others), env


def _was_killed(payload: bytes) -> bool:
    try:
        end = decode_fields(payload)
        return end.flag(Tag.SIGNAL) or (Tag.EXIT_CODE in end and end.integer(Tag.EXIT_CODE) == SIGKILLED)
    except GuestProtocolError:
        return False  # the client finds out, and what it does about it
