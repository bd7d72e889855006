"""The tools that code may call.

Owns `ToolRegistry`: which tools there are, by which names, who may call them, and how a call is made on the host. Not
here: how a function becomes a tool (`functions.py`), the tools of MCP servers (`mcp_tools.py`), what is written about
tools (`stubs.py`), and the code that calls (`session.py`). Used by `session.py`, `executor.py`, and programs
(`atoll.ToolRegistry`).

What a call gets is not trusted: name, caller, arguments and their size are checked here, for every kind of tool. A
failed call is a `ToolCallError`; tracebacks are for the operator's log (`atoll.code.registry`).
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import inspect
import json
import logging
import math
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

import anyio
import anyio.to_thread
import pydantic_core

from atoll.code.functions import (
    MAX_ARGUMENTS_BYTES,
    FunctionTool,
    Scope,
    checked_result,
    encode,
)
from atoll.code.shapes import ANY, SchemaReader, Shape, ToolShape, is_name
from atoll.code.stubs import DEFAULT_LIMIT_CHARS, RESERVED, SEARCH_TOOL, StubWriter, ToolIndex, ToolText
from atoll.contract.errors import AtollError, InvalidRequest, ToolCallError
from atoll.tools.tool import (
    GivenArguments,
    Hints,
    ImagePart,
    SchemaTool,
    Tool,
    ToolResult,
    ToolSet,
    nearest,
    quoted,
    readable,
)

if TYPE_CHECKING:
    from atoll.code.mcp_tools import McpServer

_Function = TypeVar("_Function", bound=Callable[..., Any])
_MAX_ERROR_CHARS = 4000
_MAX_NAME_CHARS = 64
"""What all providers accept."""
_MAX_FOUND = 50
"""The most that a search gives."""
DEFAULT_THREADS = 32
_log = logging.getLogger(__name__)


class ToolCallerType(StrEnum):
    """Who may call a tool."""

    DIRECT = "direct"
    """The model, by a tool call of its own."""
    CODE_EXECUTION = "code_execution"
    """Code that the model wrote."""


_CALLERS = {
    "direct": ToolCallerType.DIRECT,
    **dict.fromkeys(
        ("code_execution", "code_execution_20250825", "code_execution_20260120", "code_execution_20260521"),
        ToolCallerType.CODE_EXECUTION,
    ),
}
"""The words of `allowed_callers`, with those of hosted APIs."""
CODE_ONLY = (ToolCallerType.CODE_EXECUTION,)


@dataclass(frozen=True)
class RegisteredTool:
    """A tool of a registry."""

    name: str
    """What code calls it: an identifier of Python."""
    original_name: str
    """Its name where it comes from: in its `ToolSet`, or at its MCP server."""
    description: str
    output_description: str
    allowed_callers: frozenset[ToolCallerType]
    timeout_s: float | None
    """After this time a call fails. None: it may take as long as its caller waits."""
    needs_approval: bool
    """A person has to allow each call. The caller of `ToolRegistry.call` asks; the registry does not."""
    input_schema: Mapping[str, Any]
    """The JSON schema of the arguments."""
    output_schema: Mapping[str, Any] | None
    """The JSON schema of the result. None: nothing is promised."""
    shape: ToolShape = field(repr=False)
    check: Callable[[Mapping[str, Any]], object] = field(repr=False)
    """Raises ToolCallError if the arguments are invalid."""
    run: Callable[[Mapping[str, Any]], Awaitable[object]] = field(repr=False)
    """Makes the call. It may raise anything."""
    bound: ToolSet | None = field(default=None, repr=False)
    """The set that it comes from, for direct calls."""
    is_timed: bool = True
    """Whether the time of a call counts as time of the code. False: it waits for others."""


class ToolRegistry:
    """Tools that code may call, and that a model may call directly.

        registry = ToolRegistry()

        @registry.register(timeout_s=30)
        def query_sales(region: str, year: int = 2025) -> list[Sale]:
            '''The sales of a region in one year.'''

    Functions that are not async run in threads, at most `threads` at a time. A thread cannot be stopped: when its call
    times out or is cancelled, the call ends at once, the function runs on, its result is dropped, and its thread counts
    until it ends. Async functions are cancelled. Context variables of the caller are visible in both.

    `async with registry:` or `aclose()` ends the MCP servers that `add_mcp` started.
    """

    def __init__(self, *, threads: int = DEFAULT_THREADS) -> None:
        if threads < 1:
            raise InvalidRequest(f"threads is {threads}; it must be at least 1")
        self._threads = _Threads(threads)
        self._tools: dict[str, RegisteredTool] = {}
        self._servers: list[McpServer] = []
        self._written: dict[object, Any] = {}
        """What was made of the tools since they last changed."""
        self._search_tool = self._make_search_tool()

    # ---------------------------------------------------------------------------------------------------- registration

    @overload
    def register(
        self,
        function: _Function,
        /,
        *,
        name: str | None = None,
        description: str | None = None,
        output_description: str | None = None,
        allowed_callers: Iterable[ToolCallerType | str] = CODE_ONLY,
        timeout_s: float | None = None,
        needs_approval: bool = False,
    ) -> _Function: ...

    @overload
    def register(
        self,
        function: None = None,
        /,
        *,
        name: str | None = None,
        description: str | None = None,
        output_description: str | None = None,
        allowed_callers: Iterable[ToolCallerType | str] = CODE_ONLY,
        timeout_s: float | None = None,
        needs_approval: bool = False,
    ) -> Callable[[_Function], _Function]: ...

    def register(
        self,
        function: Callable[..., Any] | None = None,
        /,
        *,
        name: str | None = None,
        description: str | None = None,
        output_description: str | None = None,
        allowed_callers: Iterable[ToolCallerType | str] = CODE_ONLY,
        timeout_s: float | None = None,
        needs_approval: bool = False,
    ) -> Any:
        """Register a function, with or without arguments for the decorator. The function is returned unchanged.

        Its schema comes from its signature, its texts from its docstring (Google, NumPy or Sphinx style) unless
        `description` and `output_description` give others. Arguments are validated and converted by pydantic; a result
        is serialised by the annotation. What a `functools.partial` has set is not shown to code, which cannot set it.

        Raises:
            InvalidRequest: the name is taken or not allowed, or the signature cannot be described in JSON.
        """
        scope = Scope.of_caller(1)

        def add(function: Callable[..., Any]) -> Callable[..., Any]:
            if not callable(function):
                raise InvalidRequest(f"{quoted(function)} is no function; texts are keywords: register(description=…)")
            called = name or _name_of(function)
            self._require_name(called, f"register it with another one: register(name={called + '_tool'!r})")
            made = FunctionTool(function, called, scope)
            self._add(
                RegisteredTool(
                    name=called,
                    original_name=called,
                    description=inspect.cleandoc(made.texts.description if description is None else description),
                    output_description=made.texts.returns if output_description is None else output_description,
                    allowed_callers=_callers(allowed_callers),
                    timeout_s=_timeout(timeout_s),
                    needs_approval=needs_approval,
                    input_schema=made.input_schema,
                    output_schema=made.output_schema,
                    shape=made.shape,
                    check=made.read,
                    run=self._runner(made),
                )
            )
            return function

        return add if function is None else add(function)

    def add(
        self,
        tools: Tool | ToolSet | Iterable[Tool],
        *,
        allowed_callers: Iterable[ToolCallerType | str] = CODE_ONLY,
        timeout_s: float | None = None,
        needs_approval: bool = False,
    ) -> None:
        """Add tools of Atoll's own kind. Their calls run as in their `ToolSet`, in its order for one file.

        Code gets the data of a tool that declares a `Result`, and the text of any other. A result with `is_error` is a
        `ToolCallError`. A name that is no identifier is changed (`get-user` becomes `get_user`).

        Raises:
            InvalidRequest: a name is taken, or a tool needs a context that it was given without.
        """
        chosen = (
            tools if isinstance(tools, ToolSet) else ToolSet(found := [tools] if isinstance(tools, Tool) else [*tools])
        )
        if not isinstance(tools, ToolSet):
            for each in found:
                if each.needs:
                    raise InvalidRequest(
                        f"the tool {each.name!r} needs a context; add the ToolSet that binds it to one"
                    )
        callers, timeout_s = _callers(allowed_callers), _timeout(timeout_s)
        names = identifiers([tool.name for tool in chosen])
        self._add(*(_of_tool(chosen, tool, names[tool.name], callers, timeout_s, needs_approval) for tool in chosen))

    def declare(
        self,
        name: str,
        input_schema: Mapping[str, Any],
        run: Callable[[Mapping[str, Any]], Awaitable[object]],
        *,
        description: str = "",
        original_name: str | None = None,
        is_timed: bool = True,
        needs_approval: bool = False,
        returns_text: bool = True,
    ) -> None:
        """Add a tool for code that is known by its JSON schema only, and that another program runs: `run` passes a call
        on and waits for its result. Arguments are not checked against the schema; that program does so. Without
        `returns_text` a result is anything that JSON has.

        Raises:
            InvalidRequest: the name is taken or not allowed.
        """
        self._require_name(name, "give it another one")
        reader = SchemaReader(name, foreign=True)
        schema = {**input_schema, "properties": input_schema.get("properties") or {}}
        result = Shape("plain", value="str") if returns_text else ANY

        def check(arguments: Mapping[str, Any]) -> object:
            return encode(arguments, f"the arguments of {name}", MAX_ARGUMENTS_BYTES, "InvalidArguments")

        self._add(
            RegisteredTool(
                name=name,
                original_name=original_name or name,
                description=description,
                output_description="",
                allowed_callers=frozenset(CODE_ONLY),
                timeout_s=None,
                needs_approval=needs_approval,
                input_schema=schema,
                output_schema=None,
                shape=ToolShape(reader.parameters(schema), None, result, reader.models),
                check=check,
                run=run,
                is_timed=is_timed,
            )
        )

    async def add_mcp(
        self,
        server: Any,
        *,
        prefix: str = "",
        allowed_callers: Iterable[ToolCallerType | str] = CODE_ONLY,
        timeout_s: float | None = None,
        needs_approval: bool = False,
    ) -> tuple[str, ...]:
        """Add every tool of an MCP server. Returns the names that code calls them by, in alphabetical order.

        `server` is a connected `mcp.ClientSession` or `mcp.Client`, which stays the caller's; or what the registry is
        to start and end: a command (`["npx", "-y", "server"]`, or `mcp.StdioServerParameters`), the URL of a server
        that speaks streamable HTTP, or any other server or transport that `mcp.Client` takes. It runs on the host.
        `prefix` stands before every name. A name that is no identifier is changed in a way that depends on the names
        of this server alone: `get-user` becomes `get_user`, `import` becomes `import_`.

        Raises:
            CallerError: the server cannot be reached, or the extra `atoll[mcp]` is not installed.
            InvalidRequest: a name is taken; choose a prefix.
        """
        from atoll.code.mcp_tools import McpServer

        callers, timeout_s = _callers(allowed_callers), _timeout(timeout_s)
        if prefix and not is_name(prefix):
            raise InvalidRequest(f"the prefix {prefix!r} is not the beginning of an identifier; 'github_' is one")
        connected = await McpServer.connect(server)
        try:
            listed = await connected.tools()
            names = identifiers([tool.name for tool in listed], prefix)
            added = [
                RegisteredTool(
                    name=names[tool.name],
                    original_name=tool.name,
                    description=tool.description,
                    output_description="",
                    allowed_callers=callers,
                    timeout_s=timeout_s,
                    needs_approval=needs_approval,
                    input_schema=tool.input_schema,
                    output_schema=tool.output_schema,
                    shape=tool.shape(names[tool.name]),
                    check=tool.check,
                    run=tool.run,
                )
                for tool in listed
            ]
            self._add(*sorted(added, key=lambda each: each.name))
        except BaseException:
            with anyio.CancelScope(shield=True):
                await connected.aclose()
            raise
        self._servers.append(connected)
        return tuple(sorted(names.values()))

    def remove(self, name: str) -> None:
        """Take a tool out.

        Raises:
            InvalidRequest: there is none of this name.
        """
        if name not in self._tools:
            raise InvalidRequest(self._unknown(name))
        del self._tools[name]
        self._written.clear()

    def _add(self, *tools: RegisteredTool) -> None:
        """Add all of them, or none."""
        taken = {**self._tools}
        for tool in tools:
            if tool.name in taken:
                raise InvalidRequest(
                    f"a tool is named {tool.name!r} already; remove() it, or give one of them another name "
                    "(name= of register, prefix= of add_mcp)"
                )
            taken[tool.name] = tool
        self._tools = taken
        self._written.clear()

    def _require_name(self, name: str, fix: str) -> None:
        if not is_name(name) or len(name) > _MAX_NAME_CHARS:
            raise InvalidRequest(
                f"{name!r} is not a name that code can call: at most {_MAX_NAME_CHARS} ASCII letters, digits and '_', "
                f"no keyword; {fix}"
            )
        if name in RESERVED:
            raise InvalidRequest(f"{name!r} is a name of Python or of the session, which a tool must not hide; {fix}")

    # --------------------------------------------------------------------------------------------------------- looking

    def __contains__(self, name: object) -> bool:
        return name in self._tools or name == SEARCH_TOOL

    def __getitem__(self, name: str) -> RegisteredTool:
        return self._search_tool if name == SEARCH_TOOL else self._tools[name]

    def __iter__(self) -> Iterator[RegisteredTool]:
        """The tools, in the order of their registration. `search_tools`, which is always there, is not among them."""
        return iter(self._tools.values())

    def __len__(self) -> int:
        return len(self._tools)

    def stubs(self, *, anthropic_compatible: bool = False) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
        """What a kernel needs to make functions of the tools that code may call: STUBs, and MODELs by name."""
        writer = self._writer(anthropic_compatible)
        alone = StubWriter([_text_of(self._search_tool)], one_dict=anthropic_compatible)
        return writer.stubs() + alone.stubs(), writer.models()

    def documentation(self, *, limit_chars: int = DEFAULT_LIMIT_CHARS, anthropic_compatible: bool = False) -> str:
        """The tools that code may call, for a prompt: as typed stubs or, if that takes more than `limit_chars`, one
        line each, and how to find the rest. The same registrations give the same bytes, in any process."""
        written: str = self._once(
            ("documentation", limit_chars, anthropic_compatible),
            lambda: self._writer(anthropic_compatible).documentation(limit_chars),
        )
        return written

    def search(self, query: str, limit: int = 8) -> list[dict[str, Any]]:
        """The tools that code may call and that fit the words of `query`, best first: name, signature and summary."""
        index = self._once("index", lambda: ToolIndex(self._texts()))
        writer = self._writer(False)
        found = index.search(query, max(1, min(limit, _MAX_FOUND)))
        return [{"name": each.name, "signature": writer.signature(each), "description": each.summary} for each in found]

    def direct_tools(self, *, approvals: bool = False) -> ToolSet:
        """The tools that a model may call itself, for an agent.

        Those that need an approval are among them only with `approvals`, which says that the agent asks: they are
        marked as destructive, and `Agent(approve=…)` is asked before each of their calls.
        """
        direct = ToolSet()
        for tool in self._tools.values():
            if ToolCallerType.DIRECT not in tool.allowed_callers or (tool.needs_approval and not approvals):
                continue
            if tool.bound is not None and not tool.needs_approval:
                direct |= tool.bound.only(tool.original_name)
            else:
                direct |= ToolSet([_direct_tool(self, tool)])
        return direct

    def _texts(self) -> list[ToolText]:
        return [_text_of(tool) for tool in self if ToolCallerType.CODE_EXECUTION in tool.allowed_callers]

    def _writer(self, one_dict: bool) -> StubWriter:
        writer: StubWriter = self._once(("writer", one_dict), lambda: StubWriter(self._texts(), one_dict=one_dict))
        return writer

    def _once(self, key: object, make: Callable[[], Any]) -> Any:
        if key not in self._written:
            self._written[key] = make()
        return self._written[key]

    def _unknown(self, name: object) -> str:
        return f"there is no tool {quoted(name)}{nearest(str(name), self._tools)}"

    # --------------------------------------------------------------------------------------------------------- calling

    async def call(
        self, name: str, arguments: Mapping[str, Any], *, caller: ToolCallerType, as_text: bool = False
    ) -> object:
        """Make a call. Returns the result as JSON has it; with `as_text` the result if it is text, else its JSON.

        Raises:
            ToolCallError: there is no such tool, it is not for this caller, the arguments are invalid, it timed out, it
                failed, or its result cannot be JSON. Only cancellation is raised besides.
        """
        value, _ = await self._make(name, arguments, caller)
        return _as_text(value) if as_text else value

    async def call_encoded(
        self, name: str, arguments: Mapping[str, Any], *, caller: ToolCallerType, as_text: bool = False
    ) -> str:
        """As `call`, with the result as JSON in ASCII, which a large one is made into only once.

        Raises:
            ToolCallError: as `call`.
        """
        value, text = await self._make(name, arguments, caller)
        return json.dumps(_as_text(value)) if as_text else text

    async def _make(self, name: str, arguments: Mapping[str, Any], caller: ToolCallerType) -> tuple[object, str]:
        tool = self._allowed(name, caller)
        try:
            if tool.timeout_s is None:
                value = await tool.run(arguments)
            else:
                value = await self._within(tool, tool.timeout_s, arguments)
        except ToolCallError:
            raise
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise self._failed(tool, error) from error  # the tool's own: it awaited what was cancelled
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # the one place where what a tool raises becomes an error
            raise self._failed(tool, error) from error
        return checked_result(tool.name, value)

    def check(self, name: str, arguments: Mapping[str, Any], *, caller: ToolCallerType) -> RegisteredTool:
        """Whether such a call would be made, before a person is asked to allow it. Returns the tool.

        Raises:
            ToolCallError: as `call`, without making it.
        """
        tool = self._allowed(name, caller)
        tool.check(arguments)
        return tool

    def _allowed(self, name: str, caller: ToolCallerType) -> RegisteredTool:
        tool = self._search_tool if name == SEARCH_TOOL else self._tools.get(name)
        if tool is None:
            raise ToolCallError("UnknownTool", self._unknown(name))
        if caller not in tool.allowed_callers:
            how = "by the model itself, not by code" if caller == ToolCallerType.CODE_EXECUTION else "by code only"
            raise ToolCallError("NotAllowed", f"{name} may be called {how}")
        return tool

    async def _within(self, tool: RegisteredTool, timeout_s: float, arguments: Mapping[str, Any]) -> object:
        with anyio.move_on_after(timeout_s):
            return await tool.run(arguments)
        raise ToolCallError("TimeoutError", f"{tool.name} timed out after {timeout_s:g} s")

    def _failed(self, tool: RegisteredTool, error: BaseException) -> ToolCallError:
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        if isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration | StopAsyncIteration):
            error = error.__cause__  # what coroutines make of it
        if isinstance(error, ToolCallError):
            return error
        _log.error("the tool %s failed", tool.name, exc_info=error)
        return ToolCallError(type(error).__name__, _message(error))

    def _runner(self, made: FunctionTool) -> Callable[[Mapping[str, Any]], Awaitable[object]]:
        async def run_async(arguments: Mapping[str, Any]) -> object:
            return made.write(await made.bind(made.read(arguments))())

        async def run_in_thread(arguments: Mapping[str, Any]) -> object:
            value = await self._threads.run(made.bind(made.read(arguments)))
            if inspect.isawaitable(value):
                value = await value
            return made.write(value)

        return run_async if made.is_async else run_in_thread

    def _make_search_tool(self) -> RegisteredTool:
        async def search_tools(query: str, limit: int = 8) -> list[dict[str, Any]]:
            return self.search(query, limit)

        made = FunctionTool(search_tools, SEARCH_TOOL)
        return RegisteredTool(
            name=SEARCH_TOOL,
            original_name=SEARCH_TOOL,
            description="Find tools by what they do.",
            output_description="name, signature and description of each, best first.",
            allowed_callers=frozenset(CODE_ONLY),
            timeout_s=None,
            needs_approval=False,
            input_schema=made.input_schema,
            output_schema=made.output_schema,
            shape=made.shape,
            check=made.read,
            run=self._runner(made),
        )

    # ---------------------------------------------------------------------------------------------------------- ending

    async def aclose(self) -> None:
        """End the MCP servers that `add_mcp` started. Their tools stay, and fail. Closing twice does nothing."""
        async with AsyncExitStack() as stack:
            while self._servers:
                stack.push_async_callback(self._servers.pop(0).aclose)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


# ------------------------------------------------------------------------------------------------------------- threads


class _Threads:
    """Runs functions in threads. One that was abandoned counts until it ends, so that there are never more."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._loop: asyncio.AbstractEventLoop | None = None
        self._limiter: anyio.CapacityLimiter
        self._unlimited: anyio.CapacityLimiter

    async def run(self, function: Callable[[], Any]) -> Any:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # limiters belong to an event loop, and a registry need not
            self._loop = loop
            self._limiter = anyio.CapacityLimiter(self._limit)
            self._unlimited = anyio.CapacityLimiter(math.inf)
        limiter = self._limiter
        job = _Job(function)
        await limiter.acquire_on_behalf_of(job)

        def work() -> None:
            if not job.begin():
                return
            job.run()
            if job.abandoned and job.take():
                with suppress(RuntimeError):  # the event loop has ended, and its limiter with it
                    loop.call_soon_threadsafe(limiter.release_on_behalf_of, job)

        try:
            await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._unlimited)
        except BaseException:
            job.abandoned = True
            if (job.begin() or job.finished) and job.take():  # it will not run, or has run
                limiter.release_on_behalf_of(job)
            raise
        if job.take():
            limiter.release_on_behalf_of(job)
        if job.error is not None:
            raise job.error
        return job.value


