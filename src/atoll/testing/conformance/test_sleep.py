"""Pause and resume in memory, sleep and wake on disk, and shutdown until `wake`."""

from __future__ import annotations

import json
import os
import signal
from datetime import timedelta
from functools import partial

import anyio
import pytest

from atoll import (
    Capabilities,
    Engine,
    InvalidRequest,
    Limits,
    NotCheckpointable,
    Output,
    PortRefused,
    Sandbox,
    SandboxDied,
    SandboxShutdown,
    Unenforceable,
)
from atoll.contract.model import RuntimeName
from atoll.drivers import registry
from atoll.runtime.lifecycle import lifecycle
from atoll.runtime.state.store import now
from atoll.testing.inside import client, running, until_running
from atoll.testing.waiting import BOUND_S, eventually

COUNT = "i=0; while :; do i=$((i+1)); echo $i > count; sleep 0.01; done"


async def status(engine: Engine, name: str) -> str:
    (info,) = [info for info in await engine.list() if info.name == name]
    return info.status


async def counted(sandbox: Sandbox) -> int:
    """How far COUNT has come."""

    async def number() -> int:
        text = (await sandbox.exec("cat count 2>/dev/null")).stdout
        return int(text) if text.strip() else 0

    return await eventually(number, "it counts")


# ---- asleep ----


@pytest.mark.core
async def test_a_sleeping_sandbox_has_no_process_and_wakes_with_its_files_when_it_is_used(
    engine: Engine, capabilities: Capabilities
) -> None:
    async with await engine.create("sleeper", env={"MODE": "test"}) as sandbox:
        await sandbox.files.write_text("kept", "yes")
        await sandbox.exec("echo 1 > /usr/made; rm /etc/nsswitch.conf; mkdir /srv/d", user="root")
        process = await sandbox.spawn("sleep 31537101")
        first = sandbox.info.pid
        await sandbox.sleep()
        assert await status(engine, "sleeper") == "sleeping"
        (info,) = [info for info in await engine.list() if info.name == "sleeper"]
        assert (info.pid, info.reason) == (None, None)
        with pytest.raises(SandboxDied):
            await process.wait()
        assert (await sandbox.exec("cat kept /usr/made; ls -d /srv/d; ls /etc/nsswitch.conf; echo $MODE")).stdout == (
            "yes1\n/srv/d\ntest\n"
        )
        assert await status(engine, "sleeper") == "running"
        (info,) = [info for info in await engine.list() if info.name == "sleeper"]
        assert info.pid not in (None, first)
        left = [found.command for found in await sandbox.ps() if "31537101" in found.command]
        assert bool(left) is capabilities.memory_checkpoint, "processes are kept where the driver declares it"


@pytest.mark.core
async def test_many_clients_wake_it_once(engine: Engine) -> None:
    async with await engine.create() as sandbox:
        await sandbox.sleep()
        pids: list[str] = []

        async def look() -> None:
            pids.append((await sandbox.exec("cat /proc/sys/kernel/random/boot_id; stat -c %Y /proc/1")).stdout)

        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(look)
        assert len(pids) == 20
        assert len(set(pids)) == 1
        (info,) = [info for info in await engine.list() if info.name == sandbox.name]
        assert info.status == "running"


async def test_another_process_wakes_it_too_and_the_first_goes_on(engine: Engine, runtime_name: RuntimeName) -> None:
    async with await engine.create("shared-sleeper") as sandbox:
        await sandbox.sleep()
        body = """
box = await engine.get("shared-sleeper")
say((await box.exec("echo woken > by; echo done")).stdout.strip())
await box.sleep()
say("asleep")
"""
        async with client(engine.state_dir, runtime_name, body) as other:
            assert await other.line() == "done"
            assert await other.line() == "asleep"
            await other.succeeds()
        assert (await sandbox.exec("cat by")).stdout == "woken\n"


async def test_a_sandbox_sleeps_and_wakes_again_and_again(engine: Engine) -> None:
    async with await engine.create() as sandbox:
        for number in range(3):
            await sandbox.exec(f"echo {number} >> log")
            await sandbox.sleep()
        await sandbox.sleep()  # it sleeps already
        assert (await sandbox.exec("cat log")).stdout == "0\n1\n2\n"


async def test_a_sandbox_that_sleeps_can_be_destroyed(engine: Engine) -> None:
    sandbox = await engine.create("gone-in-its-sleep")
    await sandbox.exec("echo x > /usr/x", user="root")
    await sandbox.sleep()
    await sandbox.destroy()
    assert "gone-in-its-sleep" not in {info.name for info in await engine.list()}


