"""The guest protocol: its numbers, the type of each field, and how headers and fields are written as bytes.

Owns the Python side of `guest/protocol.h`; a test compares the two in both directions. What the numbers mean is in
`guest/PROTOCOL.md`. Not here: reading frames and records that arrive in pieces (`runtime/guest/frames.py`), sockets and
streams (`runtime/guest/connection.py`, `drivers/keeper_client.py`). Used by the runtime and by drivers.
All input from a guest is hostile: each size is checked before anything is kept, and malformed input raises
`GuestProtocolError`, never another exception.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING

from atoll.contract.errors import GuestProtocolError, InvalidRequest
from atoll.contract.numbers import IntEnum

if TYPE_CHECKING:
    from datetime import datetime

PROTOCOL_VERSION = 1
HEADER_SIZE = 12
MAX_PAYLOAD = 262144
MAX_RECORD = 65536
INITIAL_CREDIT = 65536
MAX_CHANNELS = 8
FIRST_CHANNEL = 3
MAX_XATTRS = 4096
"""Bytes of the extended attributes that are sent of one file, encoded."""
MAX_PATH = 4096
"""The kernel's limit, and so that of names and of where links point to."""


class FrameType(IntEnum):
    HELLO = 1
    OPEN = 2
    DATA = 3
    EOF = 4
    CREDIT = 5
    RESET = 6
    CONTROL = 7
    EVENT = 8
    END = 9
    SHUTDOWN = 10
    FAILED = 32
    GONE = 33
    FREEZE = 34
    FROZEN = 35
    RECONFIGURE = 36
    RECONFIGURED = 37


class Op(IntEnum):
    SPAWN = 1
    ATTACH = 2
    SIGNAL = 3
    PROCS = 4
    PS = 5
    READ = 10
    WRITE = 11
    STAT = 12
    LIST = 13
    MKDIR = 14
    REMOVE = 15
    RENAME = 16
    SYMLINK = 17
    CHMOD = 18
    CHOWN = 19
    TAR_OUT = 20
    TAR_IN = 21
    GLOB = 22
    GREP = 23
    WATCH = 24
    DIAL = 30
    LISTEN = 31
    ACCEPT = 32


class EventKind(IntEnum):
    STARTED = 1
    GAP = 2
    CONNECTED = 3
    LISTENING = 4
    ACCEPTED = 5


class Action(IntEnum):
    """ACTION in CONTROL."""

    SIGNAL = 1
    RESIZE = 2


class FreezeAction(IntEnum):
    """ACTION in FREEZE, which the keeper reads."""

    PAUSE = 1
    HOLD = 2
    RELEASE = 3
    QUIESCE = 4


class Change(IntEnum):
    """CHANGE in the records of WATCH."""

    READY = 0
    CREATED = 1
    MODIFIED = 2
    DELETED = 3
    MOVED_FROM = 4
    MOVED_TO = 5
    ATTRIBUTES = 6
    LOST = 7


class FileType(IntEnum):
    """The value of the field KIND."""

    FILE = 1
    DIRECTORY = 2
    SYMLINK = 3
    FIFO = 4
    SOCKET = 5
    CHAR_DEVICE = 6
    BLOCK_DEVICE = 7


