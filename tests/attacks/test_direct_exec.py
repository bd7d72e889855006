"""`atoll exec` without an engine, against a guest that is the attacker's: it speaks to the keeper on a path of its own.

Whatever the guest does, the command ends in time, with the status of an Atoll error, and the sandbox can be destroyed.
"""

from __future__ import annotations

import struct
import subprocess
import sys

import anyio
import anyio.to_thread
import pytest

from atoll.contract.protocol import EventKind, FrameType, Tag
from atoll.runtime.interface import Engine
from tests.attacks.test_hostile_guest import (
    FASTEST,
    HELLO,
    Install,
    _answer,
    _end,
    _event,
    _frame,
    _step,
    install as install,  # noqa: PLC0414 - a fixture
)

pytestmark = FASTEST

STARTED = _event((Tag.EVENT, EventKind.STARTED), (Tag.PROC, 1), (Tag.PID, 5))
GAP = _event((Tag.EVENT, EventKind.GAP))
BEGIN = _step("w", HELLO) + _step("r") + _step("f", STARTED)
GUESTS = {
    "starts twice": _answer(STARTED, STARTED),
    "ends what it did not start": _answer(_end((Tag.EXIT_CODE, 0), (Tag.DURATION_US, 1))),
    "writes before it starts": _answer(_frame(FrameType.DATA, b"x", channel=1), STARTED),
    "writes without end": BEGIN
    + _step("F", struct.pack("<I", 100_000) + _frame(FrameType.DATA, b"y" * 60_000, channel=1)),
    "sends events without end": BEGIN + _step("F", struct.pack("<I", 1_000_000) + GAP),
    "gives more credit than there is": _answer(STARTED, *[_frame(FrameType.CREDIT, b"\xff\xff\xff\xff")] * 2),
    "ends as nothing can end": _answer(STARTED, _end((Tag.EXIT_CODE, 70_000))),
    "sends no frames": _answer(STARTED, b"\xff" * 64),
}
"""What it does: a violation of the protocol, each."""


IMPATIENT = (
    "import runpy\nfrom atoll.surfaces.cli import direct_exec as direct\n"
    "direct.KILL_S, direct.PING_AFTER_S, direct.ANSWER_S = 0.6, 0.1, 0.2\n"
    "runpy.run_module('atoll', run_name='__main__')"
)
"""The command line, with less patience for a guest that does not end a command."""


def run_exec(engine: Engine, name: str, *options: str) -> subprocess.CompletedProcess[bytes]:
    words = ["--state-dir", str(engine.state_dir), "exec", *options, name, "--", "true"]
    command = [sys.executable, "-c", IMPATIENT, *words]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=15, check=False)


@pytest.mark.parametrize("what", GUESTS)
async def test_a_guest_that_breaks_the_protocol_is_an_error(engine: Engine, install: Install, what: str) -> None:
    install(GUESTS[what])
    async with await engine.create() as sandbox:
        done = await anyio.to_thread.run_sync(run_exec, engine, sandbox.name)
    assert done.returncode == 125, done
    assert done.stderr.startswith(b"error: ")


async def test_a_guest_that_answers_everything_but_the_end_does_not_outlast_the_time_limit(
    engine: Engine, install: Install
) -> None:
    install(BEGIN + _step("e", _end()))
    async with await engine.create() as sandbox:
        done = await anyio.to_thread.run_sync(run_exec, engine, sandbox.name, "--timeout", "0.2")
    assert done.returncode == 125, done
    assert b"does not answer" in done.stderr