@pytest.mark.usefixtures("can_limit")
async def test_limits_hold_after_waking(engine: Engine, capabilities: Capabilities, as_root: None) -> None:
    async with await engine.create(limits=Limits(memory_bytes=64 << 20, open_files=64)) as sandbox:
        await sandbox.sleep()
        assert (await sandbox.exec("ulimit -n")).stdout == "64\n"
        fill = ["python3", "-c", "x = bytearray(200_000_000)"]
        if capabilities.process_oom:
            result = await sandbox.exec(fill)
            assert (result.exit_code, result.out_of_memory) == (137, True)
        else:  # gVisor ends the sandbox, not the process
            with pytest.raises(SandboxDied):
                await sandbox.exec(fill)


SERVER = """
import socket, threading, time
server = socket.socket()
server.bind(("127.0.0.1", 8080))
server.listen()
count, log = 0, open("log", "w")

def serve():
    while True:
        connection, _ = server.accept()
        connection.sendall(str(count).encode())
        connection.close()

threading.Thread(target=serve, daemon=True).start()
while True:
    count += 1
    log.write(f"{count}\\n")
    log.flush()
    time.sleep(0.02)
"""
"""It counts, holds a file open and listens."""


async def ask(sandbox: Sandbox) -> int:
    """The count that SERVER is at."""

    async def answer() -> int:
        async with await sandbox.dial(8080) as connection:
            return int(await connection.receive())

    with anyio.fail_after(BOUND_S):
        while True:
            try:
                return await answer()
            except PortRefused:
                await anyio.sleep(0.05)


async def serve(sandbox: Sandbox) -> None:
    await sandbox.files.write_text("server.py", SERVER)
    await (await sandbox.spawn(["python3", "server.py"])).detach()


async def goes_on(sandbox: Sandbox, count: int) -> None:
    """SERVER has the state that it had at `count`, and goes on counting."""
    assert count <= await ask(sandbox) < count + 2000

    async def further() -> bool:
        return await ask(sandbox) > count + 3

    await eventually(further, "it counts on")
    # The open file is the same: nothing in it is missing or repeated.
    lines = [int(line) for line in (await sandbox.exec("cat log")).stdout.split()]
    assert lines == list(range(1, len(lines) + 1))
    assert len(lines) > count


async def test_processes_go_on_where_they_were_if_the_runtime_can(engine: Engine, capabilities: Capabilities) -> None:
    async with await engine.create("counting") as sandbox:
        await serve(sandbox)
        for _ in range(2):
            count = await ask(sandbox)
            await sandbox.sleep()
            assert await status(engine, "counting") == "sleeping"
            if not capabilities.memory_checkpoint:
                with pytest.raises(PortRefused):
                    await sandbox.dial(8080)
                return
            await goes_on(sandbox, count)
        # Processes resume in forks too, which are independent.
        count = await ask(sandbox)
        forks = await sandbox.fork(5)
        for fork in forks:
            await goes_on(fork, count)
            assert (await fork.exec("hostname")).stdout == f"{fork.name}\n"
        await goes_on(sandbox, count)
        for fork in forks:
            await fork.destroy()
        # A fork of a sleeping sandbox does not wake it.
        await sandbox.sleep()
        (fork,) = await sandbox.fork(1)
        assert await status(engine, "counting") == "sleeping"
        await goes_on(fork, count)
        await fork.destroy()
        checkpoint = await sandbox.checkpoint("counted")
        assert checkpoint.with_memory
        count = await ask(sandbox)
        await anyio.sleep(1)
        await sandbox.restore("counted")
        assert abs(await ask(sandbox) - count) < 40, "it went back"
        await goes_on(sandbox, 1)
    await engine.delete_checkpoint(checkpoint.id)


async def test_processes_that_cannot_go_on_do_not_keep_a_sandbox_asleep(
    engine: Engine, capabilities: Capabilities
) -> None:
    """The process image is truncated, as after a power failure."""
    async with await engine.create("cut-short") as sandbox:
        await sandbox.files.write_text("f", "kept")
        await sandbox.sleep()
        images = list((engine.state_dir / "sandboxes" / sandbox.id).glob("memory-*/checkpoint.img"))
        assert len(images) == capabilities.memory_checkpoint
        for image in images:
            image.write_bytes(image.read_bytes()[:5000])
        assert await sandbox.files.read_text("f") == "kept"
        assert not list((engine.state_dir / "sandboxes" / sandbox.id).glob("memory-*"))