class Tag(IntEnum):
    VERSION = 1
    EPOCH = 2
    OP = 3
    ERRNO = 4
    MESSAGE = 5
    WINDOW = 6
    USER = 7
    EVENT = 8
    ACTION = 9
    PAUSE_MS = 10
    IDLE = 11
    WAITING = 12
    EXPIRES_MS = 13
    RENEWAL_MS = 14
    FREEZES_AT_END = 15
    ARGV = 20
    SHELL = 21
    ENV = 22
    CWD = 23
    STDIN = 24
    PTY_ROWS = 25
    PTY_COLS = 26
    KEEP = 27
    CHANNELS = 28
    RING = 29
    PROC = 30
    PID = 31
    PPID = 32
    EXIT_CODE = 33
    SIGNAL = 34
    TREE = 35
    OUT_TOTAL = 36
    ERR_TOTAL = 37
    OUT_OFFSET = 38
    ERR_OFFSET = 39
    DURATION_US = 40
    KILLED = 41
    LOSSLESS = 42
    CHANNEL = 43
    COMMAND = 44
    STARTED_US = 45
    ENDED_US = 46
    LIVE = 47
    STATE = 48
    RSS_BYTES = 49
    CPU_US = 50
    QUIET = 51
    MERGE = 52
    SUDO = 53
    PATH = 60
    OFFSET = 61
    LIMIT = 62
    SIZE = 63
    MODE = 64
    MTIME_NS = 65
    APPEND = 66
    ATOMIC = 67
    PARENTS = 68
    EXCLUSIVE = 69
    FOLLOW = 70
    KIND = 71
    UID = 72
    GID = 73
    TARGET = 74
    NAME = 75
    RECURSIVE = 76
    MISSING_OK = 77
    TO = 78
    INSIDE = 79
    COUNT = 80
    PATTERN = 81
    HIDDEN = 82
    TRUNCATED = 83
    IGNORE_CASE = 84
    INCLUDE = 85
    LINE = 86
    TEXT = 87
    CHANGE = 88
    EXCLUDE = 89
    OWNER = 90
    CONTEXT = 91
    BEFORE = 92
    AFTER = 93
    XATTR_PREFIX = 94
    XATTRS = 95
    PORT = 100
    HOST = 101
    CONN = 102
    PEER_PORT = 103


STRING_TAGS = frozenset(
    {
        Tag.USER,
        Tag.ARGV,
        Tag.SHELL,
        Tag.ENV,
        Tag.CWD,
        Tag.STATE,
        Tag.SUDO,
        Tag.PATH,
        Tag.TARGET,
        Tag.TO,
        Tag.PATTERN,
        Tag.INCLUDE,
        Tag.EXCLUDE,
        Tag.OWNER,
        Tag.XATTR_PREFIX,
        Tag.HOST,
    }
)
"""Fields that hold bytes without a NUL."""
BYTES_TAGS = frozenset({Tag.MESSAGE, Tag.COMMAND, Tag.NAME, Tag.TEXT, Tag.BEFORE, Tag.AFTER, Tag.XATTRS})
"""Fields that hold any bytes."""
INTEGER_TAGS = frozenset(Tag) - STRING_TAGS - BYTES_TAGS
"""Fields that hold 8 bytes, signed, little endian."""

_INTEGER, _STRING, _BYTES = range(3)
_SHAPES: dict[int, int] = (
    {int(tag): _INTEGER for tag in INTEGER_TAGS}
    | {int(tag): _STRING for tag in STRING_TAGS}
    | {int(tag): _BYTES for tag in BYTES_TAGS}
)

HEADER = struct.Struct("<IBBHI")
"""Length, type, channel, reserved, stream."""
_FIELD = struct.Struct("<HI")
_INTEGER_FIELD = struct.Struct("<HIq")
_INT64 = struct.Struct("<q")
_UINT32 = struct.Struct("<I")

_PRINTABLE = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if code not in {9, 10}}

Value = int | str | bytes


# ------------------------------------------------------------------------------------------------------ encoding


def encode_frame(kind: FrameType, stream: int, payload: bytes = b"", channel: int = 0) -> bytes:
    """One frame, ready to send."""
    return HEADER.pack(len(payload), kind, channel, 0, stream) + payload


def encode_header(kind: FrameType, stream: int, length: int, channel: int = 0) -> bytes:
    """The header alone, for a payload that is sent right after it without being copied."""
    return HEADER.pack(length, kind, channel, 0, stream)


def encode_fields(fields: Iterable[tuple[Tag, Value | None]]) -> bytes:
    """The fields whose value is not None, in order.

    Raises:
        InvalidRequest: a string holds a NUL or cannot be written as UTF-8, or an integer needs more than 64 bits.
    """
    parts: list[bytes] = []
    for tag, value in fields:
        if value is None:
            continue
        if isinstance(value, int):
            try:
                parts.append(_INTEGER_FIELD.pack(tag, 8, value))
            except struct.error:
                raise InvalidRequest(f"{tag.name.lower()} is {value}; numbers have at most 63 bits") from None
            continue
        if isinstance(value, str):
            try:
                raw = value.encode("utf-8", "surrogateescape")
            except UnicodeEncodeError:
                raw = encode_text(value, tag.name.lower())  # which raises, and says why
        else:
            raw = value
        if b"\0" in raw and tag in STRING_TAGS:
            raise InvalidRequest(f"{tag.name.lower()} holds a NUL character, which no path or argument can")
        parts.append(_FIELD.pack(tag, len(raw)))
        parts.append(raw)
    return b"".join(parts)


