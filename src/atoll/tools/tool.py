"""A tool, a set of tools, and the result of a call.

Owns how an input model becomes a JSON schema, how invalid arguments are explained, which names tools may have, and the
order in which calls on the same file run. Every call ends in a `ToolResult`, never in an exception. Not here: what any
tool does (`pool.py`, `coding.py`, `tasks.py`, `sprites.py`), which vocabularies exist (`vocabularies.py`), and how
protocols write tools and results (`export.py`). Used by these, by `agents/`, and by the surfaces.

A schema is a promise: what an input model accepts, its handler does. A tool whose `needs` the context does not have is
not offered at all.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, ClassVar, Literal, Protocol, Self

import anyio
import pydantic_core
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode, JsonSchemaValue

from atoll.contract.documented import Documented
from atoll.contract.errors import AtollError, InvalidRequest
from atoll.tools.vocabularies import VOCABULARIES

NAME_RULE = "1 to 64 characters: letters, digits, '_' and '-'"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MAX_QUOTED_CHARS = 120
"""How much of an invalid value an error message repeats."""
_MAX_ERROR_CHARS = 4000
"""The longest error message. A longer one is cut in the middle: its end says how to fix it."""
_log = logging.getLogger(__name__)


class StrictModel(BaseModel):
    """The base of what tools and agents exchange with models and clients: frozen, and unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


# --------------------------------------------------------------------------------------------------------- results


class TextPart(StrictModel):
    type: Literal["text"] = "text"
    text: str


class ImagePart(StrictModel):
    type: Literal["image"] = "image"
    data: str
    """Base64."""
    mime_type: str


MediaKind = Literal["image", "audio", "video", "document"]
MAX_DESCRIBED_CHARS = 100
"""Of a `data:` URL where it is shown as text."""


class MediaPart(StrictModel):
    """Something to see, hear or read that only some models take: the others are given its text."""

    type: Literal["media"] = "media"
    kind: MediaKind
    url: str
    """`http(s)://…`, or `data:…;base64,…` that has been checked."""

    @property
    def text(self) -> str:
        """The kind and the URL; of a `data:` URL its type, its size and how it begins."""
        if not self.url.startswith("data:"):
            return f"[{self.kind}] {self.url}"
        head, _, data = self.url.partition(",")
        size = len(data) * 3 // 4 - data[-2:].count("=")
        about = f"[{self.kind}: {head[5:].partition(';')[0]}, {size} bytes]"
        return f"{about} {self.url[:MAX_DESCRIBED_CHARS]}…"


ContentPart = TextPart | ImagePart | MediaPart


class ResultLink(StrictModel):
    """A URL in a result that a client can open."""

    url: str
    name: str


class ToolResult(StrictModel):
    """The result of a call, for the model and for programs."""

    content: str | tuple[ContentPart, ...]
    """What the model reads."""
    is_error: bool = False
    """True: the call failed, wholly or in part; `content` says why and how to fix it."""
    structured: dict[str, Any] | None = None
    """The same as data: the fields of the tool's `Result` or, of an error, `{"error": {"code", "retryable"}}`. Unset:
    there is only text."""
    links: tuple[ResultLink, ...] = ()
    """URLs that a client may offer to open. The text contains them too."""

    @property
    def text(self) -> str:
        """The text in `content`."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content if not isinstance(part, ImagePart))


def failure(message: str, code: str = "tool_error", *, retryable: bool = False) -> ToolResult:
    """The result of a call that failed."""
    if len(message) > _MAX_ERROR_CHARS:
        message = f"{message[: _MAX_ERROR_CHARS // 2]} … {message[-_MAX_ERROR_CHARS // 2 :]}"
    return ToolResult(
        content=readable(message), is_error=True, structured={"error": {"code": code, "retryable": retryable}}
    )


def readable(text: str) -> str:
    """`text` without surrogates, which no protocol can carry: bytes that are not UTF-8 become `\\xff`."""
    try:
        text.encode()
    except UnicodeEncodeError:
        try:
            return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        except UnicodeEncodeError:
            return text.encode("utf-8", "backslashreplace").decode()
    return text


def readable_all(value: Any) -> Any:
    """`value` with `readable` applied to every string in it."""
    if isinstance(value, str):
        return readable(value)
    if isinstance(value, dict):
        return {readable(key): readable_all(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [readable_all(each) for each in value]
    return value


def nearest(wanted: str, known: Iterable[str]) -> str:
    """`; did you mean …?` with the most similar name, or an empty string."""
    # difflib is too slow for long text.
    found = difflib.get_close_matches(wanted, sorted(known), n=1, cutoff=0.6) if len(wanted) <= 255 else []
    return f"; did you mean {found[0]!r}?" if found else ""


# ---------------------------------------------------------------------------------------------------------- a tool


class Input(Documented):
    """The arguments of a tool. For a field with a default, null means the default."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_the_default(cls, given: Any) -> Any:
        if not isinstance(given, dict) or None not in given.values():
            return given
        optional = {name for name, info in cls.model_fields.items() if not info.is_required()}
        return {name: value for name, value in given.items() if value is not None or name not in optional}


