"""A guest that is the attacker's: it breaks the protocol in every way that there is, or just does not play along.

The program at the guest's place is `hostile.c` with a script. Whatever it does, the host says that this sandbox is
broken, does not hang, does not grow, writes nothing elsewhere, and can end it.

What is attacked here, the keeper and the host process, is the same for every runtime. So everything is tried with the
fastest, and a sample with the others.
"""

from __future__ import annotations

import io
import os
import resource
import shutil
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from atoll.contract.errors import AtollError, ExecTimeout, GuestProtocolError, SandboxError
from atoll.contract.protocol import MAX_PAYLOAD, MAX_RECORD, FrameType, Tag, encode_fields, encode_frame
from atoll.drivers import oci
from atoll.drivers.keeper_command import BIN
from atoll.runtime.guest import process
from atoll.runtime.guest.stream import Stream
from atoll.runtime.interface import Engine
from atoll.runtime.sandbox import Sandbox
from atoll.testing.waiting import eventually

FASTEST = pytest.mark.parametrize("runtime_name", ["crun"], indirect=True, scope="session")
MIB = 1024 * 1024
HELLO = encode_frame(FrameType.HELLO, 0, encode_fields([(Tag.VERSION, 1), (Tag.EPOCH, 0)]))
Install = Callable[..., None]


def _step(what: str, data: bytes = b"") -> bytes:
    return what.encode() + struct.pack("<I", len(data)) + data


def _frame(kind: int, payload: bytes = b"", *, channel: int = 0, reserved: int = 0, length: int | None = None) -> bytes:
    """A frame of whatever shape; the stream is filled in inside."""
    return struct.pack("<IBBHI", len(payload) if length is None else length, kind, channel, reserved, 0) + payload


def encode_record(fields: list[tuple[Tag, int | bytes]]) -> bytes:
    payload = encode_fields(fields)
    return struct.pack("<I", len(payload)) + payload


def _answer(*frames: bytes) -> bytes:
    """Say hello, wait for an operation, answer it so, and stay."""
    return _step("w", HELLO) + _step("r") + b"".join(_step("f", frame) for frame in frames) + _step("d")


def _repeat(times: int, frame: bytes) -> bytes:
    return _step("w", HELLO) + _step("r") + _step("F", struct.pack("<I", times) + frame) + _step("d")


def _end(*fields: tuple[Tag, int | bytes]) -> bytes:
    return _frame(FrameType.END, encode_fields(fields))


