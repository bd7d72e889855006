"""The tools of MCP servers in a registry: real servers over standard streams, HTTP, and in the process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import mcp
import pytest
from mcp.server.lowlevel import Server
from mcp_types import CallToolResult, ListToolsResult, TextContent, Tool

from atoll import InvalidRequest, ToolCallError, ToolCallerType, ToolRegistry
from atoll.contract.errors import CallerError
from atoll.surfaces.door import listen
from atoll.testing.plugin import LeakCheck
from atoll.testing.waiting import BOUND_S
from tests.code import mcp_program

CODE = ToolCallerType.CODE_EXECUTION
COMMAND = [sys.executable, str(Path(__file__).with_name("mcp_program.py"))]
NAMES = ("end", "environment", "get_user", "import_", "say")


@pytest.fixture(autouse=True)
async def nothing_left(leak_check: LeakCheck) -> None:
    """A server that a registry has started ends with it."""


@pytest.fixture
async def registry(nothing_left: None) -> AsyncIterator[ToolRegistry]:
    async with ToolRegistry() as registry:
        yield registry


async def failure(registry: ToolRegistry, name: str, /, **arguments: Any) -> tuple[str, str]:
    with pytest.raises(ToolCallError) as caught:
        await registry.call(name, arguments, caller=CODE)
    return caught.value.type, caught.value.message


async def test_a_program_becomes_tools_and_ends_with_the_registry() -> None:
    async with ToolRegistry() as registry:
        assert await registry.add_mcp(COMMAND) == NAMES
        assert registry["get_user"].original_name == "get-user"
        assert await registry.call("get_user", {"name": "ada"}, caller=CODE) == {"name": "ada", "age": 3}
        assert await registry.call("say", {"text": "hi"}, caller=CODE) == "hi"
        assert await registry.call("import_", {}, caller=CODE) == "first 1\n[left out: an image, image/png]\nsecond"
        kind, said = await failure(registry, "get_user", name="nobody there")
        assert kind == "ToolError"
        assert "no such user" in said
        kind, said = await failure(registry, "get_user", name="ada", age="old")
        assert (kind, said) == (
            "InvalidArguments", "the arguments of get-user are invalid: age: 'old' is not of type 'integer'",
        )  # fmt: skip
        assert (await failure(registry, "get_user"))[1].endswith("'name' is a required property")
        found = await asyncio.gather(*(registry.call("say", {"text": str(n)}, caller=CODE) for n in range(20)))
        assert found == [str(n) for n in range(20)]
    assert (await failure(registry, "say", text="hi"))[0] in {"ConnectionError", "McpError"}


async def test_the_documentation_comes_from_the_servers_schemas(registry: ToolRegistry) -> None:
    await registry.add_mcp(mcp_program.server, prefix="hub_")
    text = registry.documentation()
    assert "class HubGetUserResult(TypedDict):\n    name: str\n    age: NotRequired[int | None]\n" in text
    assert 'async def hub_get_user(name: str, age: int = 3) -> HubGetUserResult:\n    """Find a user."""' in text
    assert 'async def hub_say(text: str) -> str:\n    """Say a text."""' in text


async def test_a_servers_environment_is_the_hosts_and_its_own(registry: ToolRegistry) -> None:
    parameters = mcp.StdioServerParameters(command=COMMAND[0], args=COMMAND[1:], env={"TOKEN": "s3cret"})
    await registry.add_mcp(parameters)
    assert await registry.call("environment", {"name": "TOKEN"}, caller=CODE) == "s3cret"
    assert "s3cret" not in registry.documentation() + str(registry.stubs())


async def test_a_connected_session_stays_the_callers() -> None:
    async with mcp.Client(mcp_program.server) as client:
        for given in (client, client.session):
            async with ToolRegistry() as registry:
                assert await registry.add_mcp(given) == NAMES
                assert await registry.call("say", {"text": "a"}, caller=CODE) == "a"
        assert (await client.call_tool("say", {"text": "still"})).content[0].text == "still"  # type: ignore[union-attr]


async def test_a_server_over_http(registry: ToolRegistry) -> None:
    ready: list[str] = []
    listening = anyio.Event()

    def on_ready(url: str) -> None:
        ready.append(url)
        listening.set()

    async with anyio.create_task_group() as group:
        app = mcp_program.server.streamable_http_app(json_response=True)
        group.start_soon(
            lambda: listen(app, "127.0.0.1", 0, on_ready=on_ready, on_stop=lambda: None, grace_s=1)
        )  # fmt: skip
        with anyio.fail_after(BOUND_S):
            await listening.wait()
            await registry.add_mcp(f"{ready[0]}/mcp")
            assert await registry.call("get_user", {"name": "ada"}, caller=CODE) == {"name": "ada", "age": 3}
            await registry.aclose()
        group.cancel_scope.cancel()


async def test_any_task_may_close_the_registry() -> None:
    registry = ToolRegistry()
    await asyncio.create_task(registry.add_mcp(COMMAND))
    await asyncio.create_task(registry.aclose())
    await registry.aclose()


async def test_a_server_that_ends_in_a_call_is_an_error_of_the_call(registry: ToolRegistry) -> None:
    await registry.add_mcp(COMMAND)
    with anyio.fail_after(BOUND_S):
        assert (await failure(registry, "end"))[0] in {"ConnectionError", "McpError"}
        assert (await failure(registry, "say", text="x"))[0] in {"ConnectionError", "McpError"}


async def test_a_call_of_a_server_times_out(registry: ToolRegistry) -> None:
    await registry.add_mcp(mcp_program.server, timeout_s=0.000001)
    assert await failure(registry, "say", text="x") == ("TimeoutError", "say timed out after 1e-06 s")


@pytest.mark.parametrize(
    ("server", "error", "said"),
    [
        ([], InvalidRequest, "the command of the MCP server is empty"),
        ("npx server", InvalidRequest, "'npx server' is no URL of an MCP server .* a command is a list of words"),
        (["/no/such/program", "--token=s3cret"], CallerError, "the MCP server '/no/such/program' cannot be used: "),
        (["/bin/false"], CallerError, "the MCP server '/bin/false' cannot be used: "),
        ("http://127.0.0.1:1/mcp?token=s3cret", CallerError, "the MCP server at http://127.0.0.1:1 cannot be used: "),
    ],
)
async def test_a_server_that_cannot_be_used_is_named_without_its_secrets(
    registry: ToolRegistry, server: Any, error: type[Exception], said: str
) -> None:
    with anyio.fail_after(BOUND_S), pytest.raises(error, match=said) as caught:
        await registry.add_mcp(server)
    assert "s3cret" not in str(caught.value)
    assert len(registry) == 0


async def test_names_that_are_taken_add_nothing_and_a_prefix_helps(registry: ToolRegistry) -> None:
    registry.register(lambda: 1, name="say")
    with pytest.raises(InvalidRequest, match=r"a tool is named 'say' already; .*prefix= of add_mcp"):
        await registry.add_mcp(mcp_program.server)
    assert [tool.name for tool in registry] == ["say"]
    assert "hub_say" in await registry.add_mcp(mcp_program.server, prefix="hub_", allowed_callers=["direct"])
    assert registry["hub_say"].allowed_callers == {ToolCallerType.DIRECT}
    assert (await registry.direct_tools().handle_tool_call("hub_say", {"text": "a"})).text == "a"
    with pytest.raises(InvalidRequest, match="the prefix '1-' is not the beginning of an identifier"):
        await registry.add_mcp(mcp_program.server, prefix="1-")


# --------------------------------------------------------------------------------------------------------- odd servers


def odd_server(schema: dict[str, Any], calls: list[Any], *, pages: int = 1) -> Server[Any]:
    async def list_tools(_context: Any, params: Any) -> ListToolsResult:
        page = int((params and params.cursor) or 0)
        tool = Tool(name=f"odd {page}", description='says """', input_schema=schema)
        return ListToolsResult(tools=[tool], next_cursor=str(page + 1) if page + 1 < pages else None)

    async def call_tool(_context: Any, params: Any) -> CallToolResult:
        calls.append(params.arguments)
        return CallToolResult(content=[TextContent(text="ok")])

    return Server("odd", on_list_tools=list_tools, on_call_tool=call_tool)


