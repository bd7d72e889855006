"""Frames, violations, epochs, the start and the end."""

from __future__ import annotations

import ctypes
import os
import random
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.guest.client import BOUND_S, SOURCE, Guest, N, Stream, alive, encode, field_bytes, frame, wait_for
from tests.protocol_header import Row, read_lists


def exit_status(guest: Guest) -> int:
    guest.process.wait(BOUND_S)
    return guest.process.returncode


def raw(length: int, kind: int, channel: int = 0, reserved: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    return struct.pack("<IBBHI", length, kind, channel, reserved, stream) + payload


GOOD_OPEN = encode(OP=N["OP_STAT"], PATH="/")

VIOLATIONS = {
    "too long": raw(262145, 2, stream=1),
    "unknown type": raw(0, 99, stream=1),
    "type 0": raw(0, 0, stream=1),
    "event to the guest": raw(0, 8, stream=1),
    "end to the guest": raw(0, 9, stream=1),
    "keeper's type": raw(0, 32, stream=1),
    "reserved": raw(0, 6, reserved=1, stream=1),
    "channel of open": raw(len(GOOD_OPEN), 2, channel=1, stream=1, payload=GOOD_OPEN),
    "stream 0": raw(len(GOOD_OPEN), 2, stream=0, payload=GOOD_OPEN),
    "hello with a stream": frame("HELLO", 1, encode(VERSION=1, EPOCH=1)),
    "hello of no later epoch": frame("HELLO", 0, encode(VERSION=1, EPOCH=0)),
    "shutdown with payload": raw(1, 10, payload=b"x"),
    "empty data": raw(0, 3, stream=1),
    "eof with payload": raw(1, 4, stream=1, payload=b"x"),
    "credit of 3 bytes": raw(3, 5, stream=1, payload=b"xxx"),
    "credit of nothing": raw(4, 5, stream=1, payload=b"\0\0\0\0"),
    "field cut": raw(5, 2, stream=1, payload=b"\3\0\10\0\0"),
    "field overruns": raw(7, 2, stream=1, payload=struct.pack("<HIB", 3, 2, 0)),
    "field of 4 GiB": raw(6, 2, stream=1, payload=struct.pack("<HI", 3, 0xFFFFFFFF)),
    "integer of 4 bytes": raw(10, 2, stream=1, payload=struct.pack("<HII", N["TAG_OP"], 4, 1)),
    "NUL in a string": frame("OPEN", 1, encode(OP=N["OP_STAT"], PATH=b"/\0")),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_violation_ends_the_guest_with_70(binary: str, name: str) -> None:
    guest = Guest(binary)
    guest.sock.sendall(VIOLATIONS[name])
    assert exit_status(guest) == 70
    assert b"protocol" in guest.process.stderr.read()
    guest.close()


class CFields(ctypes.Structure):
    """`struct fields` of frame.h."""

    _fields_ = (("at", ctypes.c_char_p), ("size", ctypes.c_size_t))


@pytest.fixture(scope="module")
def fields_check(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bytes], bytes | None]:
    """The guest's own check of fields: the rule that they break, or None."""
    library = tmp_path_factory.mktemp("frame") / "frame.so"
    subprocess.run(["cc", "-std=gnu11", "-shared", "-fPIC", "-o", library, SOURCE / "frame.c"], check=True)
    check = ctypes.CDLL(str(library)).fields_check
    check.argtypes, check.restype = [CFields], ctypes.c_char_p
    return lambda fields: check(CFields(fields, len(fields)))


@pytest.mark.parametrize("row", read_lists()["FIELD_TAGS"], ids=lambda row: row.name)
def test_a_field_whose_value_is_not_of_its_type_is_refused(
    fields_check: Callable[[bytes], bytes | None], row: Row
) -> None:
    for size in (0, 1, 4, 7, 8, 9, 16):
        wrong_integer = row.type == "INTEGER" and size != 8
        assert fields_check(field_bytes(row.number, b"x" * size)) == (
            b"integer not of 8 bytes" if wrong_integer else None
        ), size
    with_nul = fields_check(field_bytes(row.number, b"x\0yyyyyy"))
    assert with_nul == (b"NUL in a string" if row.type == "STRING" else None)


@pytest.mark.parametrize("name", ["PAUSE_MS", "IDLE", "WAITING", "QUIET", "CPU_US", "PEER_PORT"])
def test_a_running_guest_ends_when_an_integer_has_another_size(binary: str, name: str) -> None:
    guest = Guest(binary)
    guest.sock.sendall(frame("OPEN", 1, encode(OP=N["OP_PS"]) + field_bytes(N["TAG_" + name], b"\1")))
    assert exit_status(guest) == 70
    assert b"integer not of 8 bytes" in guest.process.stderr.read()
    guest.close()


def test_a_violation_ends_what_was_started(binary: str) -> None:
    guest = Guest(binary)
    pid = guest.shell("sleep 1000", KEEP=1).event("STARTED")["PID"]
    guest.sock.sendall(VIOLATIONS["unknown type"])
    assert exit_status(guest) == 70
    wait_for(lambda: not alive(pid))
    guest.close()


def test_a_number_in_use_cannot_be_opened(binary: str) -> None:
    guest = Guest(binary)
    stream = guest.shell("sleep 1000")
    guest.sock.sendall(frame("OPEN", stream.id, GOOD_OPEN))
    assert exit_status(guest) == 70
    guest.close()


def test_data_beyond_the_credit_and_after_eof_is_a_violation(binary: str) -> None:
    for frames in ([("DATA", b"x" * 65537)], [("EOF", b""), ("DATA", b"x")]):
        guest = Guest(binary)
        stream = guest.shell("sleep 1000", STDIN=1)
        stream.event("STARTED")
        for kind, payload in frames:
            guest.sock.sendall(frame(kind, stream.id, payload))
        assert exit_status(guest) == 70
        guest.close()


def test_frames_for_streams_that_are_gone_are_ignored(guest: Guest) -> None:
    for kind, payload in (("DATA", b"x"), ("EOF", b""), ("CREDIT", b"\1\0\0\0"), ("RESET", b""), ("CONTROL", b"")):
        guest.send(frame(kind, 4711, payload))
    stream = guest.run("STAT", PATH="/")
    guest.send(frame("CREDIT", stream.id, b"\1\0\0\0", channel=200))
    assert guest.run("STAT", PATH="/").end["KIND"] == 2


def test_an_unknown_tag_is_ignored(guest: Guest) -> None:
    payload = field_bytes(9999, b"\0whatever") + GOOD_OPEN
    stream = Stream(guest, 77, True)
    guest.streams[77] = stream
    guest.send(frame("OPEN", 77, payload))
    assert stream.wait()["KIND"] == 2


def test_an_unknown_operation_ends_with_enosys(guest: Guest) -> None:
    stream = Stream(guest, 77, True)
    guest.streams[77] = stream
    guest.send(frame("OPEN", 77, encode(OP=12345)))
    assert stream.wait()["ERRNO"] == 38


def test_a_number_can_be_used_again_after_its_end(guest: Guest) -> None:
    for _ in range(3):
        stream = Stream(guest, 5, True)
        guest.streams[5] = stream
        guest.send(frame("OPEN", 5, GOOD_OPEN))
        assert stream.wait()["KIND"] == 2


def test_frames_may_arrive_in_any_pieces(guest: Guest) -> None:
    stream = Stream(guest, 5, True)
    guest.streams[5] = stream
    for byte in frame("OPEN", 5, GOOD_OPEN):
        guest.send(bytes([byte]))
    assert stream.wait()["KIND"] == 2


def test_a_new_epoch_drops_every_stream_and_keeps_what_is_kept(guest: Guest) -> None:
    assert guest.hellos == [{"VERSION": 1, "EPOCH": 0}]
    kept = guest.shell("echo kept; sleep 1000", KEEP=1)
    lost = guest.shell("sleep 1000")
    listening = guest.open("LISTEN", PORT=0)
    writing = guest.open("WRITE", PATH="/tmp/never-written-by-atoll", ATOMIC=1)
    pids = [stream.event("STARTED")["PID"] for stream in (kept, lost)]
    listening.event("LISTENING")
    guest.send(frame("HELLO", 0, encode(VERSION=1, EPOCH=7)))
    guest.until(lambda: len(guest.hellos) == 2)
    assert guest.hellos[1] == {"VERSION": 1, "EPOCH": 7}
    wait_for(lambda: not alive(pids[1]))
    assert alive(pids[0])
    again = guest.open("ATTACH", PROC=kept.event("STARTED")["PROC"])
    again.until_out(b"kept")
    wait_for(lambda: len(guest.children()) == 1)
    assert [stream.end for stream in (kept, lost, listening, writing)] == [None] * 4
    assert not Path("/tmp/never-written-by-atoll").exists()
    # The numbers are free again.
    guest.last = 0
    assert guest.run("STAT", PATH="/").end["KIND"] == 2


def test_shutdown_ends_every_process(binary: str) -> None:
    guest = Guest(binary)
    pid = guest.shell("sleep 1000", KEEP=1).event("STARTED")["PID"]
    guest.sock.sendall(frame("SHUTDOWN", 0))
    assert exit_status(guest) == 0
    assert not alive(pid)
    guest.close()


def test_a_host_that_does_not_read_bounds_the_guests_memory(guest: Guest) -> None:
    """Two thousand answers and endless data, and nobody takes any of it."""
    guest.open("SPAWN", window=1 << 30, SHELL="yes")
    peak, sent = 0, 0
    guest.sock.setblocking(False)
    for i in range(20000):
        try:
            sent += guest.sock.send(frame("OPEN", 100000 + i, encode(OP=12345)))
        except BlockingIOError:
            break
    peak = guest.status("VmRSS")
    assert peak < 6000
    guest.sock.setblocking(True)


def test_pipes_serve_as_well_as_sockets(binary: str, tmp_path: Path) -> None:
    """As in production: two FIFOs that are opened for reading and writing."""
    paths = [tmp_path / "in", tmp_path / "out"]
    for path in paths:
        os.mkfifo(path)
    fds = [os.open(path, os.O_RDWR) for path in paths]
    theirs = [os.open(path, os.O_RDWR) for path in paths]  # opened anew: the guest makes its own non-blocking
    process = subprocess.Popen([binary], stdin=theirs[0], stdout=theirs[1])
    data = os.urandom(5_000_000)
    (tmp_path / "file").write_bytes(data)
    try:
        os.write(fds[0], frame("OPEN", 1, encode(OP=N["OP_READ"], PATH=str(tmp_path / "file"), WINDOW=1 << 30)))
        assert read_stream(fds[1]) == data
        os.write(fds[0], frame("SHUTDOWN", 0))
        assert process.wait(BOUND_S) == 0
    finally:
        process.kill()
        process.wait()
        for fd in fds + theirs:
            os.close(fd)


def read_stream(fd: int) -> bytes:
    """The DATA of the only stream, until its END."""
    buffer = b""
    parts: list[bytes] = []
    while True:
        buffer += os.read(fd, 1 << 20)
        while len(buffer) >= 12:
            length, kind, _, _, _ = struct.unpack_from("<IBBHI", buffer)
            if len(buffer) < 12 + length:
                break
            if kind == N["FRAME_END"]:
                return b"".join(parts)
            if kind == N["FRAME_DATA"]:
                parts.append(buffer[12 : 12 + length])
            buffer = buffer[12 + length :]


def test_wrong_arguments_are_refused(binary: str) -> None:
    for arguments in (["--user"], ["--user", "x"], ["--home", "1:2:relative"], ["--what", "x"], ["--user", "a:b:c:/d"]):
        done = subprocess.run([binary, *arguments], stdin=subprocess.DEVNULL, capture_output=True, check=False)
        assert done.returncode == 64
        assert b"usage" in done.stderr


def test_an_idle_guest_costs_little(guest: Guest) -> None:
    guest.shell("head -c 1000000 /dev/zero").wait()

    def private_kb() -> int:
        text = Path(f"/proc/{guest.pid}/smaps_rollup").read_text()
        return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Anonymous:"))

    wait_for(lambda: private_kb() < 250)  # 64 KiB of it are the kept output


def test_seeded_noise_never_hangs_the_guest(binary: str) -> None:
    """Frames with random contents: the guest ends with 70, or serves on. (test_fuzz.py has the long runs.)"""
    random_source = random.Random(20221219)
    for _ in range(20):
        guest = Guest(binary)
        noise = random_source.randbytes(random_source.randrange(1, 300))
        guest.sock.sendall(noise)
        guest.sock.shutdown(1)
        assert exit_status(guest) in (0, 70)
        guest.close()
