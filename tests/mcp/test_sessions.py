"""A client session has sandboxes that no other client can reach, and that end with it, however it ends."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import anyio
import pytest
from mcp import Client, MCPError
from mcp_types import TextContent

import atoll
from atoll import Engine
from atoll.testing.waiting import BOUND_S, eventually
from tests.mcp.serving import HANDSHAKE, PROGRAM, Program, by_hand, environment, listening, shell, started


async def refused(client: Client, tool: str, **arguments: object) -> str:
    result = await client.call_tool(tool, arguments)
    assert result.is_error, result
    (part,) = result.content
    assert isinstance(part, TextContent)
    return part.text


async def assert_apart(one: Client, other: Client, host: Engine) -> None:
    """What `one` has, `other` cannot name, list, read or use, though it knew all that there is to know."""
    await shell(one, "echo treasure > file", sandbox="hidden")
    await one.call_tool("sprite_checkpoint", {"name": "hidden", "checkpointName": "mark"})
    (info,) = await host.list()
    (checkpoint,) = await host.checkpoints()
    assert info.name.startswith("mcp-")
    await shell(other, "echo mine > file")
    known = [
        await refused(other, "read_file", sandbox="hidden", path="file"),
        await refused(other, "read_file", sandbox=info.name, path="file"),
        await refused(other, "transfer", from_sandbox=info.name, from_path="file", to_sandbox="default", to_path="x"),
        await refused(other, "sprite_exec", name="hidden", command="cat file"),
        await refused(other, "sprite_exec", name=info.id, command="cat file"),
        await refused(other, "sprite_restore", name="default", checkpointId=checkpoint.id),
        await refused(other, "sprite_fork", name="default", newName="x", checkpointId=checkpoint.id),
        await refused(other, "sprite_wake", name=f"../{info.id}"),
    ]
    for uri in ("sandbox://hidden/home/user/file", f"sandbox://{info.name}/home/user/file"):
        with pytest.raises(MCPError) as caught:
            await other.read_resource(uri)
        known.append(caught.value.message)
    # Nothing that is said names what there is besides, other than what the client said itself.
    assert not [text for text in known if "treasure" in text or text.count("mcp-") > text.count(info.name)]
    assert not [text for text in known if text.count("hidden") > 2]
    listed = (await other.call_tool("sandbox_list", {})).structured_content
    assert [each["name"] for each in listed["sandboxes"]] == ["default"]
    assert [each["name"] for each in (await other.call_tool("sprite_list", {})).structured_content["sprites"]] == [
        "default"
    ]
    assert [each.uri for each in (await other.list_resources()).resources] == ["sandbox://default/home/user/file"]
    assert await shell(one, "cat file", sandbox="hidden") == "treasure\n"


async def test_two_clients_on_standard_streams_do_not_see_each_other(host: Engine, program: Program) -> None:
    server = program("--tools", "agent,sprites")
    async with Client(server) as one, Client(server) as other:
        await assert_apart(one, other, host)


async def test_two_clients_over_http_do_not_see_each_other_and_sessions_cannot_be_guessed(host: Engine) -> None:
    async with listening(host, "agent,sprites") as url:
        async with Client(url) as one, Client(url) as other:
            await assert_apart(one, other, host)
            (first, _) = sorted({info.name.partition(".")[0] for info in await host.list()})
            async with by_hand(url) as guessing:
                for guess in (first, first.removeprefix("mcp-"), "0" * 32, "../x", "*"):
                    guessing.session = guess
                    answer = await guessing.post("tools/list")
                    assert answer.status_code == 404
                    assert "no such session" in answer.json()["error"]["message"]
                    assert (await guessing.client.delete(url, headers=guessing.headers)).status_code == 404
        await eventually(lambda: _none(host), "both sessions have ended")


async def _none(host: Engine) -> bool:
    return not await host.list() and not await host.checkpoints()


# ------------------------------------------------------------------------------------------------------------ their end


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
async def test_a_server_that_is_ended_in_the_midst_of_a_command_leaves_nothing(
    state_dir: Path, number: signal.Signals
) -> None:
    async with started(state_dir) as raw:
        await raw.begin()
        await raw.ask("tools/call", name="shell", arguments={"command": "true"})
        command = "(setsid sleep 4711 &); sleep 4711"
        call = {"name": "shell", "arguments": {"command": command}, "_meta": {"progressToken": "p"}}
        await raw.send({"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": call})
        assert (await raw.receive())["method"] == "notifications/progress"
        raw.process.send_signal(number)
        with anyio.fail_after(BOUND_S):
            assert await raw.process.wait() == (-number if number == signal.SIGKILL else 128 + number)
    if number == signal.SIGKILL:
        # The killed server could not clean up. The next process that uses the state directory does.
        async with atoll.open(state_dir) as host:
            await eventually(lambda: _none(host), "what was left is put away")


CLIENT = """
import json, subprocess, sys, time
server = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
for message in json.loads(sys.stdin.readline()):
    server.stdin.write(json.dumps(message).encode() + b"\\n")
    server.stdin.flush()
    if "id" in message:
        server.stdout.readline()
