"""Several host processes on one state directory: what remains of one that exits or dies, and what others notice."""

from __future__ import annotations

import signal
from pathlib import Path

import anyio
import pytest

import atoll
from atoll import Engine, Sandbox, SandboxNotFound
from atoll.contract.model import RuntimeName
from atoll.testing.inside import client, output_of, running, until_running, wait_tree_exit
from atoll.testing.plugin import LeakCheck
from atoll.testing.waiting import eventually


@pytest.mark.core
async def test_two_processes_use_one_sandbox_at_once(
    state_dir: Path, runtime_name: RuntimeName, sandbox: Sandbox
) -> None:
    body = """
sandbox = await engine.get(sys.argv[3])
for number in range(20):
    result = await sandbox.exec(f"echo theirs {number}")
    assert result.stdout == f"theirs {number}\\n", result
say("done")
"""
    async with client(state_dir, runtime_name, body, sandbox.name) as other:
        for number in range(20):
            assert (await sandbox.exec(f"echo ours {number}")).stdout == f"ours {number}\n"
        assert await other.line() == "done"
        await other.succeeds()


@pytest.mark.core
async def test_two_runtimes_in_one_process_are_two_clients(
    state_dir: Path, runtime_name: RuntimeName, sandbox: Sandbox
) -> None:
    ours = await sandbox.spawn("read -r x; seq 1 1000", stdin=True)
    async with atoll.open(state_dir, settings=atoll.Settings(runtime=runtime_name)) as second:
        same = await second.get(sandbox.name)
        assert same is not sandbox
        theirs = await same.attach(ours.id)
        with pytest.raises(atoll.InvalidRequest, match="another client has the stdin"):
            await same.attach(ours.id, stdin=True)
        assert ours.stdin is not None
        await ours.stdin.send(b"go\n")
        expected = b"".join(b"%d\n" % number for number in range(1, 1001))
        assert await output_of(theirs) == expected
        assert await output_of(ours) == expected
    # One disconnects, the other stays connected.
    assert (await sandbox.exec("echo still here")).stdout == "still here\n"


@pytest.mark.core
async def test_a_client_that_is_killed_takes_its_commands_with_it_and_nothing_else(
    state_dir: Path, runtime_name: RuntimeName, sandbox: Sandbox
) -> None:
    body = """
sandbox = await engine.get(sys.argv[3])
kept = await sandbox.spawn("i=0; while :; do i=$((i + 1)); echo line $i; sleep 0.01; done")
seen = b""
async for event in kept:
    seen += event.data
    if b"line 10\\n" in seen:
        break
say(kept.id, len(seen))
async with anyio.create_task_group() as group:
    group.start_soon(sandbox.exec, "(setsid sleep 31538001 &) ; sleep 31538001")
    await sandbox.exec("head -c 1000000000 /dev/zero; sleep 31538002")
"""
    async with await sandbox.spawn("exec sleep 31538003", keep=False) as ours:
        async with client(state_dir, runtime_name, body, sandbox.name) as other:
            process_id, seen = map(int, (await other.line()).split())
            await until_running(sandbox, "sleep 31538001")
            other.send_signal(signal.SIGKILL)
            assert await other.ends() == -signal.SIGKILL
        # Its own command was killed, as no client can read its output. Ours still runs.
        await wait_tree_exit(sandbox, "31538001")
        await wait_tree_exit(sandbox, "31538002")
        assert [process.pid for process in await running(sandbox, "sleep 31538003")] == [ours.pid]
        # The process that it detached still runs, and is attached to at the offset that the dead client had read.
        process = await sandbox.attach(process_id, stdout_offset=seen)
        got = b""
        with anyio.fail_after(20):
            async for event in process:
                assert isinstance(event, atoll.Output)
                assert event.offset == seen + len(got)
                got += event.data
                if got.count(b"\n") > 50:
                    break
        numbers = [int(line.split()[1]) for line in got.splitlines()[:-1] if line.startswith(b"line ")]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        await process.detach()
        await sandbox.kill(process_id)


async def test_a_client_that_is_killed_while_it_writes_leaves_no_half_of_a_file(
    state_dir: Path, runtime_name: RuntimeName, sandbox: Sandbox
) -> None:
    body = """
sandbox = await engine.get(sys.argv[3])
async def endless():
    yield bytes(100000)
    say("writing")
    await anyio.sleep_forever()
await sandbox.files.write_bytes("file", endless())
"""
    await sandbox.files.write_text("file", "whole")
    before = {entry.name for entry in await sandbox.files.list()}
    async with client(state_dir, runtime_name, body, sandbox.name) as other:
        assert await other.line() == "writing"
        other.send_signal(signal.SIGKILL)
        await other.ends()

    async def clean() -> bool:
        return {entry.name for entry in await sandbox.files.list()} == before

    await eventually(clean, "what it had started is gone")
    assert await sandbox.files.read_text("file") == "whole"


@pytest.mark.core
async def test_a_sandbox_outlives_the_process_that_made_it(
    state_dir: Path, runtime_name: RuntimeName, engine: Engine
) -> None:
    body = """
sandbox = await engine.create("orphan")
process = await sandbox.spawn("echo begun; read -r x; echo $x", stdin=True)
say(process.id)
await anyio.sleep_forever()
"""
    async with client(state_dir, runtime_name, body) as other:
        process_id = int(await other.line())
        other.send_signal(signal.SIGKILL)
        await other.ends()
    async with await engine.get("orphan") as sandbox:
        process = await sandbox.attach(process_id, stdin=True)
        assert process.stdin is not None
        await process.stdin.send(b"adopted\n")
        assert await output_of(process) == b"begun\nadopted\n"


