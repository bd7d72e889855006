"""`spawn`, `attach`, `shell`, `kill`, `processes` and `ps`: commands while they run."""

from __future__ import annotations

import os
import signal
from datetime import UTC, datetime
from pathlib import Path

import anyio
import pytest

from atoll import (
    Capabilities,
    Engine,
    ExecTimeout,
    Exited,
    Gap,
    InvalidRequest,
    Output,
    PathNotFound,
    Process,
    ProcessNotFound,
    Sandbox,
    SandboxDied,
    SystemProcess,
)
from atoll.contract.model import RuntimeName
from atoll.testing.inside import (
    Peak,
    collect,
    connections_made,
    contiguous,
    cut,
    keeper_pid,
    output_of,
    read_until,
    running,
    until_running,
    wait_tree_exit,
)
from atoll.testing.waiting import eventually

MIB = 1024 * 1024

COUNT_ON_REQUEST = 'n=0; while read -r to; do while [ $n -lt $to ]; do n=$((n + 1)); echo "line $n"; done; done'
"""Writes numbered lines up to each number that it reads, so that its whole output is known."""


def lines_to(last: int) -> bytes:
    return "".join(f"line {number}\n" for number in range(1, last + 1)).encode()


# ---- to the end ----


async def test_communicate_gives_what_exec_gives(shared: Sandbox) -> None:
    process = await shared.spawn("tr a-z A-Z; echo oops >&2; exit 3", stdin=True)
    result = await process.communicate("x" * MIB, output_limit_bytes=2 * MIB)  # more than fits into any buffer
    assert (result.stdout, result.stderr, result.exit_code) == ("X" * MIB, "oops\n", 3)
    quiet = await shared.spawn("echo done; cat", stdin=True)
    assert (await quiet.communicate()).stdout == "done\n"  # its input is closed
    short = await shared.spawn("seq 1000000")
    result = await short.communicate(output_limit_bytes=100)
    assert result.stdout_truncation is not None
    assert result.stdout.startswith("1\n2\n")
    with pytest.raises(InvalidRequest, match="has no stdin"):
        await (await shared.spawn("true")).communicate("x")


async def test_a_spawned_command_is_killed_when_its_time_is_over(shared: Sandbox) -> None:
    process = await shared.spawn("echo begun; (setsid sleep 4711 &) ; sleep 4711", timeout_s=0.4)
    with pytest.raises(ExecTimeout, match=r"timed out after 0\.4 s") as caught:
        await process.communicate()
    assert (caught.value.result.stdout, caught.value.result.timed_out) == ("begun\n", True)
    assert await running(shared, "4711") == []
    unread = await shared.spawn("sleep 4712", timeout_s=0.1)
    await wait_tree_exit(shared, "4712")  # also if no client reads
    for _ in range(2):
        with pytest.raises(ExecTimeout):
            await unread.wait()
    with pytest.raises(ExecTimeout):
        assert [event async for event in await shared.spawn("sleep 4713", timeout_s=0.1)] == []
    left = await shared.spawn("sleep 4714", timeout_s=0.3)
    await left.detach()  # its limit ends with the handle
    assert (await (await shared.spawn("sleep 0.5", timeout_s=20)).wait()).exit_code == 0
    assert await running(shared, "4714") != []
    await shared.kill(left.id)
    with pytest.raises(InvalidRequest):
        await shared.spawn("true", timeout_s=0)


# ---- events ----


@pytest.mark.core
async def test_events_are_the_output_in_order_and_the_exit_last(shared: Sandbox) -> None:
    process = await shared.spawn("seq 1 20000; echo oops >&2; exit 5")
    events = [event async for event in process]
    out = [event for event in events if isinstance(event, Output) and event.stream == "stdout"]
    err = [event for event in events if isinstance(event, Output) and event.stream == "stderr"]
    assert b"".join(event.data for event in out) == "".join(f"{n}\n" for n in range(1, 20001)).encode()
    assert b"".join(event.data for event in err) == b"oops\n"
    assert out[0].offset == err[0].offset == 0
    assert contiguous(out)
    exited = events[-1]
    assert isinstance(exited, Exited)
    assert (exited.exit_code, exited.signal) == (5, None)
    assert (exited.stdout_total, exited.stderr_total) == (108894, 5)
    assert sum(isinstance(event, Exited) for event in events) == 1
    assert len(out) + len(err) + 1 == len(events)


