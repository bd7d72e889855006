"""Programmatic tool calling in one object: a model, tools, and code that calls them.

Owns which tools such an agent has (`execute_code`, and those that the model may call itself), its system prompt, its
conversation, and whether the variables of its code outlive a run. Not here: the loop (`loop.py`), executing code
(`code/executor.py`), and the tools (`code/registry.py`). Used by programs (`atoll.ProgrammaticToolOrchestrator`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self, TypeVar, overload

import anyio
from pydantic_ai.models import Model
from pydantic_ai.settings import ModelSettings

from atoll.agents import models
from atoll.agents.history import History
from atoll.agents.loop import DEFAULT_STEPS, Agent, AgentStream, Answer, Approve, Budget
from atoll.code.approvals import Approver
from atoll.code.executor import CodeConfig, CodeExecutor, ExecutionAudit
from atoll.code.registry import CODE_ONLY, ToolCallerType, ToolRegistry
from atoll.code.tool import execute_code_tools
from atoll.runtime.interface import Engine
from atoll.settings import Settings

_Function = TypeVar("_Function", bound=Callable[..., Any])

SYSTEM_PROMPT = (
    "You solve tasks by writing code, which you run with the tool `execute_code`. Its description lists the functions "
    "that the code can call. Prefer one piece of code with loops, conditions and parallel calls to many small ones. "
    "Filter, join and add up data in the code, and print only what you need for the answer: what is not printed, you "
    "do not see."
)


class ProgrammaticToolOrchestrator:
    """A model that solves tasks with code, and the code calls tools.

        async with ProgrammaticToolOrchestrator("anthropic:claude-sonnet-5-5") as orchestrator:

            @orchestrator.register_tool(description="Sales of a region.")
            def query_sales(region: str) -> list[dict]: ...

            print(await orchestrator.run("Which region sold most?"))

    `model` is a name (`anthropic:…`, `bedrock:…`, `openai:…`, …) or a model of pydantic-ai; unset, the model of the
    settings. `api_key` is the key of its provider; unset, that of the environment. `instructions` are added to the
    system prompt. Runs continue one conversation, `history`, until `clear_history`. With `reuse_session` the variables
    of the code persist over runs; without, each run begins with a new session. Sandboxes end with the context, or with
    `aclose`. One run at a time.

    `approve` is asked before each execution of code and each destructive call of the model, `approver` before each call
    by code of a tool with `needs_approval`.

    Raises:
        InvalidRequest: the model is unknown, or something that it needs is missing.
    """

    def __init__(
        self,
        model: str | Model | None = None,
        *,
        api_key: str | None = None,
        config: CodeConfig | None = None,
        registry: ToolRegistry | None = None,
        instructions: str = "",
        reuse_session: bool = False,
        steps: int = DEFAULT_STEPS,
        settings: ModelSettings | None = None,
        engine: Engine | None = None,
        approve: Approve | None = None,
        approver: Approver | None = None,
        audit: ExecutionAudit | None = None,
    ) -> None:
        chosen = Settings.from_environment().model if model is None else model
        self.model = models.resolve(chosen, api_key)
        self.registry = ToolRegistry() if registry is None else registry
        self.executor = CodeExecutor(self.registry, config, engine=engine, approver=approver, audit=audit)
        self.history = History()
        """The conversation so far. Another one may be set."""
        self.answer: Answer | None = None
        """The result of the last run, with its tokens and steps."""
        self.reuse_session = reuse_session
        self._instructions = instructions
        self._steps = steps
        self._settings = settings
        self._approve = approve
        self._session_id: str | None = None

    @property
    def system_prompt(self) -> str:
        """What the model is told before the conversation. What code can call is in the description of
        `execute_code`."""
        return f"{SYSTEM_PROMPT}\n\n{self._instructions}" if self._instructions else SYSTEM_PROMPT

    @overload
    def register_tool(
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
    def register_tool(
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

    def register_tool(self, function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
        """Register a function as a tool, as `ToolRegistry.register` does. The next run has it.

        Raises:
            InvalidRequest: the name is taken or not allowed, or the signature cannot be described in JSON.
        """
        register = self.registry.register(**options)
        return register if function is None else register(function)

    async def run(self, prompt: str, *, budget: Budget | int | None = None) -> str:
        """The final text of the model, after it has run as much code as it needed. `answer` has the rest.

        Raises:
            what `Agent.run` raises.
        """
        async with self._running() as agent:
            self.answer = await agent.run(prompt, history=self.history, budget=budget)
        return self.answer.text

    @asynccontextmanager
    async def stream(self, prompt: str, *, budget: Budget | int | None = None) -> AsyncIterator[AgentStream]:
        """As `run`, with events as they happen, as `Agent.stream` gives them."""
        async with self._running() as agent, agent.stream(prompt, history=self.history, budget=budget) as stream:
            yield stream
        self.answer = stream.finished or self.answer

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[Agent]:
        tools, code = execute_code_tools(self.executor)
        if self._session_id is not None and self.executor.get_session(self._session_id) is not None:
            code.session_id = self._session_id
            await self.executor.refresh_tools(self._session_id)
        tools |= self.registry.direct_tools(approvals=self._approve is not None)
        agent = Agent(
            self.model, tools, self.system_prompt, steps=self._steps, approve=self._approve, settings=self._settings
        )
        try:
            yield agent
        finally:
            self._session_id = code.session_id
            if not self.reuse_session:
                with anyio.CancelScope(shield=True):
                    await self.close_session()

    def clear_history(self) -> None:
        """Begin a new conversation. Variables of the code stay, if they outlive runs."""
        self.history = History()

    async def close_session(self) -> None:
        """End the session of the code, and its variables. The next run begins another. Does nothing without one."""
        if self._session_id is not None:
            session_id, self._session_id = self._session_id, None
            await self.executor.close_session(session_id)

    async def aclose(self) -> None:
        """End everything that this has started. Closing twice does nothing."""
        with anyio.CancelScope(shield=True):
            await self.executor.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
