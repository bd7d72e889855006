"""Commands, as a scripted guest plays them: their ends, their output, time limits, cancellation."""

from __future__ import annotations

import errno
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from hypothesis import given, strategies as st

from atoll.contract.errors import (
    AtollError,
    ExecTimeout,
    InvalidRequest,
    PathNotDirectory,
    PathNotFound,
    PermissionDenied,
    ProcessNotFound,
    SandboxError,
    UserNotFound,
)
from atoll.contract.model import ExecResult, Exited, Gap, Output
from atoll.contract.protocol import INITIAL_CREDIT, Action, EventKind, FrameType, Op, Tag
from atoll.runtime.guest import process as process_module
from atoll.runtime.guest.process import Collector
from atoll.runtime.sandbox import Sandbox
from tests.runtime.conftest import Host, Wire
from tests.runtime.peer import Heard, Peer

pytestmark = pytest.mark.anyio

Answer = Callable[[Peer, Heard], Awaitable[None]]


async def play(wire: Wire, answer: Answer) -> None:
    peer = await wire.peer()
    await answer(peer, await peer.hear(FrameType.OPEN))


async def run(scripted: Sandbox, wire: Wire, answer: Answer, **options: Any) -> ExecResult:
    """`exec`, answered by the script."""
    results: list[ExecResult] = []
    async with anyio.create_task_group() as group:
        group.start_soon(play, wire, answer)
        with anyio.fail_after(10):
            results.append(await scripted.exec("command", **options))
    return results[0]


async def fail(scripted: Sandbox, wire: Wire, answer: Answer, **options: Any) -> AtollError:
    """The error of `exec`, answered by the script."""
    async with anyio.create_task_group() as group:
        group.start_soon(play, wire, answer)
        with anyio.fail_after(10), pytest.raises(AtollError) as caught:
            await scripted.exec("command", **options)
    return caught.value


async def answer_kill(peer: Peer) -> None:
    """The host asks whether anything is left of a tree that was killed."""
    order = await peer.hear(FrameType.OPEN)
    assert (order.fields.integer(Tag.OP), order.fields.integer(Tag.PROC)) == (Op.SIGNAL, 1)
    assert (order.fields.integer(Tag.SIGNAL), order.fields.integer(Tag.TREE)) == (signal.SIGKILL, 1)
    await peer.end(order.stream, (Tag.ERRNO, errno.ESRCH))


# --------------------------------------------------------------------------------------------------------- how it ends


async def test_a_command_ends_with_its_output_and_its_exit_code(scripted: Sandbox, wire: Wire) -> None:
    async def answer(peer: Peer, opened: Heard) -> None:
        assert opened.fields.integer(Tag.OP) == Op.SPAWN
        assert opened.fields.raw(Tag.SHELL) == b"command"
        await peer.started(opened.stream)
        await peer.data(opened.stream, 1, b"out \xff")
        await peer.data(opened.stream, 2, b"err")
        await peer.exited(opened.stream, 3)

    result = await run(scripted, wire, answer)
    assert (result.exit_code, result.stdout, result.stderr, result.ok) == (3, "out \ufffd", "err", False)
    assert result.duration_s == 0.001


async def test_death_by_a_signal_is_128_and_the_signal(scripted: Sandbox, wire: Wire) -> None:
    async def answer(peer: Peer, opened: Heard) -> None:
        await peer.killed(opened.stream, signal.SIGSEGV)

    result = await run(scripted, wire, answer)
    assert (result.exit_code, result.signal) == (139, 11)


@pytest.mark.parametrize(
    ("number", "message", "kind"),
    [
        (errno.ENOENT, "/x: No such file or directory", PathNotFound),
        (errno.ENOTDIR, "/x: Not a directory", PathNotDirectory),
        (errno.EACCES, "/x: Permission denied", PermissionDenied),
        (errno.ENOENT, "no such user: No such file or directory", UserNotFound),
        (errno.EINVAL, "Invalid argument", InvalidRequest),
        (errno.ECHILD, "No child processes", SandboxError),
        (errno.ENOMEM, "fork: Cannot allocate memory", SandboxError),
    ],
)
async def test_a_command_that_did_not_run_is_an_error_and_has_no_exit_code(
    scripted: Sandbox, wire: Wire, host: Host, number: int, message: str, kind: type[AtollError]
) -> None:
    async def answer(peer: Peer, opened: Heard) -> None:
        await peer.end(opened.stream, (Tag.ERRNO, number), (Tag.MESSAGE, message.encode()))

    error = await fail(scripted, wire, answer, cwd="/x", user="nobody-here")
    assert type(error) is kind
    assert host.destroyed == host.stopped == 0


