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
    size_bytes: int
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
    try:
        message = pydantic_core.from_json(line, allow_inf_nan=False)
    except ValueError as error:
        raise ChannelViolation(f"the kernel sent a line that is no JSON: {error}") from None
    fields = _MessageFields(message)
    kind = fields.text("t")
    if kind == "call":
        return _call(fields, len(line))
    if kind == "cancel":
        return CancelMessage(fields.number("call"))
    if kind == "display":
        return _part(fields.number("cell"), fields.object("part"))
    if kind == "done":
        return _done(fields)
    if kind == "ready":
        return _ready(fields, len(line))
    if kind == "completions":
        return CompletionsMessage(fields.text("word"), fields.texts("found", 200))
    raise ChannelViolation(f"the kernel sent a message of the unknown kind {kind[:80]!r}")


def _call(fields: _MessageFields, size: int) -> CallMessage:
    arguments, refusal = fields.object("args").values, None
    if size > MAX_ARGUMENTS_BYTES:
        refusal = f"the arguments take {size} bytes; a call may take {MAX_ARGUMENTS_BYTES}"
    elif _is_deeper(arguments):
        refusal = f"the arguments are nested deeper than {MAX_DEPTH}"
    kept = {} if refusal else arguments
    return CallMessage(fields.number("call"), fields.number("cell"), fields.text("tool"), kept, size, refusal)


def _part(cell: int, fields: _MessageFields) -> PartMessage:
    data = fields.object("data").values
    if _is_deeper(data):
        raise ChannelViolation(f"the kernel sent a value that is nested deeper than {MAX_DEPTH}")
    if len(data) > 32 or any(len(kind) > MAX_NAME_CHARS for kind in data):
        raise ChannelViolation("the kernel sent a value with too many or too long MIME types")
    return PartMessage(cell, fields.text("role"), data)


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


def _ready(fields: _MessageFields, size: int) -> ReadyMessage:
    running = fields.optional_object("running")
    last = fields.optional_object("last")
    calls = fields.objects("calls", MAX_PENDING)
    parts = fields.objects("parts", 10_000)
    cell = 0 if running is None else running.number("cell")
    return ReadyMessage(
        fields.text("nonce"),
        fields.text("version"),
        None if running is None else (cell, running.text("marker"), running.text("code", MAX_LINE_BYTES)),
        tuple(_call(each, min(size, MAX_ARGUMENTS_BYTES)) for each in calls),
        tuple(_part(cell, each) for each in parts),
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


def _is_deeper(value: object) -> bool:
    """Whether it is nested deeper than `MAX_DEPTH`. Does not recurse."""
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return False
    return True
