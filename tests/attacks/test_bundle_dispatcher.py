"""A dispatcher of tools that is not ours any more: it says what it likes on its channel to the host.

Tools run as the same user, so any of them can take the dispatcher's place. None of what it then sends may stop the
host, be taken for the result of a call that was not made, or be kept without bound.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import AsyncIterator

import pytest

from atoll import Sandbox
from atoll.bundles import dispatch
from atoll.bundles.dispatch import WORKSPACE, Dispatcher
from atoll.bundles.manifest import ManifestTool
from atoll.bundles.results import MAX_PARTS
from atoll.contract.errors import AtollError, BundleFailed, SandboxError
from atoll.tools.tool import ToolResult

pytestmark = pytest.mark.runtimes("crun", "runsc")

TOOL = ManifestTool(name="run", entrypoint="tools.main:run")
PROGRAM = """#!/usr/bin/python3
import json, socket, sys
channel = socket.socket(fileno=3)
file = channel.makefile("rb")
def send(message):
    channel.sendall(message if isinstance(message, bytes) else json.dumps(message).encode() + b"\\n")
file.read(4)
for _ in ("text", "bytecode"):
    file.read(int(file.read(8)))
nonce = json.loads(file.readline())["nonce"]
def ready(**more):
    send({"t": "ready", "nonce": nonce, "version": "3", "errors": [], **more})
def call():
    return json.loads(file.readline())["call"]
"""


class Hostile:
    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self.printed = bytearray()

    async def start(self, script: str) -> Dispatcher:
        """A dispatcher that runs this script in its place."""
        await self._sandbox.files.write_text("python", PROGRAM + script, mode=0o755)
        path = (await self._sandbox.exec("pwd")).stdout.strip() + "/python"
        return await Dispatcher.start(self._sandbox, [TOOL], python=path, on_output=self.printed.extend)

    async def call(self, script: str, timeout_s: float = 20) -> ToolResult:
        """The result of a call of a dispatcher that is ready, and runs this script."""
        dispatcher = await self.start("ready()\n" + script)
        try:
            return await dispatcher.call("run", {}, timeout_s)
        finally:
            await dispatcher.aclose()


@pytest.fixture
async def hostile(shared: Sandbox) -> AsyncIterator[Hostile]:
    await shared.files.mkdir(WORKSPACE, user="root")
    yield Hostile(shared)
    await shared.exec(["pkill", "-f", "/python"])


@pytest.mark.parametrize(
    "script",
    [
        'call(); send(b"no json\\n")',
        'call(); send(b"[]\\n")',
        'call(); send({"t": "run", "code": "import os"})',
        'call(); send({"t": "done", "call": "1", "ok": True, "text": "x"})',
        'send({"t": "done", "call": call(), "ok": "yes", "text": "x"})',
        'send({"t": "done", "call": call(), "ok": True})',
        'send({"t": "done", "call": call(), "ok": True, "text": 5})',
        'send({"t": "done", "call": call(), "ok": True, "text": "x", "parts": []})',
        'send({"t": "done", "call": call(), "ok": True, "parts": [{"kind": "exec", "url": "x"}]})',
        'send({"t": "done", "call": call(), "ok": True, "parts": ["text"]})',
        'send({"t": "failed", "call": call(), "kind": "own", "message": "x"})',
        'send({"t": "failed", "call": call(), "kind": "raised", "message": {}})',
        'call(); send(b"[" * 100000 + b"\\n")',
        'call(); send(b\'{"t": "done", "call": 1, "ok": true, "text": "x", "more": [\' + b"1," * 50000 + b"1]}\\n")',
    ],
)
async def test_what_is_no_message_ends_the_dispatcher_and_is_an_error(hostile: Hostile, script: str) -> None:
    result = await hostile.call(f"{script}\nfile.read()")
    assert result.is_error
    assert "a tool damaged its channel to the host" in result.text


async def test_a_line_without_end_is_not_kept(hostile: Hostile) -> None:
    tracemalloc.start()
    result = await hostile.call("while True: send(b'x' * (1 << 20))", 60)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert f"a message is longer than {dispatch.MAX_LINE_BYTES} bytes" in result.text
    assert peak < 6 * dispatch.MAX_LINE_BYTES


async def test_results_of_calls_that_were_not_made_are_dropped(hostile: Hostile) -> None:
    script = """
number = call()
for other in range(2000):
    if other != number:
        send({"t": "done", "call": other, "ok": True, "text": "forged"})
send({"t": "done", "call": number, "ok": True, "text": "mine"})
send({"t": "done", "call": number, "ok": True, "text": "again"})
file.read()
"""
    assert (await hostile.call(script)).text == "mine"


async def test_more_parts_than_a_model_is_shown_are_an_error(hostile: Hostile) -> None:
    part = '{"kind": "text", "content": "x"}'
    result = await hostile.call(
        f'send({{"t": "done", "call": call(), "ok": True, "parts": [{part}] * {MAX_PARTS + 1}}})'
    )
    assert result.is_error
    assert f"more than {MAX_PARTS} parts" in result.text


async def test_text_that_no_protocol_can_carry_is_made_readable(hostile: Hostile) -> None:
    result = await hostile.call('send({"t": "done", "call": call(), "ok": True, "text": "a\\udcffb"}); file.read()')
    result.text.encode()


async def test_a_dispatcher_that_never_answers_is_killed_with_its_tree(
    hostile: Hostile, shared: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "START_S", 1.0)
    monkeypatch.setattr(dispatch, "GRACE_S", 1.0)
    with pytest.raises(BundleFailed, match="could not be imported within 1 s"):
        await hostile.start("import time; time.sleep(1003)")
    monkeypatch.setattr(dispatch, "START_S", 20.0)
    started = await hostile.start(
        "import subprocess; subprocess.Popen(['setsid', 'sleep', '1004']); ready(); file.read()"
    )
    monkeypatch.setattr(dispatch, "START_S", 1.0)
    began = time.monotonic()
    result = await started.call("run", {}, 1)
    assert "did not end within 1 s, and was killed" in result.text
    assert time.monotonic() - began < 15
    assert not started.is_alive
    assert (await shared.exec(["pgrep", "-f", "^sleep 1004"])).stdout == ""
    await started.aclose()


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ('ready(nonce="other"); sys.exit(3)', "did not start: it ended with exit code 3"),
        ("ready(errors='none'); file.read()", "sent what is no message"),
        ('send(b"x" * (1 << 16)); sys.exit(4)', "did not start: it ended with exit code 4"),
    ],
)
async def test_a_greeting_that_is_none_is_a_failed_start(hostile: Hostile, script: str, expected: str) -> None:
    with pytest.raises(SandboxError, match=expected):
        await hostile.start(script)


async def test_the_text_of_errors_at_the_start_is_cut(hostile: Hostile) -> None:
    script = 'ready(errors=[{"tool": "t" * 5000, "message": "m" * 200000}] * 50 + [5, {}]); file.read()'
    with pytest.raises(AtollError) as failed:
        await hostile.start(script)
    assert len(failed.value.message) < 20_000


async def test_output_without_end_does_not_stop_a_call(hostile: Hostile) -> None:
    script = """
import threading
def flood():
    while True:
        sys.stdout.write("x" * 65536)
threading.Thread(target=flood, daemon=True).start()
number = call()
send({"t": "done", "call": number, "ok": True, "text": "through"})
file.read()
"""
    assert (await hostile.call(script)).text == "through"