def _event(*fields: tuple[Tag, int | bytes]) -> bytes:
    return _frame(FrameType.EVENT, encode_fields(fields))


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.fixture
def install(hostile_program: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a hostile guest with this script where the driver takes the guest from."""

    def put(*script: bytes) -> None:
        programs = tmp_path / "bin"
        if not programs.exists():
            shutil.copytree(BIN, programs)
        joined = b"".join(script)
        guest = programs / "guest"
        guest.unlink(missing_ok=True)
        guest.write_bytes(hostile_program + joined + struct.pack("<Q", len(joined)))
        guest.chmod(0o755)
        monkeypatch.setattr(oci, "BIN", programs)

    return put


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's patience with a guest that does not answer, ten seconds in all, made shorter."""
    monkeypatch.setattr(process, "KILL_S", 0.5)
    monkeypatch.setattr(Stream.abandon, "__defaults__", (0.5,))


@FASTEST
async def test_a_guest_that_ends_no_operation_does_not_lengthen_its_lifetime(
    engine: Engine, install: Install, impatient: None
) -> None:
    install(_step("w", HELLO) + _step("r") + _step("d"))
    sandbox = await engine.create(ttl_s=1, ttl_renewed_by_use=True)
    with pytest.raises(AtollError):
        await sandbox.exec("true", timeout_s=0.1)
    await sandbox.aclose()  # from now on no client uses it, though the operation is open
    await eventually(lambda: not (engine.state_dir / "sandboxes" / sandbox.id).exists(), "it is removed")


BEFORE_HELLO = {
    "garbage": _step("w", b"\xa5" * 4096) + _step("h"),
    "text": _step("w", b"panic: guest: cannot start\n" * 100) + _step("h"),
    "another frame first": _step("w", encode_frame(FrameType.END, 1)) + _step("h"),
    "another version": _step("w", encode_frame(FrameType.HELLO, 0, encode_fields([(Tag.VERSION, 2)]))) + _step("h"),
    "a hello without a version": _step("w", encode_frame(FrameType.HELLO, 0, b"")) + _step("h"),
    "a hello that is too long": _step("w", encode_frame(FrameType.HELLO, 0, bytes(4096))) + _step("h"),
    "a frame without end": _step("w", struct.pack("<IBBHI", 0xFFFFFFFF, 1, 0, 0, 0)) + _step("h"),
    "its own death notice": _step("w", encode_frame(FrameType.GONE, 0, b"")) + _step("h"),
    "its own failure": _step("w", encode_frame(FrameType.FAILED, 0, b"")) + _step("h"),
    "an end at once": _step("x", b"\x00"),
}


@FASTEST
@pytest.mark.parametrize("what", BEFORE_HELLO)
async def test_a_guest_that_does_not_greet_makes_no_sandbox(engine: Engine, install: Install, what: str) -> None:
    install(BEFORE_HELLO[what])
    with anyio.fail_after(25), pytest.raises(SandboxError):
        await engine.create()


AFTER_HELLO = {
    "a frame too large": _answer(_frame(FrameType.DATA, channel=1, length=MAX_PAYLOAD + 1)),
    "a length that wraps": _answer(_frame(FrameType.DATA, channel=1, length=0xFFFFFFF8)),
    "reserved bits": _answer(_frame(FrameType.END, reserved=1)),
    "data without bytes": _answer(_frame(FrameType.DATA, channel=1)),
    "data on a channel that cannot be": _answer(_frame(FrameType.DATA, b"x", channel=255)),
    "data on a channel that was not asked for": _answer(_frame(FrameType.DATA, b"x", channel=7)),
    "more data than credit": _repeat(80, _frame(FrameType.DATA, bytes(MAX_PAYLOAD), channel=1)),
    "an end of file twice": _answer(_frame(FrameType.EOF, channel=1), _frame(FrameType.EOF, channel=1)),
    "data after the end of file": _answer(_frame(FrameType.EOF, channel=1), _frame(FrameType.DATA, b"x", channel=1)),
    "credit of nothing": _answer(_frame(FrameType.CREDIT, struct.pack("<I", 0))),
    "half a credit": _answer(_frame(FrameType.CREDIT, b"\1\0")),
    "an end of file with content": _answer(_frame(FrameType.EOF, b"x", channel=1)),
    "a second hello": _step("w", HELLO) + _step("r") + _step("w", HELLO) + _step("d"),
    "an operation of its own": _answer(_frame(FrameType.OPEN, encode_fields([(Tag.OP, 1)]))),
    "a reset": _answer(_frame(FrameType.RESET)),
    "a control": _answer(_frame(FrameType.CONTROL)),
    "a shutdown": _answer(_frame(FrameType.SHUTDOWN)),
    "a notice that is the keeper's": _answer(_frame(FrameType.GONE)),
    "no such type": _answer(_frame(99)),
    "an end with a channel": _answer(_frame(FrameType.END, channel=3)),
    "two ends": _answer(_end((Tag.ERRNO, 2)), _end((Tag.ERRNO, 2))),
    "an end of nothing": _answer(_end()),
    "an exit code that cannot be": _answer(_end((Tag.EXIT_CODE, 4242))),
    "a signal that cannot be": _answer(_end((Tag.SIGNAL, -9))),
    "a negative errno": _answer(_end((Tag.ERRNO, -1))),
    "half a field": _answer(_frame(FrameType.END, b"\1\2\3")),
    "a field that overruns": _answer(_frame(FrameType.END, struct.pack("<HI", 33, 0xFFFFFF))),
    "an integer of another size": _answer(_frame(FrameType.END, struct.pack("<HI", 33, 4) + bytes(4))),
    "an event that does not exist": _answer(_event((Tag.EVENT, 4711))),
    "an event without a kind": _answer(_event()),
    "events without number": _repeat(3000, _event((Tag.EVENT, 1))),
    "a stream that nobody opened": _step("w", HELLO) + _step("w", encode_frame(FrameType.END, 77)) + _step("d"),
    "a stream of a client that is not there": _step("w", HELLO)
    + _step("w", encode_frame(FrameType.END, 900 << 20 | 1))
    + _step("d"),
    "garbage in the middle": _step("w", HELLO) + _step("r") + _step("w", b"\x5a" * 100_000) + _step("d"),
    "its death": _step("w", HELLO) + _step("r") + _step("x", b"\x07"),
    "its success": _step("w", HELLO) + _step("r") + _step("x", b"\x00"),
}


@FASTEST
@pytest.mark.parametrize("what", AFTER_HELLO)
async def test_a_guest_that_breaks_the_protocol_fails_its_own_sandbox_alone(
    engine: Engine, install: Install, what: str
) -> None:
    install(AFTER_HELLO[what])
    with anyio.fail_after(25):
        try:
            sandbox = await engine.create()
        except SandboxError:
            return  # it broke the protocol so early that it was never a sandbox
        try:
            with pytest.raises(SandboxError):
                await sandbox.exec(["true"], timeout_s=20)
            with pytest.raises(AtollError):
                await sandbox.exec(["true"], timeout_s=1)
        finally:
            await sandbox.destroy()


async def test_a_guest_that_broke_the_protocol_is_ended_although_it_ignores_being_told_to(
    engine: Engine, install: Install
) -> None:
    """Its sandbox is of no use to anyone. It must not use the machine until somebody thinks of destroying it."""
    install(_answer(_frame(99)))
    async with await engine.create() as sandbox:
        pid = sandbox.info.pid
        assert pid is not None
        with pytest.raises(GuestProtocolError):
            await sandbox.exec(["true"], timeout_s=20)

        def is_gone() -> bool:
            try:
                return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] in "ZX"
            except (FileNotFoundError, ProcessLookupError):
                return True

        await eventually(is_gone, "the hostile guest is gone", bound_s=5)
        info = next(each for each in await engine.list() if each.name == sandbox.name)
        assert info.status == "error"
        assert info.reason