class Result(Documented):
    """The result of a tool as data. Fields that are None are omitted."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def dump(self) -> dict[str, Any]:
        return self.model_dump(mode="python", exclude_none=True)

    def result(
        self, content: str | tuple[ContentPart, ...] | None = None, *, links: tuple[ResultLink, ...] = ()
    ) -> ToolResult:
        """As a `ToolResult`: `content` for the model, and this as data for programs. Without `content`, the model reads
        the data as JSON."""
        data = self.dump()
        try:
            written = pydantic_core.to_json(data)
        except (pydantic_core.PydanticSerializationError, UnicodeEncodeError):
            data = readable_all(data)
            written = pydantic_core.to_json(data)
        if content is None:
            content = written.decode()
        elif isinstance(content, str):
            content = readable(content)
        return ToolResult(content=content, structured=data, links=links)


class Hints(StrictModel):
    """What a client may consider before it lets a model call the tool."""

    read_only: bool = False
    """It changes nothing."""
    destructive: bool = False
    """It may overwrite or remove data."""
    idempotent: bool = False
    """Calling it again with the same arguments changes nothing more."""
    open_world: bool = False
    """Its effects may reach beyond the sandboxes."""


NO_HINTS = Hints()


class ToolContext(Protocol):
    """What tools work on: a sandbox, or the sandboxes of a session.

    Each vocabulary has its own context classes; this is what a `ToolSet` needs of them.
    """

    @property
    def abilities(self) -> frozenset[str]:
        """What the context offers, for `Tool.needs`."""

    def explain(self, error: AtollError) -> str:
        """The message of an error for the model: with the names that the model uses."""


@dataclass(frozen=True)
class Tool:
    """The declaration of a tool. A `ToolSet` binds it to a context.

    Raises:
        InvalidRequest: the name or the description is one that some protocol does not accept, or the name is reserved.
    """

    name: str
    description: str
    input: type[Input]
    """Its JSON schema is what a model sees."""
    result: type[Result] | None
    """The shape of `ToolResult.structured` after a successful call. None: no shape is promised."""
    handler: Callable[..., Awaitable[Result | ToolResult | str]]
    """Called with the validated input and the context. It raises `AtollError` for errors that the model should see."""
    needs: frozenset[str] = frozenset()
    """Abilities that the context must have; without them the tool is not offered."""
    hints: Hints = NO_HINTS
    serialize_by: Callable[[Any, Any], Hashable] | None = None
    """A key, from the input and the context: calls with the same key run one after the other, in the order in which
    they were made. None: the tool's calls run concurrently."""
    streams_output: bool = False
    """The handler also takes `on_output`, an `OnOutput` or None, and passes it to the command that it runs."""
    title: str = ""
    """A short name for people, where a client shows tools. Empty: the name is shown."""
    vocabulary: str | None = None
    """Which of `VOCABULARIES` it belongs to. None: it is not built in, and must not have the name of a tool that is."""

    _any_name: ClassVar[bool] = False
    """True: a tool of this class may have the name of one that is built in."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InvalidRequest(f"{self.name!r} is not a valid tool name; allowed are {NAME_RULE}")
        if not self.description.strip():
            raise InvalidRequest(f"the tool {self.name!r} has no description; a model needs one to select the tool")
        if self.vocabulary is not None:
            entry = VOCABULARIES.get(self.vocabulary)
            if entry is None or self.name not in entry.tool_names:
                raise InvalidRequest(f"the vocabulary {self.vocabulary!r} has no tool {self.name!r}")
        elif not self._any_name and any(self.name in entry.tool_names for entry in VOCABULARIES.values()):
            raise InvalidRequest(f"{self.name!r} is the name of a built-in tool; use another name")

    def input_schema(self) -> dict[str, Any]:
        """The JSON schema of the input."""
        return self.input.model_json_schema(schema_generator=_PlainSchema)

    def output_schema(self) -> dict[str, Any] | None:
        """The JSON schema of the result."""
        if self.result is None:
            return None
        return self.result.model_json_schema(mode="serialization", schema_generator=_PlainSchema)

    def read(self, arguments: object) -> Input:
        """Validate the arguments of a call: an object, or the JSON of one.

        Raises:
            InvalidRequest: they are invalid; the message says where, what is allowed, and what was probably meant.
        """
        given = self.parse(arguments)
        try:
            return self.input.model_validate(given)
        except ValidationError as error:
            raise InvalidRequest(explain_invalid(self.name, error.errors(), self.input_schema())) from None

    def parse(self, arguments: object) -> dict[str, Any]:
        """The arguments of a call as an object, not yet validated.

        Raises:
            InvalidRequest: they are neither an object nor the JSON of one.
        """
        if isinstance(arguments, str | bytes | bytearray):
            try:
                arguments = pydantic_core.from_json(arguments or b"{}")
            except ValueError as error:
                raise InvalidRequest(f"the arguments of {self.name} are not JSON: {error}") from None
        if not isinstance(arguments, Mapping):
            raise InvalidRequest(
                f"the arguments of {self.name} are {quoted(arguments)}; they must be an object with "
                f"{_described_fields(self.input_schema())}"
            )
        return dict(arguments)


class GivenArguments(Input):
    """The input of a `SchemaTool`."""

    arguments: dict[str, Any]


@dataclass(frozen=True)
class SchemaTool(Tool):
    """A tool that is known by its JSON schema. `input` is `GivenArguments`, and `result` None."""

    schema: Mapping[str, Any] = field(default_factory=dict)
    check: Callable[[dict[str, Any]], object] | None = None
    """Raises `AtollError` if the arguments are invalid. None: who makes the call says so."""

    def input_schema(self) -> dict[str, Any]:
        return dict(self.schema)

    def read(self, arguments: object) -> Input:
        given = self.parse(arguments)
        if self.check is not None:
            try:
                self.check(given)
            except AtollError as error:
                raise InvalidRequest(error.message) from None
        return GivenArguments(arguments=given)


def explain_invalid(name: str, errors: list[pydantic_core.ErrorDetails], schema: Mapping[str, Any]) -> str:
    """What is wrong with the arguments of a call of the tool `name`, and what its JSON schema `schema` takes."""
    wrong = "; ".join(dict.fromkeys(_complaint(each, schema) for each in errors[:8]))
    end = "" if wrong.endswith("?") else "."
    return f"the arguments of {name} are invalid: {wrong}{end} It takes {_described_fields(schema)}"


def _complaint(error: pydantic_core.ErrorDetails, schema: Mapping[str, Any]) -> str:
    where = ".".join(str(part) for part in error["loc"]) or "the arguments"
    if error["type"] == "extra_forbidden":
        return f"there is no field {quoted(where)}{nearest(where, schema['properties'])}"
    if error["type"] == "missing":
        return f"{where} is missing"
    reason = error["msg"].removeprefix("Value error, ").replace("Input should", "it should")
    return f"{where} is {quoted(error['input'])}: {reason}"


def _described_fields(schema: Mapping[str, Any]) -> str:
    required = schema.get("required", [])
    fields = []
    for name, about in schema.get("properties", {}).items():
        kind = about.get("type", "value")
        default = pydantic_core.to_json(about.get("default")).decode()
        presence = "required" if name in required else f"default {default}"
        fields.append(f"{name} ({kind}, {presence})")
    return ", ".join(fields) or "no fields"


class _PlainSchema(GenerateJsonSchema):
    """Schemas without titles, which only repeat the names, and without bounds that no call reaches."""

    def generate(self, schema: Any, mode: JsonSchemaMode = "validation") -> JsonSchemaValue:
        plain = super().generate(schema, mode)
        plain.setdefault("properties", {})
        plain.pop("description", None)  # the tool has one
        untitle(plain)
        return plain


_MAX_USEFUL_BOUND = 2**31
"""A larger `maximum` only keeps arithmetic in bounds: it says nothing to a model, and costs tokens."""


def untitle(schema: Any) -> None:
    """Remove titles, large bounds and line breaks of descriptions from a JSON schema, in place."""
    if isinstance(schema, dict):
        if isinstance(schema.get("title"), str):
            del schema["title"]
        if isinstance(schema.get("maximum"), int | float) and schema["maximum"] >= _MAX_USEFUL_BOUND:
            del schema["maximum"]
        if isinstance(schema.get("description"), str):
            schema["description"] = " ".join(schema["description"].split())  # docstrings have lines
        for key, value in schema.items():
            # Below `properties` the keys are field names, and a field may be called `title`.
            for each in value.values() if key in {"properties", "$defs"} else (value,):
                untitle(each)
    elif isinstance(schema, list):
        for each in schema:
            untitle(each)


def quoted(value: object) -> str:
    """`value` for an error message: its repr, cut."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, or lists nested too deep
        return f"a value ({type(value).__name__}) that is too large to show"
    return text if len(text) <= _MAX_QUOTED_CHARS else text[: _MAX_QUOTED_CHARS - 3] + "..."