print(server.pid, flush=True)
time.sleep(600)
"""


async def test_a_client_that_is_killed_leaves_no_server_and_no_sandbox(host: Engine) -> None:
    say = [
        {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": HANDSHAKE},
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {
            "jsonrpc": "2.0",
            "id": 2,
            "method": "tools/call",
            "params": {"name": "shell", "arguments": {"command": "(sleep 4711 &)"}},
        },
    ]
    async with await anyio.open_process(
        [sys.executable, "-c", CLIENT, *PROGRAM], env=environment(host.state_dir), stderr=None
    ) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        await client.stdin.send(json.dumps(say).encode() + b"\n")
        with anyio.fail_after(BOUND_S):
            server = int(await client.stdout.receive())
        assert len(await host.list()) == 1
        client.kill()
    await eventually(lambda: not Path(f"/proc/{server}").exists(), "the server ends")
    assert await _none(host)


async def test_a_named_session_finds_its_sandboxes_again_and_they_sleep_while_it_is_closed(
    host: Engine, program: Program
) -> None:
    server = program("--session", "diary")
    async with Client(server) as client:
        await shell(client, "echo kept > file; sleep 4711 > /dev/null 2>&1 & echo $! > pid")
        assert client.instructions is not None
        assert "kept for the next time" in client.instructions
        for fact in ("not the user's machine", "Image: host (", "Installed, among others: bash", "There is no network"):
            assert fact in client.instructions
        async with Client(server) as other:
            assert await shell(other, "cat file") == "kept\n"
        await shell(client, "kill -0 $(cat pid)")  # what it began goes on, though another has left the session
    (info,) = await host.list()
    assert (info.name, info.status) == ("diary.default", "sleeping")
    async with Client(server) as client:
        assert await shell(client, "cat file") == "kept\n"
    await host.destroy("diary.default")


async def test_stopping_a_server_over_http_ends_its_sessions(state_dir: Path) -> None:
    async with started(state_dir, "--http", "127.0.0.1:0") as raw:
        assert raw.process.stdout is not None
        with anyio.fail_after(BOUND_S):
            url = (await raw.process.stdout.receive()).decode().strip()
        async with by_hand(url) as http:
            await http.begin()
            assert (await http.shell("(sleep 4711 &)"))["exit_code"] == 0
            raw.process.terminate()
            with anyio.fail_after(BOUND_S):
                assert await raw.process.wait() == 128 + signal.SIGTERM


async def test_an_idle_session_over_http_ends(host: Engine) -> None:
    async with listening(host, idle_s=1) as url, by_hand(url) as http:
        await http.begin()
        # A request that takes longer than that is a use of it.
        assert (await http.shell("sleep 1.3; echo yes"))["stdout"] == "yes\n"
        assert len(await host.list()) == 1
        await eventually(lambda: _none(host), "the session ends")
        assert (await http.post("tools/list")).status_code == 404


async def test_there_are_so_many_sessions_and_no_more(host: Engine) -> None:
    async with listening(host, sessions=1) as url, by_hand(url) as one, by_hand(url) as other:
        assert (await one.post("tools/list")).status_code == 400  # begins nothing
        await one.begin()
        full = await other.post("initialize", **HANDSHAKE)
        assert full.status_code == 503
        assert "limit of 1 sessions" in full.json()["error"]["message"]
        assert (await one.client.delete(url, headers=one.headers)).status_code == 200

        async def room() -> bool:
            answer = await other.post("initialize", **HANDSHAKE)
            return answer.status_code == 200

        await eventually(room, "there is room again")


async def test_the_operators_mounts_are_in_every_sandbox_and_a_client_cannot_ask_for_others(
    program: Program, tmp_path: Path
) -> None:
    (tmp_path / "notes").write_text("shared")
    tmp_path.chmod(0o755)
    async with Client(program("--tools", "agent", "--mount", f"{tmp_path}:/project")) as client:
        assert client.instructions is not None
        assert "Shared with the user: /project (read-only)." in client.instructions
        assert str(tmp_path) not in client.instructions
        assert await shell(client, "cat /project/notes") == "shared"
        refused = await client.call_tool("sandbox_create", {"sandbox": "more", "mounts": ["/etc:/etc2"]})
        assert refused.is_error
        await client.call_tool("sandbox_create", {"sandbox": "more"})
        assert await shell(client, "cat /project/notes; touch /project/x 2>&1 | grep -c Read-only", sandbox="more") == (
            "shared1\n"
        )