ECHO = """
import asyncio

async def echo(reader, writer):
    while line := await reader.readline():
        writer.write(line)

async def serve():
    server = await asyncio.start_server(echo, "127.0.0.1", 8080)
    print("up", flush=True)
    await server.serve_forever()

asyncio.run(serve())
"""


async def test_processes_that_a_save_would_lose_are_left_alone(engine: Engine, runtime_name: RuntimeName) -> None:
    """gVisor of 2022 ends when it is to save a socket that a process waits for with epoll."""
    async with await engine.create("waiting") as sandbox:
        process = await sandbox.spawn(["python3", "-c", ECHO], keep=True)
        while not isinstance(await process.__anext__(), Output):
            pass
        await process.detach()
        connection = await sandbox.dial(8080)
        if engine.runtimes()[runtime_name].saves_epoll_waiters:
            await sandbox.sleep()
            assert await status(engine, "waiting") == "sleeping"
            return
        for save in (sandbox.sleep, sandbox.checkpoint, sandbox.fork):
            with pytest.raises(NotCheckpointable, match=r"epoll.*\(python3 -c"):
                await save()
        await connection.send(b"still here\n")
        assert await connection.receive() == b"still here\n", "the server inside still runs"
        await connection.aclose()
        # An unused sandbox is paused in memory instead.
        while not await engine.sleep_unused("waiting", timedelta(0)):
            await anyio.sleep(0.01)
        assert await status(engine, "waiting") == "paused"
        connection = await sandbox.dial(8080)
        await connection.send(b"awake\n")
        assert await connection.receive() == b"awake\n"
        # And no process inside can prevent a shutdown.
        await sandbox.shutdown()
        assert await status(engine, "waiting") == "shutdown"
        await sandbox.wake()
        assert await running(sandbox, "asyncio.run") == []