async def test_all_pages_are_read_and_an_endless_list_is_refused(registry: ToolRegistry) -> None:
    assert await registry.add_mcp(odd_server({"type": "object"}, [], pages=3)) == ("odd_0", "odd_1", "odd_2")
    with anyio.fail_after(BOUND_S), pytest.raises(CallerError, match="lists more than 2000 tools"):
        await registry.add_mcp(odd_server({"type": "object"}, [], pages=10**9), prefix="more_")


async def test_parameters_that_code_cannot_write_have_names_that_it_can(registry: ToolRegistry) -> None:
    calls: list[Any] = []
    names = {"user-id": {"type": "integer"}, "user_id": {}, "class": {"type": "string"}, "1": {}}
    schema = {"type": "object", "properties": names, "required": ["class"], "additionalProperties": False}
    await registry.add_mcp(odd_server(schema, calls))
    (stub, _), _ = registry.stubs()
    assert [name for name, _ in stub["params"]] == ["class_", "user_id_", "user_id", "value_1"]
    await registry.call("odd_0", {"class_": "a", "user_id_": 1, "value_1": 2}, caller=CODE)
    await registry.call("odd_0", {"class": "a", "user-id": 1}, caller=CODE)
    assert calls == [{"class": "a", "user-id": 1, "1": 2}, {"class": "a", "user-id": 1}]
    assert "no" in (await failure(registry, "odd_0", class_="a", other=1))[1]


async def test_a_pattern_of_a_server_cannot_stall_the_host(registry: ToolRegistry) -> None:
    calls: list[Any] = []
    schema = {"type": "object", "properties": {"text": {"type": "string", "pattern": "^(a+)+$"}}}
    await registry.add_mcp(odd_server(schema, calls))
    with anyio.fail_after(BOUND_S):
        await registry.call("odd_0", {"text": "a" * 64 + "!"}, caller=CODE)
    assert len(calls) == 1


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"$ref": "https://example.com/schema.json"}}},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {"type": "object", "properties": {"a": {"type": "nonsense"}}},
        {"type": "object", "properties": {"a": True}, "patternProperties": {"(x+x+)+y": {}}},
        {"type": "object", "properties": "none"},
    ],
)
async def test_a_schema_that_makes_no_sense_is_left_to_the_server(
    registry: ToolRegistry, schema: dict[str, Any]
) -> None:
    calls: list[Any] = []
    await registry.add_mcp(odd_server(schema, calls))
    with anyio.fail_after(BOUND_S):
        assert await registry.call("odd_0", {"a": 1}, caller=CODE) == "ok"
    assert calls == [{"a": 1}]
    assert "async def odd_0(" in registry.documentation()


async def test_large_arguments_are_bounded(registry: ToolRegistry) -> None:
    calls: list[Any] = []
    await registry.add_mcp(odd_server({"type": "object", "properties": {"a": {"type": "array"}}}, calls))
    assert await registry.call("odd_0", {"a": [1] * 20_000}, caller=CODE) == "ok"
    kind, said = await failure(registry, "odd_0", a="x" * 5_000_000)
    assert kind == "InvalidArguments"
    assert "allowed are 4,194,304" in said
    assert len(calls) == 1
