"""Chat: turns of conversations with agents, run here.

Owns the life of a turn in this process: its task, which outlives the request that began it, its events, its budgets,
its end and its cancellation. A client-side agent's turn stops at each call of a tool, until the client has sent its
results; a sandboxed agent's runs the loop (`agents/loop.py`) with the tools of its workspace. Not here: what is stored
and when (`conversations.py`), workspaces (`workspaces.py`), and HTTP routes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import anyio
from pydantic_ai.messages import (
    InstructionPart,
    ModelMessage,
    ModelRequest,
    ModelResponse,
    ModelResponseStreamEvent,
    ToolCallPart,
    ToolReturnPart,
)
from pydantic_ai.models import Model, ModelRequestParameters
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import ToolDefinition

from atoll.agents import models
from atoll.agents.events import AgentEvent, RetryEvent, TextEvent, Tokens, ToolCallEvent, UsageEvent
from atoll.agents.history import History
from atoll.agents.loop import Agent, Budget, streamed_event
from atoll.agents.requests import CUT_OFF_REASONS, AnswerRequester, arguments_of
from atoll.contract.errors import (
    AtollError,
    BudgetExceeded,
    Conflict,
    InvalidRequest,
    ModelFailed,
    ModelUnavailable,
    QuotaExceeded,
    ScriptFailed,
    TenantNotFound,
)
from atoll.server.configs import AgentConfig, AgentConfigs, ToolDeclaration, check_model
from atoll.server.conversations import Conversations, OpenTurn, SpentTokens
from atoll.server.quotas import QuotaLedger
from atoll.server.tenants import Tenant, Tenants
from atoll.server.turns import ChatAnswer, ChatInput, ChatToolCall, ChatTurn, TurnStatus
from atoll.server.workspaces import Workspaces
from atoll.tools.tool import nearest

if TYPE_CHECKING:
    from atoll.settings import Settings

MAX_TURNS = 256
"""Of one tenant, at the same time."""
MAX_EVENT_BYTES = 1024 * 1024
"""Of one turn's events that are kept for clients that come back. The newest is kept in any case."""
REMEMBERED_S = 300.0
"""How long the events of a turn are kept after its end."""
MAX_REMEMBERED = 256
_DISABLED_S = 1.0
_log = logging.getLogger(__name__)


class TurnRun:
    """A turn while it runs here, and a while after."""

    def __init__(self, turn: OpenTurn, *, streams: bool) -> None:
        self.turn = turn
        self.streams = streams
        """Whether a client reads the model's text as it comes."""
        self.scope = anyio.CancelScope()
        self.is_cancelled = False
        """True: a client has asked for its end."""
        self.ended_at: float | None = None
        self._first = turn.steps
        self._events: deque[tuple[int, int, AgentEvent]] = deque()
        """Each with its number and its size."""
        self._bytes = 0
        self._count = 0
        self._changed = anyio.Event()
        self._outcome: ChatAnswer | Exception | None = None

    def emit(self, event: AgentEvent) -> None:
        if isinstance(event, RetryEvent):  # it has what the provider says of the server's account, and its address
            _log.warning("a model is asked again: %s", event.reason)
            event = event.model_copy(update={"reason": "the model is not available now"})
        self._count += 1
        size = len(event.model_dump_json())
        self._events.append((self._count, size, event))
        self._bytes += size
        while self._bytes > MAX_EVENT_BYTES and len(self._events) > 1:
            self._bytes -= self._events.popleft()[1]
        self._wake()

    def finish(self, outcome: ChatAnswer | Exception | None) -> None:
        self._outcome = outcome
        self.turn.history = []  # it is remembered for its events
        self.ended_at = time.monotonic()
        self._wake()

    def _wake(self) -> None:
        waiting, self._changed = self._changed, anyio.Event()
        waiting.set()

    def cancel(self) -> None:
        """Begin to end it because a client asked for that."""
        self.is_cancelled = True
        self.scope.cancel()

    async def ended(self) -> None:
        """Wait for the end."""
        while self.ended_at is None:
            await self._changed.wait()

    async def answer(self) -> ChatAnswer:
        """Wait for the end, and say how it came.

        Raises:
            AtollError: what the turn failed with.
        """
        await self.ended()
        if isinstance(self._outcome, ChatAnswer):
            return self._outcome
        raise self._outcome or AssertionError("a turn ends with an answer or an error")

    async def follow(self, after: str | None = None) -> AsyncIterator[tuple[str, AgentEvent | None]]:
        """The events with their ids, from the one after `after` on, until the end. None: some are no longer kept."""
        reached = self._number(after)
        while True:
            changed = self._changed
            first = self._events[0][0] if self._events else self._count + 1
            if reached + 1 < first:
                reached = first - 1
                yield self._id(reached), None
            fresh = [*takewhile(lambda each: each[0] > reached, reversed(self._events))]  # noqa: B023 - used at once
            for number, _, event in reversed(fresh):
                reached = number
                yield self._id(number), event
            if self.ended_at is not None and reached == self._count:
                return
            if changed is self._changed:
                await changed.wait()

    def _id(self, number: int) -> str:
        return f"{self._first}-{number}"

    def _number(self, after: str | None) -> int:
        """Of an id. One of the turn before it waited last is before all of these."""
        first, _, number = (after or "").partition("-")
        return min(int(number), self._count) if first == str(self._first) and number.isdecimal() else 0