OnOutput = Callable[[bytes], None]
"""Receives the output of a command as it is printed, while the call runs. It must be fast, and must not raise."""


# -------------------------------------------------------------------------------------------------------------- order


class KeyedQueue:
    """First in, first out, for each key. Keys without tickets are removed."""

    def __init__(self) -> None:
        self._queues: dict[Hashable, list[Ticket]] = {}

    def take(self, key: Hashable) -> Ticket:
        """A ticket at the end of the queue of `key`. It must be released, by leaving its context or with `leave`."""
        ticket = Ticket(self._queues, key)
        self._queues.setdefault(key, []).append(ticket)
        return ticket

    def __len__(self) -> int:
        return len(self._queues)


class Ticket:
    """A position in one queue. As a context it waits until it is the first, and leaves the queue at the end."""

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
        """Leave the queue and wake the next ticket. A second call does nothing."""
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
class _BoundTool:
    tool: Tool
    context: ToolContext | None
    queue: KeyedQueue
    change: Callable[[ToolResult], Awaitable[ToolResult]] | None = None


@dataclass(frozen=True)
class _PreparedCall:
    """A call whose arguments are valid and which has its ticket."""

    bound: _BoundTool
    input: Input
    ticket: Ticket | None
    on_output: OnOutput | None


def _by_name(bound: Iterable[_BoundTool]) -> dict[str, _BoundTool]:
    found: dict[str, _BoundTool] = {}
    for each in bound:
        if each.tool.name in found:
            raise InvalidRequest(
                f"two tools are named {each.tool.name!r}, and a model could not tell which is which; remove one "
                "with without(), or rename yours"
            )
        found[each.tool.name] = each
    return found