async def test_a_host_process_that_is_stopped_blocks_no_other(
    state_dir: Path, runtime_name: RuntimeName, sandbox: Sandbox
) -> None:
    body = """
sandbox = await engine.get(sys.argv[3])
process = await sandbox.spawn("yes", keep=False)
async for event in process:
    say("reading")
    break
async for event in process:
    pass
"""
    async with client(state_dir, runtime_name, body, sandbox.name) as other:
        assert await other.line() == "reading"
        other.send_signal(signal.SIGSTOP)
        try:
            with anyio.fail_after(30):
                for number in range(20):
                    assert (await sandbox.exec(f"echo {number}")).stdout == f"{number}\n"
                data = bytes(3_000_000)
                await sandbox.files.write_bytes("file", data)
                assert await sandbox.files.read_bytes("file") == data
        finally:
            other.send_signal(signal.SIGCONT)


async def test_one_process_destroys_what_another_uses(
    state_dir: Path, runtime_name: RuntimeName, engine: Engine, leak_check: LeakCheck
) -> None:
    body = """
sandbox = await engine.get(sys.argv[3])
try:
    say("using")
    await sandbox.exec("sleep 31538004")
except atoll.SandboxDied:
    say("died")
try:
    await engine.get(sys.argv[3])
except atoll.SandboxNotFound:
    say("gone")
"""
    sandbox = await engine.create()
    async with client(state_dir, runtime_name, body, sandbox.name) as other:
        assert await other.line() == "using"
        await until_running(sandbox, "sleep 31538004")
        await engine.destroy(sandbox.name)
        assert await other.line() == "died"
        assert await other.line() == "gone"
        await other.succeeds()
    await leak_check.back_to_start()


async def test_processes_that_want_one_name_do_not_both_get_it(
    state_dir: Path, runtime_name: RuntimeName, engine: Engine
) -> None:
    body = """
try:
    sandbox = await engine.create("contested")
    say("got it")
except atoll.SandboxExists:
    say("refused")
"""
    async with client(state_dir, runtime_name, body) as one, client(state_dir, runtime_name, body) as other:
        assert sorted([await one.line(), await other.line()]) == ["got it", "refused"]
        await one.succeeds()
        await other.succeeds()
    await engine.destroy("contested")


# ---- ephemeral ----


@pytest.mark.core
@pytest.mark.parametrize("end", ["leaves", "is killed"])
async def test_an_ephemeral_sandbox_ends_with_its_client_however_that_one_ends(
    state_dir: Path, runtime_name: RuntimeName, engine: Engine, end: str, leak_check: LeakCheck
) -> None:
    body = """
sandbox = await engine.create("mayfly", ephemeral=True)
await sandbox.spawn("(setsid sleep 31538005 &) ; exec sleep 31538005")
say(sandbox.info.pid)
if sys.argv[3] == "is killed":
    await anyio.sleep_forever()
"""
    async with client(state_dir, runtime_name, body, end) as other:
        pid = int(await other.line())
        if end == "is killed":
            other.send_signal(signal.SIGKILL)
        await other.ends()
    await eventually(lambda: not Path(f"/proc/{pid}").exists(), "its first process is gone")

    async def collected() -> bool:
        await engine.remove_abandoned()
        return "mayfly" not in {info.name for info in await engine.list()}

    await eventually(collected, "its remains are collected")
    await leak_check.back_to_start()


async def test_an_ephemeral_sandbox_lives_until_its_last_client_leaves(
    state_dir: Path, runtime_name: RuntimeName, engine: Engine
) -> None:
    body = """
sandbox = await engine.create("shared-mayfly", ephemeral=True)
say(sandbox.info.pid)
await anyio.sleep_forever()
"""
    settings = atoll.Settings(runtime=runtime_name)
    async with client(state_dir, runtime_name, body) as other:
        pid = int(await other.line())
        async with atoll.open(state_dir, settings=settings) as second:
            sandbox = await second.get("shared-mayfly")
            assert (await sandbox.exec("echo two")).stdout == "two\n"
            other.send_signal(signal.SIGKILL)
            await other.ends()
            for _ in range(20):
                assert (await sandbox.exec("echo one left")).stdout == "one left\n"
            assert await engine.remove_abandoned() == [], "it is in use"
    await eventually(lambda: not Path(f"/proc/{pid}").exists(), "it ends with the last")

    async def collected() -> bool:
        await engine.remove_abandoned()
        return "shared-mayfly" not in {info.name for info in await engine.list()}

    await eventually(collected, "its remains are collected")
    with pytest.raises(SandboxNotFound):
        await engine.get("shared-mayfly")


async def test_the_name_of_an_ephemeral_sandbox_that_ended_is_free(
    state_dir: Path, runtime_name: RuntimeName, engine: Engine
) -> None:
    settings = atoll.Settings(runtime=runtime_name)
    async with atoll.open(state_dir, settings=settings) as first:
        sandbox = await first.create("again", ephemeral=True)
        pid = sandbox.info.pid
    await eventually(lambda: not Path(f"/proc/{pid}").exists(), "it ends with its client")

    async def made() -> bool:
        try:
            async with await engine.create("again") as second:
                return second.id != sandbox.id
        except atoll.SandboxExists:
            return False  # its keeper has not exited yet

    await eventually(made, "the name can be used again")
    await engine.remove_abandoned()


async def test_a_sandbox_that_is_not_ephemeral_needs_no_client(
    state_dir: Path, runtime_name: RuntimeName, engine: Engine
) -> None:
    async with atoll.open(state_dir, settings=atoll.Settings(runtime=runtime_name)) as first:
        sandbox = await first.create("needs-no-host")
    assert await engine.remove_abandoned() == []
    async with await engine.get("needs-no-host") as found:
        assert (await found.exec("echo still here")).stdout == "still here\n"
        assert found.info.pid == sandbox.info.pid
