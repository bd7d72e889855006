"""What outlives what, per runtime: the guide's table, row by row, against the runtimes themselves."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from atoll import Engine, Sandbox
from atoll.contract.model import RuntimeName
from atoll.testing.inside import client
from atoll.testing.waiting import eventually

GUIDE = Path(__file__).parents[2] / "docs/guide.md"
MAKE = """
sandbox = await engine.create("orphan")
await sandbox.exec(sys.argv[3])
await (await sandbox.spawn(sys.argv[4])).detach()
os.kill(os.getpid(), 9)
"""
WRITE, RUN = "echo content > file", "exec sleep 31536042"


def table() -> dict[str, dict[str, str]]:
    """The guide's table: what happened, the runtime, what is kept."""
    lines = itertools.dropwhile(lambda line: not line.startswith("| after "), GUIDE.read_text().splitlines())
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in itertools.takewhile(bool, lines)]
    (_, *runtimes), _, *rest = rows
    return {what: dict(zip(runtimes, kept, strict=True)) for what, *kept in rest}


async def pause(engine: Engine, sandbox: Sandbox) -> Sandbox:
    await sandbox.pause()
    return sandbox


async def sleep(engine: Engine, sandbox: Sandbox) -> Sandbox:
    await sandbox.sleep()
    return sandbox


async def shutdown(engine: Engine, sandbox: Sandbox) -> Sandbox:
    await sandbox.shutdown()
    return await engine.wake(sandbox.name)


async def end(engine: Engine, sandbox: Sandbox) -> Sandbox:
    (info,) = [info for info in await engine.list() if info.name == sandbox.name]
    assert info.pid is not None
    os.kill(info.pid, signal.SIGKILL)

    async def ended() -> bool:
        return any(info.status == "error" for info in await engine.list())

    await eventually(ended, "it is seen to have ended")
    return await engine.wake(sandbox.name)


async def restore(engine: Engine, sandbox: Sandbox) -> Sandbox:
    checkpoint = await sandbox.checkpoint()
    await sandbox.restore(checkpoint.id)
    await engine.delete_checkpoint(checkpoint.id)
    return sandbox


async def fork(engine: Engine, sandbox: Sandbox) -> Sandbox:
    (copy,) = await sandbox.fork(1)
    return copy


async def fork_sleeping(engine: Engine, sandbox: Sandbox) -> Sandbox:
    await sandbox.sleep()
    return await fork(engine, sandbox)


async def kill_host(engine: Engine, sandbox: Sandbox) -> Sandbox:
    async with client(engine.state_dir, sandbox.info.runtime, MAKE, WRITE, RUN) as other:
        assert await other.ends() == -signal.SIGKILL
    return await engine.get("orphan")


HAPPENINGS: dict[str, Callable[[Engine, Sandbox], Awaitable[Sandbox]]] = {
    "pause": pause,
    "sleep": sleep,
    "shutdown": shutdown,
    "its own exit": end,
    "restore": restore,
    "fork": fork,
    "fork of a sleeping sandbox": fork_sleeping,
    "the host process is killed": kill_host,
}


def test_the_table_has_a_row_for_each() -> None:
    assert table().keys() == HAPPENINGS.keys()


@pytest.mark.parametrize("what", HAPPENINGS)
async def test_what_the_guide_says_is_kept_and_no_more(
    engine: Engine, runtime_name: RuntimeName, as_root: None, what: str
) -> None:
    async with await engine.create("kept") as sandbox:
        await sandbox.exec(WRITE)
        await (await sandbox.spawn(RUN)).detach()
        after = await HAPPENINGS[what](engine, sandbox)
        found = await after.exec("cat file")
        kept = ["files"] if found.stdout == "content\n" else []
        if any("sleep 31536042" in process.command for process in await after.ps()):
            kept.append("processes")
        assert ", ".join(kept) == table()[what][runtime_name]
        if after.name != sandbox.name:
            await after.destroy()
