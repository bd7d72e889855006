"""Conversations with agents: their messages and turns, stored as they happen.

Owns what is committed when. A prompt is stored before the model is asked, each answer before its calls are made, and
each result before the model is asked again: a server that is killed has lost nothing that it told a client, and no call
is made twice. A turn whose process died is completed here as interrupted: what had no result gets one that says so. Not
here: running a turn (`chat.py`), and what an agent is (`configs.py`).

A turn begins with a message and ends with an answer without calls. It may wait in between for results that the client
sends. A conversation has one turn at a time.
"""

from __future__ import annotations

import builtins
import secrets
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, TypeVar

import sqlalchemy as sa
from pydantic_ai.messages import (
    BinaryContent,
    ModelMessage,
    ModelMessagesTypeAdapter,
    ModelRequest,
    ModelResponse,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from sqlalchemy.exc import IntegrityError

from atoll.agents.events import Tokens
from atoll.agents.history import interrupted
from atoll.agents.media import described
from atoll.agents.requests import arguments_of
from atoll.contract.errors import AtollError, ConfigNotFound, Conflict, ConversationNotFound, InvalidRequest
from atoll.server.configs import AgentConfig
from atoll.server.database import Database
from atoll.server.quotas import QuotaLedger
from atoll.server.tables import agent_configs, chat_messages, chat_turns, conversations
from atoll.server.turns import ChatMessage, ChatToolCall, ChatTurn, Conversation, TurnStatus
from atoll.tools.tool import readable

MAX_MESSAGES = 10_000
"""Of one conversation, results of calls included."""
MAX_CONVERSATION_CHARS = 64 * 1024 * 1024
"""Of all messages of one conversation, as they are stored, and of all results of one turn. They are in memory while a
turn runs; no model reads a tenth of it."""
MAX_CONVERSATIONS = 100_000
"""Of one config."""
T = TypeVar("T")
RESUMABLE = ("failed", "cancelled", "interrupted")
"""How turns end that can go on."""


@dataclass
class OpenTurn:
    """A turn that this process runs."""

    id: str
    conversation: str
    tenant: str
    config: str
    version: int
    steps: int
    tokens: Tokens
    history: list[ModelMessage] = field(default_factory=list)
    """What the model is to be shown: requests and answers alternate, and results have the order of their calls."""
    result_chars: int = 0
    """Of the results that were added while it ran here."""


@dataclass(frozen=True)
class SpentTokens:
    """What has been spent when an answer was stored."""

    of_turn: int
    of_config: int
    of_tenant: int
    """In this month."""


class Conversations:
    """The conversations of all tenants of a server. `instance` is this process; `is_alive` says of a turn that another
    instance began, or this one, whether it still runs."""

    def __init__(
        self, database: Database, quotas: QuotaLedger, instance: str, is_alive: Callable[[str, str], bool]
    ) -> None:
        self._database = database
        self._quotas = quotas
        self._instance = instance
        self._is_alive = is_alive

    # ---- a turn ----

    async def begin(
        self, tenant: str, config: AgentConfig, message: str, *, conversation: str | None, request: str
    ) -> OpenTurn:
        """Store a message, and begin a turn with it. Without a conversation, begin one.

        Raises:
            ConversationNotFound: the config has no such conversation.
            ConfigNotFound: the config was deleted meanwhile.
            Conflict: a turn of it runs, or waits for results.
            InvalidRequest: there are too many conversations, or too many messages in this one.
        """
        try:
            return await self._begin(tenant, config, message, conversation, request)
        except IntegrityError:
            raise ConfigNotFound(f"no agent config has the id {config.id!r}", config=config.id) from None

    async def _begin(
        self, tenant: str, config: AgentConfig, message: str, conversation: str | None, request: str
    ) -> OpenTurn:
        now = datetime.now(UTC)
        turn = OpenTurn(
            f"turn_{secrets.token_hex(8)}", conversation or _new_id(), tenant, config.id, config.version, 0, Tokens()
        )

        def store(connection: sa.Connection) -> OpenTurn:
            last = None
            if conversation is None:
                self._make(connection, turn, now)
            else:
                last = self._last(connection, tenant, config.id, conversation)
                self._require_idle(connection, last)
                _touch(connection, conversation, now)
            row = {
                "id": turn.id,
                "number": 1 if last is None else last.number + 1,
                "conversation": turn.conversation,
                "version": turn.version,
                "status": "running",
                "instance": self._instance,
                "request": request,
                "steps": 0,
                "tokens": turn.tokens.model_dump(),
                "started_at": now,
            }
            connection.execute(sa.insert(chat_turns).values(row))
            _add(connection, turn, [UserPromptPart(content=readable(message))])
            turn.history = _history(connection, turn.conversation)
            return turn

        return await self._database.transact(store)

    async def give(
        self, tenant: str, config: str, conversation: str, results: Sequence[ToolReturnPart], *, request: str
    ) -> OpenTurn:
        """Store the results that a turn waits for, and go on with it.

        Raises:
            ConversationNotFound: the config has no such conversation.
            Conflict: no turn of it waits for results.
            InvalidRequest: they are not the results that are awaited; the message names what is wrong.
        """

        def store(connection: sa.Connection) -> OpenTurn:
            last = self._last(connection, tenant, config, conversation)
            if last is None or last.status != "waiting":
                raise Conflict(
                    "tool_results: no call of this conversation waits for a result; send a message instead",
                    conversation_id=conversation,
                    status=None if last is None else last.status,
                )
            check_results(self._awaited(connection, last.conversation, last.id), results)
            return self._continue(connection, last, tenant, config, last.version, request, results)

        return await self._database.transact(store)

    async def resume(self, tenant: str, config: AgentConfig, conversation: str, *, request: str) -> OpenTurn:
        """Go on with a turn that failed, was cancelled or interrupted, where it ended.

        Raises:
            ConversationNotFound: the config has no such conversation.
            Conflict: its last turn runs, waits or is done.
        """

        def store(connection: sa.Connection) -> OpenTurn:
            last = self._last(connection, tenant, config.id, conversation)
            self._require_idle(connection, last)
            if last is None or last.status == "done":
                raise Conflict(
                    "resume: the last turn of this conversation is done; send a message", conversation_id=conversation
                )
            return self._continue(connection, last, tenant, config.id, config.version, request, ())

        return await self._database.transact(store)

    def _continue(
        self,
        connection: sa.Connection,
        last: sa.Row[Any],
        tenant: str,
        config: str,
        version: int,
        request: str,
        results: Sequence[ToolReturnPart],
    ) -> OpenTurn:
        turn = OpenTurn(
            last.id, last.conversation, tenant, config, version, last.steps, Tokens.model_validate(last.tokens)
        )
        values = {
            "status": "running",
            "instance": self._instance,
            "request": request,
            "version": version,
            "outcome": None,
            "ended_at": None,
        }
        connection.execute(sa.update(chat_turns).where(chat_turns.c.id == last.id).values(values))
        _add(connection, turn, results)
        turn.history = _history(connection, turn.conversation)
        return turn

    async def answered(
        self,
        turn: OpenTurn,
        response: ModelResponse,
        refused: Sequence[ToolReturnPart] = (),
        *,
        status: TurnStatus,
    ) -> SpentTokens:
        """Store an answer of the model, with the results of calls that cannot be made, and count its tokens.

        Raises:
            ConversationNotFound: the conversation was deleted meanwhile.
        """
        tokens = Tokens.of(response.usage)
        turn.steps += 1
        turn.tokens += tokens
        values: dict[str, Any] = {"steps": turn.steps, "tokens": turn.tokens.model_dump(), "status": status}
        if status == "done":
            values |= {"ended_at": datetime.now(UTC), "outcome": {"response": response.text or ""}}
        spend = sa.update(agent_configs).where(agent_configs.c.id == turn.config)
        spend = spend.values(tokens=agent_configs.c.tokens + tokens.total).returning(agent_configs.c.tokens)

        def store(connection: sa.Connection) -> SpentTokens:
            _add(connection, turn, [response, *refused])
            connection.execute(sa.update(chat_turns).where(chat_turns.c.id == turn.id).values(values))
            of_config: int = connection.execute(spend).scalar_one()
            of_tenant = self._quotas.spend_within(connection, turn.tenant, tokens.total)
            if status == "done":
                _touch(connection, turn.conversation, values["ended_at"])
            return SpentTokens(turn.tokens.total, of_config, of_tenant)

        return await self._write(turn, store)

    async def add_result(self, turn: OpenTurn, result: ToolReturnPart) -> None:
        """Store the result of a call.

        Raises:
            ConversationNotFound: the conversation was deleted meanwhile.
            InvalidRequest: the results of this turn are too large together.
        """
        turn.result_chars += _size(result.content)
        if turn.result_chars > MAX_CONVERSATION_CHARS:
            raise InvalidRequest(
                f"the results of this turn have more than {MAX_CONVERSATION_CHARS} characters; have tools return less"
            )
        await self._write(turn, lambda connection: _add(connection, turn, [result]))

    async def end(self, turn: str, status: TurnStatus, error: AtollError | None = None) -> None:
        """End a turn before it is done. Calls without a result get one that says that they were interrupted."""

        def store(connection: sa.Connection) -> None:
            query = sa.select(chat_turns).where(chat_turns.c.id == turn).with_for_update()
            row = connection.execute(query).one_or_none()
            if row is not None and row.status in ("running", "waiting"):
                self._complete(connection, row, status, error)

        await self._database.transact(store)

    async def recover(self) -> None:
        """Complete the turns of processes that died."""

        def store(connection: sa.Connection) -> None:
            query = sa.select(chat_turns).where(chat_turns.c.status == "running").with_for_update()
            for row in connection.execute(query).all():
                if not self._is_alive(row.instance, row.id):
                    self._complete(connection, row, "interrupted")

        await self._database.transact(store)

    # ---- reading ----

    async def turn(self, tenant: str, config: str, id: str) -> ChatTurn:
        """
        Raises:
            ConversationNotFound: the config has no such turn.
        """
        query = _turns().where(chat_turns.c.id == id)
        async with self._database.read() as connection:
            row = (await connection.execute(query)).one_or_none()
            if row is None or (row.tenant, row.config) != (tenant, config):
                raise ConversationNotFound(f"no turn of the agent config has the id {id!r}", turn=id)
            awaited = await connection.run_sync(self._awaited, row.conversation, id) if row.status == "waiting" else []
        return self._shown(row, awaited)

    async def turn_of_request(self, tenant: str, config: str, request: str) -> str | None:
        """The id of the turn that a request began or went on with. None: it has not."""
        query = _turns().where(chat_turns.c.request == request)
        async with self._database.read() as connection:
            row = (await connection.execute(query)).one_or_none()
        return row.id if row is not None and (row.tenant, row.config) == (tenant, config) else None

    async def get(self, tenant: str, id: str) -> Conversation:
        """
        Raises:
            ConversationNotFound: the tenant has none with this id.
        """
        async with self._database.read() as connection:
            row = (await connection.execute(_conversations().where(conversations.c.id == id))).one_or_none()
        if row is None or row.tenant != tenant:
            raise _missing(id)
        return self._conversation(row)

    async def list(
        self, tenant: str, *, config: str | None = None, before: str | None = None, limit: int = 100
    ) -> builtins.list[Conversation]:
        """The newest first; those `before` one, for the next page."""
        table = conversations
        query = _conversations().where(table.c.tenant == tenant).order_by(table.c.id.desc()).limit(limit)
        if config is not None:
            query = query.where(table.c.config == config)
        if before is not None:
            query = query.where(table.c.id < before)
        async with self._database.read() as connection:
            return [self._conversation(row) for row in await connection.execute(query)]

    async def messages(self, conversation: str, *, after: int = 0, limit: int = 100) -> builtins.list[ChatMessage]:
        """The oldest first; those `after` one, for the next page."""
        table = chat_messages
        query = sa.select(table).where(table.c.conversation == conversation, table.c.id > after)
        async with self._database.read() as connection:
            rows = (await connection.execute(query.order_by(table.c.id).limit(limit))).all()
        read = ModelMessagesTypeAdapter.validate_python([row.data for row in rows])
        return [_message(row, message) for row, message in zip(rows, read, strict=True)]

    async def turns(self, conversation: str, ids: Iterable[str]) -> builtins.list[ChatTurn]:
        """These turns of a conversation, in their order."""
        query = _turns().where(chat_turns.c.conversation == conversation, chat_turns.c.id.in_([*ids]))
        async with self._database.read() as connection:
            rows = (await connection.execute(query.order_by(chat_turns.c.number))).all()
            waiting = {
                row.id: await connection.run_sync(self._awaited, row.conversation, row.id)
                for row in rows
                if row.status == "waiting"
            }
        return [self._shown(row, waiting.get(row.id, [])) for row in rows]

    async def delete(self, tenant: str, id: str) -> None:
        """Remove a conversation with all of its messages.

        Raises:
            ConversationNotFound: the tenant has none with this id.
        """
        async with self._database.write(durable=True) as connection:
            of_tenant = sa.and_(conversations.c.id == id, conversations.c.tenant == tenant)
            if (await connection.execute(sa.delete(conversations).where(of_tenant))).rowcount == 0:
                raise _missing(id)

    # ---- rows ----

    async def _write(self, turn: OpenTurn, work: Callable[[sa.Connection], T]) -> T:
        """A transaction of a turn whose conversation may be deleted at any time."""
        try:
            return await self._database.transact(work)
        except (IntegrityError, sa.exc.NoResultFound):
            raise _missing(turn.conversation) from None

    def _make(self, connection: sa.Connection, turn: OpenTurn, now: datetime) -> None:
        """The conversation of a turn."""
        count = sa.select(sa.func.count()).select_from(conversations).where(conversations.c.config == turn.config)
        if connection.execute(count).scalar_one() >= MAX_CONVERSATIONS:
            raise InvalidRequest(f"an agent config may have {MAX_CONVERSATIONS} conversations; delete some first")
        row = {
            "id": turn.conversation,
            "tenant": turn.tenant,
            "config": turn.config,
            "created_at": now,
            "updated_at": now,
        }
        connection.execute(sa.insert(conversations).values(row))

    def _last(self, connection: sa.Connection, tenant: str, config: str, conversation: str) -> sa.Row[Any] | None:
        """The last turn of a conversation, which is locked until the end of the transaction."""
        query = sa.select(conversations).where(conversations.c.id == conversation).with_for_update()
        owner = connection.execute(query).one_or_none()
        if owner is None or (owner.tenant, owner.config) != (tenant, config):
            raise _missing(conversation)
        of_it = sa.select(chat_turns).where(chat_turns.c.conversation == conversation)
        last = connection.execute(of_it.order_by(chat_turns.c.number.desc()).limit(1)).one_or_none()
        if last is not None and last.status == "running" and not self._is_alive(last.instance, last.id):
            self._complete(connection, last, "interrupted")
            last = connection.execute(of_it.where(chat_turns.c.id == last.id)).one()
        return last

    def _require_idle(self, connection: sa.Connection, last: sa.Row[Any] | None) -> None:
        if last is None or last.status not in ("running", "waiting"):
            return
        details = {"conversation_id": last.conversation, "turn_id": last.id, "status": last.status}
        if last.status == "running":
            raise Conflict(
                f"the turn {last.id} of this conversation is under way; wait for its end "
                f"(GET …/turns/{last.id}/events), or cancel it (POST …/turns/{last.id}/cancel)",
                **details,
            )
        awaited = self._awaited(connection, last.conversation, last.id)
        raise Conflict(
            f"the turn {last.id} of this conversation waits for the results of {_named(awaited)}; send them as "
            f"tool_results, or cancel the turn (POST …/turns/{last.id}/cancel)",
            **details,
            tool_calls=[_call(call).model_dump() for call in awaited],
        )

    def _awaited(self, connection: sa.Connection, conversation: str, turn: str) -> builtins.list[ToolCallPart]:
        """The calls of a turn that have no result: only its last answer can have such."""
        table = chat_messages
        of_turn = sa.and_(table.c.conversation == conversation, table.c.turn == turn)
        query = sa.select(table.c.data).where(of_turn).order_by(table.c.id.desc())
        done: set[str] = set()
        for data in connection.execute(query).scalars().all():
            (message,) = ModelMessagesTypeAdapter.validate_python([data])
            if isinstance(message, ModelResponse):
                calls = [part for part in message.parts if isinstance(part, ToolCallPart)]
                return [call for call in calls if call.tool_call_id not in done]
            done |= {part.tool_call_id for part in message.parts if isinstance(part, ToolReturnPart)}
        return []

    def _complete(
        self, connection: sa.Connection, row: sa.Row[Any], status: TurnStatus, error: AtollError | None = None
    ) -> None:
        now = datetime.now(UTC)
        turn = OpenTurn(row.id, row.conversation, "", "", row.version, row.steps, Tokens())
        _add(connection, turn, [interrupted(call) for call in self._awaited(connection, row.conversation, row.id)])
        outcome = None if error is None else {"error": {"code": error.code, "message": readable(error.message)}}
        values = {"status": status, "ended_at": now, "outcome": outcome}
        connection.execute(sa.update(chat_turns).where(chat_turns.c.id == row.id).values(values))
        _touch(connection, row.conversation, now)

    def _status(self, row: sa.Row[Any]) -> TurnStatus:
        """As it will be when it is recovered: a process may have died a moment ago."""
        status: TurnStatus = row.status
        return "interrupted" if status == "running" and not self._is_alive(row.instance, row.turn) else status

    def _shown(self, row: sa.Row[Any], awaited: Iterable[ToolCallPart]) -> ChatTurn:
        outcome = row.outcome or {}
        return ChatTurn(
            id=row.id,
            conversation_id=row.conversation,
            config_id=row.config,
            version=row.version,
            status=self._status(row),
            response=outcome.get("response"),
            tool_calls=tuple(_call(call) for call in awaited),
            error=outcome.get("error"),
            steps=row.steps,
            usage=Tokens.model_validate(row.tokens),
            started_at=row.started_at,
            ended_at=row.ended_at,
        )

    def _conversation(self, row: sa.Row[Any]) -> Conversation:
        return Conversation(
            id=row.id,
            config_id=row.config,
            status=None if row.status is None else self._status(row),
            created_at=row.created_at,
            updated_at=row.updated_at,
        )


def check_results(awaited: Sequence[ToolCallPart], given: Sequence[ToolReturnPart]) -> None:
    """
    Raises:
        InvalidRequest: a result is of no call that waits, is given twice, is named otherwise, or one is missing.
    """
    expected = f"awaited are the results of {_named(awaited)}"
    names = {call.tool_call_id: call.tool_name for call in awaited}
    seen: set[str] = set()
    for each in given:
        id = each.tool_call_id
        if id not in names:
            raise InvalidRequest(f"tool_results: no call {id[:100]!r} waits for a result; {expected}", tool_call_id=id)
        if id in seen:
            raise InvalidRequest(f"tool_results: the result of {id!r} is given twice; {expected}", tool_call_id=id)
        if each.tool_name != names[id]:
            raise InvalidRequest(
                f"tool_results: the call {id!r} is of {names[id]!r}, not of {each.tool_name[:100]!r}; {expected}",
                tool_call_id=id,
            )
        seen.add(id)
    if missing := [call for call in awaited if call.tool_call_id not in seen]:
        raise InvalidRequest(
            f"tool_results: the result of {_named(missing)} is missing; {expected}",
            missing=[call.tool_call_id for call in missing],
        )


def _named(calls: Sequence[ToolCallPart]) -> str:
    return ", ".join(f"{call.tool_call_id} ({call.tool_name})" for call in calls) or "no calls"


def _call(call: ToolCallPart) -> ChatToolCall:
    return ChatToolCall(id=call.tool_call_id, name=call.tool_name, arguments=arguments_of(call) or {})


def _missing(id: str) -> ConversationNotFound:
    return ConversationNotFound(f"no conversation has the id {id!r}", conversation_id=id)


def _new_id() -> str:
    """A UUID (version 7) that sorts by the time at which it was made."""
    milliseconds, drawn = time.time_ns() // 1_000_000, secrets.randbits(74)
    return str(uuid.UUID(int=milliseconds << 80 | 0x7 << 76 | drawn >> 62 << 64 | 0b10 << 62 | drawn & (1 << 62) - 1))


def _touch(connection: sa.Connection, conversation: str, now: datetime) -> None:
    connection.execute(sa.update(conversations).where(conversations.c.id == conversation).values(updated_at=now))


def _add(
    connection: sa.Connection, turn: OpenTurn, added: Iterable[ModelResponse | ToolReturnPart | UserPromptPart]
) -> None:
    now = datetime.now(UTC)
    rows = [
        {
            "conversation": turn.conversation,
            "turn": turn.id,
            "kind": _KINDS[type(each)],
            "data": _dumped(each),
            "created_at": now,
        }
        for each in added
    ]
    if rows:
        connection.execute(sa.insert(chat_messages), rows)


_KINDS = {ModelResponse: "assistant", ToolReturnPart: "tool", UserPromptPart: "user"}


def _dumped(added: ModelResponse | ToolReturnPart | UserPromptPart) -> Any:
    message = added if isinstance(added, ModelResponse) else ModelRequest(parts=[added])
    (data,) = ModelMessagesTypeAdapter.dump_python([message], mode="json")
    return data


def _history(connection: sa.Connection, conversation: str) -> builtins.list[ModelMessage]:
    """
    Raises:
        InvalidRequest: it is too long.
    """
    table = chat_messages
    size = sa.select(sa.func.sum(sa.func.length(sa.cast(table.c.data, sa.Text))))
    size_chars = connection.execute(size.where(table.c.conversation == conversation)).scalar_one() or 0
    if size_chars > MAX_CONVERSATION_CHARS:
        raise InvalidRequest(
            f"a conversation may have {MAX_CONVERSATION_CHARS} characters, and this has {size_chars}; begin a new one"
        )
    query = sa.select(table.c.data).where(table.c.conversation == conversation).order_by(table.c.id)
    data = connection.execute(query.limit(MAX_MESSAGES + 1)).scalars().all()
    if len(data) > MAX_MESSAGES:
        raise InvalidRequest(f"a conversation may have {MAX_MESSAGES} messages; begin a new one")
    return _alternating(ModelMessagesTypeAdapter.validate_python(data))


def _alternating(messages: Iterable[ModelMessage]) -> builtins.list[ModelMessage]:
    merged: builtins.list[ModelMessage] = []
    for message in messages:
        if merged and isinstance(message, ModelRequest) and isinstance(merged[-1], ModelRequest):
            merged[-1] = ModelRequest(parts=[*merged[-1].parts, *message.parts])
        else:
            merged.append(message)
    for before, after in pairwise(merged):
        if isinstance(before, ModelResponse) and isinstance(after, ModelRequest):
            calls = [part.tool_call_id for part in before.parts if isinstance(part, ToolCallPart)]
            order = {id: place for place, id in enumerate(calls)}
            after.parts = sorted(after.parts, key=lambda part: order.get(getattr(part, "tool_call_id", ""), len(order)))
    return merged


def _message(row: sa.Row[Any], message: ModelMessage) -> ChatMessage:
    shared = {"id": row.id, "turn_id": row.turn, "role": row.kind, "created_at": row.created_at}
    if isinstance(message, ModelResponse):
        calls = tuple(_call(part) for part in message.parts if isinstance(part, ToolCallPart))
        return ChatMessage(**shared, content=message.text, tool_calls=calls)
    (part,) = message.parts
    if isinstance(part, ToolReturnPart):
        return ChatMessage(
            **shared,
            content=_text(part.content),
            tool_call_id=part.tool_call_id,
            name=part.tool_name,
            outcome=part.outcome,
        )
    return ChatMessage(**shared, content=_text(part.content) if isinstance(part, UserPromptPart) else None)


def _text(content: Any) -> str:
    """What was said, with images and the like by their type."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list | tuple) else [content]
    return "\n".join(map(described, parts))


def _size(content: Any) -> int:
    parts = content if isinstance(content, list | tuple) else [content]
    return sum(len(part.data) if isinstance(part, BinaryContent) else len(str(part)) for part in parts)


def _turns() -> sa.Select[Any]:
    return sa.select(chat_turns, chat_turns.c.id.label("turn"), conversations.c.tenant, conversations.c.config).join(
        conversations
    )


def _conversations() -> sa.Select[Any]:
    """Each with its last turn."""
    newest = (
        sa.select(sa.func.max(chat_turns.c.number))
        .where(chat_turns.c.conversation == conversations.c.id)
        .correlate(conversations)
        .scalar_subquery()
    )
    last = sa.and_(chat_turns.c.conversation == conversations.c.id, chat_turns.c.number == newest)
    turn = (chat_turns.c.id.label("turn"), chat_turns.c.status, chat_turns.c.instance)
    return sa.select(conversations, *turn).outerjoin(chat_turns, last)
