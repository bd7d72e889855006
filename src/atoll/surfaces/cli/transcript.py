"""How the events of an agent are shown: to people line by line, to programs as JSON lines.

Owns which part of a tool call is worth a line, and that text from models and sandboxes is hostile. Not here: where
events come from and when a conversation ends (`conversation.py`, which uses this).

The model's text goes to standard output, everything else to standard error: a pipe gets the text alone. On a terminal,
running calls are at the bottom, with their elapsed time. They are drawn here and not with rich, which would hide the
cursor and write from a thread that a stopped terminal blocks.
"""

from __future__ import annotations

import json
import logging
import os
import re
import textwrap
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import anyio

from atoll.agents.events import (
    AgentEvent,
    RetryEvent,
    TextEvent,
    ThinkingEvent,
    Tokens,
    ToolCallEvent,
    ToolResultEvent,
    UsageEvent,
)
from atoll.agents.loop import Answer
from atoll.code.results import CallRecord
from atoll.surfaces.cli import render, terminal
from atoll.tools.tasks import TaskEvent
from atoll.tools.tool import ToolResult, ToolSet
from atoll.tools.vocabularies import vocabulary_of

_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_FRAME_S = 0.1
_PIPE_COLUMNS = 240
"""The length of a line that is not on a terminal."""
_LEAST = 8
"""The least columns for the text of a line, however narrow the terminal is."""
_TAIL = 3
_FAILED_TAIL = 8
"""How many lines of a call's result are shown."""
_CODE_LINES = 16
"""How many lines of code are shown."""
_MAX_CODE_CALLS = 20
"""How many calls of one execution are shown."""
_LOOKED_AT = 16_000
_LONGEST = 1000
"""How many characters of a line are kept: its width is measured each time that it is drawn."""
_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])")
_LAST_S = 1.0
"""How long a stopped terminal may delay the end."""


@dataclass(frozen=True)
class TurnUsage:
    """What a turn used, that of child sessions included."""

    steps: int
    tokens: Tokens
    duration_s: float


class Display(Protocol):
    """Shows a conversation. No method fails because of an event's content."""

    async def begin(self) -> None:
        """A request to the model begins."""

    async def take(self, event: AgentEvent) -> None: ...

    def take_child(self, event: TaskEvent) -> None:
        """An event of a child session. It is shown soon, and before events that `take` gets later."""

    def take_call(self, call: CallRecord) -> None:
        """A call that code has made. It is shown as `take_child` shows."""

    async def end(self, answer: Answer | None, spent: TurnUsage) -> None:
        """A turn has ended; without an answer, it was interrupted."""

    async def say(self, text: str) -> None:
        """Write `text` for the user, with no newline at its end. It must not contain control characters."""

    async def tell(self, text: str) -> None:
        """As `say`, where people read; programs get the same from `emit`."""

    async def emit(self, value: object) -> None:
        """Write a line of JSON where programs read; people get the same from `tell`."""

    def aside(self) -> Any:
        """A context in which only `say` writes."""

    async def keep_up(self) -> None:
        """Show events that come between calls of `take`, until cancelled."""

    async def close(self) -> None: ...


@asynccontextmanager
async def opened(display: Display) -> AsyncIterator[None]:
    """While it is open, events are shown as they come; afterwards the terminal is as before."""
    handler = _LogHandler(display.take_child)
    logging.getLogger("atoll").addHandler(handler)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(display.keep_up)
            yield
            tasks.cancel_scope.cancel()
    finally:
        logging.getLogger("atoll").removeHandler(handler)
        with anyio.move_on_after(_LAST_S, shield=True):
            await display.close()


class _LogHandler(logging.Handler):
    """Log records as events: written directly, they would break the lines that are being drawn."""

    def __init__(self, take: Callable[[TaskEvent], None]) -> None:
        super().__init__(logging.WARNING)
        self._take = take

    def emit(self, record: logging.LogRecord) -> None:
        self._take(TaskEvent(task="", kind="log", data={"text": self.format(record)}))


class _EventWriter:
    """What both displays share: one writer at a time, and a queue for events of child sessions and of code."""

    def __init__(self) -> None:
        self._out = terminal.OutputWriter(terminal.STDOUT)
        self._err = terminal.OutputWriter(terminal.STDERR)
        self._lock = anyio.Lock()
        self._queued: deque[TaskEvent | CallRecord] = deque()
        self._woken = anyio.Event()

    def take_child(self, event: TaskEvent) -> None:
        self._queued.append(event)
        self._woken.set()

    def take_call(self, call: CallRecord) -> None:
        self._queued.append(call)
        self._woken.set()

    async def say(self, text: str) -> None:
        await self._err.write(text.encode())

    async def tell(self, text: str) -> None:
        await self.say(text)

    async def emit(self, value: object) -> None:
        pass


