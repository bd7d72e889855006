"""How tests reach the server as clients do, and a walk through every tool that all clients take."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.abc
import httpx2
from mcp import Client, StdioServerParameters

import atoll
from atoll.surfaces.mcp import ServerConfig
from atoll.surfaces.mcp.http import listen
from atoll.testing.waiting import BOUND_S
from atoll.tools.vocabularies import VOCABULARIES

PROGRAM = [sys.executable, "-m", "atoll.surfaces.cli", "mcp"]
"""For tests about how the program ends. Others begin a copy of one that was started before."""
CHOICES = ("workspace,sprites", "agent", "coding", "code")
"""All vocabularies, as they can be offered."""


class Step(NamedTuple):
    tool: str
    arguments: dict[str, Any]
    says: str
    """What the text of the answer holds."""


_SERVER = "(python3 -m http.server 8000 --bind 127.0.0.1 >/dev/null 2>&1 &)"
_AGENT = (
    Step("shell", {"command": f"echo hello > a.txt; {_SERVER}; echo done"}, "done"),
    Step("write_file", {"path": "b.txt", "content": "written"}, "wrote b.txt, which has 7 bytes now"),
    Step("read_file", {"path": "b.txt"}, "written"),
    Step("glob", {"pattern": "*.txt"}, "a.txt\nb.txt"),
    Step("browse", {"port": 8000}, "http://"),
    Step("sandbox_create", {"sandbox": "work"}, "created the sandbox 'work'"),
    Step(
        "transfer",
        {"from_sandbox": "default", "from_path": "a.txt", "to_sandbox": "work", "to_path": "c.txt"},
        "copied 6 bytes",
    ),
    Step("sandbox_list", {}, "work: running, image host"),
)
WALK: Mapping[str, Sequence[Step]] = {
    "agent": _AGENT,
    "workspace,sprites": (
        *_AGENT,
        Step("edit_file", {"path": "b.txt", "old_text": "written", "new_text": "edited"}, "replaced 1 match"),
        Step("grep", {"pattern": "ED$", "ignore_case": True}, "b.txt:1: edited"),
        Step("shell", {"command": "id -un", "user": "root"}, "root"),
        Step("sandbox_destroy", {"sandbox": "work"}, "destroyed the sandbox 'work'"),
        Step("sprite_create", {"name": "s"}, '"status":"running"'),
        Step("sprite_checkpoint", {"name": "s", "checkpointName": "one"}, '"name":"one"'),
        Step("sprite_exec", {"name": "s", "command": "echo $((6 * 7)) | tee file"}, '"stdout":"42\\n"'),
        Step("sprite_list_checkpoints", {"name": "s"}, '[{"id":"cp-'),
        Step("sprite_restore", {"name": "s", "checkpointId": "one"}, '"message":'),
        Step("sprite_fork", {"name": "s", "newName": "t"}, '"name":"t"'),
        Step("sprite_shutdown", {"name": "s"}, '"status":"shutdown"'),
        Step("sprite_wake", {"name": "s"}, '"status":"running"'),
        Step("sprite_list", {}, '"name":"t"'),
        Step("sprite_destroy", {"name": "t"}, "t is destroyed"),
    ),
    "coding": (
        Step("write", {"path": "f.txt", "content": "one\ntwo\n"}, "wrote 8 bytes"),
        Step("edit", {"path": "f.txt", "oldText": "two", "newText": "three"}, "replaced 1 match"),
        Step("read", {"path": "f.txt"}, "     1\tone\n     2\tthree\n"),
        Step("bash", {"command": "wc -l f.txt"}, "2 f.txt"),
        Step("grep", {"pattern": "thr"}, "f.txt:2: three"),
        Step("glob", {"pattern": "*.txt"}, "f.txt"),
    ),
    "code": (
        Step("execute_code", {"code": "import asyncio\nx = await asyncio.sleep(0, 20)\nprint('set')"}, "set"),
        Step("execute_code", {"code": "x + 22"}, "42"),
        Step("execute_code", {"code": "1 / 0"}, "ZeroDivisionError: division by zero"),
    ),
}


def names(tools: str) -> set[str]:
    """The tools that are offered: all but those that a server must be given more for."""
    return set().union(*(VOCABULARIES[each].tool_names for each in tools.split(","))) - {"task", "save_file"}


def environment(state_dir: Path) -> dict[str, str]:
    return {**os.environ, "ATOLL_STATE_DIR": str(state_dir)}


class Program:
    """The server, as a client starts it."""

    def __init__(self, words: list[str], state_dir: Path) -> None:
        self.words = words
        self.state_dir = state_dir

    def __call__(self, *arguments: str) -> StdioServerParameters:
        command, *rest = [*self.words, *arguments]
        return StdioServerParameters(command=command, args=rest, env=environment(self.state_dir), cwd="/")


@asynccontextmanager
async def listening(
    engine: atoll.Engine, tools: str = "agent", config: ServerConfig | None = None, **options: Any
) -> AsyncIterator[str]:
    """A server at an address, in this process. Gives its URL."""
    config = config or ServerConfig(tools.split(","))
    async with anyio.create_task_group() as tasks:
        url: list[str] = []
        ready = anyio.Event()

        def on_ready(ready_url: str) -> None:
            url.append(ready_url)
            ready.set()

        async def serve() -> None:
            await listen(engine, config, "127.0.0.1", 0, on_ready=on_ready, **options)

        tasks.start_soon(serve)
        await ready.wait()
        yield url[0]
        tasks.cancel_scope.cancel()


async def shell(client: Client, command: str, **arguments: Any) -> str:
    """The output of a command that went well."""
    result = await client.call_tool("shell", {"command": command, **arguments})
    assert not result.is_error, result.content
    assert result.structured_content["exit_code"] == 0, result.structured_content
    return str(result.structured_content["stdout"])


class Raw:
    """The server on standard streams, and what a client would not send."""

    def __init__(self, process: anyio.abc.Process) -> None:
        self.process = process
        self._kept = b""

    async def send(self, *messages: object) -> None:
        assert self.process.stdin is not None
        lines = [each if isinstance(each, bytes) else json.dumps(each).encode() for each in messages]
        await self.process.stdin.send(b"".join(line + b"\n" for line in lines))

    async def receive(self) -> dict[str, Any]:
        """The next message. All that comes has to be one."""
        assert self.process.stdout is not None
        with anyio.fail_after(BOUND_S):
            while b"\n" not in self._kept:
                self._kept += await self.process.stdout.receive()
        line, _, self._kept = self._kept.partition(b"\n")
        message = json.loads(line)
        assert message["jsonrpc"] == "2.0"
        return dict(message)

    async def ask(self, method: str, **params: object) -> dict[str, Any]:
        """The result of a request."""
        await self.send({"jsonrpc": "2.0", "id": 1, "method": method, "params": params})
        answer = await self.receive()
        return dict(answer["result"])

    async def begin(self) -> None:
        await self.ask("initialize", **HANDSHAKE)
        await self.send({"jsonrpc": "2.0", "method": "notifications/initialized"})


HANDSHAKE: dict[str, Any] = {
    "protocolVersion": "2025-11-25",
    "capabilities": {},
    "clientInfo": {"name": "test", "version": "1"},
}


@asynccontextmanager
async def started(state_dir: Path, *arguments: str, words: Sequence[str] = PROGRAM) -> AsyncIterator[Raw]:
    async with await anyio.open_process(
        [*words, *arguments], env=environment(state_dir), stderr=None, cwd="/"
    ) as process:
        try:
            yield Raw(process)
        finally:
            with suppress(ProcessLookupError):
                process.kill()


class Http:
    """A session over HTTP, by hand. It ends by nothing that is done here."""

    def __init__(self, url: str, client: httpx2.AsyncClient) -> None:
        self.url = url
        self.client = client
        self.session = ""

    @property
    def headers(self) -> dict[str, str]:
        said = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
        return {**said, "Mcp-Session-Id": self.session} if self.session else said

    async def post(self, method: str, **params: object) -> httpx2.Response:
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        return await self.client.post(self.url, json=body, headers=self.headers)

    async def begin(self) -> None:
        answer = await self.post("initialize", **HANDSHAKE)
        assert answer.status_code == 200, answer.text
        self.session = answer.headers["Mcp-Session-Id"]
        note = {"jsonrpc": "2.0", "method": "notifications/initialized"}
        assert (await self.client.post(self.url, json=note, headers=self.headers)).status_code == 202

    async def shell(self, command: str) -> dict[str, Any]:
        answer = await self.post("tools/call", name="shell", arguments={"command": command})
        assert answer.status_code == 200, answer.text
        (line,) = [line for line in answer.text.splitlines() if line.startswith("data: ")]
        return dict(json.loads(line.removeprefix("data: "))["result"]["structuredContent"])


@asynccontextmanager
async def by_hand(url: str) -> AsyncIterator[Http]:
    async with httpx2.AsyncClient(timeout=BOUND_S) as client:
        yield Http(url, client)
