"""The endpoint on a port of loopback, scripted models behind it, and a client as its users write one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
from anthropic import AsyncAnthropic
from pydantic_ai.models import Model

from atoll import Engine
from atoll.agents.script import Script, scripted
from atoll.surfaces.messages import listen

Tools = Mapping[str, Callable[..., str]]
"""What the program makes calls with, by name."""
KEY = "the-key-of-one-client"
CODE: Any = {"type": "code_execution_20260120", "name": "code_execution"}
SALES = {
    "name": "query_sales",
    "description": "The sales of a region, as JSON.",
    "input_schema": {"type": "object", "properties": {"region": {"type": "string"}}, "required": ["region"]},
    "allowed_callers": ["code_execution_20260120"],
}
NOW = {"name": "now", "description": "The time.", "input_schema": {"type": "object", "properties": {}}}


def runs(code: str, *more: dict[str, Any], text: str = "", **expect: Any) -> dict[str, Any]:
    """A step of a script that executes code."""
    return {"text": text, "call": [{"tool": "execute_code", "input": {"code": code}}, *more], "expect": expect}


def says(text: str, *results: str, **expect: Any) -> dict[str, Any]:
    """A step that answers, and what the results before it have to contain."""
    return {"text": text, "expect": {"result": [{"contains": [each], "error": "any"} for each in results], **expect}}


def script(*steps: dict[str, Any]) -> Model:
    return scripted(Script.model_validate({"step": steps}))


@asynccontextmanager
async def serving(engine: Engine, model: Model, **options: Any) -> AsyncIterator[str]:
    """The URL of a server, in this process."""
    async with anyio.create_task_group() as tasks:
        urls: list[str] = []
        ready = anyio.Event()

        def on_ready(url: str) -> None:
            urls.append(url)
            ready.set()

        async def serve() -> None:
            await listen(engine, model, "127.0.0.1", 0, on_ready=on_ready, **options)

        tasks.start_soon(serve)
        await ready.wait()
        yield urls[0]
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def client(url: str, key: str = KEY) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as made:
        yield made


class HostedClient:
    """A program that was written for the hosted product: it makes calls until the turn ends."""

    def __init__(self, anthropic: AsyncAnthropic, *, streams: bool = False, **options: Any) -> None:
        self._anthropic = anthropic
        self._streams = streams
        self.options: dict[str, Any] = {"model": "claude-opus-5", "max_tokens": 1000, "tools": [CODE, SALES], **options}
        self.messages: list[Any] = []
        self.container: str | None = None
        self.pauses: list[list[Any]] = []
        """The calls of each pause."""

    async def create(self) -> Any:
        """One request."""
        given = {**self.options, "messages": self.messages}
        if self.container is not None:
            given["container"] = self.container
        if not self._streams:
            message = await self._anthropic.messages.create(**given)
        else:
            async with self._anthropic.messages.stream(**given) as stream:
                message = await stream.get_final_message()
        if message.container is not None:
            self.container = message.container.id
        self.messages.append({"role": "assistant", "content": message.content})
        return message

    async def run(self, prompt: str, tools: Tools | None = None) -> Any:
        """The last message of a turn."""
        self.messages.append({"role": "user", "content": prompt})
        while True:
            message = await self.create()
            if message.stop_reason != "tool_use":
                return message
            calls = [block for block in message.content if block.type == "tool_use"]
            self.pauses.append(calls)
            self.messages.append(answers({call.id: (tools or {})[call.name](**call.input) for call in calls}))


def answers(results: Mapping[str, str]) -> dict[str, Any]:
    """The user's message with results."""
    blocks = [{"type": "tool_result", "tool_use_id": id, "content": text} for id, text in results.items()]
    return {"role": "user", "content": blocks}


def text(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def blocks(message: Any) -> list[str]:
    return [block.type for block in message.content]