# ---------------------------------------------------------------------------------------------------------- programs


class JsonLines(_EventWriter):
    """Events as JSON lines on standard output."""

    async def begin(self) -> None:
        pass

    async def take(self, event: AgentEvent) -> None:
        async with self._lock:
            await self._catch_up()
            await self._emit(event.model_dump(mode="json"))

    async def end(self, answer: Answer | None, spent: TurnUsage) -> None:
        async with self._lock:
            await self._catch_up()
            if answer is not None:
                total = spent.tokens.model_dump(mode="json")
                value = {"type": "answer", "text": answer.text, "ended": answer.ended, "steps": answer.steps}
                await self._emit({**value, "tokens": total, "duration_s": spent.duration_s})

    @asynccontextmanager
    async def aside(self) -> AsyncIterator[None]:
        async with self._lock:
            yield

    async def keep_up(self) -> None:
        while True:
            await self._woken.wait()
            self._woken = anyio.Event()
            async with self._lock:
                await self._catch_up()

    async def tell(self, text: str) -> None:
        pass

    async def emit(self, value: object) -> None:
        async with self._lock:
            await self._emit(value)

    async def close(self) -> None:
        pass

    async def _catch_up(self) -> None:
        while self._queued:
            event = self._queued.popleft()
            if isinstance(event, CallRecord):
                await self._emit({"type": "code_call", **event.model_dump(mode="json")})
            elif event.kind == "log":
                await self.say(_harmless(str(event.data["text"]), lines=True) + "\n")
            else:
                await self._emit({"type": "task", **event.model_dump(mode="json")})

    async def _emit(self, value: object) -> None:
        await self._out.write(f"{json.dumps(value)}\n".encode())


# ------------------------------------------------------------------------------------------------------------ people


@dataclass
class _PendingCall:
    """A tool call that has not ended."""

    words: str
    """The tool, and the sandbox that it works on."""
    about: str
    """The most informative arguments."""
    child: _ChildSession | None = None
    began: float = field(default_factory=time.monotonic)


@dataclass
class _ChildSession:
    """A child session."""

    id: str
    depth: int
    said: str = ""
    """The text of a line that has not ended."""