@pytest.mark.parametrize("ending", ["signal", "shell"])
@pytest.mark.parametrize("grown", [True, False, None])
async def test_memory_is_blamed_when_the_kernel_counted_a_kill(
    scripted: Sandbox, wire: Wire, host: Host, ending: str, grown: bool | None
) -> None:
    host.oom_kills = None if grown is None else 5

    async def answer(peer: Peer, opened: Heard) -> None:
        if grown:
            host.oom_kills = 6
        if ending == "signal":
            await peer.killed(opened.stream)
        else:
            await peer.exited(opened.stream, 137)

    result = await run(scripted, wire, answer)
    assert result.exit_code == 137
    assert result.out_of_memory is bool(grown)


async def test_memory_is_not_blamed_for_a_kill_that_was_asked_for(scripted: Sandbox, wire: Wire, host: Host) -> None:
    async def answer(peer: Peer, opened: Heard) -> None:
        host.oom_kills = 1
        await peer.killed(opened.stream, 9, (Tag.KILLED, 1))

    assert not (await run(scripted, wire, answer)).out_of_memory


# -------------------------------------------------------------------------------------------------------- when it must


async def test_a_command_that_runs_too_long_is_killed_and_its_output_kept(scripted: Sandbox, wire: Wire) -> None:
    async def answer(peer: Peer, opened: Heard) -> None:
        await peer.data(opened.stream, 1, b"before ")
        control = (await peer.hear(FrameType.CONTROL)).fields
        assert control.integer(Tag.ACTION) == Action.SIGNAL
        assert (control.integer(Tag.SIGNAL), control.integer(Tag.TREE)) == (9, 1)
        await peer.data(opened.stream, 1, b"after")
        await peer.killed(opened.stream, 9, (Tag.KILLED, 1))
        await answer_kill(peer)

    error = await fail(scripted, wire, answer, timeout_s=0.05)
    assert isinstance(error, ExecTimeout)
    assert isinstance(error, TimeoutError)
    assert (error.result.stdout, error.result.timed_out, error.result.exit_code) == ("before after", True, 137)


async def test_a_command_that_cannot_be_killed_is_not_said_to_have_ended(
    scripted: Sandbox, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "KILL_S", 0.05)

    async def answer(peer: Peer, opened: Heard) -> None:
        await peer.hear(FrameType.CONTROL)
        await peer.hear(FrameType.RESET)
        await peer.end(opened.stream, (Tag.PROC, 1), (Tag.ERRNO, errno.ECANCELED))
        await answer_kill(peer)

    error = await fail(scripted, wire, answer, timeout_s=0.05)
    assert isinstance(error, SandboxError)
    assert "could not be killed" in error.message


async def test_cancelling_kills_the_tree_and_waits_until_it_is_gone(scripted: Sandbox, wire: Wire) -> None:
    gone = False

    async def answer() -> None:
        nonlocal gone
        peer = await wire.peer()
        opened = await peer.hear(FrameType.OPEN)
        assert Tag.KEEP not in opened.fields
        scope.cancel()
        await peer.hear(FrameType.RESET)
        await peer.started(opened.stream)
        await peer.data(opened.stream, 1, b"what was under way")
        await peer.end(opened.stream, (Tag.PROC, 1), (Tag.ERRNO, errno.ECANCELED))
        await answer_kill(peer)
        gone = True

    async with anyio.create_task_group() as group:
        with anyio.CancelScope() as scope:
            group.start_soon(answer)
            await scripted.exec("sleep 100")
        assert scope.cancelled_caught
        assert gone


async def test_cancelling_a_spawn_leaves_nothing_running(scripted: Sandbox, wire: Wire) -> None:
    async def answer() -> None:
        peer = await wire.peer()
        opened = await peer.hear(FrameType.OPEN)
        assert opened.fields.flag(Tag.KEEP)
        scope.cancel()
        assert (await peer.hear(FrameType.CONTROL)).fields.integer(Tag.SIGNAL) == signal.SIGKILL
        await peer.hear(FrameType.RESET)
        await peer.end(opened.stream, (Tag.PROC, 1), (Tag.ERRNO, errno.ECANCELED))
        await answer_kill(peer)

    async with anyio.create_task_group() as group:
        with anyio.CancelScope() as scope:
            group.start_soon(answer)
            await scripted.spawn("sleep 100")
        assert scope.cancelled_caught