@FASTEST
@pytest.mark.usefixtures("impatient")
async def test_a_guest_that_never_answers_holds_nobody_up_for_ever(engine: Engine, install: Install) -> None:
    install(_step("w", HELLO) + _step("d"))
    async with await engine.create() as sandbox:
        with anyio.fail_after(10), pytest.raises((ExecTimeout, SandboxError)):
            await sandbox.exec(["true"], timeout_s=0.2)


@FASTEST
@pytest.mark.usefixtures("impatient")
async def test_a_guest_that_does_not_read_stops_what_is_sent_to_it_and_no_more(
    engine: Engine, install: Install
) -> None:
    install(_step("w", HELLO) + _step("h"))
    before = _resident_bytes()
    async with await engine.create() as sandbox:
        with anyio.move_on_after(0.5):
            async with anyio.create_task_group() as group:
                for i in range(200):
                    group.start_soon(_ignore, sandbox, i)
    assert _resident_bytes() - before < 128 * MIB


async def _ignore(sandbox: Sandbox, number: int) -> None:
    try:
        await sandbox.exec(["echo", "x" * 100_000, str(number)], timeout_s=1)
    except AtollError:
        return


@FASTEST
async def test_events_as_large_as_can_be_do_not_fill_the_hosts_memory(engine: Engine, install: Install) -> None:
    """Data is held back by credit. Events are not, so they must be small, few or dropped."""
    large = _event((Tag.EVENT, 1), (Tag.MESSAGE, b"x" * (MAX_PAYLOAD - 64)))
    install(_repeat(1500, large))
    before = _resident_bytes()
    peak = 0

    async def watch(done: anyio.Event) -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, _resident_bytes() - before)
            await anyio.sleep(0.005)

    async with await engine.create() as sandbox, anyio.create_task_group() as group:
        done = anyio.Event()
        group.start_soon(watch, done)
        with pytest.raises(SandboxError):
            await sandbox.exec(["true"], timeout_s=20)
        done.set()
    assert peak < 64 * MIB, f"{peak // MIB} MiB were held for one command"


