"""The agent loop: request the model's answer, make the tool calls in it, repeat until there are no more calls.

Owns when a run ends, approval and budgets. The history is complete at every moment. Not here: what its events have
(`events.py`), which models exist and what their errors mean (`models.py`), how one answer is requested (`requests.py`),
the file format of a conversation (`history.py`), and tools (`tools/`). Used by `children.py`, `orchestrator.py`, `atoll
agent`, and programs (`atoll.Agent`, `atoll.generate_text`).

It calls models through pydantic-ai, but does not use pydantic-ai's own loop: see docs/design/0013.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import anyio
from anyio.abc import ObjectReceiveStream
from pydantic_ai.messages import (
    InstructionPart,
    ModelRequest,
    ModelResponse,
    ModelResponseStreamEvent,
    PartDeltaEvent,
    PartStartEvent,
    TextPart,
    TextPartDelta,
    ThinkingPart,
    ThinkingPartDelta,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models import Model, ModelRequestParameters
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import ToolDefinition
from pydantic_ai.usage import RequestUsage

from atoll.agents import media, models
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
from atoll.agents.history import History, interrupted
from atoll.agents.requests import CUT_OFF_REASONS, AnswerRequester, arguments_of
from atoll.contract.errors import BudgetExceeded, InvalidRequest
from atoll.settings import Settings
from atoll.tools.tool import Tool, ToolResult, ToolSet, failure, readable

DEFAULT_STEPS = 50
"""The default limit of model requests in one run."""
MAX_CALLS_PER_ANSWER = 128
"""Calls of one answer that are made, concurrently. Further calls fail."""


@dataclass(frozen=True)
class Answer:
    """The result of a run."""

    text: str
    """The final text of the model."""
    ended: Literal["done", "length", "filtered"]
    """`length`: the text is cut, because it reached the model's output limit. `filtered`: the provider withheld it."""
    steps: int
    tokens: Tokens
    history: History = field(repr=False)
    """The whole conversation, for the next run."""


# -------------------------------------------------------------------------------------------------------------- budget


class Budget:
    """A token budget that several runs share, such as an agent and its children.

    When it is spent, a run ends before its next request. The last request may exceed the budget.
    """

    def __init__(self, tokens: int | None = None) -> None:
        if tokens is not None and tokens < 1:
            raise InvalidRequest(f"the token budget is {tokens}; it must be above 0, or None for no limit")
        self.tokens = tokens
        self.spent = Tokens()

    @property
    def is_spent(self) -> bool:
        return self.tokens is not None and self.spent.total >= self.tokens

    def spend(self, tokens: Tokens) -> None:
        self.spent += tokens


Approve = Callable[[Tool, dict[str, Any]], Awaitable[bool]]
"""Decides whether a call may be made, from its tool and its arguments."""
Emit = Callable[[AgentEvent], Awaitable[None]]


# --------------------------------------------------------------------------------------------------------------- agent


