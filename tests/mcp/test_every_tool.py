"""Every tool of every vocabulary, listed and called by the official client, over standard streams and over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from mcp import Client
from mcp_types import ResourceLink, TextContent

from atoll import Engine
from tests.mcp.serving import CHOICES, WALK, Program, listening, names


@asynccontextmanager
async def connected(transport: str, tools: str, host: Engine, program: Program) -> AsyncIterator[Client]:
    if transport == "stdio":
        async with Client(program("--tools", tools)) as client:
            yield client
    else:
        async with listening(host, tools) as url, Client(url) as client:
            yield client


def text_of(result: Any) -> str:
    return "".join(part.text for part in result.content if isinstance(part, TextContent))


@pytest.mark.parametrize("tools", CHOICES)
@pytest.mark.parametrize("transport", ["stdio", "http"])
async def test_the_official_client_lists_and_calls_every_tool(
    host: Engine, program: Program, transport: str, tools: str
) -> None:
    async with connected(transport, tools, host, program) as client:
        listed = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert set(listed) == names(tools)
        assert not [info for info in await host.list() if info.name.startswith("mcp-")]
        called = set()
        for step in WALK[tools]:
            # The client checks what is structured against the schema that it was shown, and would raise.
            result = await client.call_tool(step.tool, step.arguments)
            assert not result.is_error, (step, result.content)
            assert step.says in text_of(result), step
            assert result.structured_content is not None
            called.add(step.tool)
            if step.tool == "browse":
                (link,) = [part for part in result.content if isinstance(part, ResourceLink)]
                assert link.uri == result.structured_content["url"]
                assert link.name == "port 8000 of default"
        assert called == set(listed)
        for name, tool in listed.items():
            assert tool.output_schema is not None
            assert tool.annotations is not None
            assert tool.description
            refused = await client.call_tool(name, {"nonsense": 1})
            assert refused.is_error
            assert refused.structured_content is None
            assert "there is no field 'nonsense'" in text_of(refused)
            assert text_of(refused).startswith("Error: ") == name.startswith("sprite_")
        read_only = {name for name, tool in listed.items() if tool.annotations and tool.annotations.read_only_hint}
        assert read_only == names(tools) & {
            *("read_file", "glob", "sandbox_list", "read", "grep", "sprite_list", "sprite_list_checkpoints")
        }


async def test_listing_tools_creates_no_sandbox_and_an_unknown_tool_gets_a_suggestion(
    host: Engine,
) -> None:
    async with listening(host, "coding,sprites") as url, Client(url) as client:
        await client.list_tools()
        assert (await client.list_resources()).resources == []
        assert await host.list() == []
        unknown = await client.call_tool("bahs", {"command": "true"})
        assert unknown.is_error
        assert "did you mean 'bash'?" in text_of(unknown)
        assert await host.list() == []
