"""The tool `execute_code`: code that calls tools, for any agent or MCP client.

Owns what a model reads about it, and which session its calls share. Not here: executing (`executor.py`). Used by
`agents/`, by the surfaces and by programs (`atoll.code_tool`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated

import anyio
from pydantic import Field

from atoll.code.executor import CodeConfig, CodeExecutor
from atoll.code.registry import ToolRegistry
from atoll.code.results import ExecutionResult
from atoll.contract.errors import AtollError, InvalidRequest
from atoll.runtime.sandbox import Sandbox
from atoll.tools.tool import Hints, Input, OnOutput, Result, Tool, ToolResult, ToolSet

MAX_CODE_CHARS = 1_000_000
MAX_TIMEOUT_S = 3600

_ABOUT = {
    "python": (
        "Run Python in a sandbox. Variables, functions and imports persist between calls. Top-level `await` works. "
        "Only what is printed, the value of the last line, and figures come back: process large data in code and print "
        "the conclusion."
    ),
    "javascript": (
        "Run JavaScript (Node) in a sandbox. Variables and functions persist between calls. Top-level `await` works. "
        "Only what is printed and the value of the last line come back: process large data in code and print the "
        "conclusion."
    ),
    "bash": "Run bash in a sandbox. The working directory and variables persist between calls.",
}
_TOOLS = {
    "python": (
        "These functions call tools outside of the sandbox. Each call must be awaited; `asyncio.gather` makes calls in "
        "parallel. Their results stay in the code: print what you need of them."
    ),
    "javascript": (
        "These functions, described here as Python has them, call tools outside of the sandbox. Each takes one object "
        "of named arguments and returns a promise: `await name({key: value})`; `Promise.all` makes calls in parallel. "
        "Their results stay in the code: print what you need of them."
    ),
}


class ExecuteCodeInput(Input):
    code: Annotated[str, Field(min_length=1, max_length=MAX_CODE_CHARS)]
    """The code of one cell."""
    timeout: Annotated[int, Field(ge=1, le=MAX_TIMEOUT_S)] = 60
    """Seconds after which it is interrupted. Variables survive that."""


class ExecuteCodeResult(Result):
    success: bool
    """Whether it ended without an error."""
    output: str
    """What it printed on stdout."""
    value: str | None = None
    """The value of its last line."""
    traceback: str | None = None
    """Of the error that ended it."""
    calls: int
    """How many tools it called."""
    timed_out: bool
    """True: it was interrupted."""
    session_replaced: bool
    """True: variables of earlier calls are lost."""


class CodeContext:
    """The session that calls of `execute_code` share: started by the first call, and again when it has expired.

    In a sandbox that is given, it goes on with the session that an earlier context has left there.
    """

    abilities: frozenset[str] = frozenset()

    def __init__(self, executor: CodeExecutor, sandbox: Callable[[], Awaitable[Sandbox]] | None = None) -> None:
        self.executor = executor
        self._sandbox = sandbox
        self.session_id: str | None = None
        self._starting = anyio.Lock()

    def explain(self, error: AtollError) -> str:
        return error.message

    async def run(self, code: str, timeout_s: float, on_output: OnOutput | None) -> ExecutionResult:
        def hear(_stream: str, data: bytes) -> None:
            if on_output is not None:
                on_output(data)

        expired = False
        async with self._starting:
            if self.session_id is not None and self.executor.get_session(self.session_id) is None:
                self.session_id, expired = None, True
            if self.session_id is None:
                self.session_id = await self._open()
        result, _ = await self.executor.execute(code, self.session_id, timeout_s=timeout_s, on_output=hear)
        return result.model_copy(update={"session_replaced": True}) if expired else result

    async def _open(self) -> str:
        if self._sandbox is None:
            return await self.executor.open_session()
        sandbox = await self._sandbox()
        try:
            return await self.executor.open_session(sandbox, leave_running=True)
        except InvalidRequest:  # another client of the same sandbox uses the session there: each has its own then
            return await self.executor.open_session(sandbox)

    async def aclose(self) -> None:
        if self.session_id is not None:
            await self.executor.close_session(self.session_id)


async def _execute_code(
    args: ExecuteCodeInput, context: CodeContext, *, on_output: OnOutput | None = None
) -> ToolResult:
    result = await context.run(args.code, args.timeout, on_output)
    values = (part.data.get("text/plain") for part in result.parts if part.role == "value")
    value = next((str(text) for text in values if text is not None), None)
    data = ExecuteCodeResult(
        success=result.success,
        output=result.output,
        value=value,
        traceback=None if result.error is None else result.error.traceback or result.error.message,
        calls=len(result.calls),
        timed_out=result.timed_out,
        session_replaced=result.session_replaced,
    )
    content = result.content
    return data.result(result.text if len(content) == 1 else content)


def describe_code(registry: ToolRegistry, config: CodeConfig) -> str:
    """What a model reads about executing code: the language, and the tools that code may call."""
    about = _ABOUT[config.language]
    if not len(registry) or config.language == "bash":
        return about
    documentation = registry.documentation(anthropic_compatible=config.anthropic_compatible)
    return f"{about}\n\n{_TOOLS[config.language]}\n\n{documentation}"


def execute_code_tools(
    executor: CodeExecutor, sandbox: Callable[[], Awaitable[Sandbox]] | None = None
) -> tuple[ToolSet, CodeContext]:
    """The tool, bound to a session of its own, and that session. `sandbox` gives the sandbox that it runs in; without
    it, it has its own."""
    tool = Tool(
        name="execute_code",
        description=describe_code(executor.registry, executor.config),
        input=ExecuteCodeInput,
        result=ExecuteCodeResult,
        handler=_execute_code,
        hints=Hints(destructive=True),
        streams_output=True,
        title="Execute code",
        vocabulary="code",
    )
    context = CodeContext(executor, sandbox)
    return ToolSet([tool], context), context


@asynccontextmanager
async def code_tool(
    registry: ToolRegistry | None = None,
    config: CodeConfig | None = None,
    *,
    executor: CodeExecutor | None = None,
) -> AsyncIterator[ToolSet]:
    """`execute_code` as a tool set, for as long as the context lasts. Its session and sandbox end with it.

    Give the tools that code may call (`registry`), or an executor that is already there.

    Raises:
        InvalidRequest: both are given.
    """
    if executor is not None and (registry is not None or config is not None):
        raise InvalidRequest("give a registry and a config, or an executor, which has both")
    own = CodeExecutor(registry or ToolRegistry(), config) if executor is None else executor
    tools, context = execute_code_tools(own)
    try:
        yield tools
    finally:
        with anyio.CancelScope(shield=True):
            await (own.aclose() if executor is None else context.aclose())
