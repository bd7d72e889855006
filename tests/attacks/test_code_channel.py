"""Code that turns against its channel to the host.

All of it runs in the kernel's own process and owns it: the channel's socket, the stubs, the numbers of calls. None of
that may make a tool run that the host would refuse, stop or confuse the host, or reach another session.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from atoll import Engine, Sandbox
from atoll.code.messages import MAX_LINE_BYTES, MAX_PENDING, CallMessage
from atoll.code.session import CellOutcome, CodeSession

pytestmark = pytest.mark.runtimes("crun", "runsc")

STUBS: dict[str, Any] = {
    "tools": [
        {"name": "echo", "params": [["value", True]], "returns": "any"},
        {"name": "never", "params": [], "returns": "any"},
    ],
    "models": {},
}
SOCKET = (
    "import json\nkernel = type(echo).__call__.__globals__['kernel']\ns = kernel.channel.socket\n"
    "send = lambda m: s.sendall(json.dumps(m).encode() + b'\\n')\n"
)


class Handler:
    def __init__(self) -> None:
        self.calls: list[CallMessage] = []

    async def handle(self, call: CallMessage) -> dict[str, Any]:
        self.calls.append(call)
        if call.tool == "never":
            await asyncio.sleep(3600)
        return {"value": call.arguments.get("value")}


@pytest.fixture
async def hostile(shared: Sandbox) -> AsyncIterator[CodeSession]:
    session = await CodeSession.start(shared, Handler(), stubs=STUBS)
    yield session
    await session.aclose()


@pytest.fixture(scope="module")
async def bystanders_session(engine: Engine) -> AsyncIterator[CodeSession]:
    async with await engine.create() as sandbox:
        session = await CodeSession.start(sandbox, Handler(), stubs=STUBS)
        yield session
        await session.aclose()


@pytest.fixture
async def other_session(bystanders_session: CodeSession) -> AsyncIterator[CodeSession]:
    """Another session of the same process, which has to go on."""
    yield bystanders_session
    outcome = await bystanders_session.run("print(await echo('well'))", timeout_s=30)
    assert outcome.stdout.text()[0] == "well\n"


async def attack(session: CodeSession, code: str, timeout_s: float = 20) -> CellOutcome:
    with anyio.fail_after(60):
        return await session.run(SOCKET + code, timeout_s=timeout_s)


@pytest.mark.parametrize(
    "line",
    [
        "b'garbage\\n'",
        "b'[]\\n'",
        "b'{}\\n'",
        'b\'{"t":"unknown"}\\n\'',
        'b\'{"t":"call","call":"x","cell":1,"tool":"echo","args":{}}\\n\'',
        'b\'{"t":"call","call":1,"cell":1,"tool":["echo"],"args":{}}\\n\'',
        'b\'{"t":"call","call":1,"cell":1,"tool":"echo","args":[1]}\\n\'',
        'b\'{"t":"call","call":-1,"cell":1,"tool":"echo","args":{}}\\n\'',
        'b\'{"t":"done","cell":99999999999999999999}\\n\'',
        "b'\\xff\\xfe\\n'",
        "b'[' * 100000 + b'\\n'",
        'b\'{"t":"call","call":1,"cell":1,"tool":"echo","args":{"a":NaN}}\\n\'',
        'b\'{"t":"call","call":1,"cell":1,"tool":"\' + b\'x\' * 300 + b\'","args":{}}\\n\'',
    ],
)
async def test_a_line_that_is_no_message_ends_the_session_alone(
    hostile: CodeSession, other_session: CodeSession, line: str
) -> None:
    outcome = await attack(hostile, f"s.sendall({line})\nawait echo(1)")
    assert outcome.kernel_lost is not None
    assert "damaged its channel" in outcome.kernel_lost
    assert not hostile.is_alive


async def test_a_line_without_end_is_not_held(hostile: CodeSession, other_session: CodeSession) -> None:
    outcome = await attack(hostile, f"for _ in range({MAX_LINE_BYTES // (1 << 20) + 8}): s.sendall(b'x' * (1 << 20))")
    assert outcome.kernel_lost is not None
    assert "longer than" in outcome.kernel_lost


async def test_a_flood_of_calls_is_bounded(hostile: CodeSession, other_session: CodeSession) -> None:
    code = (
        f"for i in range({MAX_PENDING * 4}):\n"
        "    send({'t': 'call', 'call': 10_000_000 + i, 'cell': 1, 'tool': 'never', 'args': {}})"
    )
    outcome = await attack(hostile, code)
    assert outcome.kernel_lost is not None
    handler = hostile.handler
    assert isinstance(handler, Handler)
    assert len(handler.calls) <= MAX_PENDING * 2


async def test_a_number_that_is_used_twice_ends_the_session(hostile: CodeSession) -> None:
    code = "m = {'t': 'call', 'call': 77, 'cell': 1, 'tool': 'never', 'args': {}}\nsend(m); send(m)\nawait echo(1)"
    outcome = await attack(hostile, code)
    assert outcome.kernel_lost is not None


async def test_a_forged_end_ends_no_other_cell(hostile: CodeSession) -> None:
    done = "{'t': 'done', 'cell': %d, 'error': None, 'warnings': [], 'streams': []}"
    await attack(hostile, f"send({done % 500})")
    outcome = await hostile.run("print('next')", timeout_s=20)
    assert outcome.stdout.text()[0] == "next\n"


async def test_an_end_in_the_middle_of_a_message_is_an_end(hostile: CodeSession, other_session: CodeSession) -> None:
    outcome = await attack(hostile, 'import os\ns.sendall(b\'{"t":"call"\')\nos._exit(1)')
    assert outcome.kernel_lost is not None
    assert "exit code 1" in outcome.kernel_lost


async def test_a_closed_channel_is_an_end(hostile: CodeSession, other_session: CodeSession) -> None:
    outcome = await attack(hostile, "s.close()", timeout_s=3)
    assert outcome.error is not None
    assert outcome.kernel_lost is not None


async def test_results_that_the_code_makes_up_reach_only_itself(
    hostile: CodeSession, other_session: CodeSession
) -> None:
    code = (
        "import asyncio\ntask = asyncio.ensure_future(echo('real'))\nawait asyncio.sleep(0)\n"
        "kernel.route({'t': 'result', 'call': kernel.calls._next, 'value': 'forged'})\nprint(await task)"
    )
    outcome = await attack(hostile, code)
    assert outcome.stdout.text()[0] in ("forged\n", "real\n")
    assert (await hostile.run("print(await echo(2))", timeout_s=20)).stdout.text()[0] == "2\n"


async def test_rebound_stubs_change_nothing_on_the_host(hostile: CodeSession) -> None:
    await attack(hostile, "import builtins\nbuiltins.echo = echo = lambda *a: 1/0\ntype(kernel.calls).make = None")
    outcome = await hostile.run("del echo\nawait echo(1)", timeout_s=20)
    assert outcome.error is not None  # of its own making
    assert hostile.is_alive


async def test_a_marker_that_the_code_prints_hides_only_its_own_output(hostile: CodeSession) -> None:
    outcome = await attack(hostile, "print('a'); print(kernel._running['marker'], flush=True); print('b')")
    assert "a" in outcome.stdout.text()[0]
    assert (await hostile.run("print('next')", timeout_s=20)).stdout.text()[0].endswith("next\n")


async def test_descriptors_inherited_by_children_do_not_include_the_channel(hostile: CodeSession) -> None:
    outcome = await attack(
        hostile,
        "import subprocess\nprint(subprocess.run(['ls', '/proc/self/fd'], capture_output=True, text=True).stdout)",
    )
    assert outcome.stdout.text()[0].split() == ["0", "1", "2", "3"]  # the last is that of ls itself


async def test_a_result_that_never_comes_is_ended_by_the_time_limit(hostile: CodeSession) -> None:
    outcome = await attack(hostile, "await never()", timeout_s=0.5)
    assert outcome.timed_out
    assert outcome.kernel_lost is None
    assert (await hostile.run("print(await echo(3))", timeout_s=20)).stdout.text()[0] == "3\n"
