"""What clients are shown of conversations with agents, and what they send: turns, messages and answers.

Not here: what is stored of them (`conversations.py`), and how a turn runs (`chat.py`). Both need pydantic-ai, which
takes most of a second to import, and are loaded when a client chats. Used by them and by `surfaces/rest/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from atoll.agents.events import Tokens
from atoll.tools.tool import StrictModel

if TYPE_CHECKING:
    from pydantic_ai.messages import ToolReturnPart

TurnStatus = Literal["running", "waiting", "done", "failed", "cancelled", "interrupted"]


class ChatToolCall(StrictModel):
    """A call of a tool that the client is to make."""

    id: str
    name: str
    arguments: dict[str, Any]


class ChatMessage(StrictModel):
    """A message of a conversation."""

    id: int
    """Counts up within a conversation."""
    turn_id: str
    role: Literal["user", "assistant", "tool"]
    content: str | None = None
    tool_calls: tuple[ChatToolCall, ...] = ()
    """Of an assistant's message."""
    tool_call_id: str | None = None
    """Of a tool's message: the call that it is the result of."""
    name: str | None = None
    """Of a tool's message: the tool."""
    outcome: str | None = None
    """Of a tool's message: `success`, `failed`, `denied` or `interrupted`."""
    created_at: datetime


class ChatTurn(StrictModel):
    """A turn of a conversation."""

    id: str
    conversation_id: str
    config_id: str
    version: int
    """The version of the config that it uses."""
    status: TurnStatus
    """`waiting`: for the results of `tool_calls`. `interrupted`: the server ended meanwhile. What failed, was cancelled
    or interrupted can be resumed."""
    response: str | None = None
    """The agent's answer, once it is done."""
    tool_calls: tuple[ChatToolCall, ...] = ()
    """Those that it waits for."""
    error: dict[str, Any] | None = None
    """Why it failed: `code` and `message`."""
    steps: int
    """How often the model was asked."""
    usage: Tokens
    started_at: datetime
    ended_at: datetime | None = None


class Conversation(StrictModel):
    """A conversation with an agent."""

    id: str
    config_id: str
    status: TurnStatus | None
    """Of its last turn."""
    created_at: datetime
    updated_at: datetime
    """When its last turn began or ended."""


class ChatAnswer(StrictModel):
    """What a client is answered: the agent's text, or the calls that it is to make."""

    response: str | None
    """The agent's answer. Null: the turn waits for the results of `tool_calls`."""
    tool_calls: tuple[ChatToolCall, ...]
    conversation_id: str
    turn_id: str
    version: int
    """The version of the config that the turn uses."""
    steps: int
    """How often the model was asked in this turn."""
    usage: Tokens
    """Of this turn."""

    @classmethod
    def of(cls, turn: ChatTurn) -> ChatAnswer:
        return cls(
            response=turn.response,
            tool_calls=turn.tool_calls,
            conversation_id=turn.conversation_id,
            turn_id=turn.id,
            version=turn.version,
            steps=turn.steps,
            usage=turn.usage,
        )


@dataclass(frozen=True)
class ChatInput:
    """What a client sends: a message, results of calls, or neither, to go on with a turn that ended too early."""

    conversation: str | None = None
    message: str | None = None
    results: Sequence[ToolReturnPart] | None = None