def encode_text(text: str, what: str) -> bytes:
    """Encode `text` for the guest: UTF-8; surrogates that stand for other bytes become those bytes again.

    Raises:
        InvalidRequest: it holds another surrogate.
    """
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise InvalidRequest(f"{what} holds a surrogate that stands for no byte: {text[:200]!r}") from None


def encode_xattrs(xattrs: Mapping[str, bytes]) -> bytes:
    """The value of XATTRS: each name with a NUL, the size of its value, and its value.

    Raises:
        InvalidRequest: a name is empty, holds a NUL or cannot be written as UTF-8, or all take more than 4096 bytes.
    """
    parts: list[bytes] = []
    for name, value in xattrs.items():
        raw = encode_text(name, "the name of an extended attribute")
        if not raw or b"\0" in raw:
            raise InvalidRequest(f"{name[:200]!r} cannot be the name of an extended attribute")
        parts.append(raw + b"\0" + _UINT32.pack(len(value)) + value)
    encoded = b"".join(parts)
    if len(encoded) > MAX_XATTRS:
        raise InvalidRequest(f"the extended attributes take {len(encoded)} bytes; {MAX_XATTRS} is the most")
    return encoded


# ------------------------------------------------------------------------------------------------------ decoding


class Problem:
    """Why an operation failed."""

    __slots__ = ("about", "number")

    def __init__(self, number: int, about: str) -> None:
        self.number = number
        """The errno."""
        self.about = about
        """The subject of the failure, in the guest's words. May be empty."""

    @property
    def words(self) -> str:
        """The text of the errno."""
        return os.strerror(self.number).lower()

    @property
    def reason(self) -> str:
        return f"{self.about}: {self.words}" if self.about else self.words

    @property
    def no_such_user(self) -> bool:
        return self.number == errno.ENOENT and self.about == "no such user"