class ToolSet:
    """Tools that are offered together, each bound to its context. `a | b` has the tools of both.

    A tool whose `needs` the context does not have is omitted.

    Raises:
        InvalidRequest: two tools have the same name.
    """

    def __init__(self, tools: Iterable[Tool] = (), context: ToolContext | None = None) -> None:
        abilities = frozenset[str]() if context is None else context.abilities
        queue = KeyedQueue()
        self._bound = _by_name(_BoundTool(tool, context, queue) for tool in tools if tool.needs <= abilities)

    @classmethod
    def _of(cls, bound: Iterable[_BoundTool]) -> Self:
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
        """A set of only these tools.

        Raises:
            InvalidRequest: this set has no tool of that name.
        """
        self._require(names)
        return ToolSet._of(self._bound[name] for name in dict.fromkeys(names))

    def without(self, *names: str) -> ToolSet:
        """A set without these tools.

        Raises:
            InvalidRequest: this set has no tool of that name.
        """
        self._require(names)
        return ToolSet._of(each for name, each in self._bound.items() if name not in names)

    def changing(self, change: Callable[[ToolResult], Awaitable[ToolResult]]) -> ToolSet:
        """The same tools, each of whose results is passed through `change` before anything else sees it."""
        return ToolSet._of(replace(each, change=change) for each in self._bound.values())

    def _require(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._bound:
                raise InvalidRequest(self._unknown(name))

    def _unknown(self, name: object) -> str:
        available = ", ".join(self._bound) or "none"
        return f"there is no tool {quoted(name)} (tools: {available}){nearest(str(name), self._bound)}"

    # -------------------------------------------------------------------------------------------------- calling

    async def handle_tool_call(
        self, name: str, input: object = None, *, on_output: OnOutput | None = None
    ) -> ToolResult:
        """Make the call that a model asked for. `input` is an object, or the JSON of one; None is an empty object.
        `on_output` receives the output of the command that the tool runs, as it is printed.

        Every failure is a result with `is_error` and a text that says what failed, what is allowed and what was
        probably meant. Only cancellation is raised.
        """
        prepared = self._prepare(name, {} if input is None else input, on_output)
        return prepared if isinstance(prepared, ToolResult) else await self._run(prepared)

    async def handle_batch(
        self,
        calls: Iterable[tuple[str, object]],
        on_result: Callable[[int, ToolResult], Awaitable[None]] | None = None,
    ) -> list[ToolResult]:
        """Make several calls concurrently. Returns their results in the order of the calls.

        Calls with the same key (`Tool.serialize_by`), such as those on one file, run one after the other in order.
        `on_result` receives each result as soon as it is there, with the index of its call.
        """
        prepared = [self._prepare(name, {} if input is None else input) for name, input in calls]
        results: list[ToolResult | None] = [None] * len(prepared)

        async def one(index: int, call: _PreparedCall | ToolResult) -> None:
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
                if isinstance(each, _PreparedCall) and each.ticket is not None:
                    each.ticket.leave()  # a task that was cancelled before it started has not left the queue
        return [result for result in results if result is not None]

    def _prepare(self, name: str, input: object, on_output: OnOutput | None = None) -> _PreparedCall | ToolResult:
        bound = self._bound.get(name)
        if bound is None:
            return failure(self._unknown(name), "unknown_tool")
        try:
            read = bound.tool.read(input)
            key = bound.tool.serialize_by and bound.tool.serialize_by(read, bound.context)
        except AtollError as error:
            return _error_result(error, bound.context)
        return _PreparedCall(bound, read, None if key is None else bound.queue.take(key), on_output)

    async def _run(self, call: _PreparedCall) -> ToolResult:
        if call.ticket is None:
            result = await self._handle(call)
        else:
            async with call.ticket:
                result = await self._handle(call)
        return result if call.bound.change is None else await call.bound.change(result)

    async def _handle(self, call: _PreparedCall) -> ToolResult:
        tool, context = call.bound.tool, call.bound.context
        try:
            options = {"on_output": call.on_output} if tool.streams_output else {}
            given = await tool.handler(call.input, context, **options)
            if isinstance(given, Result):
                return given.result()
            return ToolResult(content=readable(given)) if isinstance(given, str) else given
        except AtollError as error:
            return _error_result(error, context)
        except Exception:  # noqa: BLE001 - the one place where a call becomes a result; a model must not see a traceback
            _log.exception("tool %s failed with an internal error", tool.name)
            return _error_result(
                _InternalError(
                    f"{tool.name} failed with an internal error, not because of its input; the operator's log has it"
                ),
                context,
            )


def _error_result(error: AtollError, context: ToolContext | None) -> ToolResult:
    message = error.message if context is None else context.explain(error)
    return failure(message, error.code, retryable=error.retryable)


class _InternalError(AtollError):
    code = "internal"
