"""Frames and records of the guest protocol, read from bytes that arrive in pieces.

Owns `FrameReader` and `RecordReader`, which `connection.py` and `stream.py` feed, and the frames and fields that only
the runtime writes. Not here: the protocol's numbers and the encoding of fields (`contract/protocol.py`), sockets,
streams, credit, and the meaning of operations.
All input from a guest is hostile: each size is checked before anything is kept, and malformed input raises
`GuestProtocolError`, never another exception.
"""

from __future__ import annotations

import struct

from atoll.contract.errors import GuestProtocolError
from atoll.contract.protocol import HEADER, HEADER_SIZE, MAX_PAYLOAD, MAX_RECORD, Fields, FrameType, decode_fields

_UINT32 = struct.Struct("<I")

_DATA = int(FrameType.DATA)
_STREAM_TYPES = frozenset(map(int, (FrameType.DATA, FrameType.EOF, FrameType.CREDIT, FrameType.EVENT, FrameType.END)))
_LINK_TYPES = frozenset(map(int, (FrameType.HELLO, FrameType.FAILED, FrameType.GONE)))
_CHANNEL_TYPES = frozenset(map(int, (FrameType.DATA, FrameType.EOF, FrameType.CREDIT)))

Frame = tuple[int, int, int, bytes]
"""Type, channel, stream and payload. A DATA frame may come as several, in order."""


def encode_credit(stream: int, channel: int, amount: int) -> bytes:
    """A CREDIT frame."""
    return HEADER.pack(4, FrameType.CREDIT, channel, 0, stream) + _UINT32.pack(amount)


def name_user(user: str) -> str | None:
    """The USER field. Root is left out: unset means root, and spares the guest a lookup in /etc/passwd."""
    return None if user == "root" else user


def decode_credit(payload: bytes) -> int:
    """The amount of a CREDIT frame.

    Raises:
        GuestProtocolError: it is 0.
    """
    amount: int = _UINT32.unpack(payload)[0]
    if amount == 0:
        raise GuestProtocolError("the guest gave a credit of 0")
    return amount


class FrameReader:
    """Splits received bytes into frames, in whatever pieces they arrive.

    Holds at most one frame that is not DATA. DATA is passed on as it arrives, as several frames if it must, and never
    held back.
    """

    def __init__(self) -> None:
        self._head = bytearray()
        self._payload = bytearray()
        self._left = 0
        self._kind = 0
        self._channel = 0
        self._stream = 0

    def feed(self, chunk: bytes | memoryview) -> list[Frame]:
        """The frames that `chunk` completes. Nothing of `chunk` itself is kept.

        Raises:
            GuestProtocolError: a header breaks a rule of frames to the host. The reader cannot be used afterwards.
        """
        frames: list[Frame] = []
        position, size = 0, len(chunk)
        while position < size:
            if self._left:
                piece = chunk[position : position + self._left]
                position += len(piece)
                self._left -= len(piece)
                if self._kind == _DATA:
                    frames.append((_DATA, self._channel, self._stream, bytes(piece)))
                    continue
                self._payload += piece
                if not self._left:
                    frames.append((self._kind, self._channel, self._stream, bytes(self._payload)))
                    self._payload.clear()
                continue
            if self._head or size - position < HEADER_SIZE:
                piece = chunk[position : position + HEADER_SIZE - len(self._head)]
                position += len(piece)
                self._head += piece
                if len(self._head) < HEADER_SIZE:
                    break
                self._begin(self._head, 0)
                self._head.clear()
            else:
                self._begin(chunk, position)
                position += HEADER_SIZE
            if not self._left:
                frames.append((self._kind, self._channel, self._stream, b""))
        return frames

    def _begin(self, buffer: bytes | bytearray | memoryview, position: int) -> None:
        length, kind, channel, reserved, stream = HEADER.unpack_from(buffer, position)
        if length > MAX_PAYLOAD:
            raise GuestProtocolError(f"the guest sent a frame of {length} bytes; {MAX_PAYLOAD} is the most")
        if kind in _STREAM_TYPES:
            if not stream:
                raise GuestProtocolError(f"the guest sent a frame of type {kind} for stream 0")
        elif kind not in _LINK_TYPES:
            raise GuestProtocolError(f"the guest sent a frame of type {kind}")
        if reserved or (channel and kind not in _CHANNEL_TYPES):
            raise GuestProtocolError(f"the guest sent a frame of type {kind} with bits set that must be 0")
        if (
            (kind == _DATA and not length)
            or (kind == FrameType.EOF and length)
            or (kind == FrameType.CREDIT and length != _UINT32.size)
        ):
            raise GuestProtocolError(f"the guest sent a frame of type {kind} with {length} bytes")
        self._left, self._kind, self._channel, self._stream = length, kind, channel, stream


class RecordReader:
    """Splits the bytes of a channel into records. Holds at most one that is incomplete."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Fields]:
        """The records that `data` completes.

        Raises:
            GuestProtocolError: a record is longer than `MAX_RECORD`, or its fields are malformed.
        """
        records: list[Fields] = []
        buffer = self._buffer
        buffer += data
        position, end = 0, len(buffer)
        while end - position >= _UINT32.size:
            length: int = _UINT32.unpack_from(buffer, position)[0]
            if length > MAX_RECORD:
                raise GuestProtocolError(f"the guest sent a record of {length} bytes; {MAX_RECORD} is the most")
            if end - position - _UINT32.size < length:
                break
            position += _UINT32.size
            records.append(decode_fields(bytes(buffer[position : position + length])))
            position += length
        del buffer[:position]
        return records

    def finish(self) -> None:
        """Check that the channel ended after a whole record.

        Raises:
            GuestProtocolError: an incomplete record is left.
        """
        if self._buffer:
            raise GuestProtocolError("the guest ended in the middle of a record")
