"""What docs/mcp.md tells people to copy works."""

from __future__ import annotations

import ast
import inspect
import json
import re
from pathlib import Path
from types import CodeType

import pytest
from mcp import Client

from atoll import Engine
from tests.mcp.serving import Program, listening, names

PAGE = (Path(__file__).parents[2] / "docs" / "mcp.md").read_text()


async def test_the_configurations_lead_to_tools(host: Engine, program: Program) -> None:
    local, remote = (
        json.loads(text)["mcpServers"]["atoll"] for text in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    )
    assert (local["command"], local["args"][0]) == ("atoll", "mcp")
    async with Client(program(*local["args"][1:])) as client:
        assert {tool.name for tool in (await client.list_tools()).tools} == names("coding")
    async with listening(host) as url, Client(url) as client:
        assert re.sub(r":\d+/", ":8000/", url) == remote["url"]
        assert {tool.name for tool in (await client.list_tools()).tools} == names("agent")


async def test_the_app_is_mounted_as_it_says(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_STATE_DIR", str(state_dir))
    (snippet,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    code = compile(snippet, "mcp.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    assert isinstance(code, CodeType)
    coroutine = eval(code, {})
    assert inspect.iscoroutine(coroutine)
    await coroutine
