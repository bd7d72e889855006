"""Using up what is limited: processes, memory, descriptors, and what the kernel counts per user."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

import anyio
import pytest

from atoll.contract.errors import AtollError, ExecTimeout, SandboxDied
from atoll.contract.model import Limits, RuntimeName
from atoll.drivers.machine import read_machine
from atoll.runtime.interface import Engine
from atoll.runtime.sandbox import Sandbox
from atoll.testing.waiting import BOUND_S, SLOWNESS
from tests.attacks.programs import PROBE, attempts, running, shell

MIB = 1024 * 1024
limited = pytest.mark.usefixtures("can_limit")
NS_GET_OWNER_UID = 0xB704


async def _make(engine: Engine, probe_program: bytes, limits: Limits) -> Sandbox:
    sandbox = await engine.create(limits=limits)
    await sandbox.files.write_bytes(PROBE, probe_program, mode=0o755)
    return sandbox


def _limits(runtime_name: RuntimeName, memory_bytes: int, *, pids: int) -> Limits:
    """gVisor's processes cannot be counted from outside; there memory holds a bomb."""
    return Limits(memory_bytes=memory_bytes, pids=None if runtime_name == "runsc" else pids)


@limited
async def test_a_fork_bomb_is_held_and_ended_with_its_tree(
    engine: Engine, runtime_name: RuntimeName, probe_program: bytes, bystander: Sandbox
) -> None:
    # Forks that are refused take the kernel's memory for a moment, on a busy machine more than a little.
    limits = _limits(runtime_name, 128 * MIB if runtime_name == "runsc" else 1024 * MIB, pids=64)
    async with await _make(engine, probe_program, limits) as sandbox:
        # With gVisor all processes live in one of the host's: what fills its memory may end the sandbox.
        held = (ExecTimeout, SandboxDied) if runtime_name == "runsc" else (ExecTimeout,)
        with pytest.raises(held) as bomb:
            await sandbox.exec([PROBE, "fork-bomb"], timeout_s=1)
        assert (await shell(bystander, "echo on")).stdout == "on\n"
        if isinstance(bomb.value, SandboxDied):
            return
        assert (await shell(sandbox, "echo on")).stdout == "on\n"
        assert not [each for each in await sandbox.ps() if "fork-bomb" in each.command]
        usage = await sandbox.stat()
        assert usage.pids is not None
        assert runtime_name == "runsc" or usage.pids < 16


@limited
async def test_a_fork_bomb_does_not_stop_other_operations_from_failing_fast(
    engine: Engine, runtime_name: RuntimeName, probe_program: bytes
) -> None:
    """With no process to be had, an operation says so or waits its turn; the sandbox is not lost."""
    if runtime_name == "runsc":
        return  # there the sandbox is lost, see above
    limits = Limits(pids=32, memory_bytes=1024 * MIB)
    async with await _make(engine, probe_program, limits) as sandbox:
        async with running(sandbox, PROBE, "fork-bomb") as (bomb, _):
            for _ in range(3):
                with anyio.fail_after(BOUND_S), contextlib.suppress(AtollError):
                    await sandbox.exec(["true"], timeout_s=5)
                with anyio.fail_after(BOUND_S), contextlib.suppress(AtollError):
                    await sandbox.files.read_bytes("/etc/hosts")
            await bomb.kill()
        assert (await shell(sandbox, "echo on")).stdout == "on\n"


@limited
async def test_a_memory_bomb_is_ended_and_said_to_be_one(
    engine: Engine, runtime_name: RuntimeName, probe_program: bytes
) -> None:
    limits = _limits(runtime_name, 96 * MIB, pids=64)
    async with await _make(engine, probe_program, limits) as sandbox:
        if runtime_name == "runsc":
            # One process of the host holds all of gVisor's memory: the kernel ends the sandbox, and that is said.
            with pytest.raises(SandboxDied, match="out of memory"):
                await sandbox.exec([PROBE, "memory-bomb"], timeout_s=30)
        else:
            result = await sandbox.exec([PROBE, "memory-bomb"], timeout_s=30)
            assert result.out_of_memory
            assert (await shell(sandbox, "echo on")).stdout == "on\n"