RECORDS = {
    "a record too large": struct.pack("<I", MAX_RECORD + 1) + bytes(100),
    "half a record": struct.pack("<I", 100) + bytes(50),
    "a name that leads up": encode_record([(Tag.NAME, b"../../etc/passwd"), (Tag.KIND, 1)]),
    "a name with a NUL": encode_record(
        [(Tag.NAME, b"a\0b"), (Tag.KIND, 1), (Tag.SIZE, 0), (Tag.MODE, 0), (Tag.MTIME_NS, 0)]
    ),
    "a kind that does not exist": encode_record([(Tag.NAME, b"a"), (Tag.KIND, 99), (Tag.SIZE, 0), (Tag.MODE, 0)]),
    "a negative size": encode_record(
        [(Tag.NAME, b"a"), (Tag.KIND, 1), (Tag.SIZE, -1), (Tag.MODE, 0), (Tag.MTIME_NS, 0)]
    ),
    "nothing at all": encode_record([]),
}


@FASTEST
@pytest.mark.parametrize("what", RECORDS)
async def test_a_listing_that_cannot_be_is_refused(engine: Engine, install: Install, what: str) -> None:
    install(_answer(_frame(FrameType.DATA, RECORDS[what], channel=1), _end()))
    async with await engine.create() as sandbox:
        with anyio.fail_after(15), pytest.raises(SandboxError):
            await sandbox.files.list("/")


XATTRS = {
    "too many": b"a\0" + struct.pack("<I", 5000) + bytes(5000),
    "cut off": b"a\0\x01\0",
    "overrunning": b"a\0" + struct.pack("<I", 2**32 - 1) + b"x",
    "without an end of its name": b"a" * 100,
    "without a name": b"\0" + struct.pack("<I", 0),
}
_ATTRIBUTES = [
    (Tag.KIND, 1),
    *((tag, 0) for tag in (Tag.SIZE, Tag.MODE, Tag.UID, Tag.GID, Tag.MTIME_NS)),
]


@FASTEST
@pytest.mark.parametrize("what", XATTRS)
async def test_extended_attributes_that_cannot_be_are_refused(engine: Engine, install: Install, what: str) -> None:
    install(_answer(_end(*_ATTRIBUTES, (Tag.XATTRS, XATTRS[what]))))
    async with await engine.create() as sandbox:
        with anyio.fail_after(15), pytest.raises(GuestProtocolError):
            await sandbox.files.stat("/etc/passwd", xattr_prefix="user.mine.")


@FASTEST
async def test_extended_attributes_that_nobody_asked_for_are_not_believed(engine: Engine, install: Install) -> None:
    install(_answer(_end(*_ATTRIBUTES, (Tag.XATTRS, b"a\0" + struct.pack("<I", 1) + b"x"))))
    async with await engine.create() as sandbox:
        assert (await sandbox.files.stat("/etc/passwd")).xattrs == {}


@FASTEST
async def test_a_file_longer_than_was_asked_for_is_refused(engine: Engine, install: Install) -> None:
    install(
        _answer(_frame(FrameType.DATA, bytes(1000), channel=1), _end((Tag.SIZE, 10), (Tag.MODE, 0), (Tag.MTIME_NS, 0)))
    )
    async with await engine.create() as sandbox:
        with anyio.fail_after(15), pytest.raises(SandboxError):
            await sandbox.files.read_bytes("/x", limit=10)


@FASTEST
async def test_messages_of_a_guest_are_cut_and_cleaned(engine: Engine, install: Install) -> None:
    install(_answer(_end((Tag.ERRNO, 5), (Tag.MESSAGE, b"\x1b]0;owned\x07\x1b[2J" + b"m" * 200_000))))
    async with await engine.create() as sandbox:
        with pytest.raises(AtollError) as failed:
            await sandbox.files.read_bytes("/x")
        assert "\x1b" not in str(failed.value)
        assert len(str(failed.value)) < 10_000


