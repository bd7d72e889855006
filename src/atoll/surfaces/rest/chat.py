"""Chat over REST: a message to an agent, the results of its calls, and the turns that come of them.

Owns the bodies, how a request that is sent again finds its turn, and the events of a turn. A turn belongs to its
conversation, not to the connection: when the client leaves, it goes on. Not here: running turns (`atoll.server.chat`),
and what is stored of them (`atoll.server.conversations`).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated, Any, Self

from fastapi import APIRouter, Header, Path, Request
from fastapi.responses import Response
from pydantic import Field, model_validator

from atoll.agents.events import AgentEvent
from atoll.bundles.results import MAX_PARTS, PartKind, read_result
from atoll.contract.errors import Conflict, InvalidRequest
from atoll.server.turns import ChatAnswer, ChatInput, ChatTurn
from atoll.surfaces.rest.caller import ApiRoute, Caller
from atoll.surfaces.rest.configs import ConfigPath
from atoll.surfaces.rest.conversations import Chatter
from atoll.surfaces.rest.errors import failures
from atoll.surfaces.rest.event_stream import MEDIA_TYPE, EventStream, ServerEvent, streams
from atoll.surfaces.rest.exec import CLIENT_LEFT, until_left, wants_events
from atoll.surfaces.rest.idempotent import IdempotencyKey, once
from atoll.surfaces.rest.pages import JsonBody, RequestBody, answer
from atoll.tools.tool import StrictModel

if TYPE_CHECKING:
    from pydantic_ai.messages import ToolReturnPart

    from atoll.server.chat import TurnRun

MAX_MESSAGE_CHARS = 1_000_000
MAX_PART_CHARS = 8_000_000
MAX_RESULTS = 128
router = APIRouter(prefix="/api/v1/chat/{config}", tags=["chat"], route_class=ApiRoute)
TurnPath = Annotated[str, Path(description="The id of a turn.", max_length=64)]
_UUID = r"^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$"
_EVENTS = (
    "`turn` (its ids), `text`, `thinking`, `tool_call`, `tool_result`, `usage`, `retry`, and at last `end` with the "
    "answer, or `error`"
)


class ResultPart(RequestBody):
    """A part of a result: text, or a URL (`http(s):` or `data:` with base64). Models that see are shown images."""

    kind: PartKind
    content: str | None = Field(default=None, max_length=MAX_MESSAGE_CHARS)
    """Of the kind `text`."""
    url: str | None = Field(default=None, max_length=MAX_PART_CHARS)
    """Of the other kinds."""

    @model_validator(mode="after")
    def _has_its_value(self) -> Self:
        wanted, other = (self.content, self.url) if self.kind == "text" else (self.url, self.content)
        if wanted is None or other is not None:
            raise ValueError("a part of the kind text has content, one of another kind a url")
        return self


class ToolResultInput(RequestBody):
    """The result of a call that the client has made."""

    tool_call_id: str = Field(min_length=1, max_length=256, examples=["call_01"])
    name: str = Field(min_length=1, max_length=64, examples=["write_file"])
    content: (
        Annotated[str, Field(max_length=MAX_MESSAGE_CHARS)]
        | Annotated[list[ResultPart], Field(min_length=1, max_length=MAX_PARTS)]
    ) = Field(examples=["ok"])
    """What the model reads: text, or parts."""
    is_error: bool = False
    """Whether the call failed; `content` says why."""


class ChatBody(RequestBody):
    """A message, the results that the agent waits for, or `resume`."""

    message: str | None = Field(default=None, min_length=1, max_length=MAX_MESSAGE_CHARS, examples=["Hello!"])
    tool_results: list[ToolResultInput] | None = Field(default=None, min_length=1, max_length=MAX_RESULTS)
    resume: bool = False
    """Go on with a turn that failed, was cancelled or interrupted, where it ended."""
    conversation_id: str | None = Field(default=None, pattern=_UUID)
    """Unset: a new conversation."""


class TurnBegun(StrictModel):
    """Of the first event of a turn."""

    turn_id: str
    conversation_id: str
    version: int
    """The version of the config that the turn uses."""


@router.post(
    "",
    operation_id="chat",
    response_model=ChatAnswer,
    responses={
        200: {
            "description": "The agent's answer, or the calls that the client is to make. With `Accept: "
            f"text/event-stream`: the events {_EVENTS}.",
            "content": {MEDIA_TYPE: {"schema": {"type": "string"}}},
        },
        **failures(404, 409, 422, 502),
    },
)
async def chat(
    request: Request,
    caller: Chatter,
    config: ConfigPath,
    body: Annotated[ChatBody, JsonBody()],
    key: IdempotencyKey = None,
    accept: Annotated[str | None, Header(include_in_schema=False)] = None,
) -> Response:
    """Send a message to an agent, or the results of the calls that it waits for, and wait for its answer.

    When the client leaves, the turn goes on, and its answer is in the conversation. One turn of a conversation is under
    way at a time: another request meanwhile is refused (409) with its id.
    """
    try:
        given = _input(body)
    except InvalidRequest:
        await caller.server.configs.get(caller.tenant.name, config)  # that it is not there comes first
        raise
    with_events = wants_events(accept)
    async with once(caller, request, key, resource=f"chat-{secrets.token_hex(16)}") as made:
        if made.replay is not None:
            kept = json.loads(bytes(made.replay.body))
            if "response" in kept and not with_events:
                return made.replay
            run = await _again(caller, config, kept["turn_id"], made.name, with_events)
        else:
            chat, name = caller.server.chat, made.name or caller.request_id
            stored = None
            if made.is_interrupted:
                stored = await caller.server.conversations.turn_of_request(caller.tenant.name, config, name)
            if stored is None:
                run = await chat.start(caller.tenant, config, given, request=name, streams=with_events)
            else:
                run = await _again(caller, config, stored, made.name, with_events)
        if isinstance(run, ChatAnswer):
            return EventStream(caller, _ended_events(run)) if with_events else made.give(answer(run))
        caller.note(conversation=run.turn.conversation, turn=run.turn.id)
        # Should the turn fail, the same request goes on with it.
        made.give(answer({"turn_id": run.turn.id, "conversation_id": run.turn.conversation}))
        if with_events:
            return EventStream(caller, _events(run, None))
        with until_left(caller, request.receive) as left:
            result = await run.answer()
        return Response(status_code=CLIENT_LEFT) if left() else made.give(answer(result))


async def _again(
    caller: Caller, config: str, turn: str, request: str | None, with_events: bool
) -> TurnRun | ChatAnswer:
    """A turn that the same request has begun before: its answer, or the turn, which goes on if it ended too early."""
    chat, tenant = caller.server.chat, caller.tenant
    found = await caller.server.conversations.turn(tenant.name, config, turn)
    if (run := chat.running(turn)) is not None and found.status == "running":
        return run
    if found.status in ("done", "waiting"):
        return ChatAnswer.of(found)
    if found.status == "cancelled":
        raise Conflict(f"the turn {turn} was cancelled; send a message, or resume it", turn_id=turn, status="cancelled")
    resumed = ChatInput(conversation=found.conversation_id)
    return await chat.start(tenant, config, resumed, request=request or caller.request_id, streams=with_events)


@router.get("/turns/{turn}", operation_id="chat_turns_get", response_model=ChatTurn, responses=failures(404))
async def get_turn(caller: Chatter, config: ConfigPath, turn: TurnPath) -> Response:
    """A turn: whether it is under way, and what came of it."""
    return answer(await caller.server.conversations.turn(caller.tenant.name, config, turn))


@router.post("/turns/{turn}/cancel", operation_id="chat_turns_cancel", response_model=ChatTurn, responses=failures(404))
async def cancel(caller: Chatter, config: ConfigPath, turn: TurnPath) -> Response:
    """End a turn with the calls that it makes, or that it waits for. One that has ended stays as it is."""
    return answer(await caller.server.chat.cancel(caller.tenant.name, config, turn))


@router.get(
    "/turns/{turn}/events",
    operation_id="chat_turns_events",
    response_class=Response,
    responses={**failures(404, 409), **streams(TurnBegun | AgentEvent | ChatAnswer | None)},
)
async def events(
    caller: Chatter,
    config: ConfigPath,
    turn: TurnPath,
    last_event_id: Annotated[
        str | None,
        Header(alias="Last-Event-ID", max_length=32, description="The id of the last event that the client has."),
    ] = None,
) -> Response:
    """The events of a turn, from its beginning or after the last that the client has, until its end."""
    found = await caller.server.conversations.turn(caller.tenant.name, config, turn)
    if (run := caller.server.chat.running(turn)) is not None:
        return EventStream(caller, _events(run, last_event_id))
    return EventStream(caller, _ended_events(await caller.server.chat.answer(caller.tenant.name, config, found.id)))


def _input(body: ChatBody) -> ChatInput:
    given = [body.message is not None, body.tool_results is not None, body.resume]
    if sum(given) != 1:
        raise InvalidRequest("give one of message, tool_results and resume")
    if body.message is None and body.conversation_id is None:
        raise InvalidRequest("conversation_id is missing: tool_results and resume go on with a conversation")
    if body.message is not None and not body.message.strip():
        raise InvalidRequest("the message is empty")
    conversation = None if body.conversation_id is None else body.conversation_id.lower()
    results = None if body.tool_results is None else [_result(each) for each in body.tool_results]
    return ChatInput(conversation, body.message, results)


def _result(given: ToolResultInput) -> ToolReturnPart:
    from pydantic_ai.messages import ToolCallPart

    from atoll.agents.loop import tool_return

    if isinstance(given.content, str):
        message: dict[str, Any] = {"text": given.content}
    else:
        message = {"parts": [part.model_dump() for part in given.content]}
    result = read_result({"ok": not given.is_error, **message})
    call = ToolCallPart(given.name, {}, given.tool_call_id)
    return tool_return(call, result, "failed" if given.is_error else "success")


async def _events(run: TurnRun, after: str | None) -> AsyncIterator[ServerEvent]:
    turn = run.turn
    begun = TurnBegun(turn_id=turn.id, conversation_id=turn.conversation, version=turn.version)
    yield ServerEvent("turn", begun)
    async for id, event in run.follow(after):
        yield ServerEvent("lost", None, id) if event is None else ServerEvent(event.type, event, id)
    yield ServerEvent("end", await run.answer())


async def _ended_events(answer: ChatAnswer) -> AsyncIterator[ServerEvent]:
    begun = TurnBegun(turn_id=answer.turn_id, conversation_id=answer.conversation_id, version=answer.version)
    yield ServerEvent("turn", begun)
    yield ServerEvent("end", answer)
