"""What survives a pause, a sleep, a shutdown, an exit, a restore, a fork and the death of the host process.

Files always do. Whether processes do depends on the driver's `Capabilities`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable
from typing import Literal, NamedTuple

import pytest

from atoll import Capabilities, Engine, Sandbox
from atoll.testing.inside import client, running, until_running
from atoll.testing.waiting import eventually

MAKE = """
sandbox = await engine.create("orphan")
await sandbox.exec(sys.argv[3])
await (await sandbox.spawn(sys.argv[4])).detach()
os.kill(os.getpid(), 9)
"""
WRITE, RUN = "echo content > file", "exec sleep 31536042"


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

    await eventually(ended, "the sandbox is listed with the status error")
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


class Event(NamedTuple):
    """Something that happens to a sandbox. `happen` returns the sandbox to look into afterwards."""

    happen: Callable[[Engine, Sandbox], Awaitable[Sandbox]]
    processes: Literal["kept", "kept in a memory checkpoint", "lost"]
    freezes: bool = False
    """It needs `Capabilities.freeze`."""

    def kept(self, capabilities: Capabilities) -> str:
        """What is kept, as the guide's table says it."""
        processes = self.processes == "kept" or (self.processes != "lost" and capabilities.memory_checkpoint)
        return "files, processes" if processes else "files"


EVENTS = {
    "pause": Event(pause, "kept", freezes=True),
    "sleep": Event(sleep, "kept in a memory checkpoint"),
    "shutdown": Event(shutdown, "kept in a memory checkpoint"),
    "its own exit": Event(end, "lost"),
    "restore": Event(restore, "kept in a memory checkpoint", freezes=True),
    "fork": Event(fork, "kept in a memory checkpoint", freezes=True),
    "fork of a sleeping sandbox": Event(fork_sleeping, "kept in a memory checkpoint"),
    "the host process is killed": Event(kill_host, "kept"),
}


@pytest.mark.parametrize("name", EVENTS)
async def test_files_are_kept_and_processes_where_the_driver_declares_it(
    engine: Engine, capabilities: Capabilities, as_root: None, name: str
) -> None:
    event = EVENTS[name]
    if event.freezes and not capabilities.freeze:
        pytest.skip("the driver declares that it cannot freeze a sandbox")
    async with await engine.create("kept") as sandbox:
        await sandbox.exec(WRITE)
        await (await sandbox.spawn(RUN)).detach()
        after = await event.happen(engine, sandbox)
        found = await after.exec("cat file")
        assert found.stdout == "content\n"
        if event.kept(capabilities) == "files, processes":
            await until_running(after, "sleep 31536042")
        else:
            assert not await running(after, "sleep 31536042")
        if after.name != sandbox.name:
            await after.destroy()
