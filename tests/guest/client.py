"""A small blocking client for the guest.

Knows frames and fields by itself (on purpose not through `atoll.runtime`: the guest is tested against the document).
The guest runs as an ordinary child of the test, connected by a socket pair.
"""

from __future__ import annotations

import select
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.protocol_header import read_lists, read_numbers

SOURCE = Path(__file__).resolve().parents[2] / "src" / "atoll" / "guest"
BOUND_S = 10.0


N = read_numbers()
TAG_NAMES = {value: name[4:] for name, value in N.items() if name.startswith("TAG_")}
INTEGER_TAGS = {row.name for row in read_lists()["FIELD_TAGS"] if row.type == "INTEGER"}


def field_bytes(tag: int, value: int | bytes | str) -> bytes:
    if isinstance(value, int):
        raw = struct.pack("<q", value)
    else:
        raw = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value
    return struct.pack("<HI", tag, len(raw)) + raw


def encode(**fields: Any) -> bytes:
    out = b""
    for name, value in fields.items():
        if value is None:
            continue
        for one in value if isinstance(value, (list, tuple)) else [value]:
            out += field_bytes(N["TAG_" + name], one)
    return out


def decode(payload: bytes) -> dict[str, Any]:
    out: dict[str, Any] = {}
    at = 0
    while at < len(payload):
        tag, size = struct.unpack_from("<HI", payload, at)
        raw = payload[at + 6 : at + 6 + size]
        assert len(raw) == size
        at += 6 + size
        name = TAG_NAMES[tag]
        out[name] = struct.unpack("<q", raw)[0] if name in INTEGER_TAGS else raw
    return out


def frame(kind: str, stream: int, payload: bytes = b"", channel: int = 0) -> bytes:
    return struct.pack("<IBBHI", len(payload), N["FRAME_" + kind], channel, 0, stream) + payload


def records(data: bytes) -> list[dict[str, Any]]:
    out = []
    at = 0
    while at < len(data):
        (size,) = struct.unpack_from("<I", data, at)
        assert size + 4 <= N["MAX_RECORD"]
        out.append(decode(data[at + 4 : at + 4 + size]))
        at += 4 + size
    assert at == len(data)
    return out


@dataclass
class Stream:
    guest: Guest
    id: int
    auto: bool
    data: dict[int, bytearray] = field(default_factory=dict)
    events: list[dict] = field(default_factory=list)
    eofs: set[int] = field(default_factory=set)
    end: Any = None  # the fields of END, once it is there
    may_send: dict[int, int] = field(default_factory=dict)
    frames: int = 0
    discard: bool = False
    received: int = 0

    @property
    def out(self) -> bytes:
        return bytes(self.data.get(1, b""))

    @property
    def err(self) -> bytes:
        return bytes(self.data.get(2, b""))

    def send(self, data: bytes, channel: int = 0) -> None:
        """Sends within the credit, reading meanwhile."""
        view = memoryview(data)
        while view:
            self.guest.until(lambda: self.credit(channel) > 0 or self.end is not None)
            if self.end is not None:
                return
            part = view[: min(self.credit(channel), N["MAX_PAYLOAD"])]
            self.may_send[channel] -= len(part)
            self.guest.send(frame("DATA", self.id, bytes(part), channel))
            view = view[len(part) :]

    def credit(self, channel: int) -> int:
        return self.may_send.setdefault(channel, N["INITIAL_CREDIT"])

    def eof(self, channel: int = 0) -> None:
        self.guest.send(frame("EOF", self.id, channel=channel))

    def give(self, count: int, channel: int = 1) -> None:
        self.guest.send(frame("CREDIT", self.id, struct.pack("<I", count), channel))

    def reset(self) -> None:
        self.guest.send(frame("RESET", self.id))

    def control(self, **fields: Any) -> None:
        self.guest.send(frame("CONTROL", self.id, encode(**fields)))

    def wait(self, bound_s: float = BOUND_S) -> dict:
        self.guest.until(lambda: self.end is not None, bound_s)
        assert self.end is not None
        return self.end

    def event(self, name: str) -> dict:
        wanted = N["EVENT_" + name]
        self.guest.until(lambda: any(e["EVENT"] == wanted for e in self.events) or self.end is not None)
        found = [e for e in self.events if e["EVENT"] == wanted]
        assert found, self.end
        return found[0]

    def until_received(self, count: int) -> None:
        self.guest.until(lambda: self.received >= count)

    def until_out(self, wanted: bytes, channel: int = 1) -> None:
        self.guest.until(lambda: wanted in self.data.get(channel, b"") or self.end is not None)
        assert wanted in self.data.get(channel, b""), (bytes(self.data.get(channel, b"")), self.end)