class Chat:
    """The turns that run in this process."""

    def __init__(
        self,
        settings: Settings,
        configs: AgentConfigs,
        conversations: Conversations,
        workspaces: Workspaces,
        quotas: QuotaLedger,
        tenants: Tenants,
    ) -> None:
        self._settings = settings
        self._tenants = tenants
        self._configs = configs
        self._conversations = conversations
        self._workspaces = workspaces
        self._quotas = quotas
        self._runs: dict[str, TurnRun] = {}
        self._starting: Counter[str] = Counter()
        """By tenant: turns that are about to be in `_runs`."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._lost: set[str] = set()
        """Turns that have ended, but could not be stored so."""
        self._is_closed = False

    def is_running(self, turn: str) -> bool:
        """Whether a turn that this process has begun still runs."""
        return turn not in self._lost

    async def start(
        self, tenant: Tenant, config_id: str, given: ChatInput, *, request: str, streams: bool = False
    ) -> TurnRun:
        """Begin a turn, or go on with one. What the client sent is stored when this returns.

        The turn goes on whether or not anything waits for it. `request` is an id of the request.

        Raises:
            ConfigNotFound, ConversationNotFound: the tenant has no such config, or the config no such conversation.
            Conflict: a turn of the conversation runs, it does not wait for what was sent, or too many turns of the
                tenant run.
            InvalidRequest: the results are not those that are awaited.
            QuotaExceeded, BudgetExceeded: no tokens are left.
        """
        if self._is_closed:
            raise Conflict("the server is stopping; send it again")
        config = await self._configs.get(tenant.name, config_id)
        check_model(self._settings, self._model_name(config))
        await self._quotas.check_tokens(tenant)
        if spent := _overspent(config, SpentTokens(0, config.tokens_spent, 0)):
            raise spent
        running = [run for run in self._runs.values() if run.ended_at is None and run.turn.tenant == tenant.name]
        if len(running) + self._starting[tenant.name] >= MAX_TURNS:
            raise Conflict(f"{MAX_TURNS} turns of this tenant are under way; wait for one of them to end")
        self._starting[tenant.name] += 1
        try:
            turn = await self._begin(tenant.name, config, given, request)
        finally:
            self._starting[tenant.name] -= 1
        try:
            if turn.version != config.version:
                config = await self._configs.get(tenant.name, config_id, turn.version)
        except BaseException:
            self._lost.add(turn.id)
            raise
        self._lost.discard(turn.id)
        run = self._runs[turn.id] = TurnRun(turn, streams=streams)
        task = asyncio.create_task(self._run(run, tenant, config), name=f"atoll {turn.id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._forget_old()
        return run

    async def _begin(self, tenant: str, config: AgentConfig, given: ChatInput, request: str) -> OpenTurn:
        stored = self._conversations
        if given.message is not None:
            return await stored.begin(tenant, config, given.message, conversation=given.conversation, request=request)
        if given.conversation is None:
            raise InvalidRequest("conversation_id is missing: tool_results and resume go on with a conversation")
        if given.results is not None:
            return await stored.give(tenant, config.id, given.conversation, given.results, request=request)
        return await stored.resume(tenant, config, given.conversation, request=request)

    def running(self, turn: str) -> TurnRun | None:
        """A turn that runs here, or ran a while ago. The caller has made sure whose it is."""
        return self._runs.get(turn)

    async def answer(self, tenant: str, config: str, turn: str) -> ChatAnswer:
        """The answer of a turn that was begun before, here or by a server that was killed.

        Raises:
            ConversationNotFound: the config has no such turn.
            Conflict: it was interrupted or cancelled.
            AtollError: it failed.
        """
        if (run := self._runs.get(turn)) is not None:
            return await run.answer()
        stored = await self._conversations.turn(tenant, config, turn)
        if stored.status in ("done", "waiting"):
            return ChatAnswer.of(stored)
        raise _ended(stored.id, stored.status, stored.error)

    async def cancel(self, tenant: str, config: str, turn: str) -> ChatTurn:
        """End a turn, with the calls that it makes. One that has ended stays as it is.

        Raises:
            ConversationNotFound: the config has no such turn.
        """
        stored = await self._conversations.turn(tenant, config, turn)
        if (run := self._runs.get(turn)) is not None and run.ended_at is None:
            await self._cancel_all([run])
        elif stored.status == "waiting":
            await self._conversations.end(turn, "cancelled")
        return await self._conversations.turn(tenant, config, turn)

    async def delete_conversation(self, tenant: str, id: str) -> None:
        """Remove a conversation; a turn of it that is under way is ended first.

        Raises:
            ConversationNotFound: the tenant has none with this id.
        """
        await self._conversations.get(tenant, id)
        await self._cancel_all([run for run in self._runs.values() if run.turn.conversation == id])
        await self._conversations.delete(tenant, id)

    async def delete_config(self, tenant: str, id: str) -> None:
        """Remove a config with its workspace and conversations; turns that are under way are ended first.

        Raises:
            ConfigNotFound: the tenant has none with this id.
        """
        config = await self._configs.get(tenant, id)
        await self._end_all_of(tenant, config)
        await self._configs.delete(tenant, id)
        await self._end_all_of(tenant, config)  # of turns that began meanwhile; now none can

    async def end_tenant(self, tenant: str) -> None:
        """End all turns of a tenant that is being deleted, and let go of its workspaces."""
        await self._cancel_all_of(tenant)
        await self._workspaces.release(tenant)

    async def end_disabled(self) -> None:
        """End the turns of tenants that are disabled, here or by another process, until this is cancelled."""
        while True:
            await anyio.sleep(_DISABLED_S)
            for name in {run.turn.tenant for run in self._runs.values() if run.ended_at is None}:
                with suppress(TenantNotFound):
                    if (await self._tenants.get(name)).disabled:
                        await self._cancel_all_of(name)

    async def _cancel_all_of(self, tenant: str) -> None:
        await self._cancel_all([run for run in self._runs.values() if run.turn.tenant == tenant])

    async def _end_all_of(self, tenant: str, config: AgentConfig) -> None:
        await self._cancel_all([run for run in self._runs.values() if run.turn.config == config.id])
        await self._workspaces.destroy(tenant, config)

    async def _cancel_all(self, runs: Sequence[TurnRun]) -> None:
        running = [run for run in runs if run.ended_at is None]
        for run in running:
            run.cancel()
        for run in running:
            await run.ended()

    async def aclose(self) -> None:
        """End all turns that run here. They are interrupted, and can be resumed."""
        self._is_closed = True
        for run in self._runs.values():
            run.scope.cancel()
        with anyio.CancelScope(shield=True):
            if self._tasks:
                await asyncio.wait(self._tasks)

    def _forget_old(self) -> None:
        ended = [run for run in self._runs.values() if run.ended_at is not None]
        oldest = sorted(ended, key=lambda run: run.ended_at or 0)
        now = time.monotonic()
        for place, run in enumerate(oldest):
            if now - (run.ended_at or 0) > REMEMBERED_S or place < len(oldest) - MAX_REMEMBERED:
                del self._runs[run.turn.id]

    def _model_name(self, config: AgentConfig) -> str:
        return self._settings.model if config.model is None else config.model.name

    # ---- a turn ----

    async def _run(self, run: TurnRun, tenant: Tenant, config: AgentConfig) -> None:
        """Run a turn to its end, however that comes. Nothing is raised: what it ended with is in `run`."""
        answer: ChatAnswer | None = None
        error: Exception | None = None
        with run.scope:
            try:
                answer = await self._drive(run, tenant, config)
            except Exception as failed:  # noqa: BLE001 - no caller waits for a turn: what it failed with is stored
                error = _for_clients(failed)
        with anyio.CancelScope(shield=True):
            try:
                if answer is None:
                    status: TurnStatus = "failed"
                    if error is None:
                        status = "cancelled" if run.is_cancelled else "interrupted"
                        error = _ended(run.turn.id, status, None)
                    told = error if isinstance(error, AtollError) else AtollError("it failed with an internal error")
                    await self._conversations.end(run.turn.id, status, told if status == "failed" else None)
            except AtollError as failed:
                self._lost.add(run.turn.id)
                error = failed
            finally:
                run.finish(answer or error)

    async def _drive(self, run: TurnRun, tenant: Tenant, config: AgentConfig) -> ChatAnswer:
        messages = run.turn.history
        driver = _TurnDriver(run, tenant, config, self._conversations, self._resolve(config))
        if config.agent_type == "client-side":
            return await driver.ask_until_calls(messages)
        async with self._workspaces.using(tenant.name, config) as tools:
            return await driver.run_loop(messages, tools)

    def _resolve(self, config: AgentConfig) -> Model:
        name = self._model_name(config)
        try:
            return models.resolve(name)
        except InvalidRequest as error:  # its message is for who runs the server
            raise ModelUnavailable(f"the model {name!r} cannot be used on this server", hint=error.message) from error


class _TurnDriver:
    """Asks the model, and stores each step before the next."""

    def __init__(self, run: TurnRun, tenant: Tenant, config: AgentConfig, stored: Conversations, model: Model) -> None:
        self._run = run
        self._turn = run.turn
        self._tenant = tenant
        self._config = config
        self._stored = stored
        self._model = model
        self._budget = _TurnBudget(config, tenant, run.turn)
        self._settings = ModelSettings(cache=True)
        if config.model is not None and config.model.temperature is not None:
            self._settings["temperature"] = config.model.temperature
        if config.model is not None and config.model.max_tokens is not None:
            self._settings["max_tokens"] = config.model.max_tokens

    # ---- client-side ----

    async def ask_until_calls(self, messages: list[ModelMessage]) -> ChatAnswer:
        """Ask the model until it answers, or calls a tool of the client."""
        requester = AnswerRequester(
            self._model,
            self._parameters(),
            self._settings,
            on_streamed=self._streamed if self._run.streams else None,
            on_retry=self._retrying,
        )
        async with models.connected(self._model):
            while True:
                self._budget.require_step()
                response = await requester.request(messages)
                messages.append(response)
                calls = [part for part in response.parts if isinstance(part, ToolCallPart)]
                cut = CUT_OFF_REASONS.get(response.finish_reason or "")
                refused = [part for call in calls if (part := self._refusal(call, calls, cut)) is not None]
                awaited = len(calls) - len(refused)
                status: TurnStatus = "waiting" if awaited else "running" if calls else "done"
                self._budget.spent_now(await self._stored.answered(self._turn, response, refused, status=status))
                self._tell(response, refused)
                if status != "running":
                    return self._answer(response, refused)
                messages.append(ModelRequest(parts=refused))

    def _parameters(self) -> ModelRequestParameters:
        prompt = self._config.prompt(self._tenant.name)
        return ModelRequestParameters(
            function_tools=[_definition(tool) for tool in self._config.tools_config],
            instruction_parts=[InstructionPart(content=prompt)] if prompt.strip() else [],
        )

    def _refusal(self, call: ToolCallPart, calls: Sequence[ToolCallPart], cut: str | None) -> ToolReturnPart | None:
        """The result of a call that cannot be passed on to the client. None: it can."""
        names = self._config.tool_names
        if call.tool_name not in names:
            why = f"there is no tool {call.tool_name!r} to call{nearest(call.tool_name, names)}"
        elif cut is not None and call is calls[-1]:
            why = f"{cut} in the middle of this call"
        elif arguments_of(call) is None:
            why = "the arguments are no JSON object"
        else:
            return None
        return ToolReturnPart(call.tool_name, f"not done: {why}", call.tool_call_id, outcome="failed")

    def _tell(self, response: ModelResponse, refused: Sequence[ToolReturnPart]) -> None:
        if not self._run.streams and response.text:
            self._run.emit(TextEvent(text=response.text))
        for call in _passed_on(response, refused):
            self._run.emit(ToolCallEvent(id=call.id, tool=call.name, input=call.arguments))
        usage = Tokens.of(response.usage)
        self._run.emit(UsageEvent(step=self._turn.steps, tokens=usage, total=self._turn.tokens))

    def _answer(self, response: ModelResponse, refused: Sequence[ToolReturnPart]) -> ChatAnswer:
        calls = _passed_on(response, refused)
        return ChatAnswer(
            response=None if calls else response.text or "",
            tool_calls=calls,
            conversation_id=self._turn.conversation,
            turn_id=self._turn.id,
            version=self._turn.version,
            steps=self._turn.steps,
            usage=self._turn.tokens,
        )

    async def _streamed(self, event: ModelResponseStreamEvent) -> None:
        if (translated := streamed_event(event)) is not None:
            self._run.emit(translated)

    async def _retrying(self, reason: str, wait_s: float) -> None:
        self._run.emit(RetryEvent(reason=reason, wait_s=wait_s))

    # ---- sandboxed ----

    async def run_loop(self, messages: list[ModelMessage], tools: Any) -> ChatAnswer:
        """Run the loop until the model has finished."""
        self._budget.require_step()
        steps = self._config.budget.turn_steps - self._turn.steps
        agent = Agent(self._model, tools, self._config.prompt(self._tenant.name), steps=steps, settings=self._settings)
        history = History(messages, record=self._record)
        try:
            if self._run.streams:
                async with agent.stream(None, history=history, budget=self._budget) as stream:
                    async for event in stream:
                        self._run.emit(event)
            else:
                await agent.run(None, history=history, budget=self._budget, on_event=self._run.emit)
        except BudgetExceeded:
            self._budget.require_step()
            raise
        last = history.messages[-1]
        if not isinstance(last, ModelResponse):
            raise AssertionError("a run that did not raise ends with the model's answer")  # noqa: TRY004
        return self._answer(last, ())

    async def _record(self, happened: ModelResponse | ToolReturnPart) -> None:
        if isinstance(happened, ToolReturnPart):
            await self._stored.add_result(self._turn, happened)
            return
        has_calls = any(isinstance(part, ToolCallPart) for part in happened.parts)
        status: TurnStatus = "running" if has_calls or happened.state == "suspended" else "done"
        self._budget.spent_now(await self._stored.answered(self._turn, happened, status=status))


class _TurnBudget(Budget):
    """What a turn may still spend: of its own, of its config's and of its tenant's tokens, and of its steps."""

    def __init__(self, config: AgentConfig, tenant: Tenant, turn: OpenTurn) -> None:
        super().__init__()
        self._config = config
        self._tenant = tenant
        self._turn = turn
        self._exceeded: AtollError | None = _overspent(config, SpentTokens(turn.tokens.total, config.tokens_spent, 0))

    @property
    def is_spent(self) -> bool:
        return self._exceeded is not None

    def spent_now(self, spent: SpentTokens) -> None:
        quota = self._tenant.quotas.model_tokens
        self._exceeded = _overspent(self._config, spent)
        if self._exceeded is None and quota is not None and spent.of_tenant >= quota:
            self._exceeded = QuotaExceeded("model_tokens", used=spent.of_tenant, asked=1, allowed=quota)

    def require_step(self) -> None:
        """
        Raises:
            BudgetExceeded, QuotaExceeded: the model may not be asked again.
        """
        if self._exceeded is not None:
            raise self._exceeded
        steps = self._config.budget.turn_steps
        if self._turn.steps >= steps:
            raise BudgetExceeded(
                f"the turn has used up its {steps} steps before the agent had finished; send a message to go on, or "
                "raise turn_steps of the config's budget and resume",
                steps=self._turn.steps,
                tokens=self._turn.tokens.total,
            )


def _overspent(config: AgentConfig, spent: SpentTokens) -> BudgetExceeded | None:
    for name, allowed, used in (
        ("turn_tokens", config.budget.turn_tokens, spent.of_turn),
        ("tokens", config.budget.tokens, spent.of_config),
    ):
        if allowed is not None and used >= allowed:
            return BudgetExceeded(
                f"the config's budget of {name} is used up: {used} of {allowed}; raise it to go on",
                budget=name,
                used=used,
                allowed=allowed,
            )
    return None


def _definition(tool: str | ToolDeclaration) -> ToolDefinition:
    declared = ToolDeclaration(name=tool) if isinstance(tool, str) else tool
    return ToolDefinition(
        name=declared.name,
        description=declared.description,
        parameters_json_schema={"properties": {}, **declared.input_schema},
        strict=False,
    )


def _passed_on(response: ModelResponse, refused: Sequence[ToolReturnPart]) -> tuple[ChatToolCall, ...]:
    done = {part.tool_call_id for part in refused}
    calls = [part for part in response.parts if isinstance(part, ToolCallPart) and part.tool_call_id not in done]
    return tuple(
        ChatToolCall(id=call.tool_call_id, name=call.tool_name, arguments=arguments_of(call) or {}) for call in calls
    )


def _ended(turn: str, status: TurnStatus, error: dict[str, Any] | None) -> AtollError:
    """Why a turn has no answer."""
    if error is not None:
        return Conflict(f"the turn {turn} failed: {error['message']}", turn_id=turn, status=status, error=error)
    return Conflict(
        f"the turn {turn} was {status}; go on with it by sending resume, or send a message", turn_id=turn, status=status
    )


def _for_clients(error: Exception) -> Exception:
    """An error as tenants see it. What it says of the provider and of this machine stays in the log."""
    if isinstance(error, ScriptFailed) or not isinstance(error, ModelFailed):
        if not isinstance(error, AtollError):
            _log.error("a turn failed", exc_info=error)
        return error
    if models.is_of_request(error):
        return error
    _log.warning("a model failed: %s", error.hint or error.message)
    if isinstance(error.__cause__, InvalidRequest):  # no time will help
        return ModelUnavailable(
            "this server is not set up for the model, such as without the key of its provider; the server's log says "
            "what its operator has to do"
        )
    if isinstance(error, ModelUnavailable):
        return ModelUnavailable("the model is not available now; try again later, and resume the conversation")
    return ModelFailed("the request to the model failed; the server's log has the reason")