@limited
@pytest.mark.parametrize("place", ["/dev/shm", "/run", "/tmp"])
async def test_memory_in_files_counts_as_the_sandboxs(
    engine: Engine, runtime_name: RuntimeName, probe_program: bytes, place: str
) -> None:
    """tmpfs is memory, the file system's cache is given back: neither gets around the limit."""
    limits = _limits(runtime_name, 96 * MIB, pids=64)
    async with await _make(engine, probe_program, limits) as sandbox:
        with contextlib.suppress(AtollError):
            await sandbox.exec(
                ["dd", "if=/dev/zero", f"of={place}/big", "bs=1M", "count=160"], user="root", timeout_s=30
            )
        if runtime_name == "runsc":
            return  # the sandbox may have been ended for it; test_a_memory_bomb says the same
        usage = await sandbox.stat()
        assert usage.memory_peak_bytes is not None
        assert usage.memory_peak_bytes <= 96 * MIB
        assert (await shell(sandbox, "echo on")).stdout == "on\n"


_FILL_TCP = """
import socket
server = socket.create_server(('127.0.0.1', 0))
held, total = [], 0
for _ in range(120):
    client = socket.create_connection(server.getsockname())
    held += [client, server.accept()[0]]
    for end in held[-2:]:
        end.setblocking(False)
        try:
            while total < 320 << 20:
                total += end.send(bytes(1 << 16))
        except BlockingIOError:
            pass
print(total >> 20)
"""

_FILL_UDP = """
import socket
held, total = [], 0
for _ in range(900):
    receiver, sender = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
    receiver.bind(('127.0.0.1', 0))
    held.append(receiver)
    sender.setblocking(False)
    while True:  # what is beyond the receiver's buffer is dropped
        before = receiver.getsockopt(socket.SOL_SOCKET, 55, 36)[:4]  # SO_MEMINFO: memory held for reading
        sender.sendto(bytes(60000), receiver.getsockname())
        if receiver.getsockopt(socket.SOL_SOCKET, 55, 36)[:4] == before:
            break
        total += 60000
print(total >> 20)
"""


@limited
@pytest.mark.parametrize("fill", [_FILL_TCP, _FILL_UDP], ids=["tcp", "udp"])
async def test_network_buffers_count_as_the_sandboxs(engine: Engine, runtime_name: RuntimeName, fill: str) -> None:
    """On cgroup v1 those of TCP have a limit of their own, of the same size."""
    if fill is _FILL_UDP and runtime_name != "crun":
        pytest.skip("SO_MEMINFO is Linux's own; with runc, the kernel and the cgroup are those of crun")
    if fill is _FILL_UDP and read_machine().cgroup_mode == "v1":
        pytest.skip("cgroup v1 does not count the buffers of UDP")
    async with await engine.create(limits=_limits(runtime_name, 64 * MIB, pids=64)) as sandbox:
        try:
            said = await sandbox.exec(["python3", "-I", "-S", "-c", fill], timeout_s=30 * SLOWNESS)
        except SandboxDied:
            # The kernel frees the buffers of a killed program late, and may kill the guest meanwhile.
            assert runtime_name == "runsc" or fill is _FILL_UDP
            return
        assert said.out_of_memory or int(said.stdout) < 2 * 64, said


async def test_running_out_of_descriptors_fails_the_program_alone(
    engine: Engine, runtime_name: RuntimeName, probe_program: bytes
) -> None:
    async with (
        await _make(engine, probe_program, Limits(open_files=256)) as sandbox,
        running(sandbox, PROBE, "hoard", "files", "100000") as (_, said),
    ):
        count, error = map(int, said.split())
        assert count < 256
        assert error == errno.EMFILE
        assert (await shell(sandbox, "echo on")).stdout == "on\n"


