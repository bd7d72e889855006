"""A conversation as the client has it, and as the model behind sees it.

Owns the translation: the blocks of requests and of our own answers become pydantic-ai's messages, one at a time and in
the same way, so that what the model sees of a turn does not change when the turn comes back as history, and stays in
the provider's cache. Calls by code are inside of the code: the model sees neither them nor their results. Owns the
rules between blocks too: which call a result belongs to, and what a request answers (`PendingAnswers`). Not here: the
shapes of blocks (`wire.py`). Used by `turn.py`.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pydantic_core
from pydantic import TypeAdapter, ValidationError
from pydantic_ai.messages import (
    BinaryContent,
    DocumentUrl,
    ImageUrl,
    ModelMessage,
    ModelRequest,
    ModelRequestPart,
    ModelResponse,
    ModelResponsePart,
    SystemPromptPart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolReturnPart,
    UserContent,
    UserPromptPart,
)

from atoll.agents.history import interrupted
from atoll.surfaces.messages.wire import (
    ApiError,
    AssistantMessage,
    MessagesRequest,
    SystemMessage,
    UserMessage,
    WireAddress,
    WireCall,
    WireCode,
    WireCodeError,
    WireCodeResult,
    WireDocument,
    WireImage,
    WirePlain,
    WireResult,
    WireText,
    WireThinking,
)

_SIGNED = "atoll1."
"""Begins the signature of a thinking block: what its provider needs to get back with it, as JSON in base64."""
_THINKING: TypeAdapter[ThinkingPart] = TypeAdapter(ThinkingPart)
_BLANK = "[blank]"
"""Replaces an empty result: providers refuse blank text."""
_STOPPED = {
    "execution_time_exceeded": "its time was over; variables of the session are kept",
    "unavailable": "the sandbox is not available; try again",
    "too_many_requests": "there are too many sandboxes now; try again later",
    "invalid_tool_input": "the input has to be an object with the text `code`, which is not blank",
}


@dataclass(frozen=True)
class PendingAnswers:
    """What the last message of a request says to code that waits."""

    code_id: str
    results: dict[str, WireResult]


class MessageHistory:
    """The messages of one conversation. `code_tool` is what the model knows the code execution tool as."""

    def __init__(self, code_tool: str) -> None:
        self.messages: list[ModelMessage] = []
        self.pending: PendingAnswers | None = None
        """Set when the last message answers calls of code that has not ended."""
        self._code_tool = code_tool
        self._code: dict[str, ToolCallPart] = {}
        """Code without a result."""
        self._direct: dict[str, ToolCallPart] = {}
        """Calls of the model without a result."""
        self._by_code: dict[str, str] = {}
        """Calls by code without a result → the code."""
        self._refused: list[ToolReturnPart] = []

    @classmethod
    def read(cls, request: MessagesRequest, code_tool: str) -> MessageHistory:
        """The conversation of a request.

        Raises:
            ApiError: results and calls do not belong together, or it is not the model's turn.
        """
        history = cls(code_tool)
        messages = request.body.messages
        for index, message in enumerate(messages):
            where = f"messages.{index}"
            history.pending = None
            if isinstance(message, UserMessage):
                history._user(message, where)
            elif isinstance(message, AssistantMessage):
                history._assistant(message, where)
            elif isinstance(message, SystemMessage):
                history._system(message)
        if history.pending is None:
            history._interrupt_code()
        if not history.messages or (history.pending is None and isinstance(history.messages[-1], ModelResponse)):
            raise ApiError(400, "the conversation must end with a user message that is not blank")
        return history

    # ---------------------------------------------------------------------------------------------------- what is read

    def _system(self, message: SystemMessage) -> None:
        texts = [message.content] if isinstance(message.content, str) else [block.text for block in message.content]
        for text in filter(str.strip, texts):
            self._interrupt_code()
            self._request(SystemPromptPart(text))

    def _user(self, message: UserMessage, where: str) -> None:
        blocks = [WireText(text=message.content)] if isinstance(message.content, str) else message.content
        results = [block for block in blocks if isinstance(block, WireResult)]
        shown = [block for block in blocks if not isinstance(block, WireResult)]
        answered = {result.tool_use_id: result for result in results}
        missing = sorted({*self._direct, *self._by_code} - set(answered))
        if missing:
            raise ApiError(
                400, f"{where}: tool_use ids without a tool_result in the next message: {', '.join(missing[:8])}"
            )
        if self._by_code and shown:
            raise ApiError(
                400, f"{where}: while code waits for calls, only tool_result blocks are allowed, not {shown[0].type}"
            )
        for id, result in answered.items():
            if id in self._direct:
                self._request(_returned(self._direct.pop(id), result, where))
            elif id not in self._by_code:
                raise ApiError(400, f"{where}: no tool_use before it has the id of the tool_result {id[:80]!r}")
        if self._by_code:
            code_ids = set(self._by_code.values())
            results_of = {id: result for id, result in answered.items() if id in self._by_code}
            self.pending = PendingAnswers(code_ids.pop(), results_of)
            self._by_code.clear()
        contents = [content for block in shown for content in _content(block, where)]
        if contents:
            self._interrupt_code()
            alone = contents[0] if len(contents) == 1 else None
            self._request(UserPromptPart(alone if isinstance(alone, str) else contents))

    def _assistant(self, message: AssistantMessage, where: str) -> None:
        if self._direct or self._by_code:
            raise ApiError(400, f"{where}: the calls of the message before have no tool_result")
        blocks = [WireText(text=message.content)] if isinstance(message.content, str) else message.content
        for index, block in enumerate(blocks):
            self.add(block, f"{where}.content.{index}")

    def add(self, block: Any, where: str = "the answer") -> None:
        """Add a block of an answer.

        Raises:
            ApiError: it does not belong there.
        """
        if isinstance(block, WireText) and block.text.strip():
            self._respond(TextPart(block.text))
        elif isinstance(block, WireThinking):
            self._respond(_thinking(block))
        elif isinstance(block, WireCall):
            self._call(block, where)
        elif isinstance(block, WireCode):
            if block.id in self._code:
                raise ApiError(400, f"{where}: two server_tool_use blocks have the id {block.id[:80]!r}")
            call = ToolCallPart(self._code_tool, dict(block.input), block.id)
            self._respond(call)
            self._code[block.id] = call
        elif isinstance(block, WireCodeResult):
            code = self._code.pop(block.tool_use_id, None)
            if code is None:
                raise ApiError(
                    400, f"{where}: no server_tool_use without a result has the id {block.tool_use_id[:80]!r}"
                )
            self._request(_code_returned(code, block))

    def refuse(self, call: ToolCallPart, why: str) -> None:
        """Tell the model, when it is asked next, that a call of its cannot be made. The client sees neither."""
        self._respond(call)
        self._refused.append(ToolReturnPart(call.tool_name, why, call.tool_call_id, outcome="failed"))

    def model_turn(self) -> list[ModelMessage]:
        """The messages, with all that the model has to be told before its next answer."""
        for part in self._refused:
            self._request(part)
        self._refused.clear()
        return self.messages

    def _call(self, block: WireCall, where: str) -> None:
        if block.id in self._direct or block.id in self._by_code:
            raise ApiError(400, f"{where}: two tool_use blocks have the id {block.id[:80]!r}")
        code_id = block.code_id
        if code_id is None:
            self._direct[block.id] = call = ToolCallPart(block.name, dict(block.input), block.id)
            self._respond(call)
        elif code_id not in self._code:
            raise ApiError(400, f"{where}.caller: no server_tool_use without a result has the id {code_id[:80]!r}")
        elif {code_id} != {*self._by_code.values(), code_id}:
            raise ApiError(400, f"{where}.caller: calls of two server_tool_use blocks are pending")
        else:
            self._by_code[block.id] = code_id

    # ------------------------------------------------------------------------------------------------- what is written

    def _respond(self, part: ModelResponsePart) -> None:
        if not self.messages or not isinstance(self.messages[-1], ModelResponse):
            self._interrupt_code()
            self.messages.append(ModelResponse(parts=[part]))
        else:
            self.messages[-1].parts = [*self.messages[-1].parts, part]

    def _request(self, part: ModelRequestPart) -> None:
        if not self.messages or not isinstance(self.messages[-1], ModelRequest):
            self.messages.append(ModelRequest(parts=[part]))
        else:
            self.messages[-1].parts = [*self.messages[-1].parts, part]

    def _interrupt_code(self) -> None:
        """Code that was left waiting has a result too: models must be shown one for every call."""
        left, self._code = self._code, {}
        for call in left.values():
            self._request(interrupted(call))


# --------------------------------------------------------------------------------------------------------------- parts


def _content(block: WireText | WireImage | WireDocument, where: str) -> Sequence[UserContent]:
    if isinstance(block, WireText):
        return [block.text] if block.text.strip() else []
    source = block.source
    if isinstance(source, WireAddress):
        return [ImageUrl(source.url) if isinstance(block, WireImage) else DocumentUrl(source.url)]
    if isinstance(source, WirePlain):
        return [source.data] if source.data.strip() else []
    try:
        return [BinaryContent(base64.b64decode(source.data, validate=True), media_type=source.media_type)]
    except (binascii.Error, ValueError):
        raise ApiError(400, f"{where}: the data of the {block.type} is no base64") from None


def _returned(call: ToolCallPart, result: WireResult, where: str) -> ToolReturnPart:
    content = result.content or ""
    if not isinstance(content, str):
        parts = [part for block in content for part in _content(block, where)]
        content = "\n".join(map(str, parts)) if all(isinstance(part, str) for part in parts) else parts  # type: ignore[assignment]
    outcome: Any = "failed" if result.is_error else "success"
    return ToolReturnPart(call.tool_name, content or _BLANK, call.tool_call_id, outcome=outcome)


def result_text(result: WireResult) -> str:
    """A result as code gets it: text.

    Raises:
        ApiError: it is an image or a document, which code cannot be given.
    """
    if isinstance(result.content, str):
        return result.content
    other = next((block.type for block in result.content or () if not isinstance(block, WireText)), None)
    if other is not None:
        raise ApiError(400, f"the result of {result.tool_use_id[:80]!r} has {other}; a call by code takes text only")
    return "\n".join(block.text for block in result.content or () if isinstance(block, WireText))


def _code_returned(call: ToolCallPart, block: WireCodeResult) -> ToolReturnPart:
    result = block.content
    if isinstance(result, WireCodeError):
        text = f"The code was not run to its end: {_STOPPED.get(result.error_code, result.error_code)}."
        return ToolReturnPart(call.tool_name, text, call.tool_call_id, outcome="failed")
    lines = [result.stdout.rstrip("\n")] if result.stdout.strip() else []
    if result.stderr.strip():
        lines.append(f"[stderr]\n{result.stderr.rstrip()}")
    text = "\n".join(lines) or "[no output; print what you want to see]"
    outcome: Any = "failed" if result.return_code else "success"
    return ToolReturnPart(call.tool_name, text, call.tool_call_id, outcome=outcome)


def signature(part: ThinkingPart) -> str:
    """The signature of a thinking block: all that its provider gave besides its text."""
    kept = {
        name: value
        for name in ("id", "signature", "provider_name", "provider_details")
        if (value := getattr(part, name)) is not None
    }
    return _SIGNED + base64.b64encode(pydantic_core.to_json(kept)).decode() if kept else ""


def _thinking(block: WireThinking) -> ThinkingPart:
    """The part of the provider again. A signature that is not ours is dropped, with all that it may have meant."""
    if block.signature.startswith(_SIGNED):
        try:
            kept = pydantic_core.from_json(base64.b64decode(block.signature.removeprefix(_SIGNED), validate=True))
            return _THINKING.validate_python({**kept, "content": block.thinking})
        except (ValueError, TypeError, ValidationError):
            pass
    return ThinkingPart(block.thinking)
