"""The messages between the host and a kernel, and what the host accepts of them.

Owns their shapes, their sizes, and the reader that turns a hostile stream of bytes into them: a line that is too long,
is no JSON or has the wrong fields raises `ChannelViolation`. Not here: what happens because of a
message (`session.py`). Used by `session.py`. The other end is `kernel/kernel.py` and `kernel/kernel.mjs`.

    host → kernel   hello {nonce} · tools {tools, models} · run {cell, code, marker} · result {call, value | error}
                    complete {code}
    kernel → host   ready {nonce, version, running, calls, parts, last} · call {call, cell, tool, args} · cancel {call}
                    display {cell, part} · done {cell, error, warnings, streams, outbox} · completions {word, found}
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pydantic_core

MAX_LINE_BYTES = 32 * 1024 * 1024
"""The longest message of a kernel. A cell may show 16 MiB, and base64 and escapes make them longer."""
MAX_ARGUMENTS_BYTES = 4 * 1024 * 1024
"""The arguments of one call, as JSON."""
MAX_DEPTH = 64
"""How deep lists and objects may be nested."""
MAX_NAME_CHARS = 200
MAX_TEXT_CHARS = 65536
MAX_PENDING = 4096
"""Calls of a session that have no result yet."""
MAX_PENDING_BYTES = 256 * 1024 * 1024
"""What their arguments may take on the host together."""
MAX_PARTS_BYTES = 128 * 1024 * 1024
"""What the values that a cell shows may take on the host together. Kernels leave out what is beyond 16 MiB."""
MAX_VALUES = 1_000_000
"""Values of one message. They take the host far more time and memory than their bytes."""
MARKER = "\0atoll-cell-"
"""What the mark begins with that ends the output of a cell. 32 digits follow."""
ANY_MARKER = re.compile(re.escape(MARKER).encode() + rb"[0-9a-f]{32}")
_VALUE_BYTES = 64
"""What an empty object takes, at least."""
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"')
_CALL_HEAD = re.compile(
    rb'\{"t": ?"call", ?"call": ?(\d{1,15}), ?"cell": ?(\d{1,15}), ?"tool": ?"(\w{1,64})"', re.ASCII
)


class ChannelViolation(Exception):
    """The kernel sent what is no message: the code has damaged its channel. Internal: the result of the cell says so,
    and the session gets a new kernel."""


@dataclass(frozen=True, slots=True)
class CallMessage:
    """Code asks for a tool. Nothing of it is checked but its shape."""

    call: int
    cell: int
    tool: str
    arguments: dict[str, Any]
    held_bytes: int = 0
    """About what it takes on the host."""
    refusal: str | None = None
    """Why it must not be made, whatever the tool: its arguments are too large or nested too deep."""


@dataclass(frozen=True, slots=True)
class CancelMessage:
    """Code no longer waits for a call."""

    call: int


@dataclass(frozen=True, slots=True)
class PartMessage:
    """A value, in one or more forms by MIME type."""

    cell: int
    role: str
    data: dict[str, Any]
    held_bytes: int = 0
    """About what it takes on the host."""


@dataclass(frozen=True, slots=True)
class CellError:
    """Why a cell ended early, as the kernel tells it."""

    type: str
    message: str
    traceback: str
    line: int | None


@dataclass(frozen=True, slots=True)
class DoneMessage:
    """A cell has ended."""

    cell: int
    error: CellError | None
    warnings: tuple[str, ...]
    streams: frozenset[str]
    """Those of stdout and stderr on which its marker was written."""
    outbox: tuple[tuple[str, int], ...]
    """Files in its outbox that are new or changed: path relative to it, and size. Nothing of it is checked."""


@dataclass(frozen=True, slots=True)
class ReadyMessage:
    """The kernel has read a hello."""

    nonce: str
    version: str
    running: tuple[int, str, str] | None
    """The cell that runs, its marker, and its code."""
    calls: tuple[CallMessage, ...]
    parts: tuple[PartMessage, ...]
    last: DoneMessage | None


@dataclass(frozen=True, slots=True)
class CompletionsMessage:
    word: str
    found: tuple[str, ...]


Message = CallMessage | CancelMessage | PartMessage | DoneMessage | ReadyMessage | CompletionsMessage


def encode(message: Mapping[str, Any]) -> bytes:
    """A message to the kernel, as a line. `json` of a result is a value that is encoded already."""
    if "json" in message:
        return b'{"t":"result","call":%d,"value":%b}\n' % (message["call"], message["json"].encode("ascii"))
    return pydantic_core.to_json(message, ensure_ascii=True) + b"\n"


class MessageReader:
    """Bytes of a kernel in, messages out. Holds at most one line."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._nonce: str | None = None

    def skip_until(self, nonce: str) -> None:
        """Ignore everything before the `ready` that answers this hello: the rest of what an earlier host was sent."""
        self._nonce = nonce

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are complete now.

        Raises:
            ChannelViolation: it is no message.
        """
        if b"\n" not in data:
            self._rest += data
            if len(self._rest) > MAX_LINE_BYTES:
                raise ChannelViolation(f"a message of the kernel is longer than {MAX_LINE_BYTES} bytes")
            return []
        *lines, rest = (bytes(self._rest) + data).split(b"\n") if self._rest else data.split(b"\n")
        self._rest = bytearray(rest)
        if len(rest) > MAX_LINE_BYTES:
            raise ChannelViolation(f"a message of the kernel is longer than {MAX_LINE_BYTES} bytes")
        found = []
        for line in lines:
            if not line:
                continue
            if self._nonce is not None and self._nonce.encode() not in line:
                continue
            message = _parse(line)
            if self._nonce is not None:
                if not isinstance(message, ReadyMessage) or message.nonce != self._nonce:
                    continue
                self._nonce = None
            found.append(message)
        return found


def _parse(line: bytes) -> Message:
    if len(line) > MAX_LINE_BYTES:
        raise ChannelViolation(f"a message of the kernel is longer than {MAX_LINE_BYTES} bytes")
    values = count_values(line)
    too_large = None
    if len(line) > MAX_ARGUMENTS_BYTES:
        too_large = _too_long(len(line))
    elif values > MAX_VALUES:
        too_large = f"the arguments have more than {MAX_VALUES} values"
    if too_large and (head := _CALL_HEAD.match(line)):  # refused without reading all of it
        return CallMessage(int(head[1]), int(head[2]), head[3].decode(), {}, refusal=too_large)
    if values > MAX_VALUES:
        raise ChannelViolation(f"the kernel sent a message of more than {MAX_VALUES} values")
    held = len(line) + values * _VALUE_BYTES
    try:
        message = pydantic_core.from_json(line, allow_inf_nan=False)
    except ValueError as error:
        raise ChannelViolation(f"the kernel sent a line that is no JSON: {error}") from None
    fields = _MessageFields(message)
    kind = fields.text("t")
    if kind == "call":
        return _call(fields, len(line), held)
    if kind == "cancel":
        return CancelMessage(fields.number("call"))
    if kind == "display":
        return _part(fields.number("cell"), fields.object("part"), held)
    if kind == "done":
        return _done(fields)
    if kind == "ready":
        return _ready(fields)
    if kind == "completions":
        return CompletionsMessage(fields.text("word"), fields.texts("found", 200))
    raise ChannelViolation(f"the kernel sent a message of the unknown kind {kind[:80]!r}")


def count_values(line: bytes, most: int = MAX_VALUES) -> int:
    """About how many values a message has, without reading it: fast, and never less than there are. The count is exact
    where it matters, if it is more than `most`."""
    found = _count_marks(line)
    if found <= most or line.count(b'"') > 4 * MAX_VALUES:
        return found
    return _count_marks(_STRING.sub(b"", line))  # a long text may have many of them, too


def _count_marks(line: bytes) -> int:
    return line.count(b",") + line.count(b"[") + line.count(b"{")


def _too_long(size: int) -> str:
    return f"the arguments take {size} bytes; a call may take {MAX_ARGUMENTS_BYTES}"


def _call(fields: _MessageFields, size: int, held: int) -> CallMessage:
    arguments, refusal = fields.object("args").values, None
    if size > MAX_ARGUMENTS_BYTES:
        refusal = _too_long(size)
    elif _is_deeper(arguments):
        refusal = f"the arguments are nested deeper than {MAX_DEPTH}"
    kept, held = ({}, 0) if refusal else (arguments, held)
    return CallMessage(fields.number("call"), fields.number("cell"), fields.text("tool"), kept, held, refusal)


def _part(cell: int, fields: _MessageFields, held: int) -> PartMessage:
    data = fields.object("data").values
    if _is_deeper(data):
        raise ChannelViolation(f"the kernel sent a value that is nested deeper than {MAX_DEPTH}")
    if len(data) > 32 or any(len(kind) > MAX_NAME_CHARS for kind in data):
        raise ChannelViolation("the kernel sent a value with too many or too long MIME types")
    return PartMessage(cell, fields.text("role"), data, held)


def _done(fields: _MessageFields) -> DoneMessage:
    error = fields.optional_object("error")
    described = None
    if error is not None:
        described = CellError(
            error.text("type"),
            error.text("message", MAX_TEXT_CHARS),
            error.text("traceback", MAX_TEXT_CHARS),
            error.optional_number("line"),
        )
    outbox = tuple((each.text("path", 4096), each.number("size")) for each in fields.objects("outbox", 1000))
    streams = frozenset(fields.texts("streams", 2))
    return DoneMessage(fields.number("cell"), described, fields.texts("warnings", 100), streams, outbox)


def _ready(fields: _MessageFields) -> ReadyMessage:
    # What the calls and parts of one message take is bounded by its length: 0 each.
    running = fields.optional_object("running")
    last = fields.optional_object("last")
    calls = tuple(_call(each, 0, 0) for each in fields.objects("calls", MAX_PENDING))
    if len({each.call for each in calls}) < len(calls):
        raise ChannelViolation("a number is used for two calls at once")
    parts = fields.objects("parts", 10_000)
    cell = 0 if running is None else running.number("cell")
    return ReadyMessage(
        fields.text("nonce"),
        fields.text("version"),
        None if running is None else (cell, running.marker("marker"), running.text("code", MAX_LINE_BYTES)),
        calls,
        tuple(_part(cell, each, 0) for each in parts),
        None if last is None else _done(last),
    )


class _MessageFields:
    """The fields of an object, each read as the one type that it may have."""

    def __init__(self, values: object) -> None:
        if not isinstance(values, dict):
            raise ChannelViolation("the kernel sent a line that is no JSON object")
        self.values: dict[str, Any] = values

    def text(self, name: str, limit: int = MAX_NAME_CHARS) -> str:
        value = self.values.get(name)
        if not isinstance(value, str) or len(value) > limit:
            raise self._wrong(name, f"a text of at most {limit} characters")
        # A surrogate cannot be written anywhere.
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()

    def marker(self, name: str) -> str:
        value = self.text(name)
        if not ANY_MARKER.fullmatch(value.encode()):
            raise self._wrong(name, "a marker")
        return value

    def number(self, name: str) -> int:
        value = self.values.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**53:
            raise self._wrong(name, "a number")
        return value

    def optional_number(self, name: str) -> int | None:
        return None if self.values.get(name) is None else self.number(name)

    def object(self, name: str) -> _MessageFields:
        value = self.values.get(name)
        if not isinstance(value, dict):
            raise self._wrong(name, "an object")
        return _MessageFields(value)

    def optional_object(self, name: str) -> _MessageFields | None:
        return None if self.values.get(name) is None else self.object(name)

    def objects(self, name: str, limit: int) -> list[_MessageFields]:
        value = self.values.get(name, [])
        if not isinstance(value, list) or len(value) > limit:
            raise self._wrong(name, f"a list of at most {limit}")
        return [_MessageFields(each) for each in value]

    def texts(self, name: str, limit: int) -> tuple[str, ...]:
        value = self.values.get(name, [])
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self._wrong(name, "a list of texts")
        return tuple(each[:1000].encode("utf-8", "backslashreplace").decode() for each in value[:limit])

    def _wrong(self, name: str, expected: str) -> ChannelViolation:
        return ChannelViolation(f"the kernel sent a message whose {name!r} is not {expected}")


def _is_deeper(value: dict[str, Any]) -> bool:
    """Whether it is nested deeper than `MAX_DEPTH`. Does not recurse."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for each in level
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True
