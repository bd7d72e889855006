"""One tool, a set of them, and what comes back from a call.

Knows how an input model becomes a JSON schema, how arguments that do not fit it are explained, which tools may stand
beside each other, in which order calls on one thing run, and that every call ends in a `ToolResult` and never in an
exception. Refuses to know what any tool does (`agent.py`, `coding.py`, `sprites.py` above) and how protocols write it
all down (`export.py`).

A schema is a promise. What an input model lets through, its handler does; what the context lacks (`needs`), is not
offered at all.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import anyio
import pydantic_core
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode, JsonSchemaValue

from atoll.contract.errors import AtollError, InvalidRequest
from atoll.contract.model import Frozen
from atoll.tools.vocabularies import VOCABULARIES

NAME_RULE = "1 to 64 characters: letters, digits, '_' and '-'"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SHOWN = 120
"""How much of a wrong value is shown to who sent it."""
_TOLD = 4000
"""How long an error is told at most: what is wrong may be long too."""
_log = logging.getLogger(__name__)


# --------------------------------------------------------------------------------------------------------- results


class TextPart(Frozen):
    type: Literal["text"] = "text"
    text: str


class ImagePart(Frozen):
    type: Literal["image"] = "image"
    data: str
    """Base64."""
    mime_type: str


Part = TextPart | ImagePart


class Link(Frozen):
    """Something that a result speaks of and that can be opened."""

    url: str
    name: str


class ToolResult(Frozen):
    """What a call gave: for the model, and for programs."""

    content: str | tuple[Part, ...]
    """What the model reads."""
    is_error: bool = False
    """True: nothing was done, or not all; `content` says why and what would help."""
    structured: dict[str, Any] | None = None
    """The same as data: what the tool's result says or, of an error, `{"error": {"code", "retryable"}}`. Unset: there
    is only text."""
    links: tuple[Link, ...] = ()
    """What a client may offer to open. The text names it too."""

    @property
    def text(self) -> str:
        """The text in `content`."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content if isinstance(part, TextPart))


def failure(message: str, code: str = "tool_error", *, retryable: bool = False) -> ToolResult:
    """The result of a call that did not do what was asked."""
    if len(message) > _TOLD:
        message = f"{message[: _TOLD // 2]} … {message[-_TOLD // 2 :]}"
    return ToolResult(
        content=readable(message), is_error=True, structured={"error": {"code": code, "retryable": retryable}}
    )


def readable(text: str) -> str:
    """`text` without surrogates, which no protocol carries: bytes that are not UTF-8 are shown as `\\xff`."""
    try:
        text.encode()
    except UnicodeEncodeError:
        try:
            return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        except UnicodeEncodeError:
            return text.encode("utf-8", "backslashreplace").decode()
    return text


