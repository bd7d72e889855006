"""Every tool of every vocabulary, listed and called by the official client, over standard streams and over HTTP."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from mcp import Client
from mcp_types import ImageContent, ResourceLink, TextContent

from atoll import Engine
from tests.mcp.serving import CHOICES, WALK, Program, listening, names
from tests.tools.test_coding import IMAGES


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
            assert tool.title
            refused = await client.call_tool(name, {"nonsense": 1})
            assert refused.is_error
            assert refused.structured_content is None
            assert "there is no field 'nonsense'" in text_of(refused)
            assert text_of(refused).startswith("Error: ") == name.startswith("sprite_")
        read_only = {name for name, tool in listed.items() if tool.annotations and tool.annotations.read_only_hint}
        assert read_only == names(tools) & {
            *("read_file", "glob", "sandbox_list", "read", "grep", "sprite_list", "sprite_list_checkpoints")
        }


async def test_a_client_gets_text_to_read_data_beside_it_and_images_as_images(host: Engine) -> None:
    async with listening(host) as url, Client(url) as client:
        result = await client.call_tool("shell", {"command": "echo out; echo err >&2; exit 3"})
        assert text_of(result) == "out\n[stderr]\nerr\n[exit code 3]"
        assert result.structured_content == {"stdout": "out\n", "stderr": "err\n", "exit_code": 3}
        data = base64.b64encode(IMAGES["a.png"][0]).decode()
        await client.call_tool("shell", {"command": f"echo {data} | base64 -d > plot.png"})
        result = await client.call_tool("read_file", {"path": "plot.png"})
        text, image = result.content
        assert isinstance(text, TextContent)
        assert isinstance(image, ImageContent)
        assert (image.mime_type, image.data) == ("image/png", data)


async def test_figures_of_code_are_images_and_its_output_is_progress(host: Engine) -> None:
    data = base64.b64encode(IMAGES["a.png"][0]).decode()
    code = (
        f"import base64, time\nclass Figure:\n    def __init__(self, data): self.data = data\n"
        f"    def _repr_png_(self): return self.data\n"
        f"display(Figure(b'no image'))\ndisplay(Figure(base64.b64decode('{data}')))\n"
        "print('half way')\ntime.sleep(1.5)"
    )
    told: list[str] = []

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        told.append(message or "")

    async with listening(host, "code") as url, Client(url) as client:
        result = await client.call_tool("execute_code", {"code": code}, progress_callback=hear)
        images = [part for part in result.content if isinstance(part, ImageContent)]
        assert [(image.mime_type, image.data) for image in images] == [("image/png", data)]
        assert "half way" in text_of(result)
        assert any("half way" in message for message in told)


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
