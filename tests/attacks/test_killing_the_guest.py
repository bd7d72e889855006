"""Killing what keeps a sandbox going: PID 1, the supervisors above commands, the workers of file operations."""

from __future__ import annotations

import contextlib
import os
import signal as signals
from collections.abc import Awaitable, Callable

import anyio
import pytest

from atoll.contract.driver import Capabilities
from atoll.contract.errors import AtollError, GuestUnresponsive, SandboxDied, SandboxError
from atoll.contract.model import RuntimeName
from atoll.runtime.interface import Engine
from atoll.runtime.sandbox import Sandbox
from atoll.testing.waiting import eventually
from tests.attacks.programs import probe, running, shell

USERS = ("user", "root")


@pytest.mark.parametrize("user", USERS)
async def test_no_signal_from_inside_ends_or_stops_the_guest(
    victim: Sandbox, runtime_name: RuntimeName, user: str
) -> None:
    # Linux keeps signals away from PID 1, gVisor does not: there SIGKILL and SIGSTOP by root cannot be helped.
    which = "most" if runtime_name == "runsc" and user == "root" else "all"
    said = await probe(victim, "signals", "1", which, user=user)
    assert said.stdout == "sent\n"
    assert (await shell(victim, "echo on")).stdout == "on\n"


async def test_a_sandbox_that_root_ended_from_inside_is_said_to_have_ended(
    victim: Sandbox, runtime_name: RuntimeName
) -> None:
    try:
        result = await victim.exec("kill -9 1; echo on", user="root", timeout_s=10)
    except SandboxDied:
        assert runtime_name == "runsc", "Linux keeps this signal away from PID 1"
    else:
        assert result.stdout == "on\n"


@pytest.mark.parametrize("user", USERS)
async def test_killing_all_that_may_be_killed_ends_no_sandbox(victim: Sandbox, user: str) -> None:
    """`kill -9 -1` by root takes the supervisors too: what they watched over is told to be lost, never made up.

    That may still be so of what comes next, when it was given to one that waited and is just being killed.
    """

    async def answers() -> bool:
        with contextlib.suppress(AtollError):
            return (await shell(victim, "echo on")).stdout == "on\n"
        return False

    for _ in range(3):
        with contextlib.suppress(AtollError):
            result = await victim.exec(
                ["/bin/sh", "-c", "kill -9 -1; kill -STOP -1; echo survived"], user=user, timeout_s=5
            )
            assert not result.ok or result.stdout == "survived\n"
        await eventually(answers, "the sandbox answers")


async def test_a_user_cannot_kill_a_supervisor(prey: Sandbox) -> None:
    async with running(prey, "/bin/sh", "-c", "echo up; sleep 60") as (process, _):
        supervisor = next(each.ppid for each in await prey.ps() if each.pid == process.pid)
        said = await shell(prey, f"kill -9 {supervisor} && echo killed; kill -STOP {supervisor} && echo stopped")
        assert said.stdout == ""
        await process.kill()


async def test_a_command_whose_supervisor_is_killed_is_lost_and_does_not_hang(victim: Sandbox) -> None:
    async with await victim.spawn(["/bin/sh", "-c", "echo up; exec sleep 60"], user="root", keep=False) as process:
        await anext(process)
        supervisor = next(each.ppid for each in await victim.ps() if each.pid == process.pid)
        assert supervisor != 1
        await shell(victim, f"kill -9 {supervisor}", user="root")
        with anyio.fail_after(15):
            with contextlib.suppress(AtollError):
                assert (await process.wait()).exit_code != 0
    assert (await shell(victim, "echo on")).stdout == "on\n"


@pytest.mark.parametrize("signal", ["KILL", "STOP"])
async def test_a_worker_that_is_killed_or_stopped_fails_its_operation_alone(victim: Sandbox, signal: str) -> None:
    """A process that does nothing but hunt for workers while files are read and written."""
    hunt = (
        "echo hunting; while :; do for p in /proc/[0-9]*; do "
        f'read -r n < $p/comm 2>/dev/null && [ "$n" = atoll-worker ] && kill -{signal} ${{p#/proc/}}; done; done'
    )
    outcomes = 0
    async with running(victim, "/bin/sh", "-c", hunt, user="user"):
        for i in range(10):
            with anyio.move_on_after(0.5) as patience:
                try:
                    await victim.files.write_bytes(f"file-{i}", b"x" * 65536)
                    assert len(await victim.files.read_bytes(f"file-{i}")) == 65536
                except AtollError:
                    pass
                outcomes += 1
            outcomes += patience.cancelled_caught
            if patience.cancelled_caught:
                break
    assert outcomes
    assert await victim.files.write_text("after", "x") == 1
    assert await victim.files.read_text("after") == "x"


async def test_stopping_the_whole_sandbox_from_inside_is_undone_by_the_host(victim: Sandbox) -> None:
    """A command that stops itself and everything it may is killed when its time is up."""
    with pytest.raises(TimeoutError):
        await victim.exec("kill -STOP -1; kill -STOP $$; sleep 60", timeout_s=0.5)
    assert (await shell(victim, "echo on")).stdout == "on\n"
    left = [each for each in await victim.ps() if "sleep 60" in each.command]
    assert not left


