"""The other end of a link, for tests: says what a test tells it to, and gives what it hears."""

from __future__ import annotations

import struct
from collections.abc import Iterable

import anyio
from anyio.abc import ByteStream
from anyio.streams.buffered import BufferedByteReceiveStream

from atoll.contract.protocol import (
    HEADER_SIZE,
    EventKind,
    Fields,
    FrameType,
    Tag,
    Value,
    decode_fields,
    encode_fields,
    encode_frame,
)

BOUND_S = 10.0


def encode_record(*fields: tuple[Tag, Value]) -> bytes:
    """One record, as a guest writes it."""
    payload = encode_fields(fields)
    return struct.pack("<I", len(payload)) + payload


class Heard:
    """A frame from the host."""

    def __init__(self, kind: int, channel: int, stream: int, payload: bytes) -> None:
        self.kind = FrameType(kind)
        self.channel = channel
        self.stream = stream
        self.payload = payload

    @property
    def fields(self) -> Fields:
        return decode_fields(self.payload)


class Peer:
    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._reader = BufferedByteReceiveStream(stream)

    async def hello(self) -> None:
        await self.say(FrameType.HELLO, 0, fields=((Tag.VERSION, 1), (Tag.EPOCH, 0)))

    async def say(
        self,
        kind: FrameType,
        stream: int,
        payload: bytes = b"",
        *,
        channel: int = 0,
        fields: Iterable[tuple[Tag, Value]] = (),
    ) -> None:
        await self.say_raw(encode_frame(kind, stream, payload or encode_fields(fields), channel))

    async def say_raw(self, data: bytes) -> None:
        with anyio.fail_after(BOUND_S):
            await self._stream.send(data)

    async def data(self, stream: int, channel: int, payload: bytes) -> None:
        await self.say(FrameType.DATA, stream, payload, channel=channel)

    async def end(self, stream: int, *fields: tuple[Tag, Value]) -> None:
        await self.say(FrameType.END, stream, fields=fields)

    async def started(self, stream: int, process: int = 1) -> None:
        await self.say(
            FrameType.EVENT, stream, fields=((Tag.EVENT, EventKind.STARTED), (Tag.PROC, process), (Tag.PID, 7))
        )

    async def exited(self, stream: int, code: int = 0, *more: tuple[Tag, Value]) -> None:
        await self.end(
            stream,
            (Tag.PROC, 1),
            (Tag.EXIT_CODE, code),
            (Tag.DURATION_US, 1000),
            (Tag.OUT_TOTAL, 0),
            (Tag.ERR_TOTAL, 0),
            *more,
        )

    async def killed(self, stream: int, signal: int = 9, *more: tuple[Tag, Value]) -> None:
        await self.end(
            stream,
            (Tag.PROC, 1),
            (Tag.SIGNAL, signal),
            (Tag.DURATION_US, 1000),
            (Tag.OUT_TOTAL, 0),
            (Tag.ERR_TOTAL, 0),
            *more,
        )

    async def hear(self, kind: FrameType | None = None) -> Heard:
        """The next frame from the host, which must be of this type."""
        with anyio.fail_after(BOUND_S):
            length, got, channel, _, stream = struct.unpack("<IBBHI", await self._reader.receive_exactly(HEADER_SIZE))
            payload = await self._reader.receive_exactly(length) if length else b""
        heard = Heard(got, channel, stream, payload)
        assert kind is None or heard.kind is kind, f"{heard.kind.name} came instead of {kind.name}"
        return heard

    async def hears_the_end(self) -> None:
        """The host has closed the connection; what it said before is passed over."""
        with anyio.fail_after(BOUND_S):
            try:
                while True:
                    await self._stream.receive()
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                return

    async def aclose(self) -> None:
        await self._stream.aclose()