class Screen(_EventWriter):
    """Events as lines to read."""

    def __init__(self, tools: ToolSet, model: str) -> None:
        super().__init__()
        self._tools = tools
        self._model = _harmless(model)
        self._draws = os.isatty(terminal.STDERR) and os.environ.get("TERM") != "dumb"
        self._is_one = self._draws and os.isatty(terminal.STDOUT)
        """Text and everything else are on the same terminal."""
        self._open: terminal.OutputWriter | None = None
        """The stream on which a line has begun and not ended."""
        self._drawn = 0
        """The number of lines at the bottom that are drawn again."""
        self._asked_at: float | None = None
        self._calls: dict[tuple[str, str], _PendingCall] = {}
        self._children: dict[str, _ChildSession] = {}
        self._code_calls = 0
        """Calls by code since the last call by the model."""

    async def begin(self) -> None:
        self._asked_at = time.monotonic()
        self._woken.set()

    async def take(self, event: AgentEvent) -> None:
        async with self._lock:
            await self._catch_up()
            match event:
                case TextEvent(text=text):
                    await self._stream(self._out, _harmless(text, lines=True))
                case ThinkingEvent(text=text):
                    if self._draws:
                        await self._stream(self._err, _harmless(text, lines=True), render.DIM)
                case _:
                    await self._event(event, None)
            self._woken.set()

    async def _event(self, event: AgentEvent, child: _ChildSession | None) -> None:
        match event:
            case ToolCallEvent():
                call = _PendingCall(*_named(event, None if child else self._tools), child)
                self._calls[_key(event, child)] = call
                self._asked_at = None
                self._code_calls = 0
                if not self._draws:
                    await self._print(self._line("·", call))
                if lines := _code_lines(event):
                    await self._print("\n".join(self._styled(f"  │ {line}", render.DIM, child) for line in lines))
            case ToolResultEvent():
                await self._result(event, child)
            case RetryEvent(reason=reason, wait_s=wait_s):
                again = f"↻ the answer broke off; retrying in {wait_s:g} s: {_harmless(reason)}"
                await self._print(self._styled(again, render.DIM, child))
            case UsageEvent():
                await self._end_line()
                self._asked_at = None

    async def _result(self, event: ToolResultEvent, child: _ChildSession | None) -> None:
        call = self._calls.pop(_key(event, child), None) or _PendingCall(_harmless(event.tool), "", child)
        failed, fact, lines = _outcome(event.result)
        mark = render.styled("✗", render.RED) if failed else render.styled("✓", render.GREEN)
        shown = [self._line(mark, call, ", ".join(filter(None, (fact, render.human_seconds(event.duration_s)))))]
        room = max(self._columns() - len(self._margin(child)) - 2, _LEAST)
        if event.result.is_error:  # The end of an error says how to fix it: it is not shortened.
            pieces = [piece for line in lines for piece in textwrap.wrap(line, room)]
            shown += [self._styled(f"  {piece}", render.RED, child) for piece in pieces]
        else:
            room = _PIPE_COLUMNS if "url" in (event.result.structured or {}) else room  # half a URL is useless
            shown += [self._styled(f"  {render.shortened(line, room)}", render.DIM, child) for line in lines]
        await self._print("\n".join(shown))
        if child is None and not any(call.child is None for call in self._calls.values()):
            self._asked_at = time.monotonic()

    async def end(self, answer: Answer | None, spent: TurnUsage) -> None:
        async with self._lock:
            await self._catch_up()
            await self._end_line()
            self._asked_at = None
            left, self._calls = self._calls, {}
            for call in left.values():
                await self._print(self._line(render.styled("✗", render.RED), call, "cut off"))
            if answer is not None and answer.ended != "done":
                why = {"length": "the answer is truncated: it reached the limit of output tokens"}
                reason = why.get(answer.ended, "the answer is truncated: the provider withheld the rest")
                await self._print(render.styled(reason, render.RED))
            if spent.steps:
                steps = f"{spent.steps} step{'' if spent.steps == 1 else 's'}"
                tokens = f"{spent.tokens.input:,} tokens in, {spent.tokens.output:,} out"
                took = render.human_seconds(spent.duration_s)
                await self._print(render.styled(f"{steps} · {tokens} · {took}", render.DIM))

    @asynccontextmanager
    async def aside(self) -> AsyncIterator[None]:
        async with self._lock:
            await self._catch_up()
            await self._end_line()
            await self.say(self._erased())
            yield
            now = time.monotonic()
            for call in self._calls.values():  # their time stood still meanwhile
                call.began = now
            self._woken.set()

    async def keep_up(self) -> None:
        while True:
            with anyio.move_on_after(_FRAME_S if self._live() else None):
                await self._woken.wait()
            self._woken = anyio.Event()
            async with self._lock:
                await self._catch_up()
                await self.say(self._redrawn())

    async def close(self) -> None:
        self._calls.clear()
        self._asked_at = None
        await self._end_line()
        await self.say(self._erased())

    # ------------------------------------------------------------------------------------------------- children

    async def _catch_up(self) -> None:
        while self._queued:
            event = self._queued.popleft()
            if isinstance(event, CallRecord):
                await self._code_call(event)
                continue
            if event.kind == "log":
                await self._print(_harmless(str(event.data["text"]), lines=True))
                continue
            child = self._children.setdefault(event.task, _ChildSession(event.task, int(event.data.get("depth", 2))))
            await self._child(event, child)

    async def _child(self, event: TaskEvent, child: _ChildSession) -> None:
        if event.kind == "text":
            *whole, child.said = (child.said + _harmless(str(event.data["text"]), lines=True)).split("\n")
            await self._child_said(whole, child)
            return
        await self._child_said([child.said], child)
        child.said = ""
        if event.kind == "started":
            about = f"{event.data['role']} in {event.data['cwd']}"
            await self._print(self._styled(_harmless(about), render.DIM, child))
        elif event.kind == "ended":
            del self._children[child.id]
            for key in [key for key, call in self._calls.items() if call.child is child]:
                del self._calls[key]
            if event.data["status"] != "completed":
                await self._print(self._styled(_harmless(str(event.data["status"])), render.RED, child))
        elif event.kind in _CHILD_EVENTS:
            data = {name: value for name, value in event.data.items() if name != "depth"}
            await self._event(_CHILD_EVENTS[event.kind].model_validate(data), child)

    async def _code_call(self, record: CallRecord) -> None:
        """A line for a call that code has made, of the first ones."""
        self._code_calls += 1
        if self._code_calls > _MAX_CODE_CALLS:
            return
        event = ToolCallEvent(id="", tool=record.tool, input=dict(record.arguments))
        call = _PendingCall(*_named(event, self._tools), _ChildSession("↳", 2))
        mark = render.styled("✗", render.RED) if record.error else render.styled("✓", render.GREEN)
        shown = [self._line(mark, call, render.human_seconds(record.duration_s))]
        if record.error:
            shown.append(self._styled(f"  {_harmless(record.error)[:_LONGEST]}", render.RED, call.child))
        if self._code_calls == _MAX_CODE_CALLS:
            shown.append(self._styled("further calls are not shown; `atoll trace` has all", render.DIM, call.child))
        await self._print("\n".join(shown))

    async def _child_said(self, lines: list[str], child: _ChildSession) -> None:
        for line in lines:
            if line.strip():
                await self._print(self._styled(line, render.DIM, child))

    # -------------------------------------------------------------------------------------------------- writing

    async def _stream(self, writer: terminal.OutputWriter, text: str, style: str | None = None) -> None:
        """Write a piece of text as it comes."""
        if writer is not self._open:
            await self._end_line()
        self._asked_at = None
        await self.say(self._erased())
        if not text:
            return
        await writer.write((render.styled(text, style) if style else text).encode())
        self._open = None if text.endswith("\n") else writer

    async def _end_line(self) -> None:
        if self._open is not None:
            writer, self._open = self._open, None
            await writer.write(b"\n")

    async def _print(self, text: str) -> None:
        """Write permanent lines, above those that are being drawn."""
        await self._end_line()
        await self.say(f"{self._erased()}{text}\n{self._redrawn()}")

    def _styled(self, text: str, style: str, child: _ChildSession | None = None) -> str:
        return self._margin(child) + render.styled(text, style)

    def _margin(self, child: _ChildSession | None) -> str:
        return "  " if child is None else "  " * child.depth + _harmless(child.id.removeprefix("task-")) + " "

    def _line(self, mark: str, call: _PendingCall, tail: str = "") -> str:
        margin = self._margin(call.child)
        room = self._columns() - len(margin) - 2 - (len(tail) + 2 if tail else 0)
        body = render.shortened("  ".join(filter(None, (call.words, call.about))), max(room, _LEAST))
        return f"{margin}{mark} {body}  {tail}".rstrip()

    def _columns(self) -> int:
        if not self._draws:
            return _PIPE_COLUMNS
        try:
            return (os.get_terminal_size(terminal.STDERR).columns or 80) - 1  # the last one may begin a new line
        except OSError:
            return 79

    # -------------------------------------------------------------------------------------------------- drawing

    def _live(self) -> bool:
        """Whether there are lines at the bottom that are drawn again."""
        if not self._draws or (self._open is not None and self._is_one) or self._open is self._err:
            return False
        return bool(self._calls) or self._asked_at is not None

    def _redrawn(self) -> str:
        """What draws the bottom again, line over line, so that nothing flickers."""
        if not self._live():
            return self._erased()
        now = time.monotonic()
        frame = _FRAMES[int(now / _FRAME_S) % len(_FRAMES)]
        lines = [self._line(frame, call, _elapsed(now - call.began)) for call in self._calls.values()]
        if self._asked_at is not None and not lines:
            waiting = _PendingCall(self._model, "")
            lines = [render.styled(self._line(frame, waiting, _elapsed(now - self._asked_at)), render.DIM)]
        most = max(terminal.terminal_size()[0] - 1, 1)
        if len(lines) > most:
            lines = [*lines[: most - 1], f"  … and {len(lines) - most + 1} more"]
        begin = self._top()
        self._drawn = len(lines)
        return begin + "\n".join(f"{line}\x1b[K" for line in lines) + "\x1b[J"

    def _erased(self) -> str:
        if not self._drawn:
            return ""
        begin = self._top()
        self._drawn = 0
        return f"{begin}\x1b[J"

    def _top(self) -> str:
        return "\r" + (f"\x1b[{self._drawn - 1}A" if self._drawn > 1 else "")


