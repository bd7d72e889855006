"""How an answer is written: its blocks, whole or as a stream of events, with tokens and container.

Owns the shapes that clients read. Not here: when which block is written (`turn.py`), and HTTP (`http.py`). Used by
both.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from anyio.abc import ObjectSendStream
from pydantic_ai.messages import ModelResponse

from atoll.code.results import ExecutionResult
from atoll.tools.tool import readable

StopReason = Literal["end_turn", "max_tokens", "tool_use", "pause_turn", "refusal"]


class AnswerWriter(Protocol):
    """Where the blocks of an answer go."""

    streams: bool

    async def block(self, block: dict[str, Any]) -> None:
        """A whole block."""

    async def open(self, block: dict[str, Any]) -> None:
        """The beginning of a block, to which `delta` adds until `close`."""

    async def delta(self, delta: dict[str, Any]) -> None: ...

    async def close(self) -> None: ...

    async def finish(self, stop: StopReason, container: dict[str, Any] | None, usage: dict[str, Any]) -> None: ...


@dataclass
class UsedTokens:
    """Tokens of all requests to the model in one turn, as clients count them: without what was cached."""

    input: int = 0
    output: int = 0
    cache_read: int = 0
    cache_write: int = 0

    def add(self, response: ModelResponse) -> None:
        used = response.usage
        self.input += max(0, used.input_tokens - used.cache_read_tokens - used.cache_write_tokens)
        self.output += used.output_tokens
        self.cache_read += used.cache_read_tokens
        self.cache_write += used.cache_write_tokens

    @property
    def total(self) -> int:
        return self.input + self.output + self.cache_read + self.cache_write

    def wire(self) -> dict[str, Any]:
        return {
            "input_tokens": self.input,
            "output_tokens": self.output,
            "cache_read_input_tokens": self.cache_read,
            "cache_creation_input_tokens": self.cache_write,
        }


class WholeAnswer:
    """The answer as one message."""

    streams = False

    def __init__(self, model: str) -> None:
        self._model = model
        self._content: list[dict[str, Any]] = []
        self.message: dict[str, Any] = {}

    async def block(self, block: dict[str, Any]) -> None:
        self._content.append(block)

    async def open(self, block: dict[str, Any]) -> None:
        raise AssertionError(f"blocks come whole, not as {block}")

    delta = open

    async def close(self) -> None:
        raise AssertionError("blocks come whole")

    async def finish(self, stop: StopReason, container: dict[str, Any] | None, usage: dict[str, Any]) -> None:
        self.message = {
            **_new_message(self._model, usage),
            "content": self._content,
            "stop_reason": stop,
            "container": container,
        }


class StreamedAnswer:
    """The answer as events. The first one is sent when there is something to tell: until then, an error can have a
    status of its own."""

    streams = True

    def __init__(self, model: str, events: ObjectSendStream[dict[str, Any]]) -> None:
        self._model = model
        self._events = events
        self._index = -1
        self.has_begun = False

    async def begin(self) -> None:
        """Send the beginning of the message, once."""
        if not self.has_begun:
            self.has_begun = True
            await self._events.send(
                {"type": "message_start", "message": _new_message(self._model, UsedTokens().wire())}
            )

    async def block(self, block: dict[str, Any]) -> None:
        if "input" not in block and block["type"] != "text":
            await self.open(block)  # results come whole
        elif block["type"] == "text":
            await self.open({**block, "text": ""})
            await self.delta({"type": "text_delta", "text": block["text"]})
        else:
            await self.open({**block, "input": {}})
            await self.delta({"type": "input_json_delta", "partial_json": json.dumps(block["input"])})
        await self.close()

    async def open(self, block: dict[str, Any]) -> None:
        await self.begin()
        self._index += 1
        await self._events.send({"type": "content_block_start", "index": self._index, "content_block": block})

    async def delta(self, delta: dict[str, Any]) -> None:
        await self._events.send({"type": "content_block_delta", "index": self._index, "delta": delta})

    async def close(self) -> None:
        await self._events.send({"type": "content_block_stop", "index": self._index})

    async def finish(self, stop: StopReason, container: dict[str, Any] | None, usage: dict[str, Any]) -> None:
        await self.begin()
        delta = {"stop_reason": stop, "stop_sequence": None, "container": container}
        await self._events.send({"type": "message_delta", "delta": delta, "usage": usage})
        await self._events.send({"type": "message_stop"})


def _new_message(model: str, usage: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "container": None,
        "usage": {**usage, "service_tier": "standard"},
    }


def code_error(id: str, code: str) -> dict[str, Any]:
    """The block that says why code has no result."""
    content = {"type": "code_execution_tool_result_error", "error_code": code}
    return {"type": "code_execution_tool_result", "tool_use_id": id, "content": content}


def code_result(id: str, result: ExecutionResult) -> dict[str, Any]:
    """The block with the result of code. What a cell shows besides its output is among it: there are no files here."""
    if result.timed_out:
        return code_error(id, "execution_time_exceeded")
    out = [result.output.rstrip("\n")] if result.output.strip() else []
    out += [str(part.data["text/plain"]) for part in result.parts if "text/plain" in part.data]
    out += [f"[file: outbox/{each.path}, {each.size_bytes} bytes]" for each in result.files]
    if result.output_file is not None:
        out.append(f"[the whole output is in {result.output_file}]")
    err = [result.stderr.rstrip("\n")] if result.stderr.strip() else []
    err += [f"warning: {each}" for each in result.warnings]
    if result.error is not None:
        err.append(result.error.traceback.rstrip() or f"{result.error.type}: {result.error.message}")
    if result.session_replaced:
        err.append("the session was restarted: its variables are lost, its files are there")
    content: dict[str, Any] = {
        "type": "code_execution_result",
        "stdout": readable("".join(f"{each}\n" for each in out)),
        "stderr": readable("".join(f"{each}\n" for each in err)),
        "return_code": 0 if result.success else 1,
        "content": [],
    }
    return {"type": "code_execution_tool_result", "tool_use_id": id, "content": content}