# --------------------------------------------------------------------------------------------------------------- input


async def test_input_and_its_end_are_sent_with_the_request(scripted: Sandbox, wire: Wire) -> None:
    async def answer(peer: Peer, opened: Heard) -> None:
        assert opened.fields.flag(Tag.STDIN)
        assert (await peer.hear(FrameType.DATA)).payload == "grün".encode()
        await peer.hear(FrameType.EOF)
        await peer.exited(opened.stream)

    assert (await run(scripted, wire, answer, stdin="grün")).ok


async def test_a_command_that_does_not_read_its_input_ends_as_usual(scripted: Sandbox, wire: Wire) -> None:
    async def answer(peer: Peer, opened: Heard) -> None:
        await peer.hear(FrameType.DATA)
        await peer.exited(opened.stream, 4)

    assert (await run(scripted, wire, answer, stdin=bytes(5 * INITIAL_CREDIT))).exit_code == 4


async def test_input_to_a_process_that_has_ended_is_broken(scripted: Sandbox, wire: Wire) -> None:
    async def answer() -> None:
        peer = await wire.peer()
        opened = await peer.hear(FrameType.OPEN)
        await peer.started(opened.stream)
        await peer.hear(FrameType.DATA)
        await peer.exited(opened.stream)

    async with anyio.create_task_group() as group:
        group.start_soon(answer)
        process = await scripted.spawn("true", stdin=True)
        assert process.stdin is not None
        with pytest.raises(anyio.BrokenResourceError):
            await process.stdin.send(bytes(5 * INITIAL_CREDIT))
        with pytest.raises(anyio.BrokenResourceError):
            await process.stdin.send(b"more")
        await process.stdin.aclose()
        with pytest.raises(anyio.ClosedResourceError):
            await process.stdin.send(b"more")


# --------------------------------------------------------------------------------------------------------- environment


async def test_the_environment_is_the_sandboxs_with_the_commands_on_top(host: Host, wire: Wire) -> None:
    sandbox = host.sandbox(wire.connect, env={"A": "1", "B": "2", "PATH": "/opt/bin"}, user="user")
    heard: list[Heard] = []

    async def answer(peer: Peer, opened: Heard) -> None:
        heard.append(opened)
        await peer.exited(opened.stream)

    await run(sandbox, wire, answer, env={"B": "3"})
    for setting in (b"A=1", b"B=3", b"PATH=/opt/bin", b"LANG=C.UTF-8"):
        assert setting in heard[0].payload
    assert b"B=2" not in heard[0].payload
    assert b"TERM=" not in heard[0].payload
    assert heard[0].fields.raw(Tag.USER) == b"user"


@pytest.mark.parametrize(
    "wrong",
    [
        {"command": ""},
        {"command": []},
        {"command": ["", "x"]},
        {"command": "a\0b"},
        {"command": ["echo", "a\0b"]},
        {"command": "true", "env": {"1A": "x"}},
        {"command": "true", "env": {"A": "x\0"}},
        {"command": "true", "cwd": "a\0b"},
        {"command": "true", "user": "a\0b"},
        {"command": "true", "timeout_s": 0},
        {"command": "true", "timeout_s": float("nan")},
        {"command": "true", "output_limit_bytes": -1},
    ],
)
async def test_what_cannot_be_asked_is_refused_before_anything_is_sent(
    scripted: Sandbox, wire: Wire, wrong: dict[str, object]
) -> None:
    with pytest.raises(InvalidRequest):
        await scripted.exec(**wrong)  # type: ignore[arg-type]
    assert wire.connections == 0