_CHILD_EVENTS: Mapping[str, Any] = {
    "tool_call": ToolCallEvent,
    "tool_result": ToolResultEvent,
    "usage": UsageEvent,
    "retry": RetryEvent,
}


def _key(event: ToolCallEvent | ToolResultEvent, child: _ChildSession | None) -> tuple[str, str]:
    """Some servers number calls from the start in each conversation: a child's call may have its parent's id."""
    return ("" if child is None else child.id, event.id)


def _elapsed(seconds: float) -> str:
    return f"{int(seconds)} s" if seconds < 60 else render.human_seconds(seconds)


# ------------------------------------------------------------------------------------------------------------- words


def _named(event: ToolCallEvent, tools: ToolSet | None) -> tuple[str, str]:
    """The name of a call with its sandbox, and its most informative arguments."""
    tool = _harmless(event.tool)
    if isinstance(event.input, str):
        return tool, _first_line(event.input)
    given = {name: value for name, value in event.input.items() if value is not None}
    shown = _with_defaults(event.tool, given, tools)
    vocabulary = vocabulary_of(event.tool)
    where = shown.get("sandbox" if vocabulary is None else vocabulary.sandbox_argument)
    words = tool if where is None else f"{tool}  {_harmless(str(where)[:_LONGEST])}"
    template = None if vocabulary is None else vocabulary.transcripts.get(event.tool)
    if template is None:
        return words, _first_line(str(given.get("path", "")))
    # Only names of ours are looked up: the arguments are not a template.
    about = re.sub(r"\{(\w+)\}", lambda found: str(shown.get(found[1], "")), template)
    return words, _first_line(about)


