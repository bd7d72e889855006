"""Connections, and a peer that dies, lies or floods: what a caller sees and what the host does about it."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import anyio
import pytest
from anyio.abc import ByteStream
from anyio.streams.stapled import StapledByteStream
from hypothesis import given, strategies as st

from atoll.contract.errors import (
    AtollError,
    GuestProtocolError,
    GuestUnresponsive,
    InvalidRequest,
    LaunchFailed,
    PortRefused,
    SandboxDied,
)
from atoll.contract.model import Output
from atoll.contract.protocol import (
    INITIAL_CREDIT,
    MAX_PAYLOAD,
    Change,
    EventKind,
    FileType,
    FrameType,
    Op,
    Tag,
    encode_frame,
)
from atoll.runtime.guest import connection as connection_module, files as files_module
from atoll.runtime.guest.connection import GuestConnection
from atoll.runtime.guest.flow import MAX_CHUNKS, MAX_EVENTS, WINDOW
from atoll.runtime.lifetimes import BackgroundTasks
from atoll.runtime.sandbox import Sandbox
from atoll.testing.waiting import eventually
from tests.runtime.conftest import Host, Wire
from tests.runtime.peer import Peer, encode_record

pytestmark = pytest.mark.anyio


async def raised(operation: Callable[[], Awaitable[object]]) -> AtollError:
    with anyio.fail_after(10), pytest.raises(AtollError) as caught:
        await operation()
    return caught.value


def entry(name: str) -> bytes:
    return encode_record(
        (Tag.NAME, name),
        (Tag.KIND, FileType.FILE),
        (Tag.SIZE, 1),
        (Tag.MODE, 0o644),
        (Tag.UID, 0),
        (Tag.GID, 0),
        (Tag.MTIME_NS, 0),
    )


# -------------------------------------------------------------------------------------------------------- connecting


async def test_callers_that_come_at_once_share_one_connection(scripted: Sandbox, wire: Wire) -> None:
    async def answer() -> None:
        peer = await wire.peer()
        for _ in range(5):
            opened = await peer.hear(FrameType.OPEN)
            await peer.exited(opened.stream)

    async with anyio.create_task_group() as group:
        group.start_soon(answer)
        for _ in range(5):
            group.start_soon(scripted.exec, "true")
    assert wire.connections == 1


async def test_a_sandbox_that_is_not_used_is_not_connected_to(scripted: Sandbox, wire: Wire) -> None:
    await scripted.stat()
    assert wire.connections == 0


async def test_a_sandbox_that_did_not_start_says_why_every_time(host: Host, wire: Wire) -> None:
    wire.greets = False
    sandbox = host.sandbox(wire.connect)

    async def fail() -> None:
        peer = await wire.peer()
        await peer.say(FrameType.FAILED, 0, fields=((Tag.ERRNO, 13), (Tag.MESSAGE, b"no such layer")))

    async with anyio.create_task_group() as group:
        group.start_soon(fail)
        error = await raised(sandbox.connect)
    assert isinstance(error, LaunchFailed)
    assert "no such layer" in error.message
    assert isinstance(await raised(lambda: sandbox.exec("true")), LaunchFailed)
    assert wire.connections == 1


@pytest.mark.parametrize(
    "greeting",
    [
        encode_frame(FrameType.END, 1),
        encode_frame(FrameType.DATA, 1, b"x", 1),
        encode_frame(FrameType.HELLO, 0),
        encode_frame(FrameType.HELLO, 0, struct.pack("<HIq", Tag.VERSION, 8, 2)),
        b"SSH-2.0-OpenSSH_9.2\r\n",
    ],
)
async def test_a_wrong_handshake_stops_the_guest(host: Host, wire: Wire, greeting: bytes) -> None:
    wire.greets = False
    sandbox = host.sandbox(wire.connect)
    async with anyio.create_task_group() as group:

        async def greet() -> None:
            await (await wire.peer()).say_raw(greeting)

        group.start_soon(greet)
        assert isinstance(await raised(sandbox.connect), GuestProtocolError)
    assert host.stopped == 1


async def test_a_sandbox_that_is_destroyed_while_a_call_connects_is_not_used(host: Host, wire: Wire) -> None:
    wire.greets = False
    sandbox = host.sandbox(wire.connect)
    errors: list[AtollError] = []

    async def call() -> None:
        errors.append(await raised(lambda: sandbox.exec("true")))

    async with anyio.create_task_group() as group:
        group.start_soon(call)
        peer = await wire.peer()
        await sandbox.destroy()
        await peer.hello()
        await peer.hears_the_end()
    assert isinstance(errors[0], SandboxDied)


async def test_any_byte_stream_will_do(host: Host, wire: Wire) -> None:
    async def connect() -> ByteStream:
        stream = await wire.connect()
        return StapledByteStream(stream, stream)

    sandbox = host.sandbox(connect)

    async def answer() -> None:
        peer = await wire.peer()
        opened = await peer.hear(FrameType.OPEN)
        await peer.data(opened.stream, 1, b"hello")
        await peer.exited(opened.stream, 5)
        await peer.hear(FrameType.OPEN)
        await peer.aclose()

    async with anyio.create_task_group() as group:
        group.start_soon(answer)
        assert (await sandbox.exec("true")).stdout == "hello"
        assert isinstance(await raised(lambda: sandbox.exec("true")), SandboxDied)


async def test_a_handshake_that_times_out_is_a_failed_launch(
    host: Host, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "HANDSHAKE_S", 0.05)
    wire.greets = False
    assert isinstance(await raised(host.sandbox(wire.connect).connect), LaunchFailed)


async def test_a_connection_that_cannot_be_made_is_a_dead_sandbox(host: Host) -> None:
    async def connect() -> None:
        raise ConnectionRefusedError("nobody there")

    sandbox = host.sandbox(connect)  # type: ignore[arg-type]
    assert isinstance(await raised(lambda: sandbox.exec("true")), SandboxDied)


async def test_after_a_lost_connection_the_next_call_connects_again(scripted: Sandbox, wire: Wire, host: Host) -> None:
    async def lose_and_answer() -> None:
        peer = await wire.peer()
        opened = await peer.hear(FrameType.OPEN)
        await peer.data(opened.stream, 1, b"half of the out")
        await peer.aclose()
        peer = await wire.peer()
        opened = await peer.hear(FrameType.OPEN)
        await peer.exited(opened.stream, 3)

    async with anyio.create_task_group() as group:
        group.start_soon(lose_and_answer)
        error = await raised(lambda: scripted.exec("true"))
        assert isinstance(error, SandboxDied)
        assert "connection lost" in error.message
        assert (await scripted.exec("true")).exit_code == 3
    assert host.destroyed == host.stopped == 0


async def test_closing_leaves_the_sandbox_and_the_next_call_connects_again(scripted: Sandbox, wire: Wire) -> None:
    await scripted.connect()
    first = await wire.peer()
    await scripted.aclose()
    await first.hears_the_end()
    await scripted.connect()
    assert wire.connections == 2


# --------------------------------------------------------------------------------------------------------- its death


async def test_a_sandbox_that_dies_raises_and_never_returns_output(scripted: Sandbox, wire: Wire, host: Host) -> None:
    async def die() -> None:
        peer = await wire.peer()
        opened = await peer.hear(FrameType.OPEN)
        await peer.data(opened.stream, 1, b"all is well\n")
        wire.ended = True
        await peer.say(FrameType.GONE, 0, fields=((Tag.SIGNAL, 9), (Tag.MESSAGE, b"killed by signal 9")))
        await peer.aclose()

    async with anyio.create_task_group() as group:
        group.start_soon(die)
        error = await raised(lambda: scripted.exec("echo all is well"))
    assert isinstance(error, SandboxDied)
    assert "killed by signal 9" in error.message
    assert isinstance(await raised(lambda: scripted.files.read_bytes("x")), SandboxDied)
    assert wire.connections == 1
    assert host.destroyed == host.stopped == 0


async def test_a_guest_that_does_not_answer_fails_the_call_and_the_next_one_connects_again(
    scripted: Sandbox, wire: Wire, host: Host
) -> None:
    async def stall() -> None:
        peer = await wire.peer()
        await peer.hear(FrameType.OPEN)
        await peer.say(FrameType.GONE, 0, fields=((Tag.MESSAGE, b"stalled: the guest has sent nothing for 30 s"),))
        await peer.aclose()

    for connections in (1, 2):
        async with anyio.create_task_group() as group:
            group.start_soon(stall)
            error = await raised(lambda: scripted.exec("true"))
        assert isinstance(error, GuestUnresponsive)
        assert error.retryable
        assert "does not answer: the guest has sent nothing for 30 s" in error.message
        assert wire.connections == connections
    assert host.destroyed == host.stopped == 0


async def test_a_guest_that_the_keeper_ended_broke_the_protocol(scripted: Sandbox, wire: Wire, host: Host) -> None:
    async def end() -> None:
        peer = await wire.peer()
        await peer.hear(FrameType.OPEN)
        await peer.say(FrameType.GONE, 0, fields=((Tag.MESSAGE, b"protocol: more data than was asked for"),))

    async with anyio.create_task_group() as group:
        group.start_soon(end)
        error = await raised(lambda: scripted.exec("true"))
    assert isinstance(error, GuestProtocolError)
    assert "more data than was asked for" in error.message
    assert isinstance(await raised(lambda: scripted.exec("true")), GuestProtocolError)
    assert host.destroyed == host.stopped == 0


async def test_destroying_ends_calls_under_way_and_refuses_later_ones(
    scripted: Sandbox, wire: Wire, host: Host
) -> None:
    errors: list[AtollError] = []

    async def call() -> None:
        errors.append(await raised(lambda: scripted.exec("sleep 100")))

    async with anyio.create_task_group() as group:
        group.start_soon(call)
        await (await wire.peer()).hear(FrameType.OPEN)
        await scripted.destroy()
    assert isinstance(errors[0], SandboxDied)
    assert isinstance(await raised(lambda: scripted.exec("true")), SandboxDied)
    assert host.destroyed == 1


async def test_leaving_the_context_destroys_even_when_cancelled(scripted: Sandbox, host: Host) -> None:
    with anyio.CancelScope() as scope:
        async with scripted:
            scope.cancel()
            await anyio.sleep_forever()
    assert host.destroyed == 1


# --------------------------------------------------------------------------------------------------------- violations


def credit(amount: int) -> bytes:
    return struct.pack("<I", amount)


VIOLATIONS = {
    "a stream that was never opened": encode_frame(FrameType.DATA, 77, b"x", 1),
    "END of a stream that was never opened": encode_frame(FrameType.END, 77),
    "a second HELLO": encode_frame(FrameType.HELLO, 0, struct.pack("<HIq", Tag.VERSION, 8, 1)),
    "FAILED after HELLO": encode_frame(FrameType.FAILED, 0),
    "a type that only the host sends": encode_frame(FrameType.OPEN, 1),
    "a frame that is too large": struct.pack("<IBBHI", MAX_PAYLOAD + 1, FrameType.DATA, 1, 0, 1),
    "data on a channel that is not there": encode_frame(FrameType.DATA, 1, b"x", 5),
    "data on the host's own channel": encode_frame(FrameType.DATA, 1, b"x", 0),
    "data after its end": encode_frame(FrameType.EOF, 1, channel=1) + encode_frame(FrameType.DATA, 1, b"x", 1),
    "a second end of a channel": encode_frame(FrameType.EOF, 1, channel=1) * 2,
    "credit for a channel that is not there": encode_frame(FrameType.CREDIT, 1, credit(1), 0),
    "a credit of nothing": encode_frame(FrameType.CREDIT, 1, credit(0), 0),
    "an event that is none": encode_frame(FrameType.EVENT, 1, struct.pack("<HIq", Tag.EVENT, 8, 99)),
    "an event without its kind": encode_frame(FrameType.EVENT, 1),
    "an END that is malformed": encode_frame(FrameType.END, 1, b"\1\2\3"),
    "a frame after END": encode_frame(FrameType.END, 1, struct.pack("<HIq", Tag.ERRNO, 8, 2))
    + encode_frame(FrameType.DATA, 1, b"x", 1),
    "an event that is too large": encode_frame(FrameType.EVENT, 1, struct.pack("<HI", Tag.MESSAGE, 5000) + bytes(5000)),
    "more data than credit": encode_frame(FrameType.DATA, 1, bytes(MAX_PAYLOAD), 1) * 5,
}


@pytest.mark.parametrize("violation", VIOLATIONS.values(), ids=VIOLATIONS.keys())
async def test_a_guest_that_breaks_a_rule_is_stopped_and_all_calls_raise(
    scripted: Sandbox, wire: Wire, host: Host, violation: bytes
) -> None:
    errors: list[AtollError] = []

    async def first() -> None:
        process = await scripted.spawn("first", keep=False)
        # Nothing is read before, so that no credit is given back.
        await eventually(lambda: host.stopped, "the sandbox is stopped")
        await raised(process.wait)

    async def second() -> None:
        errors.append(await raised(lambda: scripted.exec("second")))

    async with anyio.create_task_group() as group:
        group.start_soon(first)
        peer = await wire.peer()
        opened = await peer.hear(FrameType.OPEN)
        await peer.started(opened.stream)
        group.start_soon(second)
        await peer.hear(FrameType.OPEN)
        with contextlib.suppress(anyio.BrokenResourceError):
            await peer.say_raw(violation)
        await peer.hears_the_end()
    assert isinstance(errors[0], GuestProtocolError)
    assert isinstance(await raised(lambda: scripted.files.stat("x")), GuestProtocolError)
    assert host.stopped == 1
    assert wire.connections == 1


@pytest.mark.parametrize(
    "end",
    [
        {},
        {Tag.EXIT_CODE: 0},
        {Tag.EXIT_CODE: 256, Tag.DURATION_US: 1, Tag.OUT_TOTAL: 0, Tag.ERR_TOTAL: 0},
        {Tag.SIGNAL: 0, Tag.DURATION_US: 1, Tag.OUT_TOTAL: 0, Tag.ERR_TOTAL: 0},
        {Tag.EXIT_CODE: 0, Tag.DURATION_US: -1, Tag.OUT_TOTAL: 0, Tag.ERR_TOTAL: 0},
        {Tag.ERRNO: 2**40},
    ],
)
async def test_an_end_that_says_nothing_is_no_exit_code(
    scripted: Sandbox, wire: Wire, host: Host, end: dict[Tag, int]
) -> None:
    async def answer() -> None:
        peer = await wire.peer()
        await peer.end((await peer.hear(FrameType.OPEN)).stream, *end.items())
        await peer.hears_the_end()

    async with anyio.create_task_group() as group:
        group.start_soon(answer)
        assert isinstance(await raised(lambda: scripted.exec("true")), GuestProtocolError)
    assert host.stopped == 1


async def test_a_flood_of_events_is_a_violation(scripted: Sandbox, wire: Wire, host: Host) -> None:
    async with anyio.create_task_group() as group:

        async def flood() -> None:
            peer = await wire.peer()
            opened = await peer.hear(FrameType.OPEN)
            gap = struct.pack("<HIqHIqHIq", Tag.EVENT, 8, EventKind.GAP, Tag.CHANNEL, 8, 1, Tag.OFFSET, 8, 0)
            await peer.say_raw(encode_frame(FrameType.EVENT, opened.stream, gap) * (MAX_EVENTS + 1))
            await peer.hears_the_end()

        group.start_soon(flood)
        assert isinstance(await raised(lambda: scripted.exec("true")), GuestProtocolError)
    assert host.stopped == 1


@pytest.mark.parametrize(
    "records",
    [
        encode_record((Tag.NAME, "x")),
        encode_record(
            (Tag.NAME, b"a\0b"),
            (Tag.KIND, 1),
            (Tag.SIZE, 1),
            (Tag.MODE, 0),
            (Tag.UID, 0),
            (Tag.GID, 0),
            (Tag.MTIME_NS, 0),
        ),
        entry("x").replace(struct.pack("<HIq", Tag.KIND, 8, 1), struct.pack("<HIq", Tag.KIND, 8, 99)),
        entry("x")[:-1],
        struct.pack("<I", 2**31),
    ],
)
async def test_a_record_that_is_none_destroys_the_sandbox(
    scripted: Sandbox, wire: Wire, host: Host, records: bytes
) -> None:
    async def answer() -> None:
        peer = await wire.peer()
        opened = await peer.hear(FrameType.OPEN)
        await peer.data(opened.stream, 1, records)
        await peer.end(opened.stream)
        await peer.hears_the_end()

    async with anyio.create_task_group() as group:
        group.start_soon(answer)
        assert isinstance(await raised(scripted.files.list), GuestProtocolError)
    await eventually(lambda: host.stopped == 1, "the sandbox is stopped")


async def test_what_is_wrong_with_one_sandbox_is_not_blamed_on_another(host: Host, wire: Wire) -> None:
    async def broken_source() -> AsyncIterator[bytes]:
        yield b"some"
        raise GuestProtocolError("the other sandbox broke the protocol")

    sandbox = host.sandbox(wire.connect)

    async def answer() -> None:
        peer = await wire.peer()
        opened = await peer.hear(FrameType.OPEN)
        await peer.hear(FrameType.DATA)
        await peer.hear(FrameType.RESET)
        await peer.end(opened.stream, (Tag.ERRNO, 125))
        await peer.exited((await peer.hear(FrameType.OPEN)).stream)

    async with anyio.create_task_group() as group:
        group.start_soon(answer)
        assert isinstance(await raised(lambda: sandbox.files.write_bytes("x", broken_source())), GuestProtocolError)
        assert (await sandbox.exec("true")).ok
    assert host.destroyed == host.stopped == 0


# -------------------------------------------------------------------------------------------------------- flow control


async def test_credit_comes_back_when_half_of_the_window_was_read(scripted: Sandbox, wire: Wire) -> None:
    async with anyio.create_task_group() as group:

        async def read() -> None:
            pieces = [piece async for piece in scripted.files.stream("big")]
            assert sum(map(len, pieces)) == 3 * WINDOW

        group.start_soon(read)
        peer = await wire.peer()
        opened = await peer.hear(FrameType.OPEN)
        assert opened.fields.integer(Tag.WINDOW) == WINDOW
        have, sent = WINDOW, 0
        while sent < 3 * WINDOW:
            size = min(have, 3 * WINDOW - sent, MAX_PAYLOAD)
            if not size:
                heard = await peer.hear(FrameType.CREDIT)
                assert heard.channel == 1
                have += struct.unpack("<I", heard.payload)[0]
                assert have <= WINDOW
                continue
            await peer.data(opened.stream, 1, bytes(size))
            sent += size
            have -= size
        await peer.end(opened.stream, (Tag.SIZE, sent))


async def test_a_reader_that_does_not_read_gives_no_credit_and_holds_up_nobody(scripted: Sandbox, wire: Wire) -> None:
    process_opened = anyio.Event()

    async def answer(peer: Peer) -> None:
        opened = await peer.hear(FrameType.OPEN)
        await peer.started(opened.stream)
        for _ in range(WINDOW // MAX_PAYLOAD):
            await peer.data(opened.stream, 1, bytes(MAX_PAYLOAD))
        process_opened.set()
        other = await peer.hear(FrameType.OPEN)
        await peer.exited(other.stream)
        await peer.hear(FrameType.CREDIT)
        await peer.exited(opened.stream)

    async with anyio.create_task_group() as group:
        await scripted.connect()
        group.start_soon(answer, await wire.peer())
        process = await scripted.spawn("yes")
        await process_opened.wait()
        assert (await scripted.exec("true")).ok
        assert (await process.wait()).exit_code == 0


async def test_sending_waits_for_credit(scripted: Sandbox, wire: Wire) -> None:
    data = bytes(range(256)) * 1024
    async with anyio.create_task_group() as group:
        group.start_soon(scripted.files.write_bytes, "x", data)
        peer = await wire.peer()
        opened = await peer.hear(FrameType.OPEN)
        got = (await peer.hear(FrameType.DATA)).payload
        assert len(got) == INITIAL_CREDIT
        while len(got) < len(data):
            await peer.say(FrameType.CREDIT, opened.stream, credit(50_000))
            piece = (await peer.hear(FrameType.DATA)).payload
            assert len(piece) <= 50_000
            got += piece
        assert got == data
        await peer.hear(FrameType.EOF)
        await peer.end(opened.stream, (Tag.SIZE, len(data)))


async def test_a_write_that_fails_half_way_raises_what_the_guest_said(scripted: Sandbox, wire: Wire) -> None:
    async def answer() -> None:
        peer = await wire.peer()
        opened = await peer.hear(FrameType.OPEN)
        await peer.hear(FrameType.DATA)
        await peer.end(opened.stream, (Tag.ERRNO, 28), (Tag.MESSAGE, b"No space left on device"))

    async with anyio.create_task_group() as group:
        group.start_soon(answer)
        error = await raised(lambda: scripted.files.write_bytes("/x", bytes(10 * INITIAL_CREDIT)))
    assert error.code == "disk_full"
    assert error.message == "/x: no space left on device"


async def test_a_write_that_ends_before_all_was_sent_is_a_violation(scripted: Sandbox, wire: Wire, host: Host) -> None:
    async def answer() -> None:
        peer = await wire.peer()
        opened = await peer.hear(FrameType.OPEN)
        await peer.end(opened.stream, (Tag.SIZE, 1))
        await peer.hears_the_end()

    async with anyio.create_task_group() as group:
        group.start_soon(answer)
        error = await raised(lambda: scripted.files.write_bytes("/x", bytes(10 * INITIAL_CREDIT)))
    assert isinstance(error, GuestProtocolError)


async def test_cancelling_a_sender_tears_no_frame(host: Host, wire: Wire) -> None:
    """The peer does not read while senders come and go, then finds whole frames only."""
    connection = GuestConnection(await wire.connect(), "the sandbox")
    peer = await wire.peer()
    await connection.handshake()
    host.tasks.start_soon(connection.run)
    cancelled = 0
    opened = 0
    for _ in range(60):
        with anyio.move_on_after(0.002) as scope:
            stream = await connection.open(Op.WRITE, b"", receive=(), send=(0,))
            opened += 1
            try:
                await stream.send(bytes(2 * INITIAL_CREDIT))
            finally:
                stream.reset()
        cancelled += scope.cancelled_caught
    assert cancelled == 60
    resets = 0
    while resets < opened:
        resets += (await peer.hear()).kind is FrameType.RESET


async def test_tiny_pieces_that_nobody_reads_are_joined(scripted: Sandbox, wire: Wire) -> None:
    async def answer(peer: Peer) -> None:
        opened = await peer.hear(FrameType.OPEN)
        await peer.started(opened.stream)
        out, err = (
            encode_frame(FrameType.DATA, opened.stream, b"o", 1),
            encode_frame(FrameType.DATA, opened.stream, b"e", 2),
        )
        await peer.say_raw((out + err) * 20_000)
        await peer.exited(opened.stream)

    async with anyio.create_task_group() as group:
        await scripted.connect()
        group.start_soon(answer, await wire.peer())
        process = await scripted.spawn("flood")
        await eventually(lambda: process._stream.result is not None, "all has come")
        events = [event async for event in process]
    outputs = [event for event in events if isinstance(event, Output)]
    assert len(outputs) <= MAX_CHUNKS
    assert b"".join(event.data for event in outputs if event.stream == "stdout") == b"o" * 20_000
    assert b"".join(event.data for event in outputs if event.stream == "stderr") == b"e" * 20_000
    for name in ("stdout", "stderr"):
        offset = 0
        for event in outputs:
            if event.stream == name:
                assert event.offset == offset
                offset += len(event.data)


# -------------------------------------------------------------------------------------------------------------- limits


async def test_a_list_without_end_is_refused(
    scripted: Sandbox, wire: Wire, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "MAX_ENTRIES", 100)

    async def answer() -> None:
        peer = await wire.peer()
        opened = await peer.hear(FrameType.OPEN)
        for _ in range(101):
            await peer.data(opened.stream, 1, entry("x"))
        await peer.hear(FrameType.RESET)
        await peer.end(opened.stream, (Tag.ERRNO, 125))

    async with anyio.create_task_group() as group:
        group.start_soon(answer)
        error = await raised(scripted.files.list)
    assert isinstance(error, InvalidRequest)
    assert "more than 100 entries" in error.message
    assert host.destroyed == host.stopped == 0


async def test_finding_more_than_was_asked_for_is_a_violation(scripted: Sandbox, wire: Wire) -> None:
    async def answer() -> None:
        peer = await wire.peer()
        opened = await peer.hear(FrameType.OPEN)
        assert opened.fields.integer(Tag.LIMIT) == 2
        await peer.data(opened.stream, 1, entry("x") * 3)
        await peer.hears_the_end()

    async with anyio.create_task_group() as group:
        group.start_soon(answer)
        assert isinstance(await raised(lambda: scripted.files.glob("*", limit=2)), GuestProtocolError)


async def test_reading_more_than_was_asked_for_is_a_violation(scripted: Sandbox, wire: Wire) -> None:
    async def answer() -> None:
        peer = await wire.peer()
        opened = await peer.hear(FrameType.OPEN)
        await peer.data(opened.stream, 1, b"12345")
        await peer.hears_the_end()

    async with anyio.create_task_group() as group:
        group.start_soon(answer)
        assert isinstance(await raised(lambda: scripted.files.read_bytes("x", limit=4)), GuestProtocolError)


async def test_a_file_that_is_too_large_to_hold_is_refused(
    scripted: Sandbox, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "MAX_READ_BYTES", 1000)

    async def answer() -> None:
        peer = await wire.peer()
        opened = await peer.hear(FrameType.OPEN)
        await peer.data(opened.stream, 1, bytes(opened.fields.integer(Tag.LIMIT)))
        await peer.end(opened.stream, (Tag.SIZE, 5000))

    async with anyio.create_task_group() as group:
        group.start_soon(answer)
        error = await raised(lambda: scripted.files.read_bytes("x"))
    assert isinstance(error, InvalidRequest)
    assert "use stream" in error.message


async def test_a_request_that_is_too_large_is_refused_with_a_way_out(scripted: Sandbox) -> None:
    error = await raised(lambda: scripted.exec(["echo", "x" * MAX_PAYLOAD]))
    assert isinstance(error, InvalidRequest)
    assert "stdin" in error.message


# ------------------------------------------------------------------------------------------------------ watches, ports


async def test_a_watch_is_ready_when_it_is_entered(scripted: Sandbox, wire: Wire) -> None:
    async def answer() -> None:
        peer = await wire.peer()
        opened = await peer.hear(FrameType.OPEN)
        assert opened.fields.integer(Tag.OP) == Op.WATCH
        await peer.data(opened.stream, 1, encode_record((Tag.CHANGE, Change.READY)))
        await peer.data(opened.stream, 1, encode_record((Tag.CHANGE, Change.CREATED), (Tag.NAME, "a"), (Tag.KIND, 1)))
        await peer.hear(FrameType.RESET)
        await peer.end(opened.stream, (Tag.ERRNO, 125))

    async with anyio.create_task_group() as group:
        group.start_soon(answer)
        async with scripted.files.watch("/x") as changes:
            change = await anext(changes)
    assert (change.change, change.path, change.kind) == ("created", "a", "file")


async def test_bytes_pass_both_ways_through_a_connection(scripted: Sandbox, wire: Wire) -> None:
    async def answer() -> None:
        peer = await wire.peer()
        opened = await peer.hear(FrameType.OPEN)
        assert (opened.fields.integer(Tag.OP), opened.fields.integer(Tag.PORT)) == (Op.DIAL, 80)
        await peer.say(FrameType.EVENT, opened.stream, fields=((Tag.EVENT, EventKind.CONNECTED),))
        assert (await peer.hear(FrameType.DATA)).payload == b"ping"
        await peer.data(opened.stream, 1, b"pong")
        await peer.hear(FrameType.EOF)
        await peer.say(FrameType.EOF, opened.stream, channel=1)
        await peer.end(opened.stream)

    async with anyio.create_task_group() as group:
        group.start_soon(answer)
        async with await scripted.dial(80) as connection:
            await connection.send(b"ping")
            assert await connection.receive(2) == b"po"
            assert await connection.receive() == b"ng"
            await connection.send_eof()
            with pytest.raises(anyio.EndOfStream):
                await connection.receive()


async def test_a_connection_to_a_sandbox_that_dies_is_broken(scripted: Sandbox, wire: Wire) -> None:
    async def answer() -> None:
        peer = await wire.peer()
        opened = await peer.hear(FrameType.OPEN)
        await peer.say(FrameType.EVENT, opened.stream, fields=((Tag.EVENT, EventKind.CONNECTED),))
        await peer.say(FrameType.GONE, 0)

    async with anyio.create_task_group() as group:
        group.start_soon(answer)
        connection = await scripted.dial(80)
        with pytest.raises(anyio.BrokenResourceError) as caught:
            await connection.receive()
    assert isinstance(caught.value.__cause__, SandboxDied)


async def test_a_port_where_nobody_listens_is_refused(scripted: Sandbox, wire: Wire) -> None:
    async def answer() -> None:
        peer = await wire.peer()
        opened = await peer.hear(FrameType.OPEN)
        await peer.end(opened.stream, (Tag.ERRNO, 111), (Tag.MESSAGE, b"Connection refused"))

    async with anyio.create_task_group() as group:
        group.start_soon(answer)
        assert isinstance(await raised(lambda: scripted.dial(80)), PortRefused)


async def test_a_listener_passes_over_connections_that_were_closed_again(scripted: Sandbox, wire: Wire) -> None:
    async def answer() -> None:
        peer = await wire.peer()
        opened = await peer.hear(FrameType.OPEN)
        await peer.say(FrameType.EVENT, opened.stream, fields=((Tag.EVENT, EventKind.LISTENING), (Tag.PORT, 8080)))
        for number in (1, 2):
            await peer.say(
                FrameType.EVENT,
                opened.stream,
                fields=((Tag.EVENT, EventKind.ACCEPTED), (Tag.CONN, number), (Tag.PEER_PORT, 4000)),
            )
        first = await peer.hear(FrameType.OPEN)
        assert first.fields.integer(Tag.CONN) == 1
        await peer.end(first.stream, (Tag.ERRNO, 2))
        second = await peer.hear(FrameType.OPEN)
        await peer.say(FrameType.EVENT, second.stream, fields=((Tag.EVENT, EventKind.CONNECTED),))
        await peer.data(second.stream, 1, b"hello")
        await peer.hear(FrameType.EOF)
        await peer.hear(FrameType.RESET)
        await peer.end(second.stream, (Tag.ERRNO, 125))
        await peer.hear(FrameType.RESET)
        await peer.end(opened.stream, (Tag.ERRNO, 125))

    async with anyio.create_task_group() as group:
        group.start_soon(answer)
        async with scripted.listen() as listener:
            assert listener.port == 8080
            async with await anext(listener) as connection:
                assert await connection.receive() == b"hello"


async def test_connections_that_nobody_takes_do_not_pile_up(scripted: Sandbox, wire: Wire, host: Host) -> None:
    last = MAX_EVENTS + 100

    async def answer() -> None:
        peer = await wire.peer()
        opened = await peer.hear(FrameType.OPEN)
        await peer.say(FrameType.EVENT, opened.stream, fields=((Tag.EVENT, EventKind.LISTENING), (Tag.PORT, 8080)))
        for number in range(1, last + 1):
            fields = ((Tag.EVENT, EventKind.ACCEPTED), (Tag.CONN, number), (Tag.PEER_PORT, 4000))
            await peer.say(FrameType.EVENT, opened.stream, fields=fields)
        await peer.exited((await peer.hear(FrameType.OPEN)).stream)
        first = await peer.hear(FrameType.OPEN)
        assert first.fields.integer(Tag.CONN) > 1
        await peer.say(FrameType.EVENT, first.stream, fields=((Tag.EVENT, EventKind.CONNECTED),))
        await peer.hear(FrameType.EOF)
        for stream in (first.stream, opened.stream):
            await peer.hear(FrameType.RESET)
            await peer.end(stream, (Tag.ERRNO, 125))

    async with anyio.create_task_group() as group:
        group.start_soon(answer)
        async with scripted.listen() as listener:
            assert (await scripted.exec("true")).ok
            await (await anext(listener)).aclose()
    assert host.destroyed == host.stopped == 0


async def test_a_reader_that_stops_early_abandons_the_stream(scripted: Sandbox, wire: Wire) -> None:
    async def answer() -> None:
        peer = await wire.peer()
        opened = await peer.hear(FrameType.OPEN)
        await peer.data(opened.stream, 1, b"first")
        await peer.hear(FrameType.RESET)
        await peer.end(opened.stream, (Tag.ERRNO, 125))

    async with anyio.create_task_group() as group:
        group.start_soon(answer)
        pieces = scripted.files.stream("x")
        assert await anext(pieces) == b"first"
        await pieces.aclose()


frames = st.lists(
    st.tuples(
        st.sampled_from(
            [FrameType.DATA, FrameType.EOF, FrameType.CREDIT, FrameType.EVENT, FrameType.END, FrameType.GONE]
        ),
        st.integers(0, 3),
        st.integers(0, 2),
        st.one_of(
            st.binary(max_size=20),
            st.lists(st.tuples(st.sampled_from(sorted(Tag)), st.integers(-3, 300)), max_size=6).map(
                lambda fields: b"".join(struct.pack("<HIq", tag, 8, value) for tag, value in fields)
            ),
        ),
    ),
    max_size=12,
)


@given(frames)
def test_whatever_frames_come_a_call_returns_or_raises_ours(script: list[tuple[FrameType, int, int, bytes]]) -> None:
    data = b"".join(encode_frame(kind, stream, payload, channel) for kind, channel, stream, payload in script)

    async def play() -> None:
        async with AsyncExitStack() as stack:
            tasks = await BackgroundTasks.open()
            stack.push_async_callback(tasks.close)
            wire = Wire(stack)
            sandbox = Host(tasks).sandbox(wire.connect)

            async def misbehave() -> None:
                peer = await wire.peer()
                opened = 0
                while opened < 2:
                    opened += (await peer.hear()).kind is FrameType.OPEN
                with contextlib.suppress(anyio.BrokenResourceError):
                    await peer.say_raw(data or b" ")
                await peer.aclose()

            async def call(operation: Callable[[], Awaitable[object]]) -> None:
                with contextlib.suppress(AtollError):
                    await operation()

            with anyio.fail_after(10):
                async with anyio.create_task_group() as group:
                    group.start_soon(misbehave)
                    group.start_soon(call, lambda: sandbox.exec("true", stdin="x"))
                    group.start_soon(call, lambda: sandbox.spawn("true", stdin=True, channels=1))

    anyio.run(play)


@pytest.mark.parametrize(("port", "host_name"), [(0, "127.0.0.1"), (65536, "127.0.0.1"), (80, "example.org")])
async def test_what_cannot_be_dialled_is_refused_at_once(scripted: Sandbox, port: int, host_name: str) -> None:
    assert isinstance(await raised(lambda: scripted.dial(port, host_name)), InvalidRequest)