@pytest.mark.parametrize("wrong", [{"pty": (0, 80)}, {"pty": (24, 70000)}, {"channels": 9}, {"channels": -1}])
async def test_a_process_that_cannot_be_is_refused(scripted: Sandbox, wire: Wire, wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        await scripted.spawn("true", **wrong)  # type: ignore[arg-type]
    assert wire.connections == 0


# ------------------------------------------------------------------------------------------------------ while it runs


async def test_what_happens_to_a_process_comes_in_order(scripted: Sandbox, wire: Wire) -> None:
    async def answer() -> None:
        peer = await wire.peer()
        opened = await peer.hear(FrameType.OPEN)
        await peer.started(opened.stream, 5)
        await peer.data(opened.stream, 1, b"one")
        await peer.data(opened.stream, 2, b"two")
        await peer.data(opened.stream, 1, b"three")
        await peer.exited(opened.stream, 2)

    async with anyio.create_task_group() as group:
        group.start_soon(answer)
        process = await scripted.spawn("command")
        assert (process.id, process.pid, process.takes_input) == (5, 7, False)
        events = [event async for event in process]
    assert events[:-1] == [
        Output(stream="stdout", data=b"one", offset=0),
        Output(stream="stderr", data=b"two", offset=0),
        Output(stream="stdout", data=b"three", offset=3),
    ]
    assert isinstance(events[-1], Exited)
    assert events[-1].exit_code == 2
    assert await process.wait() == events[-1]
    assert [event async for event in process] == []


@pytest.mark.parametrize("asked", [None, 10])
async def test_output_that_is_no_longer_kept_is_a_gap_where_it_was_asked_for(
    scripted: Sandbox, wire: Wire, asked: int | None
) -> None:
    async def answer() -> None:
        peer = await wire.peer()
        opened = await peer.hear(FrameType.OPEN)
        assert opened.fields.integer(Tag.OUT_OFFSET) == (asked or 0)
        await peer.started(opened.stream)
        for offset, data in ((100, b"kept"), (200, b"later")):
            gap = ((Tag.EVENT, EventKind.GAP), (Tag.CHANNEL, 1), (Tag.OFFSET, offset))
            await peer.say(FrameType.EVENT, opened.stream, fields=gap)
            await peer.data(opened.stream, 1, data)
        await peer.exited(opened.stream)

    async with anyio.create_task_group() as group:
        group.start_soon(answer)
        process = await scripted.attach(1, stdout_offset=asked)
        events = [event async for event in process][:-1]
    first = [Gap(stream="stdout", offset=100)] if asked is not None else []
    assert events == [
        *first,
        Output(stream="stdout", data=b"kept", offset=100),
        Gap(stream="stdout", offset=200),
        Output(stream="stdout", data=b"later", offset=200),
    ]


async def test_a_process_that_is_not_known_cannot_be_attached_to_or_killed(scripted: Sandbox, wire: Wire) -> None:
    async def answer() -> None:
        peer = await wire.peer()
        for _ in range(2):
            opened = await peer.hear(FrameType.OPEN)
            await peer.end(opened.stream, (Tag.ERRNO, errno.ESRCH))

    async with anyio.create_task_group() as group:
        group.start_soon(answer)
        with pytest.raises(ProcessNotFound):
            await scripted.attach(9)
        with pytest.raises(ProcessNotFound):
            await scripted.kill(9)


@pytest.mark.parametrize("keep", [True, False])
async def test_leaving_a_process_resets_it_and_waits(scripted: Sandbox, wire: Wire, keep: bool) -> None:
    async def answer() -> None:
        peer = await wire.peer()
        opened = await peer.hear(FrameType.OPEN)
        assert opened.fields.flag(Tag.KEEP) is keep
        await peer.started(opened.stream)
        await peer.data(opened.stream, 1, b"unread")
        await peer.hear(FrameType.RESET)
        await peer.end(opened.stream, (Tag.PROC, 1), (Tag.ERRNO, errno.ECANCELED))
        if not keep:
            await answer_kill(peer)

    async with anyio.create_task_group() as group:
        group.start_soon(answer)
        async with await scripted.spawn("sleep 100", keep=keep) as process:
            pass
        with pytest.raises(anyio.ClosedResourceError):
            await process.wait()


async def test_a_process_that_is_not_kept_cannot_be_detached_from(scripted: Sandbox, wire: Wire) -> None:
    async def answer() -> None:
        peer = await wire.peer()
        opened = await peer.hear(FrameType.OPEN)
        await peer.started(opened.stream)
        await peer.exited(opened.stream)

    async with anyio.create_task_group() as group:
        group.start_soon(answer)
        async with await scripted.spawn("true", keep=False) as process:
            with pytest.raises(InvalidRequest):
                await process.detach()
            await process.wait()


async def test_signals_and_sizes_go_to_the_process(scripted: Sandbox, wire: Wire) -> None:
    async def answer() -> None:
        peer = await wire.peer()
        opened = await peer.hear(FrameType.OPEN)
        assert (opened.fields.integer(Tag.PTY_ROWS), opened.fields.integer(Tag.PTY_COLS)) == (24, 80)
        assert b"TERM=xterm-256color" in opened.payload
        await peer.started(opened.stream)
        first = (await peer.hear(FrameType.CONTROL)).fields
        assert (first.integer(Tag.ACTION), first.integer(Tag.SIGNAL)) == (Action.SIGNAL, signal.SIGINT)
        second = (await peer.hear(FrameType.CONTROL)).fields
        assert (second.integer(Tag.PTY_ROWS), second.integer(Tag.PTY_COLS)) == (50, 100)
        third = (await peer.hear(FrameType.CONTROL)).fields
        assert (third.integer(Tag.SIGNAL), third.integer(Tag.TREE)) == (signal.SIGKILL, 1)
        await peer.killed(opened.stream)

    async with anyio.create_task_group() as group:
        group.start_soon(answer)
        process = await scripted.shell()
        await process.signal(signal.SIGINT)
        await process.resize(50, 100)
        with pytest.raises(InvalidRequest):
            await process.signal(65)
        await process.kill()
        assert (await process.wait()).signal == signal.SIGKILL


async def test_extra_channels_are_streams_of_their_own(scripted: Sandbox, wire: Wire) -> None:
    async def answer() -> None:
        peer = await wire.peer()
        opened = await peer.hear(FrameType.OPEN)
        assert opened.fields.integer(Tag.CHANNELS) == 2
        await peer.started(opened.stream)
        await peer.data(opened.stream, 4, b"from four")
        heard = await peer.hear(FrameType.DATA)
        assert (heard.channel, heard.payload) == (3, b"to three")
        await peer.say(FrameType.EOF, opened.stream, channel=3)
        await peer.exited(opened.stream)

    async with anyio.create_task_group() as group:
        group.start_soon(answer)
        process = await scripted.spawn("command", channels=2)
        await process.channel(0).send(b"to three")
        assert await process.channel(1).receive() == b"from four"
        for i in range(2):
            with pytest.raises(anyio.EndOfStream):
                await process.channel(i).receive()
        with pytest.raises(InvalidRequest):
            process.channel(2)
        await process.wait()


async def test_a_process_that_is_attached_to_again_remembers_the_kernels_count(
    scripted: Sandbox, wire: Wire, host: Host
) -> None:
    async def answer() -> None:
        peer = await wire.peer()
        opened = await peer.hear(FrameType.OPEN)
        await peer.started(opened.stream, 3)
        await peer.hear(FrameType.RESET)
        await peer.end(opened.stream, (Tag.PROC, 1), (Tag.ERRNO, errno.ECANCELED))
        opened = await peer.hear(FrameType.OPEN)
        await peer.started(opened.stream, 3)
        await peer.killed(opened.stream)

    async with anyio.create_task_group() as group:
        group.start_soon(answer)
        process = await scripted.spawn("hog")
        await process.detach()
        host.oom_kills = 1
        assert (await (await scripted.attach(3)).wait()).out_of_memory


# -------------------------------------------------------------------------------------------------------------- output


@given(st.lists(st.binary(max_size=200), max_size=30), st.integers(0, 400))
def test_no_more_than_the_limit_is_kept_and_it_is_head_and_tail(pieces: list[bytes], limit: int) -> None:
    collector = Collector(limit)
    for piece in pieces:
        collector.add(piece)
    whole = b"".join(pieces)
    head, tail, cut = collector.finish()
    if len(whole) <= limit:
        assert cut is None
        assert head + tail == whole
    else:
        assert cut is not None
        assert len(head) + len(tail) == limit
        assert abs(len(head) - len(tail)) <= 1
        assert (whole[: cut.start], whole[cut.end :], cut.total) == (head, tail, len(whole))


@given(st.text(max_size=300), st.integers(0, 300))
def test_no_character_is_torn_where_output_is_cut(text: str, limit: int) -> None:
    text = text.replace("\ufffd", "?")
    raw = text.encode("utf-8", "replace")
    collector = Collector(limit)
    collector.add(raw)
    shown, cut = collector.text()
    assert "\ufffd" not in shown
    if cut is None:
        assert shown.encode() == raw
    else:
        head, tail = raw[: cut.start].decode(), raw[cut.end :].decode()
        line = f"[{cut.bytes} bytes left out: {cut.start} to {cut.end} of {cut.total}]"
        assert shown == f"{head}\n{line}\n{tail}"


def test_a_hundred_megabytes_pass_through_little_memory() -> None:
    import tracemalloc

    collector, piece = Collector(1024 * 1024), b"x" * 65536
    tracemalloc.start()
    for _ in range(1600):
        collector.add(piece)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert collector.total == 1600 * 65536
    assert peak < 4 * 1024 * 1024
