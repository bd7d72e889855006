"""Code that turns against its channel to the host.

All of it runs in the kernel's own process and owns it: the channel's socket, the stubs, the numbers of calls. None of
that may make a tool run that the host would refuse, stop or confuse the host, or reach another session.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from atoll import Engine, Sandbox
from atoll.code.messages import (
    MAX_LINE_BYTES,
    MAX_PENDING,
    MAX_VALUES,
    CallMessage,
    ChannelViolation,
    MessageReader,
)
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


async def test_a_death_of_any_signal_is_an_end(hostile: CodeSession, other_session: CodeSession) -> None:
    outcome = await attack(hostile, "import os\nos.kill(os.getpid(), 40)")
    assert outcome.kernel_lost == "the session's process died of signal 40"
    assert not outcome.timed_out


async def test_millions_of_values_in_a_message_are_not_read(hostile: CodeSession, other_session: CodeSession) -> None:
    code = (
        'head = b\'{"t":"display","cell":1,"part":{"role":"display","data":{"a":[\'\n'
        f"s.sendall(head + b'{{}},' * {MAX_VALUES} + b'0]}}}}}}\\n')"
    )
    outcome = await attack(hostile, code)
    assert outcome.kernel_lost is not None
    assert "values" in outcome.kernel_lost


async def test_values_that_a_cell_shows_are_bounded_together(
    hostile: CodeSession, other_session: CodeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.code.session.MAX_PARTS_BYTES", 1 << 20)
    code = (
        "part = {'role': 'display', 'data': {'text/plain': 'x' * 100_000}}\n"
        "for _ in range(20): send({'t': 'display', 'cell': 1, 'part': part})\nawait never()"
    )
    outcome = await attack(hostile, code)
    assert outcome.kernel_lost is not None
    assert len(outcome.parts) == 10


async def test_arguments_of_calls_that_wait_are_bounded_together(
    hostile: CodeSession, other_session: CodeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.code.session.MAX_PENDING_BYTES", 1 << 20)
    code = (
        "import asyncio\nfor i in range(20):\n"
        "    send({'t': 'call', 'call': 1000 + i, 'cell': 1, 'tool': 'never', 'args': {'value': 'x' * 100_000}})\n"
        "print(await echo(1))"
    )
    await attack(hostile, code)
    handler = hostile.handler
    assert isinstance(handler, Handler)
    assert [bool(call.arguments) for call in handler.calls[:20]] == [True] * 10 + [False] * 10
    assert all(call.refusal for call in handler.calls[10:20])


@pytest.mark.parametrize("arguments", [f"{{'value': [0] * {MAX_VALUES + 1}}}", "{'value': 'x' * (5 << 20)}"])
async def test_a_call_that_is_too_large_is_refused_and_the_session_goes_on(
    hostile: CodeSession, arguments: str
) -> None:
    message = f"{{'t': 'call', 'call': 1000, 'cell': 1, 'tool': 'echo', 'args': {arguments}}}"
    outcome = await attack(hostile, f"send({message})\nprint(await echo(1))")
    assert outcome.stdout.text()[0] == "1\n"
    handler = hostile.handler
    assert isinstance(handler, Handler)
    assert handler.calls[0].refusal is not None
    assert not handler.calls[0].arguments


async def test_results_that_wait_for_a_slow_reader_are_not_mixed(hostile: CodeSession) -> None:
    code = (
        "import asyncio\nfound = await asyncio.gather(*(echo(str(i) * 8000) for i in range(400)))\n"
        "print(found == [str(i) * 8000 for i in range(400)])"
    )
    assert (await attack(hostile, code, timeout_s=50)).stdout.text()[0] == "True\n"


async def test_results_that_are_not_read_end_the_calls_not_the_host(
    hostile: CodeSession, other_session: CodeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.code.session.MAX_UNSENT_BYTES", 1 << 20)
    call = "{'t': 'call', 'call': 1000 + i, 'cell': 1, 'tool': 'echo', 'args': {'value': 'x' * 1_000_000}}"
    outcome = await attack(hostile, f"import time\nfor i in range(20): send({call})\ntime.sleep(1)", timeout_s=30)
    assert outcome.error is None
    handler = hostile.handler
    assert isinstance(handler, Handler)
    assert len(handler.calls) <= 20
    assert (await hostile.run("print(await echo(2))", timeout_s=30)).stdout.text()[0] == "2\n"


async def test_a_kernel_that_stops_reading_does_not_stop_the_time(
    hostile: CodeSession, other_session: CodeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.code.session.GRACE_S", 0.3)
    stop = "import os, signal, threading\nthreading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGSTOP)).start()"
    await attack(hostile, stop)
    await anyio.sleep(0.3)
    outcome = await attack(hostile, "#" + "x" * 3_000_000, timeout_s=0.5)
    assert outcome.timed_out
    assert outcome.kernel_lost is not None


@pytest.mark.parametrize(
    "fields",
    [
        {"running": {"cell": 1, "marker": "", "code": ""}},
        {"running": {"cell": 1, "marker": "\0atoll-cell-/../../../etc/passwd", "code": ""}},
        {"calls": [{"call": 1, "cell": 1, "tool": "echo", "args": {}}] * 2},
    ],
)
async def test_a_greeting_that_cannot_be_is_a_violation(fields: dict[str, Any]) -> None:
    reader = MessageReader()
    reader.skip_until("n" * 32)
    with pytest.raises(ChannelViolation):
        reader.feed(json.dumps({"t": "ready", "nonce": "n" * 32, "version": "3", **fields}).encode() + b"\n")