@pytest.mark.parametrize("limit", [4, 16, 24, 32, 64, 100, 128])
async def test_a_guest_that_root_left_few_descriptors_loses_no_output_without_an_error(
    victim: Sandbox, limit: int
) -> None:
    """By `prlimit` on PID 1, while a supervisor is idle and when there is none."""
    code = f"import resource; resource.prlimit(1, resource.RLIMIT_NOFILE, ({limit}, {limit}))"
    with contextlib.suppress(AtollError):
        await victim.exec(["python3", "-c", code], user="root", timeout_s=20)
    busy = []
    for attempt in range(3):
        try:
            result = await victim.exec(["/bin/sh", "-c", "echo out; echo err >&2; exit 3"], timeout_s=20)
        except AtollError:
            pass  # which says so
        else:
            assert result.stderr, f"attempt {attempt} lost its output"
            assert (result.stdout, result.exit_code) == ("out\n", 3) or "open files" in result.stderr.lower()
        with contextlib.suppress(AtollError):
            busy.append(await victim.spawn(["sleep", "60"], keep=False))
    for process in busy:
        with contextlib.suppress(AtollError):
            await process.kill()
            await process.wait()


async def test_a_stopped_guest_holds_no_caller_up_and_a_silent_or_paused_one_is_waited_for(
    engine: Engine, victim: Sandbox, runtime_name: RuntimeName, capabilities: Capabilities
) -> None:
    """By root inside where PID 1 can be stopped from there (gVisor), else from the host."""
    if runtime_name not in {"crun", "runsc"}:
        pytest.skip("it takes half a minute, and differs only in whether PID 1 can be stopped from inside")
    async with await engine.create() as other:
        quiet = await other.spawn("read line; echo got $line", stdin=True, keep=False)
        paused = await engine.create() if capabilities.freeze else None
        frozen = await paused.spawn("read line; echo got $line", stdin=True) if paused else None
        if paused:
            await paused.pause()
        started = await victim.spawn("sleep 60", keep=False)
        if runtime_name == "runsc":
            with contextlib.suppress(SandboxError):
                await victim.exec("kill -STOP 1", user="root", timeout_s=0.2)
        else:
            os.kill(_pid(victim), signals.SIGSTOP)
        outcomes: dict[str, BaseException] = {}

        async def call(name: str, operation: Callable[[], Awaitable[object]]) -> None:
            with pytest.raises(SandboxError) as caught:
                await operation()
            outcomes[name] = caught.value

        async def timed() -> None:
            """The caller's time counts, and little more: far less than what a caller without one waits."""
            with anyio.fail_after(15):
                await victim.exec("true", timeout_s=0.5)

        async def limited() -> None:
            with anyio.fail_after(15), started.time_limit(0.5):
                async for _ in started:
                    pass

        with anyio.fail_after(50):
            async with anyio.create_task_group() as group:
                group.start_soon(call, "exec", lambda: victim.exec("true"))
                group.start_soon(call, "read", lambda: victim.files.read_bytes("/etc/passwd"))
                group.start_soon(call, "write", lambda: victim.files.write_bytes("x", b"x" * 3_000_000))
                group.start_soon(call, "processes", victim.processes)
                group.start_soon(call, "ps", victim.ps)
                group.start_soon(call, "dial", lambda: victim.dial(80))
                group.start_soon(call, "timed", timed)
                group.start_soon(call, "limited", limited)
                group.start_soon(call, "spawn", lambda: victim.spawn("true", start_timeout_s=1))
        assert {name: type(error) for name, error in outcomes.items()} == dict.fromkeys(outcomes, GuestUnresponsive)
        assert "does not answer" in str(outcomes["ps"])
        listed = {each.name: each for each in await engine.list()}
        assert "has not answered since" in str(listed[victim.name].reason)
        assert await victim.status() == "running"
        assert listed[other.name].reason is None
        # No other sandbox is taken for dead: a command that says nothing, and a sandbox that was paused all the time.
        if paused and frozen:
            assert {each.name: each.status for each in await engine.list()}[paused.name] == "paused"
            assert frozen.stdin is not None
            await frozen.stdin.send(b"it\n")
            assert (await frozen.wait()).exit_code == 0
            await paused.destroy()
        assert quiet.stdin is not None
        await quiet.stdin.send(b"it\n")
        assert (await quiet.wait()).exit_code == 0
        if runtime_name != "runsc":
            os.kill(_pid(victim), signals.SIGCONT)
            assert (await shell(victim, "echo on")).stdout == "on\n"
            await victim.status()
            assert victim.info.reason is None
        with anyio.fail_after(10):
            await victim.destroy()


def _pid(sandbox: Sandbox) -> int:
    assert sandbox.info.pid is not None
    return sandbox.info.pid