class _Job:
    """A function for a thread. The thread that runs it and the task that waits for it agree without a lock: each of
    `begin` and `take` succeeds once."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self.value: Any = None
        self.error: BaseException | None = None
        self.finished = False
        self.abandoned = False
        self._beginnings = [None]
        self._places = [None]

    def run(self) -> None:
        try:
            self.value = self._function()
        except BaseException as error:  # noqa: BLE001 - raised again in the task
            self.error = error
        self.finished = True

    def begin(self) -> bool:
        """For the thread: it may run. For the task: it never will."""
        return _pop(self._beginnings)

    def take(self) -> bool:
        """Its place among the threads is to be given back."""
        return _pop(self._places)


def _pop(one: list[None]) -> bool:
    try:
        one.pop()
    except IndexError:
        return False
    return True


# ------------------------------------------------------------------------------------------------------------- details


def _name_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _text_of(tool: RegisteredTool) -> ToolText:
    return ToolText(tool.name, tool.shape, tool.description, tool.output_description, tool.needs_approval)


def _callers(given: Iterable[ToolCallerType | str]) -> frozenset[ToolCallerType]:
    words = [given] if isinstance(given, str) else list(given)
    for word in words:
        if word not in _CALLERS:
            allowed = ", ".join(map(repr, _CALLERS))
            raise InvalidRequest(f"there is no caller {quoted(str(word))}; allowed_callers has some of {allowed}")
    if not words:
        raise InvalidRequest(
            "allowed_callers is empty, so that the tool could not be called; leave it out for code only"
        )
    return frozenset(_CALLERS[word] for word in words)


def _timeout(timeout_s: float | None) -> float | None:
    if timeout_s is not None and not 0 < timeout_s < float("inf"):
        raise InvalidRequest(f"timeout_s is {timeout_s}; it must be above 0, or None for no limit")
    return timeout_s


def identifiers(names: Iterable[str], prefix: str = "") -> dict[str, str]:
    """An identifier for each name. It depends on the names alone, not on their order; no two are the same."""
    made: dict[str, str] = {}
    taken: set[str] = set()
    # Names that can stay as they are go first; the others make way.
    for name in sorted(names, key=lambda each: (_identifier(each, prefix) != prefix + each, each)):
        wanted = identifier = _identifier(name, prefix)
        number = 1
        while identifier in taken:
            number += 1
            identifier = f"{wanted[: _MAX_NAME_CHARS - 8]}_{number}"
        taken.add(identifier)
        made[name] = identifier
    return made


def _identifier(name: str, prefix: str) -> str:
    text = prefix + (re.sub(r"[^A-Za-z0-9_]+", "_", name).strip("_") or "tool")
    if text[0].isdigit():
        text = f"tool_{text}"
    if len(text) > _MAX_NAME_CHARS:
        text = f"{text[: _MAX_NAME_CHARS - 9]}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return text if is_name(text) and text not in RESERVED else f"{text}_"


def _message(error: BaseException) -> str:
    try:
        text = error.message if isinstance(error, AtollError) else str(error)
    except Exception:  # noqa: BLE001 - the tool's own exception
        text = ""
    text = readable(text) or type(error).__name__
    half = _MAX_ERROR_CHARS // 2
    return text if len(text) <= _MAX_ERROR_CHARS else f"{text[:half]} … {text[-half:]}"


# ---------------------------------------------------------------------------------------------------- tools of Atoll's


def _of_tool(
    bound: ToolSet,
    tool: Tool,
    name: str,
    callers: frozenset[ToolCallerType],
    timeout_s: float | None,
    needs_approval: bool,
) -> RegisteredTool:
    def check(arguments: Mapping[str, Any]) -> object:
        encode(arguments, f"the arguments of {name}", MAX_ARGUMENTS_BYTES, "InvalidArguments")
        try:
            return tool.read(arguments)
        except InvalidRequest as error:
            raise ToolCallError("InvalidArguments", error.message) from None

    async def run(arguments: Mapping[str, Any]) -> object:
        check(arguments)
        result = await bound.handle_tool_call(tool.name, dict(arguments))
        if result.is_error:
            raise ToolCallError(_error_type(result), result.text)
        if tool.result is not None and result.structured is not None:
            return pydantic_core.to_jsonable_python(result.structured)
        return result.text + _left_out(result)

    reader = SchemaReader(name, foreign=True)
    input_schema, output_schema = tool.input_schema(), tool.output_schema()
    parameters = reader.parameters(input_schema)
    returns = Shape("plain", value="str") if output_schema is None else reader.shape(output_schema, "result")
    return RegisteredTool(
        name=name,
        original_name=tool.name,
        description=tool.description,
        output_description="",
        allowed_callers=callers,
        timeout_s=timeout_s,
        needs_approval=needs_approval,
        input_schema=input_schema,
        output_schema=output_schema,
        shape=ToolShape(parameters, None, returns, reader.models),
        check=check,
        run=run,
        bound=bound,
    )


def _error_type(result: ToolResult) -> str:
    code = ((result.structured or {}).get("error") or {}).get("code", "tool_error")
    return "".join(part.title() for part in str(code).split("_"))


def _left_out(result: ToolResult) -> str:
    images = [] if isinstance(result.content, str) else [each for each in result.content if isinstance(each, ImagePart)]
    return "".join(f"\n[left out: an image, {each.mime_type}]" for each in images)


def _direct_tool(registry: ToolRegistry, tool: RegisteredTool) -> SchemaTool:
    """A registered tool as one that an agent calls."""

    async def handle(given: GivenArguments, _context: object) -> ToolResult:
        try:
            value = await registry.call(tool.name, given.arguments, caller=ToolCallerType.DIRECT, as_text=True)
        except ToolCallError as error:
            raise ToolCallError(error.type, f"{error.type}: {error.message}") from error
        return ToolResult(content=str(value))

    return SchemaTool(
        name=tool.name if tool.bound is None else tool.original_name,
        description=tool.description or tool.name.replace("_", " "),
        input=GivenArguments,
        result=None,
        handler=handle,
        hints=Hints(destructive=tool.needs_approval, open_world=True),
        vocabulary=None if tool.bound is None else tool.bound[tool.original_name].vocabulary,
        schema=tool.input_schema,
        check=tool.check,
    )