class Agent:
    """A model, its tools and its instructions. It holds no conversation: any number of runs may be active at once.

    `approve` is called before each call of a destructive tool, one at a time; a refused call is not made, and the model
    sees the refusal. `settings` are pydantic-ai's, for what only some models support.

    Raises:
        InvalidRequest: the model is unknown, or something that it needs is missing.
    """

    def __init__(
        self,
        model: str | Model,
        tools: ToolSet | None = None,
        instructions: str = "",
        *,
        steps: int = DEFAULT_STEPS,
        approve: Approve | None = None,
        settings: ModelSettings | None = None,
    ) -> None:
        if steps < 1:
            raise InvalidRequest(f"steps is {steps}; it must be at least 1")
        self.model = models.resolve(model)
        self.tools = ToolSet() if tools is None else tools
        self.instructions = instructions
        self.steps = steps
        self._approve = approve
        # Every step sends the whole conversation again: without a cache it would be billed each time.
        self._settings = ModelSettings(cache=True) | (settings or ModelSettings())

    async def run(
        self,
        prompt: str | None,
        *,
        history: History | None = None,
        budget: Budget | int | None = None,
        on_event: Callable[[AgentEvent], None] | None = None,
    ) -> Answer:
        """Send the prompt, make the calls of the model, and repeat until it has finished.

        Messages are added to `history` as they happen: it is complete and can be continued whenever and however the
        run ends. Without a prompt the run continues where the history ended. `budget` is in tokens. Cancelling ends
        running commands.

        Raises:
            InvalidRequest: there is neither a prompt nor a history to continue.
            BudgetExceeded: the steps or tokens were used up before the model had finished.
            ModelFailed, ModelUnavailable: the request to the model failed.
        """

        async def emit(event: AgentEvent) -> None:
            if on_event is not None:
                on_event(event)

        return await _Run(self, history, budget, emit, streams=False).drive(prompt)

    @asynccontextmanager
    async def stream(
        self, prompt: str | None, *, history: History | None = None, budget: Budget | int | None = None
    ) -> AsyncIterator[AgentStream]:
        """As `run`, with events as they happen: `async for event in stream`, then `stream.answer`.

        Leaving the context before the end cancels the run. The iteration raises what `run` raises.
        """
        send, receive = anyio.create_memory_object_stream[AgentEvent](0)
        stream = AgentStream(receive)

        async def drive() -> None:
            async with send:
                try:
                    stream.finished = await _Run(self, history, budget, send.send, streams=True).drive(prompt)
                except anyio.BrokenResourceError:
                    pass  # the context was left: nothing reads the events
                except Exception as error:  # noqa: BLE001 - it is raised where the events are read
                    stream.error = error

        async with receive, anyio.create_task_group() as group:
            group.start_soon(drive)
            failed: BaseException | None = None
            try:
                yield stream
            except BaseException as error:
                failed = error  # raised below, outside of the task group, so not as an exception group
                if isinstance(error, anyio.get_cancelled_exc_class()):
                    raise
            group.cancel_scope.cancel()
        if failed is not None:
            raise failed


class AgentStream:
    """The events of a run."""

    def __init__(self, events: ObjectReceiveStream[AgentEvent]) -> None:
        self._events = events
        self.finished: Answer | None = None
        self.error: Exception | None = None

    def __aiter__(self) -> AgentStream:
        return self

    async def __anext__(self) -> AgentEvent:
        try:
            return await self._events.receive()
        except anyio.EndOfStream:
            if self.error is not None:
                raise self.error from None
            raise StopAsyncIteration from None

    @property
    def answer(self) -> Answer:
        """The result of the run.

        Raises:
            InvalidRequest: the run has not ended yet.
        """
        if self.finished is None:
            raise InvalidRequest("the run has not ended; read its events first")
        return self.finished


async def generate_text(
    prompt: str,
    *,
    tools: ToolSet | None = None,
    model: str | Model | None = None,
    instructions: str = "",
    steps: int = DEFAULT_STEPS,
    budget: Budget | int | None = None,
) -> str:
    """The final text of a model that may call `tools`. Without `model`, the model of the settings is used.

    Raises:
        what `Agent` and `Agent.run` raise.
    """
    chosen = Settings.from_environment().model if model is None else model
    agent = Agent(chosen, tools, instructions, steps=steps)
    return (await agent.run(prompt, budget=budget)).text


# ----------------------------------------------------------------------------------------------------------------- run


