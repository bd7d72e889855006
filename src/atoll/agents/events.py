"""What a run tells of itself: its events, and the tokens that it used.

Not here: when which is told (`loop.py`). Used by all that shows a run, the server among them: so it does without
pydantic-ai, which takes most of a second to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Discriminator

from atoll.tools.tool import StrictModel, ToolResult

if TYPE_CHECKING:
    from pydantic_ai.usage import RequestUsage


class Tokens(StrictModel):
    """Token counts of a model."""

    input: int = 0
    output: int = 0
    cache_read: int = 0
    """The part of the input that was in the provider's cache."""
    cache_write: int = 0

    @classmethod
    def of(cls, usage: RequestUsage) -> Tokens:
        """As pydantic-ai counts them."""
        return cls(
            input=usage.input_tokens,
            output=usage.output_tokens,
            cache_read=usage.cache_read_tokens,
            cache_write=usage.cache_write_tokens,
        )

    @property
    def total(self) -> int:
        return self.input + self.output

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(
            input=self.input + other.input,
            output=self.output + other.output,
            cache_read=self.cache_read + other.cache_read,
            cache_write=self.cache_write + other.cache_write,
        )

    def __sub__(self, other: Tokens) -> Tokens:
        return Tokens(
            input=self.input - other.input,
            output=self.output - other.output,
            cache_read=self.cache_read - other.cache_read,
            cache_write=self.cache_write - other.cache_write,
        )


class TextEvent(StrictModel):
    """Text of the model: a piece of it when streaming, else all text of one step."""

    type: Literal["text"] = "text"
    text: str


class ThinkingEvent(StrictModel):
    """Visible reasoning of the model."""

    type: Literal["thinking"] = "thinking"
    text: str


class ToolCallEvent(StrictModel):
    """The model calls a tool. Calls of one step run concurrently."""

    type: Literal["tool_call"] = "tool_call"
    id: str
    tool: str
    input: dict[str, Any] | str
    """A string if it is not a JSON object; the call then fails."""


class ToolResultEvent(StrictModel):
    """A tool call has ended."""

    type: Literal["tool_result"] = "tool_result"
    id: str
    tool: str
    result: ToolResult
    duration_s: float


class UsageEvent(StrictModel):
    """The model has completed an answer."""

    type: Literal["usage"] = "usage"
    step: int
    tokens: Tokens
    """Tokens of this answer."""
    total: Tokens
    """Tokens of the run so far."""


class RetryEvent(StrictModel):
    """An answer was interrupted and is requested again: the text of this step so far is void."""

    type: Literal["retry"] = "retry"
    reason: str
    wait_s: float


AgentEvent = Annotated[
    TextEvent | ThinkingEvent | ToolCallEvent | ToolResultEvent | UsageEvent | RetryEvent, Discriminator("type")
]