async def test_many_processes_with_many_descriptors_leave_the_host_some(victim: Sandbox, bystander: Sandbox) -> None:
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(8):
            await stack.enter_async_context(running(victim, PROBE, "hoard", "files", "4000"))
        assert (await shell(bystander, "cat /etc/hosts")).ok
        os.close(os.open("/dev/null", os.O_RDONLY))


@pytest.mark.skipif(os.geteuid() != 0, reason="as an unprivileged user there is but one owner")
async def test_the_user_namespace_belongs_to_the_sandbox_alone(
    prey: Sandbox, bystander: Sandbox, runtime_name: RuntimeName
) -> None:
    """The kernel charges what a namespace uses (inotify, queues, pending signals) to its owner as well.

    If all belonged to root, one sandbox could use up root's share, and every other sandbox's with it.
    """
    owners = []
    for sandbox in (prey, bystander):
        descriptor = os.open(f"/proc/{sandbox.info.pid}/ns/user", os.O_RDONLY)
        try:
            owner = bytearray(4)
            fcntl.ioctl(descriptor, NS_GET_OWNER_UID, owner)
        finally:
            os.close(descriptor)
        owners.append(int.from_bytes(owner, "little"))
    if runtime_name == "runsc":
        # gVisor counts these things in its own kernel; who owns the host's namespace does not matter.
        return
    assert 0 not in owners
    assert owners[0] != owners[1]


@pytest.mark.parametrize("what", ["inotify", "mqueue", "signals", "timers", "pipes", "locked", "watches"])
async def test_what_the_kernel_counts_per_user_is_not_taken_from_the_neighbour(
    victim: Sandbox, bystander: Sandbox, probe_program: bytes, what: str
) -> None:
    """One sandbox takes all it can get. The neighbour still gets some, and so does the host."""
    most = {"signals": 100_000, "pipes": 1500, "timers": 4000, "watches": 500}.get(what, 600)
    await bystander.files.write_bytes(PROBE, probe_program, mode=0o755)
    async with contextlib.AsyncExitStack() as stack:
        taken = 0
        for user in ("user", "root"):
            _, said = await stack.enter_async_context(running(victim, PROBE, "hoard", what, str(most), user=user))
            taken += int(said.split()[0])
        assert taken, "nothing could be taken at all"
        _, said = await stack.enter_async_context(running(bystander, PROBE, "hoard", what, "4"))
        assert said == "4 0", f"the neighbour got {said} after {taken} were taken"
        if what == "inotify":
            async with bystander.files.watch("/tmp"):
                pass


async def test_terminals_are_left_for_the_neighbour_and_the_host(
    victim: Sandbox, bystander: Sandbox, probe_program: bytes, runtime_name: RuntimeName
) -> None:
    """All of the machine has some thousand of them."""
    await bystander.files.write_bytes(PROBE, probe_program, mode=0o755)
    most = 300 if runtime_name == "bwrap" else 1500  # bubblewrap's mount of them has no bound
    async with running(victim, PROBE, "hoard", "terminals", str(most), user="root") as (_, said):
        if runtime_name in ("crun", "runc"):
            assert said == f"256 {errno.ENOSPC}"
        async with running(bystander, PROBE, "hoard", "terminals", "4") as (_, said):
            assert said == "4 0"


async def test_no_process_gets_a_better_place_in_the_queue(prey: Sandbox, runtime_name: RuntimeName) -> None:
    for user in ("user", "root"):
        found = await attempts(prey, "schedule", user=user)
        granted = {name for name, error in found.items() if error == 0}
        # gVisor schedules in its own kernel and says yes to what has no effect on the host's.
        assert granted <= (
            {"fifo", "rr", "nice", "ioprio", "rtprio", "nproc"} if runtime_name == "runsc" else {"nproc"}
        )
    if runtime_name == "runsc":
        for task in Path(f"/proc/{prey.info.pid}/task").iterdir():
            fields = (task / "stat").read_text().rpartition(") ")[2].split()
            assert int(fields[16]) >= 0, "a task of the sandbox has a better nice value than others"
            assert int(fields[38]) == 0, "a task of the sandbox has a realtime policy"