async def test_iteration_is_over_after_the_exit(shared: Sandbox) -> None:
    process = await shared.spawn("true")
    assert [type(event) for event in [e async for e in process]] == [Exited]
    assert [event async for event in process] == []
    assert (await process.wait()).exit_code == 0


async def test_output_comes_as_it_is_written_and_not_at_the_end(shared: Sandbox) -> None:
    async with await shared.spawn("echo first; read -r x; echo second", stdin=True, keep=False) as process:
        assert await read_until(process, b"first\n") == b"first\n"
        assert process.stdin is not None
        await process.stdin.send(b"go on\n")
        assert await read_until(process, b"second\n") == b"second\n"


@pytest.mark.core
async def test_wait_passes_over_unread_output_of_any_size(shared: Sandbox) -> None:
    process = await shared.spawn("head -c 20000000 /dev/zero; exit 4")
    with anyio.fail_after(60):
        exited = await process.wait()
    assert (exited.exit_code, exited.stdout_total) == (4, 20_000_000)
    assert await process.wait() == exited


async def test_a_reader_that_is_slow_slows_the_process_and_loses_nothing(
    sandbox: Sandbox, state_dir: Path, runtime_name: RuntimeName
) -> None:
    """The output is not read until the process blocks. All of it arrives nevertheless."""
    async with await sandbox.spawn("seq 1 3000000; echo complete >&2", keep=False) as process:
        peaks = {"this process": Peak(os.getpid())}
        if os.geteuid() == 0:
            peaks["the keeper"] = Peak(keeper_pid(state_dir, sandbox))
        written = -1

        async def blocked() -> bool:
            nonlocal written
            before, written = written, (await sandbox.processes())[-1].stdout_total
            return 0 < before == written

        await eventually(blocked, "the process blocks")
        assert written < 8 * MIB, "output that is not read was buffered without a bound"
        total = 0
        async for event in process:
            if isinstance(event, Output) and event.stream == "stdout":
                assert event.offset == total
                total += len(event.data)
        assert total == 22_888_896
        grown = {who: peak.growth_bytes // MIB for who, peak in peaks.items()}
        assert all(growth < 16 for growth in grown.values()), grown


# ---- input ----


@pytest.mark.core
async def test_what_is_sent_to_stdin_arrives_and_closing_it_is_the_end_of_file(shared: Sandbox) -> None:
    async with await shared.spawn("cat; echo end", stdin=True) as process:
        assert process.stdin is not None
        await process.stdin.send(b"one ")
        await process.stdin.send(bytes(range(256)))
        await process.stdin.aclose()
        await process.stdin.aclose()
        assert await output_of(process) == b"one " + bytes(range(256)) + b"end\n"


async def test_without_stdin_there_is_none_and_the_process_reads_an_end_of_file(shared: Sandbox) -> None:
    process = await shared.spawn("cat")
    assert not process.takes_input
    with pytest.raises(InvalidRequest, match="stdin=True"):
        _ = process.stdin
    assert (await process.wait()).exit_code == 0


async def test_sending_to_a_process_that_has_ended_is_a_broken_resource(shared: Sandbox) -> None:
    process = await shared.spawn("true", stdin=True)
    await process.wait()
    assert process.stdin is not None
    with pytest.raises(anyio.BrokenResourceError):
        await process.stdin.send(b"too late")


async def test_sending_after_closing_is_a_closed_resource(shared: Sandbox) -> None:
    async with await shared.spawn("sleep 31536000", stdin=True, keep=False) as process:
        assert process.stdin is not None
        await process.stdin.aclose()
        with pytest.raises(anyio.ClosedResourceError):
            await process.stdin.send(b"x")


async def test_sending_waits_for_a_process_that_does_not_read(shared: Sandbox) -> None:
    async with await shared.spawn("exec sleep 31536000", stdin=True, keep=False) as process:
        assert process.stdin is not None
        with anyio.move_on_after(0.5) as waiting:
            await process.stdin.send(bytes(64 * MIB))
        assert waiting.cancelled_caught


# ---- ending it ----


@pytest.mark.core
async def test_a_signal_reaches_the_main_process_and_it_may_handle_it(shared: Sandbox) -> None:
    command = "trap 'echo caught; exit 9' USR1; echo ready; while :; do sleep 0.05; done"
    async with await shared.spawn(command, keep=False) as process:
        await read_until(process, b"ready")
        await process.signal(signal.SIGUSR1)
        assert b"caught\n" in await output_of(process)
        assert (await process.wait()).exit_code == 9


async def test_the_last_signal_is_sent_as_any_other(shared: Sandbox) -> None:
    async with await shared.spawn("exec sleep 31536000", keep=False) as process:
        await shared.kill(process.id, 64)
        exited = await process.wait()
        assert (exited.exit_code, exited.signal) == (192, 64)


async def test_who_writes_to_a_process_need_not_know_of_its_channels(shared: Sandbox) -> None:
    process = await shared.spawn("echo to whom >&3; exec 3>&-; read line; echo got $line", stdin=True, channels=1)
    await process.detach()
    async with await shared.attach(process.id, stdin=True) as process:
        await process.stdin.send(b"it\n")
        assert await output_of(process) == b"got it\n"


@pytest.mark.core
async def test_a_signal_to_the_tree_reaches_children_and_daemons(shared: Sandbox) -> None:
    async with await shared.spawn(
        "(setsid sleep 31536701 &) ; sleep 31536701 & echo ready; wait", keep=False
    ) as process:
        await read_until(process, b"ready")

        async def both() -> bool:
            return [found.command for found in await shared.ps()].count("sleep 31536701") == 2

        await eventually(both, "both sleep")
        await process.signal(signal.SIGTERM, tree=True)
        exited = await process.wait()
        assert (exited.exit_code, exited.signal) == (143, signal.SIGTERM)
        await wait_tree_exit(shared, "sleep 31536701")


async def test_a_signal_to_the_main_process_alone_spares_its_children(shared: Sandbox) -> None:
    async with await shared.spawn("sleep 31536702 & echo ready; wait", keep=False) as process:
        await read_until(process, b"ready")
        await until_running(shared, "sleep 31536702")
        await process.signal(signal.SIGTERM)
        await process.wait()
        assert await running(shared, "sleep 31536702")
    # The main process has exited, so closing kills no process. Its children are found by its id.
    await shared.kill(process.id)
    await wait_tree_exit(shared, "sleep 31536702")


@pytest.mark.core
async def test_kill_ends_the_whole_tree(shared: Sandbox) -> None:
    process = await shared.spawn("(setsid sleep 31536703 &) ; trap '' TERM; echo ready; sleep 31536703; true")
    await read_until(process, b"ready")
    await process.kill()
    exited = await process.wait()
    assert (exited.exit_code, exited.signal) == (137, signal.SIGKILL)
    assert not exited.out_of_memory
    await wait_tree_exit(shared, "sleep 31536703")


async def test_signalling_a_process_that_has_ended_does_nothing(shared: Sandbox) -> None:
    process = await shared.spawn("true")
    await process.wait()
    await process.signal(signal.SIGTERM)
    await process.kill()


@pytest.mark.parametrize("number", [0, -9, 65])
async def test_a_signal_that_does_not_exist_is_an_invalid_request(shared: Sandbox, number: int) -> None:
    async with await shared.spawn("sleep 31536000", keep=False) as process:
        with pytest.raises(InvalidRequest):
            await process.signal(number)
        with pytest.raises(InvalidRequest):
            await shared.kill(process.id, number)


async def test_the_sandbox_kills_by_id_the_tree_or_the_main_process(shared: Sandbox) -> None:
    process = await shared.spawn("trap 'exit 3' TERM; sleep 31536704 & echo ready; wait")
    await read_until(process, b"ready")
    await shared.kill(process.id, signal.SIGTERM, tree=False)
    assert (await process.wait()).exit_code == 3
    await until_running(shared, "sleep 31536704")
    await shared.kill(process.id)
    await wait_tree_exit(shared, "sleep 31536704")


@pytest.mark.core
async def test_an_unknown_process_is_not_found(shared: Sandbox) -> None:
    with pytest.raises(ProcessNotFound):
        await shared.kill(1_000_000)
    with pytest.raises(ProcessNotFound) as caught:
        await shared.attach(1_000_000)
    assert isinstance(caught.value, LookupError)


async def test_a_process_that_has_ended_with_all_its_tree_cannot_be_killed(shared: Sandbox) -> None:
    process = await shared.spawn("true")
    await process.wait()

    async def dead() -> bool:
        return not next(info for info in await shared.processes() if info.id == process.id).live

    await eventually(dead, "its tree is dead")
    with pytest.raises(ProcessNotFound):
        await shared.kill(process.id)


@pytest.mark.core
async def test_leaving_a_process_that_is_not_kept_kills_its_tree(shared: Sandbox) -> None:
    async with await shared.spawn("(setsid sleep 31536705 &) ; echo ready; sleep 31536705", keep=False) as process:
        await read_until(process, b"ready")
    assert not await running(shared, "31536705")
    with pytest.raises(InvalidRequest):
        await process.detach()


@pytest.mark.core
async def test_leaving_a_process_that_is_kept_detaches_and_it_runs_on(shared: Sandbox) -> None:
    async with await shared.spawn("echo ready; exec sleep 31536706") as process:
        await read_until(process, b"ready")
    assert [found.pid for found in await until_running(shared, "sleep 31536706")] == [process.pid]
    with pytest.raises(anyio.ClosedResourceError):
        await process.wait()
    await shared.kill(process.id)
    await wait_tree_exit(shared, "sleep 31536706")


async def test_a_process_whose_reader_left_is_not_blocked(shared: Sandbox) -> None:
    async with await shared.spawn("echo ready; read -r x; head -c 5000000 /dev/zero; exit 6", stdin=True) as process:
        await read_until(process, b"ready")
        assert process.stdin is not None
        await process.stdin.send(b"\n")
    again = await shared.attach(process.id)
    with anyio.fail_after(20):
        assert (await again.wait()).exit_code == 6


async def test_cancelling_a_spawn_leaves_nothing_of_it(shared: Sandbox) -> None:
    for delay_s in (0, 0.0005, 0.001, 0.002, 0.004):
        with anyio.move_on_after(delay_s) as scope:
            process = await shared.spawn("exec sleep 31536707")
        if not scope.cancelled_caught:
            await process.kill()
            await process.wait()
    await wait_tree_exit(shared, "sleep 31536707")


# ---- attaching ----


@pytest.mark.core
async def test_attaching_at_an_offset_goes_on_without_loss_or_repetition(shared: Sandbox) -> None:
    process = await shared.spawn(COUNT_ON_REQUEST, stdin=True)
    assert process.stdin is not None
    await process.stdin.send(b"100\n")
    seen = await read_until(process, b"line 50\n")
    await process.detach()
    for upto in (200, 300, 400):
        process = await shared.attach(process.id, stdout_offset=len(seen), stdin=True)
        assert process.stdin is not None
        await process.stdin.send(f"{upto}\n".encode())
        seen += await read_until(process, f"line {upto}\n".encode())
        await process.detach()
    last = await shared.attach(process.id, stdout_offset=len(seen), stdin=True)
    assert last.stdin is not None
    await last.stdin.send(b"500\n")
    await last.stdin.aclose()
    seen += await output_of(last)
    assert seen == lines_to(500)
    assert (await last.wait()).exit_code == 0


async def test_attaching_without_offset_replays_what_is_kept_and_says_where_it_begins(shared: Sandbox) -> None:
    process = await shared.spawn("seq 1 100")
    await process.wait()
    again = await shared.attach(process.id)
    events = [event async for event in again]
    assert isinstance(events[0], Output)
    assert events[0].offset == 0
    assert b"".join(e.data for e in events if isinstance(e, Output)) == b"".join(b"%d\n" % n for n in range(1, 101))
    assert isinstance(events[-1], Exited)


@pytest.mark.core
async def test_output_that_is_no_longer_kept_is_a_gap_and_then_the_newest(shared: Sandbox) -> None:
    async with await shared.spawn("read -r x; seq 1 200000; echo all >&2", stdin=True) as process:
        assert process.stdin is not None
        await process.stdin.send(b"\n")
    whole = b"".join(b"%d\n" % n for n in range(1, 200_001))

    async def ended() -> bool:
        info = next(info for info in await shared.processes() if info.id == process.id)
        return info.exit_code is not None

    await eventually(ended, "the process exits though its output is not read")
    events = [event async for event in await shared.attach(process.id, stdout_offset=10, stderr_offset=0)]
    [gap] = [event for event in events if isinstance(event, Gap)]
    out = [event for event in events if isinstance(event, Output) and event.stream == "stdout"]
    assert gap.stream == "stdout"
    assert gap.offset == out[0].offset > 10
    assert contiguous(out)
    kept = b"".join(event.data for event in out)
    assert kept == whole[gap.offset :]
    assert len(kept) >= 64 * 1024
    assert events.index(gap) < events.index(out[0])
    assert b"".join(e.data for e in events if isinstance(e, Output) and e.stream == "stderr") == b"all\n"
    exited = events[-1]
    assert isinstance(exited, Exited)
    assert exited.stdout_total == len(whole)


async def test_an_offset_beyond_the_end_waits_for_what_comes_after_it(shared: Sandbox) -> None:
    process = await shared.spawn("echo 0123456789")
    await process.wait()
    events = [event async for event in await shared.attach(process.id, stdout_offset=11)]
    assert [type(event) for event in events] == [Exited]


async def test_an_offset_before_the_beginning_is_an_invalid_request(shared: Sandbox) -> None:
    process = await shared.spawn("true")
    await process.wait()
    with pytest.raises(InvalidRequest):
        await shared.attach(process.id, stdout_offset=-1)


async def test_two_attached_readers_both_get_everything(shared: Sandbox) -> None:
    async with await shared.spawn("read -r x; seq 1 50000", stdin=True, keep=True) as process:
        second = await shared.attach(process.id, stdout_offset=0)
        outputs: list[bytes] = []

        async def read(one: Process) -> None:
            outputs.append(await output_of(one))

        async with anyio.create_task_group() as group:
            group.start_soon(read, process)
            group.start_soon(read, second)
            assert process.stdin is not None
            await process.stdin.send(b"\n")
    assert outputs[0] == outputs[1] == b"".join(b"%d\n" % n for n in range(1, 50_001))


async def test_an_attached_reader_that_may_lose_never_blocks_the_process(shared: Sandbox) -> None:
    async with await shared.spawn("read -r x; seq 1 2000000", stdin=True) as process:
        assert process.stdin is not None
        watcher = await shared.attach(process.id, lossless=False)
        await process.stdin.send(b"\n")
        with anyio.fail_after(60):
            total = sum([len(e.data) async for e in process if isinstance(e, Output)])
        assert total == 14_888_896
        # The first bytes and the last ones were kept. Between them is a gap, and after it the output is contiguous.
        events = [event async for event in watcher]
    gaps = [event for event in events if isinstance(event, Gap)]
    assert gaps
    position = 0
    for event in events:
        if isinstance(event, Gap):
            assert event.offset > position
            position = event.offset
        elif isinstance(event, Output):
            assert event.offset == position
            position += len(event.data)
    assert position == 14_888_896


async def test_output_of_a_background_child_after_the_exit_reaches_attached_clients(shared: Sandbox) -> None:
    await shared.exec(["mkfifo", "late"])
    process = await shared.spawn("(cat late; echo late) & echo early")
    assert await output_of(process) == b"early\n"
    await shared.exec("echo now > late")

    async def late() -> bool:
        return await output_of(await shared.attach(process.id)) == b"early\nnow\nlate\n"

    await eventually(late, "what the child wrote")
    await shared.files.remove("late")


@pytest.mark.core
async def test_a_kept_process_survives_a_broken_connection_and_goes_on_at_its_offset(engine: Engine) -> None:
    async with await engine.create() as sandbox:
        with connections_made() as made:
            await sandbox.aclose()
            await sandbox.connect()
        [connection] = made
        process = await sandbox.spawn(COUNT_ON_REQUEST, stdin=True)
        assert process.stdin is not None
        await process.stdin.send(b"5000\n")
        seen = await read_until(process, b"line 1000\n")
        cut(connection)
        pieces: list[Output] = []
        with pytest.raises(SandboxDied, match="connection lost"):
            await collect(process, pieces)
        for piece in pieces:
            assert piece.offset == len(seen)
            seen += piece.data
        again = await sandbox.attach(process.id, stdout_offset=len(seen), stdin=True)
        assert again.stdin is not None
        await again.stdin.send(b"5050\n")
        await again.stdin.aclose()
        seen += await output_of(again)
        assert seen == lines_to(5050)
        assert (await again.wait()).exit_code == 0


async def test_a_sandbox_that_was_disconnected_from_connects_again_when_it_is_used(sandbox: Sandbox) -> None:
    process = await sandbox.spawn("echo begun; exec sleep 31536715")
    await read_until(process, b"begun\n")
    await sandbox.aclose()
    with pytest.raises(SandboxDied, match="connection lost"):
        await process.wait()
    assert [found.pid for found in await until_running(sandbox, "sleep 31536715")] == [process.pid]
    await sandbox.connect()
    await sandbox.connect()


async def test_a_command_under_way_when_the_connection_breaks_raises_and_dies(engine: Engine) -> None:
    async with await engine.create() as sandbox:
        with connections_made() as made:
            await sandbox.aclose()
            await sandbox.connect()
        async with anyio.create_task_group() as group:

            async def one() -> None:
                with pytest.raises(SandboxDied, match="connection lost"):
                    await sandbox.exec("echo half; exec sleep 31536708")

            group.start_soon(one)
            await until_running(sandbox, "sleep 31536708")
            cut(made[0])
        # The next call connects again. No client can read the command's output any more, so it was killed.
        await wait_tree_exit(sandbox, "sleep 31536708")
        assert (await sandbox.exec("echo back")).stdout == "back\n"


# ---- terminals ----


@pytest.mark.core
async def test_a_terminal_has_the_size_it_was_given_and_takes_another(shared: Sandbox) -> None:
    async with await shared.spawn("tty; while :; do stty size; sleep 0.02; done", pty=(33, 101), keep=False) as process:
        seen = await read_until(process, b"33 101\r\n")
        assert b"/dev/pts/" in seen
        await process.resize(44, 122)
        await read_until(process, b"44 122\r\n")


@pytest.fixture
def terminal_keys(capabilities: Capabilities) -> None:
    if not capabilities.terminal_keys:
        pytest.skip("the driver declares that keys and sizes of terminals have no meaning: no end of file, no signals")


async def test_an_end_of_file_key_ends_the_input(shared: Sandbox, terminal_keys: None) -> None:
    async with await shared.spawn(["cat"], pty=(24, 80), keep=False) as process:
        assert process.stdin is not None
        await process.stdin.send(b"typed\n")
        await read_until(process, b"typed\r\ntyped\r\n")
        await process.stdin.send(b"\x04")
        assert (await process.wait()).exit_code == 0


async def test_an_interrupt_key_is_a_signal(shared: Sandbox, terminal_keys: None) -> None:
    async with await shared.spawn("echo ready; exec sleep 31536709", pty=(24, 80), keep=False) as process:
        await read_until(process, b"ready")
        assert process.stdin is not None
        await process.stdin.send(b"\x03")
        assert (await process.wait()).signal == signal.SIGINT


async def test_a_new_size_is_a_signal(shared: Sandbox, terminal_keys: None) -> None:
    command = "trap 'stty size' WINCH; echo ready; while :; do sleep 0.02; done"
    async with await shared.spawn(command, pty=(33, 101), keep=False) as process:
        await read_until(process, b"ready")
        await process.resize(44, 122)
        await read_until(process, b"44 122\r\n")


async def test_a_terminals_output_is_all_stdout(shared: Sandbox) -> None:
    process = await shared.spawn("echo out; echo err >&2", pty=(24, 80))
    events = [event async for event in process]
    assert {event.stream for event in events if isinstance(event, Output)} == {"stdout"}
    assert b"".join(event.data for event in events if isinstance(event, Output)) == b"out\r\nerr\r\n"


@pytest.mark.core
async def test_a_shell_is_a_login_shell_on_a_terminal_and_ends_with_its_handle(shared: Sandbox) -> None:
    async with await shared.shell(rows=30, cols=90, env={"PS1": "$ "}) as shell:
        assert shell.stdin is not None
        await shell.stdin.send(b"echo $0:$(stty size):$TERM:$((6 * 7))\n")
        seen = await read_until(shell, b":42\r\n")
        assert b"30 90" in seen
        assert b"xterm" in seen
        await shell.stdin.send(b"sleep 31536710 &\n")
        await until_running(shared, "sleep 31536710")
    await wait_tree_exit(shared, "sleep 31536710")


async def test_a_shell_says_how_it_was_left(shared: Sandbox) -> None:
    async with await shared.shell() as shell:
        assert shell.stdin is not None
        await shell.stdin.send(b"exit 17\n")
        assert (await shell.wait()).exit_code == 17


@pytest.mark.parametrize("size", [(0, 80), (24, 0), (-1, 80), (70000, 80)])
async def test_a_terminal_size_that_cannot_be_is_an_invalid_request(shared: Sandbox, size: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequest):
        await shared.spawn("true", pty=size)


async def test_resizing_a_process_without_terminal_is_an_invalid_request(shared: Sandbox) -> None:
    async with await shared.spawn("sleep 31536000", keep=False) as process:
        with pytest.raises(InvalidRequest):
            await process.resize(24, 80)


# ---- extra channels ----


@pytest.mark.core
async def test_extra_channels_are_descriptors_of_the_process_apart_from_its_output(shared: Sandbox) -> None:
    command = "cat <&3 >&3 & cat <&4 | tr a-z A-Z >&4 & exec 3>&- 4>&-; wait; echo done"
    async with await shared.spawn(command, channels=2, keep=False) as process:
        plain, loud = process.channel(0), process.channel(1)
        data = os.urandom(3 * MIB)
        received = bytearray()

        async def receive() -> None:
            async for chunk in plain:
                received.extend(chunk)

        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                group.start_soon(receive)
                await plain.send(data)
                await plain.send_eof()
                await loud.send(b"shout\n")
                await loud.send_eof()
                answer = b"".join([chunk async for chunk in loud])
            assert answer == b"SHOUT\n"
            assert bytes(received) == data
            assert await output_of(process) == b"done\n"


async def test_a_channel_ends_when_the_process_closes_it(shared: Sandbox) -> None:
    async with await shared.spawn("echo last >&3; exec 3>&-; exec sleep 31536000", channels=1, keep=False) as process:
        with anyio.fail_after(20):
            assert b"".join([chunk async for chunk in process.channel(0)]) == b"last\n"


async def test_a_channel_that_is_not_read_blocks_no_other_stream(shared: Sandbox) -> None:
    # More than fits into the buffers is sent before the process exits.
    line = "yes >&3 & sleep 0.5; echo still here"
    async with await shared.spawn(line, channels=1, keep=False) as process:
        with anyio.fail_after(20):
            assert await output_of(process) == b"still here\n"
            assert (await shared.exec("echo and here")).stdout == "and here\n"
    await shared.kill(process.id)
    await wait_tree_exit(shared, "yes")


@pytest.mark.parametrize("count", [-1, 9])
async def test_more_channels_than_there_can_be_are_an_invalid_request(shared: Sandbox, count: int) -> None:
    with pytest.raises(InvalidRequest):
        await shared.spawn("true", channels=count)


async def test_a_channel_that_was_not_asked_for_is_an_invalid_request(shared: Sandbox) -> None:
    process = await shared.spawn("true", channels=1)
    with pytest.raises(InvalidRequest):
        process.channel(1)
    await process.wait()


async def test_a_process_has_no_descriptors_but_its_own(shared: Sandbox) -> None:
    result = await shared.exec(["sh", "-c", "echo /proc/self/fd/*"])
    numbers = {Path(path).name for path in result.stdout.split()}
    assert numbers - {"0", "1", "2"} <= {"3"}, "the shell's own, for the listing, aside"


# ---- looking ----


@pytest.mark.core
async def test_processes_lists_what_was_started_with_its_state(shared: Sandbox, user_id: int) -> None:
    began = datetime.now(UTC)
    async with await shared.spawn(["sh", "-c", "echo 12345; echo x >&2; exec sleep 31536711"], keep=False) as process:
        await read_until(process, b"12345\n")

        async def told() -> bool:
            info = next(info for info in await shared.processes() if info.id == process.id)
            return (info.stdout_total, info.stderr_total) == (6, 2)

        await eventually(told, "its totals")
        info = next(info for info in await shared.processes() if info.id == process.id)
        assert (info.pid, info.uid, info.live) == (process.pid, user_id, True)
        assert "sleep 31536711" in info.command
        assert (info.exit_code, info.ended_at) == (None, None)
        assert abs((info.started_at - began).total_seconds()) < 5
        await process.kill()
        await process.wait()

    async def over() -> bool:
        info = next(info for info in await shared.processes() if info.id == process.id)
        return not info.live

    await eventually(over, "it is not live")
    info = next(info for info in await shared.processes() if info.id == process.id)
    assert info.exit_code == 137
    assert info.ended_at is not None
    assert info.ended_at >= info.started_at


async def test_process_ids_are_never_used_twice(shared: Sandbox) -> None:
    ids = []
    for _ in range(5):
        process = await shared.spawn("true")
        await process.wait()
        ids.append(process.id)
    assert len(set(ids)) == 5
    assert ids == sorted(ids)


async def test_ended_processes_are_remembered_though_not_for_ever(shared: Sandbox) -> None:
    first = await shared.spawn("exit 21")
    await first.wait()
    remembered = next(info for info in await shared.processes() if info.id == first.id)
    assert remembered.exit_code == 21
    for _ in range(80):
        await shared.exec(["true"])
    known = await shared.processes()
    assert first.id not in {info.id for info in known}
    assert 40 <= len(known) <= 200
    with pytest.raises(ProcessNotFound):
        await shared.attach(first.id)


@pytest.mark.core
async def test_ps_shows_every_process_with_its_parent_owner_and_state(shared: Sandbox, user_id: int) -> None:
    async with await shared.spawn("sleep 31536712 & sleep 31536713; true", keep=False) as process:
        children: list[SystemProcess] = []

        async def asleep() -> bool:
            children[:] = [one for one in await shared.ps() if one.command in {"sleep 31536712", "sleep 31536713"}]
            return [one.state for one in children] == ["S", "S"]

        await eventually(asleep, "both sleep")
        for child in children:
            assert child.ppid == process.pid
            assert child.uid == user_id
            assert child.rss_bytes > 0
            assert child.cpu_s < 5
            assert abs((child.started_at - datetime.now(UTC)).total_seconds()) < 60
        found = await shared.ps()
        [first] = [one for one in found if one.pid == 1]
        assert first.uid == 0
        assert len({one.pid for one in found}) == len(found)


async def test_a_directory_that_is_none_fails_the_spawn(shared: Sandbox) -> None:
    with pytest.raises(PathNotFound):
        await shared.spawn("true", cwd="/no/such")


@pytest.mark.core
async def test_a_dead_sandbox_ends_every_handle_with_an_error(sandbox: Sandbox) -> None:
    process = await sandbox.spawn("echo ready; exec sleep 31536714", stdin=True)
    await read_until(process, b"ready")
    assert sandbox.info.pid is not None
    os.kill(sandbox.info.pid, signal.SIGKILL)
    with anyio.fail_after(20):
        with pytest.raises(SandboxDied):
            await process.wait()
        pieces: list[Output] = []
        with pytest.raises(SandboxDied):
            await collect(process, pieces)
        assert not pieces


async def test_a_kept_process_goes_on_though_no_client_reads_its_output(sandbox: Sandbox) -> None:
    total = 20_000_000
    process = await sandbox.spawn(f"head -c {total} /dev/zero; echo end; echo done > done; exec sleep 31536000")

    async def done() -> bool:
        return (await sandbox.exec("cat done 2>/dev/null")).stdout == "done\n"

    await eventually(done, "it has written all of its output")
    await sandbox.kill(process.id)
    events = [event async for event in process]
    gap, exited = events[0], events[-1]
    assert isinstance(gap, Gap)
    assert isinstance(exited, Exited)
    rest = [event for event in events if isinstance(event, Output)]
    assert rest[0].offset == gap.offset > total - 2_000_000
    assert b"".join(event.data for event in rest).endswith(b"\0end\n")
    assert gap.offset + sum(len(event.data) for event in rest) == exited.stdout_total == total + 4


async def test_a_process_is_held_up_by_a_reader_of_its_handle_and_loses_nothing(sandbox: Sandbox) -> None:
    async with await sandbox.spawn("read -r x; head -c 5000000 /dev/zero", stdin=True) as process:
        assert process.stdin is not None
        async with anyio.create_task_group() as group:
            received = 0

            async def read() -> None:
                nonlocal received
                async for event in process:
                    assert not isinstance(event, Gap)
                    received += len(event.data) if isinstance(event, Output) else 0

            group.start_soon(read)
            await anyio.lowlevel.checkpoint()
            await process.stdin.send(b"go\n")
        assert received == 5_000_000


async def test_lines_are_read_as_they_come(shared: Sandbox) -> None:
    async with await shared.spawn("echo one; read -r x; echo got $x; echo err >&2; printf end", stdin=True) as process:
        lines = process.lines()
        assert await anext(lines) == "one"
        await process.stdin.send(b"it\n")
        assert sorted([line async for line in lines]) == ["end", "err", "got it"]
        assert (await process.wait()).exit_code == 0


async def test_lines_of_one_stream_are_read(shared: Sandbox) -> None:
    process = await shared.spawn("echo out; echo err >&2")
    assert [line async for line in process.lines("stderr")] == ["err"]


async def test_a_line_without_an_end_comes_in_parts(shared: Sandbox) -> None:
    process = await shared.spawn("head -c 2500000 /dev/zero | tr '\\0' x; echo; echo last")
    parts = [line async for line in process.lines()]
    assert [set(part) for part in parts[:-1]] == [{"x"}] * (len(parts) - 1)
    assert sum(map(len, parts[:-1])) == 2_500_000
    assert max(map(len, parts)) <= 1024 * 1024
    assert parts[-1] == "last"