class _Run:
    """One run of an agent."""

    def __init__(
        self, agent: Agent, history: History | None, budget: Budget | int | None, emit: Emit, *, streams: bool
    ) -> None:
        self._agent = agent
        self._model = agent.model
        self._history = History() if history is None else history
        self._budget = budget if isinstance(budget, Budget) else Budget(budget)
        self._emit = emit
        self._streams = streams
        self._tokens = Tokens()
        instructions = [InstructionPart(content=agent.instructions)] if agent.instructions else []
        self._requester = AnswerRequester(
            self._model,
            ModelRequestParameters(
                function_tools=[_definition(tool) for tool in agent.tools], instruction_parts=instructions
            ),
            agent._settings,  # noqa: SLF001 - a run is a part of its agent
            on_streamed=self._streamed if streams else None,
            on_retry=self._retrying,
        )

    async def drive(self, prompt: str | None) -> Answer:
        with self._history.held():
            self._begin(prompt)
            async with models.connected(self._model):
                return await self._steps()

    async def _steps(self) -> Answer:
        for step in range(1, self._agent.steps + 1):
            if self._budget.is_spent:
                raise self._spent(f"{self._budget.tokens} tokens", step - 1)
            response = await self._request_answer()
            self._history.messages.append(response)
            await self._record(response)
            await self._count(step, response.usage)
            calls = [part for part in response.parts if isinstance(part, ToolCallPart)]
            if not calls and response.state != "suspended":
                ended: Any = _ENDED.get(response.finish_reason or "stop", "done")
                return Answer(response.text or "", ended, step, self._tokens, self._history)
            if calls:
                await self._make_calls(calls, cut=CUT_OFF_REASONS.get(response.finish_reason or ""))
        raise self._spent(f"{self._agent.steps} steps", self._agent.steps)

    def _begin(self, prompt: str | None) -> None:
        self._history.complete()
        messages = self._history.messages
        if prompt is not None:
            if not prompt.strip():
                raise InvalidRequest("the prompt is empty")
            # Providers require that requests and answers alternate.
            before = messages.pop().parts if messages and isinstance(messages[-1], ModelRequest) else ()
            messages.append(ModelRequest(parts=[*before, UserPromptPart(content=readable(prompt))]))
        elif not messages:
            raise InvalidRequest("there is neither a prompt nor a conversation to continue")
        elif isinstance(messages[-1], ModelResponse):
            raise InvalidRequest("the conversation ends with the model's answer; give a prompt to continue it")

    def _spent(self, what: str, steps: int) -> BudgetExceeded:
        return BudgetExceeded(
            f"the run used up its {what} before the model had finished; continue with its history and a larger budget",
            steps=steps,
            tokens=self._tokens.total,
        )

    async def _record(self, happened: ModelResponse | ToolReturnPart) -> None:
        if self._history.record is not None:
            await self._history.record(happened)

    async def _count(self, step: int, usage: RequestUsage) -> None:
        tokens = Tokens.of(usage)
        self._tokens += tokens
        self._budget.spend(tokens)
        await self._emit(UsageEvent(step=step, tokens=tokens, total=self._tokens))

    # -------------------------------------------------------------------------------------------------- requests

    async def _request_answer(self) -> ModelResponse:
        response = await self._requester.request(self._history.messages)
        for part in () if self._streams else response.parts:
            if isinstance(part, ThinkingPart) and part.content:
                await self._emit(ThinkingEvent(text=part.content))
            elif isinstance(part, TextPart) and part.content:
                await self._emit(TextEvent(text=part.content))
        return response

    async def _streamed(self, event: ModelResponseStreamEvent) -> None:
        translated = streamed_event(event)
        if translated is not None:
            await self._emit(translated)

    async def _retrying(self, reason: str, wait_s: float) -> None:
        await self._emit(RetryEvent(reason=reason, wait_s=wait_s))

    # ----------------------------------------------------------------------------------------------------- calls

    async def _make_calls(self, calls: Sequence[ToolCallPart], *, cut: str | None) -> None:
        """Make the calls of an answer, and add their results to the conversation however this ends. `cut` says why the
        last call may be incomplete."""
        results: list[ToolReturnPart | None] = [None] * len(calls)
        began = time.monotonic()

        async def ended(index: int, result: ToolResult, outcome: Any = None) -> None:
            call = calls[index]
            part = results[index] = tool_return(call, result, outcome or ("failed" if result.is_error else "success"))
            await self._record(part)
            duration_s = 0.0 if outcome == "denied" else time.monotonic() - began
            await self._emit(
                ToolResultEvent(id=call.tool_call_id, tool=call.tool_name, result=result, duration_s=duration_s)
            )

        try:
            for call in calls:
                await self._emit(ToolCallEvent(id=call.tool_call_id, tool=call.tool_name, input=_shown_arguments(call)))
            allowed: list[int] = []
            for index, call in enumerate(calls):
                if self._budget.is_spent:
                    await ended(index, failure("not done: the token budget is spent", "budget_exceeded"), "denied")
                elif index >= MAX_CALLS_PER_ANSWER:
                    await ended(
                        index, failure(f"not done: an answer may have {MAX_CALLS_PER_ANSWER} calls", "too_many_calls")
                    )
                elif cut is not None and index == len(calls) - 1:
                    await ended(index, failure(f"not done: {cut} in the middle of this call", "cut_off"))
                elif await self._is_allowed(call):
                    allowed.append(index)
                else:
                    await ended(index, failure("not done: this call was refused by the user", "refused"), "denied")

            async def done(number: int, result: ToolResult) -> None:
                await ended(allowed[number], result)

            began = time.monotonic()  # the time for approval does not count
            await self._agent.tools.handle_batch(
                [(calls[index].tool_name, calls[index].args) for index in allowed], on_result=done
            )
        except BaseExceptionGroup as group:  # from receivers of events: calls never raise
            raise group.exceptions[0] from None
        finally:
            parts = [result or interrupted(call) for call, result in zip(calls, results, strict=True)]
            self._history.messages.append(ModelRequest(parts=parts))

    async def _is_allowed(self, call: ToolCallPart) -> bool:
        approve, name = self._agent._approve, call.tool_name  # noqa: SLF001
        if approve is None or name not in self._agent.tools or not self._agent.tools[name].hints.destructive:
            return True
        arguments = arguments_of(call)
        return arguments is None or await approve(self._agent.tools[name], arguments)  # an invalid call fails anyway


