"""Commands in the real guest, without isolation: both sides of the protocol together."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest
from anyio.abc import ByteStream, SocketAttribute

from atoll.contract.errors import (
    ExecTimeout,
    InvalidRequest,
    PathNotDirectory,
    PathNotFound,
    PortRefused,
    ProcessNotFound,
    SandboxDied,
)
from atoll.contract.model import Exited, Output
from atoll.runtime.guest.process import Process
from atoll.runtime.sandbox import Sandbox
from atoll.testing.waiting import eventually
from tests.runtime.conftest import Host

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(os.geteuid() != 0, reason="the guest changes users")]

MIB = 1024 * 1024


def alive(pid_file: Path) -> bool:
    """Whether the process that wrote its number there lives."""
    try:
        state = Path(f"/proc/{pid_file.read_text().strip()}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def output(process: Process) -> tuple[bytes, Exited]:
    data = b""
    with anyio.fail_after(20):
        async for event in process:
            if isinstance(event, Output):
                data += event.data
            elif isinstance(event, Exited):
                return data, event
    raise AssertionError("it did not end")


# ---------------------------------------------------------------------------------------------------------------- exec


async def test_a_line_runs_in_a_shell_and_a_sequence_does_not(sandbox: Sandbox) -> None:
    result = await sandbox.exec("echo $((6 * 7)); echo problem >&2; exit 3")
    assert (result.stdout, result.stderr, result.exit_code) == ("42\n", "problem\n", 3)
    result = await sandbox.exec(["echo", "$HOME", "a b"])
    assert (result.stdout, result.ok) == ("$HOME a b\n", True)


async def test_many_commands_at_once_keep_their_outputs_apart(sandbox: Sandbox) -> None:
    async def one(number: int) -> None:
        result = await sandbox.exec(f"for i in 1 2 3; do echo {number}; done; exit {number}")
        assert (result.stdout, result.exit_code) == (f"{number}\n" * 3, number)

    async with anyio.create_task_group() as group:
        for number in range(30):
            group.start_soon(one, number)


@pytest.mark.parametrize(
    ("command", "code"), [("no-such-program-here", 127), (["no-such-program-here"], 127), (["/etc/passwd"], 126)]
)
async def test_a_program_that_cannot_be_started_is_an_exit_code_as_in_a_shell(
    sandbox: Sandbox, command: str | list[str], code: int
) -> None:
    result = await sandbox.exec(command)
    assert result.exit_code == code
    assert result.stderr


async def test_a_process_can_be_spawned_that_cannot_be_started(sandbox: Sandbox) -> None:
    data, exited = await output(await sandbox.spawn(["no-such-program-here"]))
    assert exited.exit_code == 127
    assert b"no-such-program-here" in data


async def test_environment_directory_and_user_are_as_asked(sandbox: Sandbox) -> None:
    result = await sandbox.exec("echo $A $LANG; pwd; id -un", env={"A": "b c"}, cwd="/usr", user="daemon")
    assert result.stdout == "b c C.UTF-8\n/usr\ndaemon\n"
    assert (await sandbox.exec("id -u; echo $HOME $USER; pwd")).stdout == "0\n/root root\n/root\n"


async def test_a_directory_or_a_user_that_is_not_there_is_an_error(sandbox: Sandbox, tmp_path: Path) -> None:
    with pytest.raises(PathNotFound, match="/no/such/place"):
        await sandbox.exec("true", cwd="/no/such/place")
    with pytest.raises(PathNotDirectory):
        await sandbox.exec("true", cwd="/etc/passwd")
    with pytest.raises(PathNotFound):
        await sandbox.spawn("true", cwd="/no/such/place")
    with pytest.raises(InvalidRequest, match="nobody-here"):
        await sandbox.exec("true", user="nobody-here")


async def test_input_of_any_size_goes_through(sandbox: Sandbox) -> None:
    data = os.urandom(3 * MIB)
    result = await sandbox.exec_bytes(["cat"], stdin=data)
    assert result.stdout == data
    assert (await sandbox.exec("cat", stdin="")).stdout == ""
    assert (await sandbox.exec("cat")).stdout == ""


async def test_a_command_that_does_not_read_its_input_ends(sandbox: Sandbox) -> None:
    assert (await sandbox.exec("head -c 3; exit 5", stdin=b"x" * MIB)).exit_code == 5


async def test_output_beyond_the_limit_is_head_and_tail(sandbox: Sandbox) -> None:
    result = await sandbox.exec_bytes("seq 100000", output_limit_bytes=1000)
    whole = b"".join(b"%d\n" % i for i in range(1, 100001))
    assert result.stdout_truncation is not None
    assert result.stdout == whole[:500] + whole[-500:]
    assert (result.stdout_truncation.start, result.stdout_truncation.end, result.stdout_truncation.total) == (
        500,
        len(whole) - 500,
        len(whole),
    )
    text = await sandbox.exec("seq 100000", output_limit_bytes=1000)
    assert "bytes left out" in text.stdout


async def test_a_hundred_megabytes_of_output_pass_with_bounded_memory(sandbox: Sandbox) -> None:
    await sandbox.exec("head -c 20000000 /dev/zero", output_limit_bytes=MIB)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = await sandbox.exec_bytes("head -c 100000000 /dev/zero", output_limit_bytes=MIB)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert result.stdout_truncation is not None
    assert result.stdout_truncation.total == 100_000_000
    assert after - before < 8 * 1024, "KiB more than before"


async def test_a_command_ends_with_its_main_process_whatever_stays_behind(sandbox: Sandbox) -> None:
    with anyio.fail_after(10):
        result = await sandbox.exec("sleep 1000 & echo started")
    assert result.stdout == "started\n"
    left = [info for info in await sandbox.processes() if info.live]
    assert len(left) == 1
    await sandbox.kill(left[0].id)
    await eventually(lambda: _live(sandbox, left[0].id, False), "it is gone")


async def _live(sandbox: Sandbox, process_id: int, wanted: bool) -> bool:
    return any(info.live is wanted for info in await sandbox.processes() if info.id == process_id)


async def test_a_time_limit_kills_the_tree_and_keeps_the_output(sandbox: Sandbox, tmp_path: Path) -> None:
    daemon = tmp_path / "daemon"
    with anyio.fail_after(10), pytest.raises(ExecTimeout) as caught:
        await sandbox.exec(
            f"echo begun; setsid sh -c 'echo $$ > {daemon}; exec sleep 1000' & sleep 1000", timeout_s=0.5
        )
    assert caught.value.result.stdout == "begun\n"
    assert caught.value.result.timed_out
    assert not alive(daemon)


async def test_a_cancelled_command_is_gone_with_all_that_it_started(sandbox: Sandbox, tmp_path: Path) -> None:
    main, daemon = tmp_path / "main", tmp_path / "daemon"
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:

            async def run() -> None:
                await sandbox.exec(f"setsid sh -c 'echo $$ > {daemon}; exec sleep 1000' & echo $$ > {main}; sleep 1000")

            group.start_soon(run)
            await eventually(lambda: main.exists() and daemon.exists() and daemon.read_text(), "it runs")
            group.cancel_scope.cancel()
    assert not alive(main)
    assert not alive(daemon)


async def test_death_by_a_signal_is_told(sandbox: Sandbox) -> None:
    result = await sandbox.exec("kill -SEGV $$")
    assert (result.exit_code, result.signal) == (128 + signal.SIGSEGV, signal.SIGSEGV)


async def test_a_guest_that_ends_is_a_dead_sandbox(
    host: Host, guest_stream: Callable[[], Awaitable[ByteStream]]
) -> None:
    sandbox = host.sandbox(guest_stream)
    guest = (await sandbox.exec("cut -d' ' -f4 /proc/$PPID/stat")).stdout.strip()
    with anyio.fail_after(10), pytest.raises(SandboxDied, match="connection lost"):
        await sandbox.exec(f"kill -9 {guest}; sleep 1000")


# --------------------------------------------------------------------------------------------------------------- spawn


async def test_a_process_is_talked_to_while_it_runs(sandbox: Sandbox) -> None:
    async with await sandbox.spawn(["cat"], stdin=True, keep=False) as process:
        assert process.stdin is not None
        for word in (b"one", b"two"):
            await process.stdin.send(word)
            event = await anext(process)
            assert isinstance(event, Output)
            assert event.data == word
        await process.stdin.aclose()
        assert (await process.wait()).exit_code == 0


async def test_leaving_a_process_that_is_not_kept_kills_it(sandbox: Sandbox, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    async with await sandbox.spawn(f"echo $$ > {pid}; sleep 1000", keep=False):
        await eventually(lambda: pid.exists() and pid.read_text(), "it runs")
    assert not alive(pid)


async def test_a_process_that_is_kept_is_taken_up_again(sandbox: Sandbox, tmp_path: Path) -> None:
    go = tmp_path / "go"
    async with await sandbox.spawn(f"echo first; while [ ! -e {go} ]; do sleep 0.01; done; echo second; exit 7") as p:
        event = await anext(p)
        assert isinstance(event, Output)
    again = await sandbox.attach(p.id)
    assert (again.id, again.pid) == (p.id, p.pid)
    go.touch()
    data, exited = await output(again)
    assert data == b"first\nsecond\n"
    assert exited.exit_code == 7
    later = await sandbox.attach(p.id, stdout_offset=6)
    data, exited = await output(later)
    assert data == b"second\n"
    assert exited.exit_code == 7


async def test_output_that_is_gone_is_where_it_begins_again(sandbox: Sandbox) -> None:
    process = await sandbox.spawn("head -c 1000000 /dev/zero; sleep 1000")
    await process.detach()
    await eventually(lambda: _written(sandbox, process.id, 1_000_000), "all is written")
    attached = await sandbox.attach(process.id)
    event = await anext(attached)
    assert isinstance(event, Output)
    assert 0 < event.offset < 1_000_000
    await attached.kill()
    data, exited = await output(attached)
    assert event.offset + len(event.data) + len(data) == 1_000_000
    assert exited.signal == signal.SIGKILL


async def _written(sandbox: Sandbox, process_id: int, total: int) -> bool:
    return any(info.stdout_total == total for info in await sandbox.processes() if info.id == process_id)


async def test_processes_are_listed_and_killed(sandbox: Sandbox) -> None:
    process = await sandbox.spawn(["sleep", "1000"])
    info = next(info for info in await sandbox.processes() if info.id == process.id)
    assert (info.pid, info.live, info.exit_code, info.ended_at) == (process.pid, True, None, None)
    assert "sleep" in info.command
    system = next(one for one in await sandbox.ps() if one.pid == process.pid)
    assert "sleep" in system.command
    await sandbox.kill(process.id, signal.SIGTERM)
    assert (await process.wait()).signal == signal.SIGTERM
    info = next(info for info in await sandbox.processes() if info.id == process.id)
    assert info.exit_code == 143
    assert info.ended_at is not None
    await eventually(lambda: _live(sandbox, process.id, False), "its tree is gone")
    with pytest.raises(ProcessNotFound):
        await sandbox.kill(99999)
    with pytest.raises(ProcessNotFound):
        await sandbox.attach(99999)


async def test_a_terminal_is_one(sandbox: Sandbox) -> None:
    process = await sandbox.spawn("tty; stty size; echo $TERM", pty=(30, 100), keep=False)
    data, exited = await output(process)
    assert exited.exit_code == 0
    assert b"/dev/pts/" in data
    assert b"30 100" in data
    assert b"xterm-256color" in data


async def test_a_shell_hears_keystrokes_and_its_new_size(sandbox: Sandbox) -> None:
    async with await sandbox.shell() as shell:
        assert shell.stdin is not None
        await shell.resize(50, 120)
        await shell.stdin.send(b"stty size; exit 4\n")
        data, exited = await output(shell)
    assert b"50 120" in data
    assert exited.exit_code == 4


async def test_extra_channels_reach_the_process(sandbox: Sandbox) -> None:
    async with await sandbox.spawn("cat <&3 >&4", channels=2, keep=False) as process:
        await process.channel(0).send(b"through three and four")
        await process.channel(0).send_eof()
        data = b""
        with anyio.fail_after(10):
            while len(data) < 22:
                data += await process.channel(1).receive()
        assert data == b"through three and four"
        assert (await process.wait()).exit_code == 0


# --------------------------------------------------------------------------------------------------------------- ports


async def test_a_port_inside_is_dialled(sandbox: Sandbox) -> None:
    async def answer(stream: ByteStream) -> None:
        async with stream:
            assert await stream.receive() == b"ping"
            with pytest.raises(anyio.EndOfStream):
                await stream.receive()
            await stream.send(b"pong")

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, answer)
        port = listener.extra(SocketAttribute.local_port)
        async with await sandbox.dial(port) as connection:
            await connection.send(b"ping")
            await connection.send_eof()
            assert await connection.receive() == b"pong"
            with pytest.raises(anyio.EndOfStream):
                await connection.receive()
        group.cancel_scope.cancel()
    with pytest.raises(PortRefused):
        await sandbox.dial(port)


async def test_what_connects_inside_reaches_a_listener(sandbox: Sandbox) -> None:
    async with sandbox.listen() as listener:
        async with await anyio.connect_tcp("127.0.0.1", listener.port) as outer, await anext(listener) as inner:
            await outer.send(b"hello")
            assert await inner.receive() == b"hello"
            await inner.send(b"you")
            assert await outer.receive() == b"you"
        with pytest.raises(PortRefused):
            async with sandbox.listen(listener.port):
                pass


async def test_a_connection_carries_much_both_ways(sandbox: Sandbox) -> None:
    data = os.urandom(5 * MIB)

    async def echo(stream: ByteStream) -> None:
        async with stream:
            async for chunk in stream:
                await stream.send(chunk)

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, echo)
        port = listener.extra(SocketAttribute.local_port)
        async with await sandbox.dial(port) as connection:

            async def send() -> None:
                await connection.send(data)
                await connection.send_eof()

            group.start_soon(send)
            got = b"".join([chunk async for chunk in connection])
        assert got == data
        group.cancel_scope.cancel()
