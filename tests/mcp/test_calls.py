"""Calls while they run: progress and cancellation. And messages that are not calls."""

from __future__ import annotations

import anyio
import pytest
from mcp import Client

from atoll import Engine
from atoll.testing.waiting import BOUND_S, eventually
from tests.mcp.serving import Program, by_hand, listening, shell, started

LONG = "echo begun; (setsid sh -c 'sleep 4712; true' &); sleep 4711"
"""A command with a daemon below it."""


async def _sleepers(host: Engine) -> list[str]:
    """What still runs of it, in whichever sandbox there is."""
    (info,) = await host.list()
    sandbox = await host.get(info.name)
    return [each.command for each in await sandbox.ps() if "sleep 471" in str(each.command)]


@pytest.mark.parametrize("transport", ["stdio", "http"])
async def test_a_long_call_tells_how_far_it_is_and_dies_with_its_cancellation(
    host: Engine, program: Program, transport: str
) -> None:
    async def follow(client: Client) -> None:
        told: list[tuple[float, str | None]] = []
        with anyio.CancelScope() as scope:

            async def hear(progress: float, total: float | None, message: str | None) -> None:
                told.append((progress, message))
                assert len(await _sleepers(host)) >= 2
                scope.cancel()

            await client.call_tool("shell", {"command": LONG}, progress_callback=hear)
        assert scope.cancelled_caught
        ((progress, message),) = told
        assert 0.9 <= progress < 10
        assert message == f"{progress:.0f} s: begun"
        await eventually(lambda: _gone(host), "nothing of it runs")
        assert await shell(client, "echo on") == "on\n"

    if transport == "stdio":
        async with Client(program()) as client:
            await follow(client)
    else:
        async with listening(host) as url, Client(url) as client:
            await follow(client)


async def _gone(host: Engine) -> bool:
    return not await _sleepers(host)


async def test_a_client_over_http_that_goes_away_ends_what_it_waited_for(host: Engine) -> None:
    async with listening(host) as url, by_hand(url) as http:
        await http.begin()
        await http.shell("true")
        body = {
            "jsonrpc": "2.0",
            "id": 5,
            "method": "tools/call",
            "params": {"name": "shell", "arguments": {"command": LONG}},
        }
        async with http.client.stream("POST", url, json=body, headers=http.headers) as answer:
            assert answer.status_code == 200
            await eventually(lambda: _sleepers(host), "the command runs")
        await eventually(lambda: _gone(host), "nothing of it runs")
        assert (await http.shell("echo on"))["stdout"] == "on\n"


async def test_an_invalid_message_is_an_error_and_ends_nothing(program: Program) -> None:
    async with started(program.state_dir, words=program.words) as raw:
        for said, id, code in (
            (b"{bad", None, -32700),
            (b"\xff\xfe", None, -32700),
            (b"[" * 100_000, None, -32700),
            (b"[]", None, -32600),
            (b'{"jsonrpc":"2.0","id":7,"method":5}', 7, -32600),
            (b'{"jsonrpc":"2.0","id":1.5,"method":"ping"}', None, -32600),
            (b'{"jsonrpc":"2.0","id":null,"method":"ping"}', None, -32600),
            (b'"' + b"x" * (16 * 1024 * 1024) + b'"', None, -32600),
        ):
            await raw.send(said)
            answer = await raw.receive()
            assert (answer["id"], answer["error"]["code"]) == (id, code), said[:40]
        await raw.send(b"", b"   ", b'{"jsonrpc":"2.0","id":7,"error":{"code":1,"message":"not to be sent back"}}')
        await raw.begin()
        for request, code in (
            ({"jsonrpc": "2.0", "id": 8, "method": "nonsense"}, -32601),
            ({"jsonrpc": "2.0", "id": 8, "method": "tools/call", "params": {"arguments": []}}, -32602),
            ({"jsonrpc": "2.0", "id": 8, "method": "resources/read", "params": {"uri": 5}}, -32602),
        ):
            await raw.send(request)
            answer = await raw.receive()
            assert (answer["id"], answer["error"]["code"]) == (8, code), request
        result = await raw.ask("tools/call", name="shell", arguments={"command": "echo still here"})
        assert result["structuredContent"]["stdout"] == "still here\n"
        await raw.process.stdin.aclose()  # type: ignore[union-attr]
        assert await raw.process.wait() == 0


async def test_pending_requests_are_limited_and_further_ones_are_refused(program: Program) -> None:
    async with started(program.state_dir, words=program.words) as raw:
        await raw.begin()
        call = {"name": "shell", "arguments": {"command": "sleep 4711"}}
        await raw.send(*({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": call} for id in range(258)))
        for _ in range(2):
            refused = await raw.receive()
            assert (refused["id"] >= 256, refused["error"]["code"]) == (True, -32603)
            assert "256 requests are pending" in refused["error"]["message"]
        # What is cancelled does not wait, though it is not answered.
        note = {"jsonrpc": "2.0", "method": "notifications/cancelled"}
        await raw.send(*({**note, "params": {"requestId": id}} for id in range(256)))

        async def answered() -> bool:
            await raw.send({"jsonrpc": "2.0", "id": 300, "method": "ping"})
            return "result" in await raw.receive()

        await eventually(answered, "there is room again")
        await raw.process.stdin.aclose()  # type: ignore[union-attr]
        assert await raw.process.wait() == 0


async def test_a_client_that_reads_nothing_holds_nothing(program: Program) -> None:
    async with started(program.state_dir, words=program.words) as raw:
        await raw.begin()
        await raw.ask("tools/call", name="shell", arguments={"command": "(sleep 4711 &)"})
        list_tools = {"jsonrpc": "2.0", "id": 3, "method": "tools/list"}
        await raw.send(*[list_tools] * 50)  # far more than a pipe takes
        await raw.process.stdin.aclose()  # type: ignore[union-attr]
        with anyio.fail_after(BOUND_S):
            assert await raw.process.wait() == 0