class Guest:
    """The guest as a child process, and this end of its stream."""

    def __init__(self, binary: str, *arguments: str, env: dict[str, str] | None = None) -> None:
        ours, theirs = socket.socketpair()
        self.sock: Any = ours
        self.process: Any
        self.process = subprocess.Popen(
            [binary, *arguments], stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=subprocess.PIPE, env=env
        )
        theirs.close()
        self.buffer = bytearray()
        self.pending = bytearray()  # credit that is due, sent before anything else
        self.streams: dict[int, Stream] = {}
        self.hellos: list[dict] = []
        self.last = 0
        self.closed = False
        self.until(lambda: bool(self.hellos))

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, data: bytes) -> None:
        view = memoryview(bytes(self.pending) + data)
        self.pending.clear()
        while view:
            readable, writable, _ = select.select([self.sock], [self.sock], [], BOUND_S)
            assert readable or writable, "the guest neither reads nor writes"
            if readable:
                self._receive()
            if writable and not self.closed:
                try:
                    view = view[self.sock.send(view, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    continue
                except (BrokenPipeError, ConnectionResetError):
                    self.closed = True
            if self.closed:
                return

    def _receive(self) -> None:
        try:
            data = self.sock.recv(1 << 20)
        except ConnectionResetError:
            data = b""
        if not data:
            self.closed = True
            return
        self.buffer += data
        at = 0
        while len(self.buffer) - at >= 12:
            length, kind, channel, reserved, stream = struct.unpack_from("<IBBHI", self.buffer, at)
            assert length <= N["MAX_PAYLOAD"]
            assert reserved == 0
            if len(self.buffer) - at < 12 + length:
                break
            self._take(kind, channel, stream, bytes(self.buffer[at + 12 : at + 12 + length]))
            at += 12 + length
        del self.buffer[:at]

    def _take(self, kind: int, channel: int, number: int, payload: bytes) -> None:
        if kind == N["FRAME_HELLO"]:
            self.hellos.append(decode(payload))
            return
        stream = self.streams[number]
        assert stream.end is None, "a frame after END"
        stream.frames += 1
        if kind == N["FRAME_DATA"]:
            assert payload
            assert channel not in stream.eofs
            stream.received += len(payload)
            if not stream.discard:
                stream.data.setdefault(channel, bytearray()).extend(payload)
            if stream.auto:
                self.pending += frame("CREDIT", number, struct.pack("<I", len(payload)), channel)
        elif kind == N["FRAME_EOF"]:
            stream.eofs.add(channel)
        elif kind == N["FRAME_CREDIT"]:
            stream.may_send[channel] = stream.credit(channel) + struct.unpack("<I", payload)[0]
        elif kind == N["FRAME_EVENT"]:
            stream.events.append(decode(payload))
        elif kind == N["FRAME_END"]:
            stream.end = decode(payload)
        else:
            raise AssertionError(f"frame of type {kind}")

    def until(self, condition: Callable[[], bool], bound_s: float = BOUND_S) -> None:
        """Reads until the condition holds; fails after a bound."""
        deadline = time.monotonic() + bound_s
        while not condition():
            left = deadline - time.monotonic()
            assert left > 0, "waited in vain"
            assert not self.closed, f"the guest has gone: {self.process.poll()} {self.process.stderr.read()!r}"
            if select.select([self.sock], [], [], min(left, 0.02))[0]:
                self._receive()
            if self.pending:
                self.send(b"")

    def open(self, op: str, window: int = 1 << 20, auto: bool = True, **fields: Any) -> Stream:
        self.last += 1
        stream = Stream(self, self.last, auto)
        self.streams[self.last] = stream
        self.send(frame("OPEN", self.last, encode(OP=N["OP_" + op], WINDOW=window, **fields)))
        return stream

    def run(self, op: str, data: bytes | None = None, **fields: Any) -> Stream:
        stream = self.open(op, **fields)
        if data is not None:
            stream.send(data)
            stream.eof()
        stream.wait()
        return stream

    def shell(self, line: str, **fields: Any) -> Stream:
        return self.open("SPAWN", SHELL=line, ENV=["PATH=/usr/bin:/bin"], **fields)

    def records(self, op: str, **fields: Any) -> list[dict]:
        stream = self.run(op, **fields)
        assert "ERRNO" not in stream.end, stream.end
        return records(stream.out)

    def children(self) -> list[int]:
        """Processes of the guest's that have something to do: a supervisor without a child waits for its next job."""
        return [pid for pid in children_of(self.pid) if not is_idle_supervisor(pid)]

    def idle_supervisors(self) -> list[int]:
        """Those that wait for a job."""
        return [pid for pid in children_of(self.pid) if is_idle_supervisor(pid)]

    def status(self, key: str) -> int:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1])
        raise KeyError(key)

    def close(self) -> int:
        self.sock.close()
        try:
            return self.process.wait(BOUND_S)
        finally:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGKILL)
                self.process.wait()
            self.process.stderr.close()


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_idle_supervisor(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text() == "atoll-supervise\n" and not children_of(pid)
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition: Callable[[], bool], bound_s: float = BOUND_S) -> None:
    """For what does not come over the stream: /proc, files."""
    deadline = time.monotonic() + bound_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        select.select([], [], [], 0.005)


def alive(pid: int) -> bool:
    """Neither gone nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def build(out: Path, *flags: str, compiler: str = "cc") -> Path:
    sources = sorted(map(str, SOURCE.glob("*.c")))
    subprocess.run(
        [compiler, *flags, "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-o", str(out), *sources], check=True
    )
    return out