@pytest.mark.runtimes("runsc")
async def test_a_client_that_is_connecting_does_not_block_the_question_for_epoll_waiters(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client may be waiting for the sleep to end, so the sleep must not wait for the client."""
    monkeypatch.setattr(lifecycle, "_ANSWER_S", 1000)
    async with await engine.create() as sandbox:
        await sandbox.aclose()
        async with sandbox._connecting:
            await sandbox.sleep()


async def test_one_that_ends_with_its_clients_cannot_sleep(engine: Engine) -> None:
    async with await engine.create(ephemeral=True) as sandbox:
        for sleep in (sandbox.sleep, sandbox.shutdown):
            with pytest.raises(InvalidRequest, match="ephemeral"):
                await sleep()
        assert (await sandbox.exec("echo alive")).stdout == "alive\n"


# ---- shut down ----


@pytest.mark.core
async def test_a_sandbox_that_was_shut_down_wakes_only_by_wake(engine: Engine) -> None:
    async with await engine.create("closed") as sandbox:
        await sandbox.files.write_text("kept", "yes")
        await sandbox.shutdown()
        assert await status(engine, "closed") == "shutdown"
        for _ in range(2):
            with pytest.raises(SandboxShutdown, match="wake it first"):
                await sandbox.exec("true")
        assert await status(engine, "closed") == "shutdown"
        await sandbox.wake()
        assert await sandbox.files.read_text("kept") == "yes"
        await sandbox.wake()  # it is awake


async def kill(engine: Engine, sandbox: Sandbox) -> None:
    """Kill the sandbox from the host, and wait until that is seen."""
    assert sandbox.info.pid is not None
    os.kill(sandbox.info.pid, signal.SIGKILL)

    async def ended() -> bool:
        return await status(engine, sandbox.name) == "error"

    await eventually(ended, "it is seen to have ended")


async def test_one_that_has_ended_can_be_woken(engine: Engine) -> None:
    """As after a power failure; here the guest is killed."""
    async with await engine.create("fallen") as sandbox:
        await sandbox.files.write_text("kept", "yes")
        await kill(engine, sandbox)
        with pytest.raises(SandboxDied):
            await sandbox.exec("true")
        await sandbox.wake()
        assert await sandbox.files.read_text("kept") == "yes"


@pytest.mark.core
async def test_what_is_written_is_in_the_active_layer_at_once_and_survives_a_kill(engine: Engine) -> None:
    """gVisor since 2023 keeps it for itself, unless it is told not to: then a kill loses it."""
    async with await engine.create("written") as sandbox:
        await sandbox.exec("echo by a command > f; mkdir d; rm /etc/nsswitch.conf", user="root", cwd="/home/user")
        await sandbox.files.write_text("g", "by the file API")
        manifest = json.loads((engine.state_dir / "sandboxes" / sandbox.id / "manifest.json").read_text())
        upper = engine.state_dir / "layers" / manifest["active_layer"] / "upper" / "root"
        home = upper / "home/user"
        assert (home / "f").read_text() == "by a command\n"
        assert (home / "g").read_text() == "by the file API"
        assert (home / "d").is_dir()
        assert not (upper / "etc/nsswitch.conf").is_file()
        assert not list(upper.glob(".gvisor*"))
        await kill(engine, sandbox)
        await sandbox.wake()
        assert (await sandbox.exec("cat f g; ls -d d; ls /etc/nsswitch.conf")).stdout == (
            "by a command\nby the file APId\n"
        )


# ---- paused ----


async def test_a_paused_sandbox_is_frozen_until_it_is_used(engine: Engine, capabilities: Capabilities) -> None:
    async with await engine.create("still") as sandbox:
        if not capabilities.freeze:
            with pytest.raises(Unenforceable):
                await sandbox.pause()
            return
        await (await sandbox.spawn(COUNT)).detach()
        await counted(sandbox)
        pid = sandbox.info.pid
        await sandbox.pause()
        assert await status(engine, "still") == "paused"
        before = (await sandbox.stat()).cpu_s
        await anyio.sleep(0.3)
        after = (await sandbox.stat()).cpu_s
        assert before is not None
        assert after is not None
        assert after - before < 0.02, "a frozen sandbox uses no CPU time"
        seen = await counted(sandbox)
        assert await status(engine, "still") == "running"
        assert sandbox.info.pid == pid

        async def further() -> bool:
            return await counted(sandbox) > seen

        await eventually(further, "it resumes where it was")


async def test_a_paused_sandbox_resumes_and_only_a_paused_one_does(engine: Engine, capabilities: Capabilities) -> None:
    async with await engine.create("resumed") as sandbox:
        if capabilities.freeze:
            for resume in (sandbox.resume, sandbox.wake):
                await sandbox.pause()
                assert await status(engine, "resumed") == "paused"
                await resume()
                assert await status(engine, "resumed") == "running"
        await sandbox.resume()  # of one that runs: nothing
        await sandbox.sleep()
        with pytest.raises(InvalidRequest, match="its status is sleeping; wake it"):
            await sandbox.resume()
        assert await status(engine, "resumed") == "sleeping"


@pytest.mark.usefixtures("can_freeze")
async def test_an_unused_sandbox_pauses_by_itself_and_one_in_use_does_not(
    engine: Engine, capabilities: Capabilities, as_root: None
) -> None:
    assert capabilities.freeze
    async with await engine.create("pausing", pause_after_s=0.2) as sandbox:
        # A command that runs longer than that counts as use.
        assert (await sandbox.exec("sleep 0.5; echo done")).stdout == "done\n"

        async def paused() -> bool:
            return await status(engine, "pausing") == "paused"

        await eventually(paused, "it pauses")
        assert (await sandbox.exec("echo awake")).stdout == "awake\n"
        process = await sandbox.spawn("sleep 31537102")
        await anyio.sleep(0.5)
        assert not await paused(), "an open stream is use"
        await process.kill()
        await process.wait()
        await eventually(paused, "it pauses again")


@pytest.mark.usefixtures("can_freeze")
async def test_a_paused_sandbox_can_be_put_to_sleep_and_destroyed(
    engine: Engine, capabilities: Capabilities, as_root: None
) -> None:
    assert capabilities.freeze
    sandbox = await engine.create("frozen")
    await (await sandbox.spawn("exec sleep 31537103")).detach()
    await until_running(sandbox, "31537103")
    await sandbox.pause()
    await sandbox.sleep()
    assert await status(engine, "frozen") == "sleeping"
    await sandbox.wake()
    await sandbox.pause()
    await sandbox.destroy()


# ---- at the end of a lifetime ----


@pytest.mark.runtimes("crun", "runsc", "bwrap")
async def test_a_sandbox_sleeps_when_its_lifetime_is_over_and_lives_as_long_again(
    engine: Engine, capabilities: Capabilities
) -> None:
    async with engine.create(ttl_s=600, on_expiry="sleep") as sandbox:
        assert (sandbox.info.ttl_s, sandbox.info.on_expiry, sandbox.info.ttl_renewed_by_use) == (600, "sleep", False)
        await sandbox.spawn("echo here > note; exec sleep 1000", keep=True)
        await eventually(partial(sandbox.files.exists, "note"), "it runs")
        await sandbox.update(ttl_s=1)
        with pytest.raises(SandboxDied, match=r"lifetime|put to sleep"):
            await sandbox.exec("sleep 1000")
        with anyio.fail_after(BOUND_S):
            while await sandbox.status() != "sleeping":
                await anyio.sleep(0.01)
        assert [info.expires_at for info in await engine.list() if info.id == sandbox.id] == [None]
        await eventually(lambda: not (engine.state_dir / "expiries" / sandbox.id).is_symlink(), "it has no end")
        await engine.update(sandbox.name, ttl_s=600)  # as it sleeps: nothing ends, and the next lifetime is longer
        assert (await sandbox.exec("cat note")).stdout == "here\n"
        await sandbox.status()
        assert sandbox.info.expires_at is not None
        assert 590 < (sandbox.info.expires_at - now()).total_seconds() <= 600
        assert await _runs_on(sandbox) == capabilities.memory_checkpoint


async def _runs_on(sandbox: Sandbox) -> bool:
    """Whether a command runs in it, though it slept."""
    return any(each.live for each in await sandbox.processes())


@pytest.mark.runtimes("crun", "runsc", "bwrap")
async def test_a_sandbox_is_due_to_sleep_without_any_process_of_the_host(
    engine: Engine, runtime_name: RuntimeName, capabilities: Capabilities
) -> None:
    body = """
box = await engine.create('alone', ttl_s=1.5, on_expiry='sleep')
await box.spawn('exec sleep 1000', keep=True)
say(box.id)
"""
    driver = registry.available(engine.state_dir)[runtime_name]
    async with client(engine.state_dir, runtime_name, body) as other:
        id = await other.line()
        await other.succeeds()
    directory = engine.state_dir / "sandboxes" / id
    saves = capabilities.memory_checkpoint
    await eventually(lambda: driver.is_frozen(f"{id}.1") if saves else (directory / "ended").read_text(), "its end")
    alone = await engine.get("alone")
    try:
        assert await alone.status() in ("paused" if saves else "sleeping", "sleeping")
        assert await _runs_on(alone) == saves
        await alone.status()
        assert alone.info.expires_at is not None
        assert alone.info.expires_at > now()
    finally:
        await alone.destroy()


@pytest.mark.usefixtures("can_freeze")
@pytest.mark.runtimes("crun", "runsc")
async def test_a_sandbox_is_paused_when_its_lifetime_is_over_and_lives_as_long_again(engine: Engine) -> None:
    async with engine.create(ttl_s=600, on_expiry="pause") as sandbox:
        await sandbox.spawn("echo here > /tmp/note; exec sleep 1000", keep=True)
        await eventually(partial(sandbox.files.exists, "/tmp/note"), "it runs")
        await sandbox.update(ttl_s=1)
        with pytest.raises(SandboxDied, match="lifetime"):
            await sandbox.exec("sleep 1000")

        async def has_no_end() -> bool:
            return not (engine.state_dir / "expiries" / sandbox.id).is_symlink()

        await eventually(has_no_end, "it is paused for as long as nobody uses it")
        assert await sandbox.status() == "paused"
        await engine.update(sandbox.name, ttl_s=600)
        await sandbox.pause()
        assert (await sandbox.exec("cat /tmp/note")).stdout == "here\n"
        assert await _runs_on(sandbox)
        await sandbox.status()
        assert sandbox.info.expires_at is not None
        assert 590 < (sandbox.info.expires_at - now()).total_seconds() <= 600


@pytest.mark.usefixtures("can_freeze")
@pytest.mark.runtimes("crun", "runsc")
async def test_using_a_sandbox_that_was_paused_at_the_end_begins_another_lifetime(engine: Engine) -> None:
    async with engine.create(ttl_s=1, on_expiry="pause") as sandbox:
        with pytest.raises(SandboxDied, match="lifetime"):
            await sandbox.exec("sleep 1000")
        await eventually(lambda: not (engine.state_dir / "expiries" / sandbox.id).is_symlink(), "it has no end")
        assert await sandbox.status() == "paused"
        assert (await sandbox.exec("echo again")).stdout == "again\n"
        await sandbox.status()
        assert sandbox.info.expires_at is not None


@pytest.mark.runtimes("bwrap")
async def test_a_sandbox_that_cannot_be_frozen_cannot_be_paused_at_its_end(
    engine: Engine, capabilities: Capabilities
) -> None:
    assert not capabilities.freeze
    with pytest.raises(Unenforceable, match="cannot be paused at the end"):
        await engine.create(ttl_s=60, on_expiry="pause")
