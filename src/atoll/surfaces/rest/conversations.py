"""Conversations over REST: read and deleted. They are begun and continued by chat (`chat.py`).

Not here: what is stored of one (`atoll.server.conversations`).
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query
from fastapi.responses import Response
from starlette.requests import HTTPConnection

from atoll.server.turns import ChatMessage, ChatTurn, Conversation
from atoll.surfaces.rest.caller import ApiRoute, Caller, requires
from atoll.surfaces.rest.errors import failures
from atoll.surfaces.rest.pages import AfterNumber, Limit, Page, answer, page
from atoll.tools.tool import StrictModel

router = APIRouter(prefix="/api/v1/conversations", tags=["chat"], route_class=ApiRoute)
_may_chat = requires("chat")


async def _chatting(connection: HTTPConnection) -> Caller:
    caller = await _may_chat(connection)
    await caller.server.load_chat()
    return caller


Chatter = Annotated[Caller, Depends(_chatting)]
ConversationPath = Annotated[str, Path(description="The id of a conversation.", max_length=64)]


class ConversationBody(StrictModel):
    """A conversation, with a page of its messages."""

    conversation: Conversation
    turns: tuple[ChatTurn, ...]
    """The turns that the messages of this page belong to, each with the version of the config that it used."""
    messages: tuple[ChatMessage, ...]
    """The oldest first."""
    next: str | None
    """The cursor of the next page. Null: there is none."""


@router.get("", operation_id="conversations_list", response_model=Page[Conversation], responses=failures())
async def list_conversations(
    caller: Chatter,
    config_id: Annotated[str | None, Query(max_length=64, description="Only those of this agent config.")] = None,
    limit: Limit = 100,
    after: Annotated[str | None, Query(max_length=64, pattern="^[0-9a-f-]+$", description="`next` of a page.")] = None,
) -> Response:
    """The conversations of the tenant, the newest first."""
    found = await caller.server.conversations.list(caller.tenant.name, config=config_id, before=after, limit=limit + 1)
    return page(found[:limit], found[limit - 1].id if len(found) > limit else None)


@router.get(
    "/{conversation}", operation_id="conversations_get", response_model=ConversationBody, responses=failures(404)
)
async def get(
    caller: Chatter, conversation: ConversationPath, limit: Limit = 100, after: AfterNumber = None
) -> Response:
    """A conversation, with its messages."""
    stored = caller.server.conversations
    found = await stored.get(caller.tenant.name, conversation)
    messages = await stored.messages(conversation, after=0 if after is None else int(after), limit=limit + 1)
    shown = messages[:limit]
    return answer(
        {
            "conversation": found,
            "turns": await stored.turns(conversation, dict.fromkeys(each.turn_id for each in shown)),
            "messages": shown,
            "next": str(shown[-1].id) if len(messages) > limit else None,
        }
    )


@router.delete("/{conversation}", status_code=204, operation_id="conversations_delete", responses=failures(404))
async def delete(caller: Chatter, conversation: ConversationPath) -> Response:
    """Delete a conversation with all of its messages. A turn that is under way is cancelled first."""
    await caller.server.chat.delete_conversation(caller.tenant.name, conversation)
    return Response(status_code=204)
