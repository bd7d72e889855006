"""A server that speaks Anthropic's Messages API: the real client talks to it over HTTP, and it answers from a list.

It is as strict as the real one about what the loop could get wrong: headers, roles, that every call has its result in
the next message and nowhere else, and what a tool's definition looks like. What it refuses is a 400 with a reason.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from atoll.testing.waiting import BOUND_S
from tests.agents.http_server import Quiet, served

TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")


@dataclass(frozen=True)
class Say:
    """One answer."""

    text: str = ""
    calls: Sequence[tuple[str, Any]] = ()
    stop_reason: str | None = None
    thinking: str = ""
    input_tokens: int = 100
    output_tokens: int = 20
    breaks: str | None = None
    """`overloaded`: the stream ends with such an error in its middle. `drops`: its connection ends there. `ends`: the
    stream does, as if that were all."""
    cuts_call: bool = False
    """The arguments of the last call end in their middle."""
    id: str | None = None
    """What all calls are called."""
    after: threading.Event | None = None
    """It is not given before this is set."""

    def blocks(self, number: int) -> list[dict[str, Any]]:
        blocks: list[dict[str, Any]] = []
        if self.thinking:
            blocks.append({"type": "thinking", "thinking": self.thinking, "signature": "c2lnbmVk"})
        if self.text:
            blocks.append({"type": "text", "text": self.text})
        for index, (name, input) in enumerate(self.calls):
            id = self.id or f"toolu_{number}_{index}"
            blocks.append({"type": "tool_use", "id": id, "name": name, "input": input})
        return blocks

    def stop(self) -> str:
        return self.stop_reason or ("tool_use" if self.calls else "end_turn")


@dataclass(frozen=True)
class Refuse:
    """One answer that is an error."""

    status: int
    kind: str
    message: str = "no"


@dataclass(frozen=True)
class Raw:
    """One answer that is none."""

    body: str


OVERLOADED = Refuse(529, "overloaded_error", "Overloaded")


@dataclass
class MessagesApi:
    answers: list[Say | Refuse | Raw]
    requests: list[dict[str, Any]] = field(default_factory=list)
    """The bodies that it got, those it refused included."""
    complaints: list[str] = field(default_factory=list)
    url: str = ""

    def take(self, body: dict[str, Any], headers: Any) -> Say | Refuse | Raw:
        self.requests.append(body)
        wrong = _wrong(body, headers)
        if wrong is not None:
            self.complaints.append(wrong)
            return Refuse(400, "invalid_request_error", wrong)
        return self.answer(body)

    def answer(self, _body: dict[str, Any]) -> Say | Refuse | Raw:
        """The answer to a request that is right in itself."""
        if not self.answers:
            return Refuse(400, "invalid_request_error", "nothing more was expected to be asked")
        return self.answers.pop(0)


def _wrong(body: dict[str, Any], headers: Any) -> str | None:
    if "test-key" not in (headers.get("x-api-key"), headers.get("authorization", "").removeprefix("Bearer ")):
        return "x-api-key or authorization: Field required"
    if headers.get("anthropic-version") is None:
        return "anthropic-version: Field required"
    for name in ("model", "max_tokens", "messages"):
        if name not in body:
            return f"{name}: Field required"
    for tool in body.get("tools", []):
        if not TOOL_NAME.fullmatch(tool["name"]) or tool["input_schema"].get("type") != "object":
            return f"tools: {tool['name']}"
    open_calls: set[str] = set()
    before = None
    for index, message in enumerate(body["messages"]):
        role, content = message["role"], message["content"]
        if role == before or (before is None and role != "user"):
            return f"messages.{index}: roles must alternate, beginning with user"
        before = role
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not blocks:
            return f"messages.{index}: content must not be empty"
        results = [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]
        if role == "user" and sorted(results) != sorted(open_calls):
            return f"messages.{index}: tool_use ids {sorted(open_calls)} have the results {sorted(results)}"
        within = [block["content"] for block in blocks if isinstance(block.get("content"), list)]
        told = [*blocks, *(block for content in within for block in content)]
        if any(block["type"] == "text" and not block["text"].strip() for block in told):
            return f"messages.{index}: text content blocks must be non-empty"
        uses = [block for block in blocks if block["type"] == "tool_use"]
        if not all(TOOL_NAME.fullmatch(use["name"]) and isinstance(use["input"], dict) for use in uses):
            return f"messages.{index}: tool_use.name or tool_use.input"
        open_calls = {use["id"] for use in uses}
        if len(open_calls) < len(uses):
            return f"messages.{index}: tool_use ids must be unique"
    return "a final assistant message" if before == "assistant" else None


@contextmanager
def serving(answers: Sequence[Say | Refuse | Raw] | MessagesApi) -> Iterator[MessagesApi]:
    """The server, on a port of loopback."""
    api = answers if isinstance(answers, MessagesApi) else MessagesApi(list(answers))

    class Handler(Quiet):
        def do_POST(self) -> None:  # noqa: N802 - as the base class calls it
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if self.path.partition("?")[0] != "/v1/messages":
                self._json(404, {"type": "error", "error": {"type": "not_found_error", "message": self.path}})
                return
            answer = api.take(body, self.headers)
            if isinstance(answer, Say) and answer.after is not None:
                answer.after.wait(BOUND_S)
            number = len(api.requests)
            if isinstance(answer, Refuse):
                error = {"type": "error", "error": {"type": answer.kind, "message": answer.message}}
                self._json(answer.status, error)
            elif isinstance(answer, Raw):
                self._send(200, "text/event-stream" if body.get("stream") else "application/json", answer.body.encode())
            elif body.get("stream"):
                self._stream(body, answer, number)
            else:
                self._json(200, _message(body, answer.blocks(number), answer))

        def _json(self, status: int, body: dict[str, Any]) -> None:
            self._send(status, "application/json", json.dumps(body).encode())

        def _send(self, status: int, kind: str, data: bytes) -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(data)))
            self.send_header("retry-after-ms", "1")
            self.end_headers()
            self.wfile.write(data)

        def _stream(self, body: dict[str, Any], answer: Say, number: int) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("retry-after-ms", "1")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for event in _events(body, answer, number):
                self._chunk(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())
            if answer.breaks == "drops":
                self.close_connection = True  # in the middle of the body
            else:
                self._chunk(b"")

        def _chunk(self, data: bytes) -> None:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.flush()

    with served(Handler) as api.url:
        yield api


def _message(body: dict[str, Any], content: list[dict[str, Any]], answer: Say) -> dict[str, Any]:
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": body["model"],
        "content": content,
        "stop_reason": answer.stop(),
        "stop_sequence": None,
        "usage": {"input_tokens": answer.input_tokens, "output_tokens": answer.output_tokens},
    }


def _events(body: dict[str, Any], answer: Say, number: int) -> Iterator[dict[str, Any]]:
    begun = {**_message(body, [], answer), "stop_reason": None}
    yield {"type": "message_start", "message": {**begun, "usage": {**begun["usage"], "output_tokens": 1}}}
    yield {"type": "ping"}
    blocks = answer.blocks(number)
    for index, block in enumerate(blocks):
        yield {"type": "content_block_start", "index": index, "content_block": _begun(block)}
        cut = answer.cuts_call and index == len(blocks) - 1
        for delta in _deltas(block, cut=cut):
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        if answer.breaks == "overloaded":
            yield {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
        if answer.breaks:
            return
        yield {"type": "content_block_stop", "index": index}
    delta = {"stop_reason": answer.stop(), "stop_sequence": None}
    yield {"type": "message_delta", "delta": delta, "usage": {"output_tokens": answer.output_tokens}}
    yield {"type": "message_stop"}


def _begun(block: dict[str, Any]) -> dict[str, Any]:
    empty: dict[str, dict[str, Any]] = {
        "text": {"text": ""},
        "tool_use": {"input": {}},
        "thinking": {"thinking": "", "signature": ""},
    }
    return block | empty[block["type"]]


def _deltas(block: dict[str, Any], *, cut: bool) -> Iterator[dict[str, Any]]:
    if block["type"] == "text":
        for word in re.findall(r"\S+\s*", block["text"]):
            yield {"type": "text_delta", "text": word}
    elif block["type"] == "thinking":
        yield {"type": "thinking_delta", "thinking": block["thinking"]}
        yield {"type": "signature_delta", "signature": block["signature"]}
    else:
        written = json.dumps(block["input"])
        half = len(written) // 2
        yield {"type": "input_json_delta", "partial_json": written[:half]}
        if not cut:
            yield {"type": "input_json_delta", "partial_json": written[half:]}
