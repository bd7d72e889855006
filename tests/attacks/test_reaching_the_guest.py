"""Getting at PID 1, which holds the stream to the host: ptrace, its memory, its descriptors, frames of one's own."""

from __future__ import annotations

import errno

import pytest

from atoll.contract.errors import GuestProtocolError, SandboxDied
from atoll.contract.model import RuntimeName
from atoll.runtime.sandbox import Sandbox
from tests.attacks.programs import PROBE, attempts, probe, python, running, shell

USERS = ("user", "root")
GVISOR_SHOWS = {"auxv", "environ", "io", "maps", "exe", "root", "cwd", "fd"}
"""gVisor shows these of every process. Of the guest they tell nothing that is not in every image; what can be done with
its descriptors is tried below, in a test of its own."""


@pytest.mark.parametrize("user", USERS)
async def test_the_guest_can_be_neither_traced_nor_read(prey: Sandbox, runtime_name: RuntimeName, user: str) -> None:
    found = await attempts(prey, "reach", "1", user=user)
    assert found.pop("end") == -1
    granted = {name for name, error in found.items() if error == 0}
    # Root may see how many descriptors there are, not open one.
    harmless = {"fd"} if user == "root" else set()
    if runtime_name == "runsc":
        granted -= GVISOR_SHOWS
        granted -= {name for name in granted if name.startswith("fd/")}
    assert granted <= harmless


@pytest.mark.parametrize("user", USERS)
async def test_no_process_of_the_guests_can_be_traced(prey: Sandbox, runtime_name: RuntimeName, user: str) -> None:
    """Each command runs below a supervisor, which the guest forked; it holds ends of pipes to the guest."""
    async with running(prey, "/bin/sh", "-c", "echo up; sleep 60", user=user):
        processes = await prey.ps()
        own = [process for process in processes if process.pid != 1 and "atoll" in process.command]
        assert own, [process.command for process in processes]
        for process in own:
            found = await attempts(prey, "reach", str(process.pid), user=user)
            granted = {name for name, error in found.items() if error == 0} - {"root", "cwd", "fd"}
            if runtime_name == "runsc":
                granted -= GVISOR_SHOWS
                granted -= {name for name in granted if name.startswith("fd/")}
            assert not granted, (process.command, granted)


@pytest.mark.parametrize("user", USERS)
async def test_frames_cannot_be_forged_through_descriptors_in_proc(
    victim: Sandbox, bystander: Sandbox, runtime_name: RuntimeName, user: str
) -> None:
    code = """
import os
frame = (0).to_bytes(4, 'little') + bytes([33, 0, 0, 0]) + (0).to_bytes(4, 'little')
for pid in os.listdir('/proc'):
    if not pid.isdigit() or int(pid) == os.getpid(): continue
    for fd in range(0, 1200):
        for flags in (os.O_WRONLY, os.O_RDWR):
            try:
                opened = os.open(f'/proc/{pid}/fd/{fd}', flags | os.O_NONBLOCK)
                # gVisor since 2023: the output of the user's own commands, which the user may write to anyway.
                if os.getuid() and os.fstat(opened).st_uid == os.getuid(): continue
                os.write(opened, frame)
                print('wrote to', pid, fd, os.readlink(f'/proc/{pid}/fd/{fd}'))
            except OSError:
                pass
"""
    if runtime_name == "runsc" and user == "root":
        # gVisor of 2022 lets root inside open any descriptor. The host believes no frame: the sandbox is ended for
        # a forged one, and nobody else notices.
        with pytest.raises((GuestProtocolError, SandboxDied)):
            await python(victim, code, user=user)
        assert (await shell(bystander, "echo on")).stdout == "on\n"
        return
    said = await python(victim, code, user=user)
    assert said.ok, said.stderr
    wrote = [line for line in said.stdout.splitlines() if not line.endswith("/dev/null")]
    assert not wrote


@pytest.mark.parametrize("channels", [0, 3])
async def test_programs_inherit_no_descriptor_but_their_own(prey: Sandbox, channels: int) -> None:
    async with await prey.spawn([PROBE, "descriptors"], channels=channels, keep=False) as process:
        said = b"".join([event.data async for event in process if hasattr(event, "data")])
    numbers = [int(line.split()[0]) for line in said.decode().splitlines()]
    assert numbers == list(range(3 + channels))


async def test_programs_on_a_terminal_inherit_no_descriptor_but_their_own(prey: Sandbox) -> None:
    async with await prey.spawn([PROBE, "descriptors"], pty=(24, 80), keep=False) as process:
        said = b"".join([event.data async for event in process if hasattr(event, "data")])
    lines = [line.split() for line in said.decode().splitlines()]
    assert [int(number) for number, *_ in lines] == [0, 1, 2]


async def test_the_environment_of_the_guest_and_of_commands_holds_nothing_of_the_hosts(
    prey: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOLL_TEST_SECRET", "hunter2")
    said = await shell(prey, "env; cat /proc/*/environ", user="root")
    assert "hunter2" not in said.stdout
    assert "ATOLL_" not in said.stdout


async def test_the_output_of_a_command_cannot_pass_for_a_frame(prey: Sandbox) -> None:
    """GONE, END and HELLO with every stream number that may be in use, printed to stdout and stderr."""
    code = """
import os, struct
for kind in (1, 9, 33, 32, 8):
    for stream in range(0, 40):
        frame = struct.pack('<IBBHI', 0, kind, 0, 0, stream)
        os.write(1, frame); os.write(2, frame)
"""
    said = await prey.exec_bytes(["python3", "-I", "-S", "-c", code], timeout_s=30)
    assert said.exit_code == 0
    assert len(said.stdout) == len(said.stderr) == 5 * 40 * 12


async def test_names_of_processes_cannot_fool_the_list(prey: Sandbox) -> None:
    """/proc/PID/stat holds the name between parentheses, and the name may be anything."""
    code = """
import ctypes, time
ctypes.CDLL(None).prctl(15, b') S 1 1 1 (x\\n', 0, 0, 0)
print('named', flush=True)
time.sleep(60)
"""
    async with running(prey, "python3", "-I", "-S", "-c", code) as (process, _):
        seen = {each.pid: each for each in await prey.ps()}
        assert seen[process.pid].ppid != 1
        assert "python3" in seen[process.pid].command
        await prey.kill(process.id)
        assert (await process.wait()).signal == 9


async def test_the_probe_reaches_what_it_may_reach(prey: Sandbox, runtime_name: RuntimeName) -> None:
    """Otherwise the tests above would prove nothing."""
    async with running(prey, PROBE, "hoard", "files", "1") as (process, _):
        found = await attempts(prey, "reach", str(process.pid))
        assert found["mem"] != 1
        assert found["fd"] == 0
        # gVisor lets only an ancestor trace.
        assert found["ptrace-attach"] == (0 if runtime_name != "runsc" else errno.EPERM)
    assert (await probe(prey, "descriptors")).ok