_BLANK = "[blank]"
"""Replaces an empty result: providers refuse blank text."""
_ENDED = {"length": "length", "content_filter": "filtered"}


def _definition(tool: Tool) -> ToolDefinition:
    return ToolDefinition(
        name=tool.name,
        description=tool.description,
        parameters_json_schema=tool.input_schema(),
        strict=False,  # strict schemas cannot have optional fields, so all defaults would be lost
    )


def streamed_event(event: object) -> AgentEvent | None:
    """A piece of a model's answer as an event. None: it is not one that is told."""
    match event:
        case PartStartEvent(part=TextPart(content=text)) if text:
            return TextEvent(text=readable(text))
        case PartDeltaEvent(delta=TextPartDelta(content_delta=text)) if text:
            return TextEvent(text=readable(text))
        case PartStartEvent(part=ThinkingPart(content=text)) if text:
            return ThinkingEvent(text=readable(text))
        case PartDeltaEvent(delta=ThinkingPartDelta(content_delta=text)) if text:
            return ThinkingEvent(text=readable(text))
    return None


def _shown_arguments(call: ToolCallPart) -> dict[str, Any] | str:
    arguments = arguments_of(call)
    return str(call.args) if arguments is None else arguments


def tool_return(call: ToolCallPart, result: ToolResult, outcome: Any) -> ToolReturnPart:
    """The result of a call, as a message to the model has it."""
    if isinstance(result.content, str):
        content: Any = result.content if result.content.strip() else _BLANK
    else:
        content = media.content_of(result.content) or _BLANK
    # Providers are not sent `metadata`: it is for scripted models and for programs that read the history.
    return ToolReturnPart(call.tool_name, content, call.tool_call_id, metadata=result.structured, outcome=outcome)