class Fields:
    """Received fields, each of the size and type that its tag requires.

    The getters convert a value and raise `GuestProtocolError` if it is missing or out of range.
    """

    __slots__ = ("_values",)

    def __init__(self, values: dict[int, int | bytes]) -> None:
        self._values = values

    def __contains__(self, tag: Tag) -> bool:
        return tag in self._values

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fields) and self._values == other._values

    def __hash__(self) -> int:
        raise TypeError("fields are not hashable")

    def __repr__(self) -> str:
        return f"Fields({self._values!r})"

    def integer(self, tag: Tag) -> int:
        value = self._values.get(tag)
        if not isinstance(value, int):
            raise _missing(tag)
        return value

    def count(self, tag: Tag, default: int | None = None) -> int:
        """An integer that is not negative."""
        if default is not None and tag not in self._values:
            return default
        value = self.integer(tag)
        if value < 0:
            raise GuestProtocolError(f"the guest sent a negative {tag.name}")
        return value

    def within(self, tag: Tag, low: int, high: int) -> int:
        """An integer from `low` to `high`."""
        value = self.integer(tag)
        if not low <= value <= high:
            raise GuestProtocolError(f"the guest sent {tag.name} = {value}")
        return value

    def flag(self, tag: Tag) -> bool:
        """Whether it is present and not 0."""
        return bool(self._values.get(tag, 0))

    def raw(self, tag: Tag) -> bytes:
        value = self._values.get(tag)
        if not isinstance(value, bytes):
            raise _missing(tag)
        return value

    def path(self, tag: Tag) -> str:
        """A path or a part of one. Bytes that are not UTF-8 become surrogates, so that it can be sent back."""
        raw = self.raw(tag)
        if b"\0" in raw or len(raw) > MAX_PATH:
            raise GuestProtocolError(f"the guest sent {tag.name} that cannot be a path")
        return raw.decode("utf-8", "surrogateescape")

    def text(self, tag: Tag, limit: int = 4096) -> str:
        """Text to show: at most `limit` bytes; what is not printable UTF-8 becomes U+FFFD. Empty if missing."""
        value = self._values.get(tag, b"")
        raw = value if isinstance(value, bytes) else b""
        return raw[:limit].decode("utf-8", "replace").translate(_PRINTABLE)

    def problem(self) -> Problem | None:
        """The failure that END reports. None: the operation succeeded."""
        if Tag.ERRNO not in self._values or not self._values[Tag.ERRNO]:
            return None
        number = self.within(Tag.ERRNO, 1, 4095)
        message = self.text(Tag.MESSAGE, 1024)
        # The text of the errno is that of the guest's own C library: only the subject is kept.
        about, _, _ = message.rpartition(": ")
        return Problem(number, about)

    def time_us(self, tag: Tag) -> datetime:
        """Microseconds since 1970. Times beyond the range of `datetime` become its first or last."""
        return _moment(self.integer(tag))

    def time_ns(self, tag: Tag) -> datetime:
        """The same, from nanoseconds."""
        return _moment(self.integer(tag) // 1000)


def decode_xattrs(raw: bytes) -> dict[str, bytes]:
    """What `encode_xattrs` wrote. Bytes of names that are not UTF-8 become surrogates.

    Raises:
        GuestProtocolError: it is too long, cut off, or has an empty name.
    """
    if len(raw) > MAX_XATTRS:
        raise GuestProtocolError(f"the guest sent {len(raw)} bytes of extended attributes")
    found: dict[str, bytes] = {}
    position = 0
    while position < len(raw):
        end = raw.find(b"\0", position)
        begin = end + 1 + _UINT32.size
        if end <= position or begin > len(raw):
            raise GuestProtocolError("the guest sent a truncated extended attribute")
        size = _UINT32.unpack_from(raw, end + 1)[0]
        if size > len(raw) - begin:
            raise GuestProtocolError("the guest sent an extended attribute that overruns its field")
        found[raw[position:end].decode("utf-8", "surrogateescape")] = raw[begin : begin + size]
        position = begin + size
    return found


def _missing(tag: Tag) -> GuestProtocolError:
    return GuestProtocolError(f"the guest sent no {tag.name}")


def _moment(microseconds: int) -> datetime:
    from datetime import timedelta

    earliest, epoch, latest = _moments()
    try:
        return epoch + timedelta(microseconds=microseconds)
    except OverflowError:
        return latest if microseconds > 0 else earliest


@cache
def _moments() -> tuple[datetime, datetime, datetime]:
    """The first that there is, 1970, and the last. Not made at import: a command needs none of them."""
    from datetime import UTC, datetime

    return datetime.min.replace(tzinfo=UTC), datetime(1970, 1, 1, tzinfo=UTC), datetime.max.replace(tzinfo=UTC)


def decode_fields(payload: bytes) -> Fields:
    """Decode what `encode_fields` wrote. Unknown tags are ignored; of a repeated tag the last value counts.

    Raises:
        GuestProtocolError: a field overruns, an integer is not of 8 bytes, or a string holds a NUL.
    """
    values: dict[int, int | bytes] = {}
    position, end = 0, len(payload)
    while position < end:
        if end - position < _FIELD.size:
            raise GuestProtocolError("the guest sent a truncated field")
        tag, length = _FIELD.unpack_from(payload, position)
        position += _FIELD.size
        if length > end - position:
            raise GuestProtocolError(f"the guest sent field {tag} that overruns its frame")
        shape = _SHAPES.get(tag)
        if shape == _INTEGER:
            if length != _INT64.size:
                raise GuestProtocolError(f"the guest sent the integer {tag} in {length} bytes")
            values[tag] = _INT64.unpack_from(payload, position)[0]
        elif shape is not None:
            value = payload[position : position + length]
            if shape == _STRING and b"\0" in value:
                raise GuestProtocolError(f"the guest sent the string {tag} with a NUL")
            values[tag] = value
        position += length
    return Fields(values)