def _tar(*entries: tuple[str, bytes, str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, kind, link, content in entries:
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.size, info.mode = kind, link, len(content), 0o6755
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


FILE, LINK, HARD, DIRECTORY, DEVICE, FIFO = (
    tarfile.REGTYPE,
    tarfile.SYMTYPE,
    tarfile.LNKTYPE,
    tarfile.DIRTYPE,
    tarfile.CHRTYPE,
    tarfile.FIFOTYPE,
)
ARCHIVES = {
    "an absolute name": _tar(("/tmp/atoll-escaped", FILE, "", b"x")),
    "dot dot": _tar(("../escaped", FILE, "", b"x")),
    "dot dot within": _tar(("a/../../escaped", FILE, "", b"x")),
    "through a symlink": _tar(("s", LINK, "..", b""), ("s/escaped", FILE, "", b"x")),
    "through an absolute symlink": _tar(("s", LINK, "/tmp", b""), ("s/atoll-escaped", FILE, "", b"x")),
    "through a directory that becomes a symlink": _tar(
        ("d", DIRECTORY, "", b""), ("d", LINK, "..", b""), ("d/escaped", FILE, "", b"x")
    ),
    "through two symlinks": _tar(
        ("a", DIRECTORY, "", b""), ("a/b", LINK, "..", b""), ("c", LINK, "a/b/..", b""), ("c/escaped", FILE, "", b"x")
    ),
    "onto a symlink": _tar(("s", LINK, "../escaped", b""), ("s", FILE, "", b"x")),
    "a symlink that leads out": _tar(("s", LINK, "/etc/passwd", b"")),
    "a hard link to outside": _tar(("h", HARD, "/etc/passwd", b"")),
    "a hard link above": _tar(("h", HARD, "../precious", b""), ("h", FILE, "", b"x")),
    "a hard link to a symlink": _tar(("s", LINK, "../precious", b""), ("h", HARD, "s", b""), ("h", FILE, "", b"x")),
    "a device": _tar(("d", DEVICE, "", b"")),
    "a pipe": _tar(("p", FIFO, "", b"")),
    "garbage": os.urandom(2048),
    "half of it": _tar(("f", FILE, "", b"x" * 3000))[:1200],
    "nothing": b"",
}
STAT_OF_A_DIRECTORY = _end(
    (Tag.KIND, 2), (Tag.SIZE, 0), (Tag.MODE, 0o755), (Tag.UID, 0), (Tag.GID, 0), (Tag.MTIME_NS, 0)
)


@FASTEST
@pytest.mark.parametrize("what", ARCHIVES)
async def test_an_archive_of_a_hostile_guest_writes_nothing_outside(
    engine: Engine, install: Install, tmp_path: Path, what: str
) -> None:
    """`download` asks what stands there, then for the archive. Everything else on the host stays as it was."""
    data = ARCHIVES[what]
    frames = [_frame(FrameType.DATA, data, channel=1)] if data else []
    script = _step("w", HELLO) + _step("r") + _step("f", STAT_OF_A_DIRECTORY) + _step("r")
    install(script + b"".join(_step("f", frame) for frame in [*frames, _end()]) + _step("d"))
    place = tmp_path / "place"
    place.mkdir()
    (place / "precious").write_text("precious")
    async with await engine.create() as sandbox:
        with anyio.fail_after(20), pytest.raises((AtollError, OSError)):
            await sandbox.files.download("/x", place / "out")
    assert (place / "precious").read_text() == "precious"
    assert (place / "precious").stat().st_nlink == 1
    assert os.listdir(place) == ["precious"], "nothing is left of a download that failed"
    assert not Path("/tmp/atoll-escaped").exists()


@FASTEST
@pytest.mark.usefixtures("impatient")
async def test_a_listing_without_end_does_not_fill_the_hosts_memory(engine: Engine, install: Install) -> None:
    """As much as credit allows; the host gives credit as it reads. One megabyte here, of names that are all alike."""
    record = encode_record(
        [
            (Tag.NAME, b"n"),
            (Tag.KIND, 1),
            (Tag.SIZE, 0),
            (Tag.MODE, 0o644),
            (Tag.UID, 0),
            (Tag.GID, 0),
            (Tag.MTIME_NS, 0),
        ]
    )
    piece = record * (MAX_PAYLOAD // len(record))
    install(_repeat(3, _frame(FrameType.DATA, piece, channel=1)))
    before = _resident_bytes()
    async with await engine.create() as sandbox:
        with anyio.move_on_after(1):
            await sandbox.files.list("/")
    assert _resident_bytes() - before < 64 * MIB