def _code_lines(event: ToolCallEvent) -> list[str]:
    """The code of a call of `execute_code` that has more than one line."""
    code = event.input.get("code") if event.tool == "execute_code" and isinstance(event.input, dict) else None
    lines = code.strip("\n").split("\n") if isinstance(code, str) else []
    if len(lines) < 2:
        return []
    shown = [_harmless(line.expandtabs(4))[:_LONGEST] for line in lines[:_CODE_LINES]]
    return shown if len(lines) <= _CODE_LINES else [*shown, f"… {len(lines) - _CODE_LINES} more lines"]


def _with_defaults(name: str, given: Mapping[str, Any], tools: ToolSet | None) -> dict[str, Any]:
    if tools is None or name not in tools:
        return dict(given)
    fields = tools[name].input.model_fields
    return {**{field: about.default for field, about in fields.items() if not about.is_required()}, **given}


def _outcome(result: ToolResult) -> tuple[bool, str, list[str]]:
    """Whether a call failed, a fact for its line, and some lines of its result."""
    data = result.structured or {}
    if result.is_error:
        return True, "", _last_lines(result.text, _FAILED_TAIL)
    if "success" in data and "calls" in data:
        failed, calls = not data["success"], data["calls"]
        about = f"{calls} call{'' if calls == 1 else 's'}" if calls else ""
        return failed, about, _last_lines(result.text, _FAILED_TAIL if failed else _TAIL)
    code = data.get("exit_code", data.get("exitCode"))
    if code is not None:
        output = f"{data.get('output', '')}\n{data.get('stdout', '')}\n{data.get('stderr', '')}"
        return code != 0, f"exit {code}" if code else "", _last_lines(output, _FAILED_TAIL if code else _TAIL)
    for name in ("output", "url", "message"):
        if isinstance(data.get(name), str):
            return False, "", _last_lines(data[name], _TAIL)
    return False, _fact(data), []


def _fact(data: Mapping[str, Any]) -> str:
    for name in ("size", "bytes"):
        if isinstance(data.get(name), int):
            return render.human_bytes(data[name])
    for name, found in data.items():
        if isinstance(found, list):
            return f"{len(found)} {_harmless(name)}"
    if data.get("created") is False:
        return "existed already"
    return ""


def _last_lines(text: str, count: int) -> list[str]:
    lines = [_harmless(line.expandtabs(4)).rstrip() for line in text[-_LOOKED_AT:].splitlines()]
    return [line for line in lines if line][-count:]


def _first_line(text: str) -> str:
    first, *rest = text.strip().splitlines() or [""]
    return _harmless(first[:_LONGEST]) + (" …" if rest else "")


def _harmless(text: str, *, lines: bool = False) -> str:
    """`text` without control characters: known escape sequences are removed, all others are escaped."""
    return render.printable(_SEQUENCE.sub("", text), lines=lines)
