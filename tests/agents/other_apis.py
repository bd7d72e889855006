"""Servers that speak OpenAI's chat completions and responses and Bedrock's Converse, as far as one exchange needs."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.agents.http_server import Quiet, served

CALL = ("shell", {"command": "echo from inside"})
DONE = "All done."


@dataclass
class OtherApi:
    """Calls `shell` when it is first asked, and is done with the second answer."""

    url: str = ""
    paths: list[str] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)


@contextmanager
def serving() -> Iterator[OtherApi]:
    api = OtherApi()

    class Handler(Quiet):
        def do_POST(self) -> None:  # noqa: N802 - as the base class calls it
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            first = not api.requests
            api.paths.append(self.path)
            api.requests.append(body)
            kind, data = _answer(self.path, body, first=first)
            self.send_response(200)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    with served(Handler) as api.url:
        yield api


def _answer(path: str, body: dict[str, Any], *, first: bool) -> tuple[str, bytes]:
    if path.endswith("/chat/completions"):
        return _chat(first, streams=bool(body.get("stream")))
    if path.endswith("/responses"):
        return _responses(first, streams=bool(body.get("stream")))
    if path.endswith("/converse-stream"):
        return "application/vnd.amazon.eventstream", b"".join(_converse_events(first))
    assert path.endswith("/converse"), path
    return "application/json", json.dumps(_converse(first)).encode()


def _sse(events: list[dict[str, Any]], *, named: bool) -> tuple[str, bytes]:
    lines = [(f"event: {event['type']}\n" if named else "") + f"data: {json.dumps(event)}\n\n" for event in events]
    return "text/event-stream", "".join([*lines, "" if named else "data: [DONE]\n\n"]).encode()


# ------------------------------------------------------------------------------------------------------------- OpenAI


def _chat(first: bool, *, streams: bool) -> tuple[str, bytes]:
    name, input = CALL
    call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": json.dumps(input)}}
    said: dict[str, Any] = {"content": None, "tool_calls": [call]} if first else {"content": DONE}
    reason = "tool_calls" if first else "stop"
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    about = {"id": "chat_1", "created": 1, "model": "m"}
    if not streams:
        choice = {"index": 0, "message": {"role": "assistant", **said}, "finish_reason": reason}
        whole = {**about, "object": "chat.completion", "choices": [choice], "usage": usage}
        return "application/json", json.dumps(whole).encode()
    if first:
        said = {"tool_calls": [{"index": 0, **call}]}
    chunk = {**about, "object": "chat.completion.chunk"}
    return _sse(
        [
            {**chunk, "choices": [{"index": 0, "delta": {"role": "assistant", **said}, "finish_reason": None}]},
            {**chunk, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]},
            {**chunk, "choices": [], "usage": usage},
        ],
        named=False,
    )


def _responses(first: bool, *, streams: bool) -> tuple[str, bytes]:
    name, input = CALL
    arguments = json.dumps(input)
    part = {"type": "output_text", "text": DONE, "annotations": []}
    item: dict[str, Any] = (
        {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": name, "arguments": arguments}
        if first
        else {"type": "message", "id": "msg_1", "role": "assistant", "content": [part]}
    )
    item["status"] = "completed"
    details: dict[str, Any] = {
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }
    response: dict[str, Any] = {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "model": "m",
        "status": "completed",
        "output": [item],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {"input_tokens": 10, "output_tokens": 5, "total_tokens": 15, **details},
    }
    if not streams:
        return "application/json", json.dumps(response).encode()
    begun = item | {"status": "in_progress"}
    begun["arguments" if first else "content"] = "" if first else []
    at = {"item_id": item["id"], "output_index": 0}
    pieces: list[dict[str, Any]] = (
        [
            {"type": "response.function_call_arguments.delta", **at, "delta": arguments},
            {"type": "response.function_call_arguments.done", **at, "arguments": arguments, "name": name},
        ]
        if first
        else [
            {"type": "response.content_part.added", **at, "content_index": 0, "part": {**part, "text": ""}},
            {"type": "response.output_text.delta", **at, "content_index": 0, "delta": DONE, "logprobs": []},
            {"type": "response.output_text.done", **at, "content_index": 0, "text": DONE, "logprobs": []},
            {"type": "response.content_part.done", **at, "content_index": 0, "part": part},
        ]
    )
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": {**response, "status": "in_progress", "output": [], "usage": None}},
        {"type": "response.output_item.added", "output_index": 0, "item": begun},
        *pieces,
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": response},
    ]
    return _sse([{**event, "sequence_number": number} for number, event in enumerate(events)], named=True)


# ------------------------------------------------------------------------------------------------------------ Bedrock


def _converse(first: bool) -> dict[str, Any]:
    name, input = CALL
    block = {"toolUse": {"toolUseId": "t_1", "name": name, "input": input}} if first else {"text": DONE}
    return {
        "output": {"message": {"role": "assistant", "content": [block]}},
        "stopReason": "tool_use" if first else "end_turn",
        "usage": {"inputTokens": 10, "outputTokens": 5, "totalTokens": 15},
        "metrics": {"latencyMs": 1},
    }


def _converse_events(first: bool) -> Iterator[bytes]:
    name, input = CALL
    yield _framed("messageStart", {"role": "assistant"})
    if first:
        start = {"toolUse": {"toolUseId": "t_1", "name": name}}
        yield _framed("contentBlockStart", {"contentBlockIndex": 0, "start": start})
    delta: dict[str, Any] = {"toolUse": {"input": json.dumps(input)}} if first else {"text": DONE}
    yield _framed("contentBlockDelta", {"contentBlockIndex": 0, "delta": delta})
    yield _framed("contentBlockStop", {"contentBlockIndex": 0})
    whole = _converse(first)
    yield _framed("messageStop", {"stopReason": whole["stopReason"]})
    yield _framed("metadata", {"usage": whole["usage"], "metrics": whole["metrics"]})


def _framed(event: str, payload: dict[str, Any]) -> bytes:
    """A message of AWS's event stream: lengths, their checksum, headers, payload, and the checksum of it all."""
    headers = b""
    for key, value in {":event-type": event, ":content-type": "application/json", ":message-type": "event"}.items():
        headers += struct.pack("!B", len(key)) + key.encode() + b"\x07" + struct.pack("!H", len(value)) + value.encode()
    data = json.dumps(payload).encode()
    prelude = struct.pack("!II", 12 + len(headers) + len(data) + 4, len(headers))
    message = prelude + struct.pack("!I", zlib.crc32(prelude)) + headers + data
    return message + struct.pack("!I", zlib.crc32(message))