def readable_all(value: Any) -> Any:
    """The same for all text in data."""
    if isinstance(value, str):
        return readable(value)
    if isinstance(value, dict):
        return {readable(key): readable_all(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [readable_all(each) for each in value]
    return value


def nearest(wanted: str, known: Iterable[str]) -> str:
    """`; did you mean …?`, or nothing where nothing is near."""
    # Sentences cost difflib more time than a guess is worth.
    found = difflib.get_close_matches(wanted, sorted(known), n=1, cutoff=0.6) if len(wanted) <= 255 else []
    return f"; did you mean {found[0]!r}?" if found else ""


# ---------------------------------------------------------------------------------------------------------- a tool


class Input(BaseModel):
    """The arguments of a tool. A field that has a default may also be given as null, which is that default."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_the_default(cls, given: Any) -> Any:
        if not isinstance(given, dict) or None not in given.values():
            return given
        optional = {name for name, info in cls.model_fields.items() if not info.is_required()}
        return {name: value for name, value in given.items() if value is not None or name not in optional}


class Result(Frozen):
    """What a tool gives back as data. A field that is None is left out."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    def dump(self) -> dict[str, Any]:
        return self.model_dump(mode="python", exclude_none=True)

    def result(self) -> ToolResult:
        """This, as JSON in the text and as data."""
        try:
            text = self.model_dump_json(exclude_none=True)
            data = self.model_dump(mode="json", exclude_none=True)
        except (pydantic_core.PydanticSerializationError, UnicodeEncodeError):
            data = readable_all(self.dump())
            text = pydantic_core.to_json(data).decode()
        return ToolResult(content=text, structured=data)


class Hints(Frozen):
    """What a client may want to know before it lets a model call the tool."""

    read_only: bool = False
    """It changes nothing."""
    destructive: bool = False
    """It may overwrite or remove what was there."""
    idempotent: bool = False
    """Calling it again with the same arguments changes nothing more."""
    open_world: bool = False
    """What it does may reach beyond the sandboxes."""


NO_HINTS = Hints()


class Context(Protocol):
    """What tools work on. Each vocabulary has its own; this is what a `ToolSet` needs of it."""

    @property
    def abilities(self) -> frozenset[str]:
        """What there is for tools to need."""

    def explain(self, error: AtollError) -> str:
        """What a model is told of an error: its message, with the names that the model knows."""


@dataclass(frozen=True)
class Tool:
    """A tool, as it is declared. It is bound to what it works on by a `ToolSet`.

    Raises:
        InvalidRequest: it has no name or description that every protocol takes.
    """

    name: str
    description: str
    input: type[Input]
    """Its JSON schema is what a model sees."""
    result: type[Result] | None
    """What `ToolResult.structured` holds when the call went well. None: nothing is promised of it."""
    handler: Callable[[Any, Any], Awaitable[Result | ToolResult | str]]
    """Gets the validated input and the context. It raises `AtollError` for what a model should be told."""
    needs: frozenset[str] = frozenset()
    """Abilities without which the tool is not offered."""
    hints: Hints = NO_HINTS
    turn: Callable[[Any, Any], Hashable] | None = None
    """What calls have to take turns for, of an input and the context: of two that name the same, the one that was made
    first is done first. None: it waits for nobody."""
    vocabulary: str | None = None
    """Which of `VOCABULARIES` it belongs to. None: it is not built in, and must not have the name of a tool that is."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InvalidRequest(f"{self.name!r} is not a name for a tool; allowed are {NAME_RULE}")
        if not self.description.strip():
            raise InvalidRequest(f"the tool {self.name!r} has no description; a model needs one to choose it")
        if self.vocabulary is not None:
            entry = VOCABULARIES.get(self.vocabulary)
            if entry is None or self.name not in entry.tool_names:
                raise InvalidRequest(f"the vocabulary {self.vocabulary!r} has no tool {self.name!r}")
        elif any(self.name in entry.tool_names for entry in VOCABULARIES.values()):
            raise InvalidRequest(f"{self.name!r} is the name of a built-in tool; give yours another name")

    def input_schema(self) -> dict[str, Any]:
        """The JSON schema of the input."""
        return self.input.model_json_schema(schema_generator=_Plain)

    def output_schema(self) -> dict[str, Any] | None:
        """The JSON schema of the result."""
        if self.result is None:
            return None
        return self.result.model_json_schema(mode="serialization", schema_generator=_Plain)

    def read(self, arguments: object) -> Input:
        """The input of a call: an object, or the JSON of one.

        Raises:
            InvalidRequest: it does not fit; the message says where, what is allowed, and what was probably meant.
        """
        if isinstance(arguments, str | bytes | bytearray):
            try:
                arguments = pydantic_core.from_json(arguments or b"{}")
            except ValueError as error:
                raise InvalidRequest(f"the arguments of {self.name} are not JSON: {error}") from None
        if not isinstance(arguments, Mapping):
            raise InvalidRequest(
                f"the arguments of {self.name} are {_shown(arguments)}; they must be an object, with {self._fields()}"
            )
        try:
            return self.input.model_validate(dict(arguments))
        except ValidationError as error:
            wrong = "; ".join(dict.fromkeys(self._complaint(each) for each in error.errors()[:8]))
            raise InvalidRequest(
                f"the arguments of {self.name} are wrong. {wrong}. It takes {self._fields()}"
            ) from None

    def _complaint(self, error: pydantic_core.ErrorDetails) -> str:
        where = ".".join(str(part) for part in error["loc"]) or "the arguments"
        if error["type"] == "extra_forbidden":
            return f"there is no field {_shown(where)}{nearest(where, self.input_schema()['properties'])}"
        if error["type"] == "missing":
            return f"{where} is missing"
        said = error["msg"].removeprefix("Value error, ").replace("Input should", "it should")
        return f"{where} is {_shown(error['input'])}: {said}"

    def _fields(self) -> str:
        schema = self.input_schema()
        required = schema.get("required", [])
        fields = []
        for name, about in schema["properties"].items():
            kind = about.get("type", "value")
            default = pydantic_core.to_json(about.get("default")).decode()
            say = "required" if name in required else f"default {default}"
            fields.append(f"{name} ({kind}, {say})")
        return ", ".join(fields) or "no fields"


class _Plain(GenerateJsonSchema):
    """Without titles, which say nothing that the names do not."""

    def generate(self, schema: Any, mode: JsonSchemaMode = "validation") -> JsonSchemaValue:
        plain = super().generate(schema, mode)
        plain.setdefault("properties", {})
        plain.pop("description", None)  # the tool has one
        _untitle(plain)
        return plain


def _untitle(schema: Any) -> None:
    if isinstance(schema, dict):
        if isinstance(schema.get("title"), str):
            del schema["title"]
        for key, value in schema.items():
            # Below `properties` the keys are names of fields, of which one may be called `title`.
            for each in value.values() if key in {"properties", "$defs"} else (value,):
                _untitle(each)
    elif isinstance(schema, list):
        for each in schema:
            _untitle(each)


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, lists of lists without end
        return f"a value ({type(value).__name__}) that is too large to be shown"
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


# ------------------------------------------------------------------------------------------------------ being followed

Report = Callable[[bytes], None]
"""Hears what a command prints, as it comes, while a call runs. It must not take long, and not raise."""

_report: ContextVar[Report | None] = ContextVar("report", default=None)


def report() -> Report | None:
    """Who follows the call that is being handled, for handlers. None: nobody does."""
    return _report.get()


# ------------------------------------------------------------------------------------------------------- taking turns


class KeyedQueue:
    """Who comes first is served first, thing by thing. What nobody waits for is forgotten."""

    def __init__(self) -> None:
        self._queues: dict[Hashable, list[Ticket]] = {}

    def take(self, key: Hashable) -> Ticket:
        """A place in the line for `key`. It has to be left, by its context or with `leave`."""
        turn = Ticket(self._queues, key)
        self._queues.setdefault(key, []).append(turn)
        return turn

    def __len__(self) -> int:
        return len(self._queues)


class Ticket:
    def __init__(self, queues: dict[Hashable, list[Ticket]], key: Hashable) -> None:
        self._queues = queues
        self._key = key
        self.ready = anyio.Event()

    async def __aenter__(self) -> Self:
        if self._queues[self._key][0] is not self:
            try:
                await self.ready.wait()
            except BaseException:
                self.leave()
                raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def leave(self) -> None:
        """Let the next one go. Does nothing the second time."""
        queue = self._queues.get(self._key, [])
        if self not in queue:
            return
        queue.remove(self)
        if queue:
            queue[0].ready.set()
        else:
            del self._queues[self._key]


# ----------------------------------------------------------------------------------------------------------- a set


@dataclass(frozen=True)
class _Bound:
    tool: Tool
    context: Context | None
    turns: KeyedQueue


@dataclass(frozen=True)
class _Call:
    """A call whose arguments have been read and whose turn has been taken."""

    bound: _Bound
    input: Input
    turn: Ticket | None


def _by_name(bound: Iterable[_Bound]) -> dict[str, _Bound]:
    found: dict[str, _Bound] = {}
    for each in bound:
        if each.tool.name in found:
            raise InvalidRequest(
                f"two tools are named {each.tool.name!r}, and a model could not tell which is which; leave one out "
                "with without(), or give yours another name"
            )
        found[each.tool.name] = each
    return found


class ToolSet:
    """Tools that are offered together, each bound to what it works on. `a | b` is both.

    A tool that needs what the context has not is left out.

    Raises:
        InvalidRequest: two have the same name.
    """

    def __init__(self, tools: Iterable[Tool] = (), context: Context | None = None) -> None:
        abilities = frozenset[str]() if context is None else context.abilities
        turns = KeyedQueue()
        self._bound = _by_name(_Bound(tool, context, turns) for tool in tools if tool.needs <= abilities)

    @classmethod
    def _of(cls, bound: Iterable[_Bound]) -> Self:
        made = cls()
        made._bound = _by_name(bound)
        return made

    def __or__(self, other: ToolSet) -> ToolSet:
        return ToolSet._of([*self._bound.values(), *other._bound.values()])

    def __iter__(self) -> Iterator[Tool]:
        return (each.tool for each in self._bound.values())

    def __len__(self) -> int:
        return len(self._bound)

    def __contains__(self, name: object) -> bool:
        return name in self._bound

    def __getitem__(self, name: str) -> Tool:
        return self._bound[name].tool

    def only(self, *names: str) -> ToolSet:
        """Just these.

        Raises:
            InvalidRequest: one of them is not here.
        """
        self._require(names)
        return ToolSet._of(self._bound[name] for name in dict.fromkeys(names))

    def without(self, *names: str) -> ToolSet:
        """All but these.

        Raises:
            InvalidRequest: one of them is not here.
        """
        self._require(names)
        return ToolSet._of(each for name, each in self._bound.items() if name not in names)

    def _require(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._bound:
                raise InvalidRequest(self._unknown(name))

    def _unknown(self, name: object) -> str:
        have = ", ".join(self._bound) or "there are none"
        return f"there is no tool {_shown(name)} (tools: {have}){nearest(str(name), self._bound)}"

    # -------------------------------------------------------------------------------------------------- calling

    async def handle_tool_call(self, name: str, input: object = None, *, report: Report | None = None) -> ToolResult:
        """Do what a model asked for. `input` is an object, or the JSON of one; None is an empty one. `report` hears the
        output of commands while they run.

        Whatever goes wrong is a result with `is_error` and a text that says what was wrong, what is allowed and what
        was probably meant. Nothing but a cancellation is raised.
        """
        prepared = self._prepare(name, {} if input is None else input)
        if isinstance(prepared, ToolResult):
            return prepared
        before = _report.set(report)
        try:
            return await self._run(prepared)
        finally:
            _report.reset(before)

    async def handle_batch(
        self,
        calls: Iterable[tuple[str, object]],
        on_result: Callable[[int, ToolResult], Awaitable[None]] | None = None,
    ) -> list[ToolResult]:
        """Several calls at once, and their results in the order of the calls.

        They run side by side, but those that take turns for the same thing, a file for instance, in their order.
        `on_result` gets each result when it is there, with the number of its call.
        """
        prepared = [self._prepare(name, {} if input is None else input) for name, input in calls]
        results: list[ToolResult | None] = [None] * len(prepared)

        async def one(index: int, call: _Call | ToolResult) -> None:
            result = call if isinstance(call, ToolResult) else await self._run(call)
            results[index] = result
            if on_result is not None:
                await on_result(index, result)

        try:
            async with anyio.create_task_group() as group:
                for index, each in enumerate(prepared):
                    group.start_soon(one, index, each)
        finally:
            for each in prepared:
                if isinstance(each, _Call) and each.turn is not None:
                    each.turn.leave()  # a task that was cancelled before it began has not
        return [result for result in results if result is not None]

    def _prepare(self, name: str, input: object) -> _Call | ToolResult:
        bound = self._bound.get(name)
        if bound is None:
            return failure(self._unknown(name), "unknown_tool")
        try:
            read = bound.tool.read(input)
            turn = bound.tool.turn and bound.tool.turn(read, bound.context)
        except AtollError as error:
            return _told(error, bound.context)
        return _Call(bound, read, None if turn is None else bound.turns.take(turn))

    async def _run(self, call: _Call) -> ToolResult:
        if call.turn is None:
            return await self._handle(call)
        async with call.turn:
            return await self._handle(call)

    async def _handle(self, call: _Call) -> ToolResult:
        tool, context = call.bound.tool, call.bound.context
        try:
            given = await tool.handler(call.input, context)
            if isinstance(given, Result):
                return given.result()
            return ToolResult(content=readable(given)) if isinstance(given, str) else given
        except AtollError as error:
            return _told(error, context)
        except Exception:  # noqa: BLE001 - the one place where calls of models become answers; no traceback is for them
            _log.exception("the tool %s failed with an error that is not about its arguments", tool.name)
            return _told(
                _OurFault(f"{tool.name} failed, and not because of its input; its operator finds why"), context
            )


def _told(error: AtollError, context: Context | None) -> ToolResult:
    message = error.message if context is None else context.explain(error)
    return failure(message, error.code, retryable=error.retryable)


class _OurFault(AtollError):
    code = "internal"
