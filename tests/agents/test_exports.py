"""Tools as `export.py` writes them, used with each provider's own client and nothing of ours between."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from pydantic import TypeAdapter

from atoll.tools import export
from atoll.tools.coding import coding_tools
from atoll.tools.sprites import sprite_tools
from tests.agents.conftest import Anthropic
from tests.agents.messages_api import Say
from tests.agents.other_apis import DONE, OtherApi, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from atoll.runtime.sandbox_pool import SandboxPool

pytestmark = pytest.mark.anyio


@pytest.fixture
def api() -> Iterator[OtherApi]:
    with serving() as api:
        yield api


async def test_anthropics_client_drives_the_tools(pool: SandboxPool, anthropic: Anthropic) -> None:
    from anthropic import AsyncAnthropic

    api = anthropic([Say("I look.", [("shell", {"command": "echo in"}), ("shell", {})]), Say("Seen.")])
    tools = pool.tools()
    messages: list[Any] = [{"role": "user", "content": "Look"}]
    async with AsyncAnthropic() as client:
        while True:
            said = await client.messages.create(
                model="m",
                max_tokens=100,
                messages=messages,
                tools=export.definitions(tools, "anthropic"),  # type: ignore[arg-type]
            )
            messages.append({"role": "assistant", "content": said.content})
            if said.stop_reason != "tool_use":
                break
            results = [
                export.result(await tools.handle_tool_call(block.name, block.input), "anthropic", block.id)
                for block in said.content
                if block.type == "tool_use"
            ]
            messages.append({"role": "user", "content": results})
    assert api.complaints == []
    good, bad = api.requests[1]["messages"][2]["content"]
    assert good["content"] == "in\n"
    assert (bad["is_error"], "command is missing" in bad["content"]) == (True, True)


async def test_openais_client_drives_the_tools_in_chats(pool: SandboxPool, api: OtherApi) -> None:
    from openai import AsyncOpenAI

    tools = pool.tools()
    messages: list[Any] = [{"role": "user", "content": "Look"}]
    async with AsyncOpenAI(base_url=f"{api.url}/v1", api_key="x") as client:
        while True:
            answer = await client.chat.completions.create(
                model="m",
                messages=messages,
                tools=export.definitions(tools, "openai-chat"),  # type: ignore[arg-type]
            )
            said: Any = answer.choices[0].message
            messages.append(said)
            if not said.tool_calls:
                break
            for call in said.tool_calls:
                result = await tools.handle_tool_call(call.function.name, call.function.arguments)
                messages.append(export.result(result, "openai-chat", call.id))
    assert said.content == DONE
    assert "from inside" in api.requests[1]["messages"][-1]["content"]


async def test_openais_client_drives_the_tools_in_responses(pool: SandboxPool, api: OtherApi) -> None:
    from openai import AsyncOpenAI

    tools = pool.tools()
    items: list[Any] = [{"role": "user", "content": "Look"}]
    async with AsyncOpenAI(base_url=f"{api.url}/v1", api_key="x") as client:
        while True:
            said = await client.responses.create(
                model="m",
                input=items,
                tools=export.definitions(tools, "openai-responses"),  # type: ignore[arg-type]
            )
            items += said.output
            calls = [item for item in said.output if item.type == "function_call"]
            if not calls:
                break
            for call in calls:
                result = await tools.handle_tool_call(call.name, call.arguments)
                items.append(export.result(result, "openai-responses", call.call_id))
    assert said.output_text == DONE
    assert "from inside" in api.requests[1]["input"][-1]["output"]


async def test_every_tool_has_the_shape_that_each_client_declares(pool: SandboxPool) -> None:
    from anthropic.types import ToolParam
    from mcp.types import Tool as McpTool
    from openai.types.chat import ChatCompletionFunctionToolParam
    from openai.types.responses import FunctionToolParam

    shapes: dict[export.ToolProtocol, Any] = {
        "anthropic": ToolParam,
        "openai-chat": ChatCompletionFunctionToolParam,
        "openai-responses": FunctionToolParam,
        "mcp": McpTool,
    }
    for tools in (pool.tools(), sprite_tools(pool), coding_tools(await pool.get())):
        for protocol, shape in shapes.items():
            for definition in export.definitions(tools, protocol):
                TypeAdapter(shape).validate_python(definition)
