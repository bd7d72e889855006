"""Frames, fields and records: whatever bytes come, they are parsed or refused, and nothing else happens."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from hypothesis import given, strategies as st

from atoll.contract import protocol
from atoll.contract.errors import GuestProtocolError, InvalidRequest
from atoll.contract.numbers import IntEnum
from atoll.contract.protocol import (
    BYTES_TAGS,
    HEADER_SIZE,
    INTEGER_TAGS,
    MAX_PAYLOAD,
    MAX_RECORD,
    STRING_TAGS,
    FrameType,
    Tag,
    Value,
    decode_fields,
    decode_xattrs,
    encode_fields,
    encode_frame,
    encode_xattrs,
)
from atoll.runtime.guest.frames import Frame, FrameReader, RecordReader, decode_credit
from tests.protocol_header import read_lists
from tests.runtime.peer import encode_record

LISTS = read_lists()

int64 = st.integers(-(2**63), 2**63 - 1)
field = st.one_of(
    st.tuples(st.sampled_from(sorted(INTEGER_TAGS)), int64),
    st.tuples(st.sampled_from(sorted(STRING_TAGS)), st.binary(max_size=64).map(lambda raw: raw.replace(b"\0", b"\1"))),
    st.tuples(st.sampled_from(sorted(BYTES_TAGS)), st.binary(max_size=64)),
)
fields = st.lists(field, max_size=12)
cuts = st.lists(st.integers(1, 40), max_size=40)


def split(data: bytes, sizes: list[int]) -> list[bytes]:
    pieces = []
    for size in sizes:
        pieces.append(data[:size])
        data = data[size:]
    return [*pieces, data]


def joined(frames: list[Frame]) -> list[Frame]:
    """Frames with the parts of DATA that belong together put together."""
    out: list[Frame] = []
    for frame in frames:
        if out and frame[0] == FrameType.DATA and out[-1][:3] == frame[:3]:
            out[-1] = (*frame[:3], out[-1][3] + frame[3])
        else:
            out.append(frame)
    return out


# --------------------------------------------------------------------------------------------------------- the header


MIRRORS = {
    "FRAME_TYPES": protocol.FrameType,
    "OPERATIONS": protocol.Op,
    "EVENT_KINDS": protocol.EventKind,
    "CONTROL_ACTIONS": protocol.Action,
    "FREEZE_ACTIONS": protocol.FreezeAction,
    "CHANGES": protocol.Change,
    "FILE_TYPES": protocol.FileType,
    "FIELD_TAGS": protocol.Tag,
}


def test_each_list_of_the_guests_header_has_a_mirror() -> None:
    mirrors = {name for name, found in vars(protocol).items() if isinstance(found, type) and issubclass(found, IntEnum)}
    assert set(LISTS) == {*MIRRORS, "PROTOCOL_LIMITS"}
    assert {mirror.__name__ for mirror in MIRRORS.values()} == mirrors - {"IntEnum"}


@pytest.mark.parametrize("name", MIRRORS)
def test_the_numbers_are_those_of_the_guests_header(name: str) -> None:
    assert [(row.name, row.number) for row in LISTS[name]] == [(each.name, each.value) for each in MIRRORS[name]]


def test_the_limits_are_those_of_the_guests_header() -> None:
    assert LISTS["PROTOCOL_LIMITS"]
    for row in LISTS["PROTOCOL_LIMITS"]:
        assert getattr(protocol, row.name) == row.number, row.name


def test_the_types_of_fields_are_those_of_the_guests_header() -> None:
    theirs = {row.name: row.type for row in LISTS["FIELD_TAGS"]}
    ours = {"INTEGER": INTEGER_TAGS, "STRING": STRING_TAGS, "BYTES": BYTES_TAGS}
    assert theirs == {tag.name: kind for kind, tags in ours.items() for tag in tags}


# ------------------------------------------------------------------------------------------------------------- frames


@given(st.binary(max_size=400), cuts)
def test_any_bytes_in_any_pieces_are_frames_or_refused(data: bytes, sizes: list[int]) -> None:
    def read(pieces: list[bytes]) -> list[Frame] | None:
        reader, frames = FrameReader(), []
        try:
            for piece in pieces:
                frames += reader.feed(piece)
        except GuestProtocolError:
            return None
        return joined(frames)

    assert read([data]) == read(split(data, sizes))


well_formed = st.one_of(
    st.tuples(
        st.just(FrameType.DATA), st.integers(0, 255), st.integers(1, 2**32 - 1), st.binary(min_size=1, max_size=99)
    ),
    st.tuples(st.just(FrameType.EOF), st.integers(0, 255), st.integers(1, 2**32 - 1), st.just(b"")),
    st.tuples(
        st.just(FrameType.CREDIT), st.integers(0, 255), st.integers(1, 2**32 - 1), st.binary(min_size=4, max_size=4)
    ),
    st.tuples(
        st.sampled_from([FrameType.EVENT, FrameType.END]),
        st.just(0),
        st.integers(1, 2**32 - 1),
        fields.map(encode_fields),
    ),
    st.tuples(
        st.sampled_from([FrameType.HELLO, FrameType.FAILED, FrameType.GONE]),
        st.just(0),
        st.just(0),
        fields.map(encode_fields),
    ),
)


@given(st.lists(well_formed, max_size=8), cuts)
def test_frames_are_read_as_they_were_written_however_they_are_cut(
    frames: list[tuple[FrameType, int, int, bytes]], sizes: list[int]
) -> None:
    data = b"".join(encode_frame(kind, stream, payload, channel) for kind, channel, stream, payload in frames)
    reader = FrameReader()
    read = [frame for piece in split(data, sizes) for frame in reader.feed(piece)]
    assert joined(read) == joined([(int(kind), channel, stream, payload) for kind, channel, stream, payload in frames])


def header(length: int = 0, kind: int = FrameType.END, channel: int = 0, reserved: int = 0, stream: int = 1) -> bytes:
    return struct.pack("<IBBHI", length, kind, channel, reserved, stream)


@pytest.mark.parametrize(
    "bad",
    [
        header(MAX_PAYLOAD + 1),
        header(2**32 - 1),
        header(kind=0),
        header(kind=FrameType.OPEN),
        header(kind=FrameType.RESET),
        header(kind=FrameType.CONTROL),
        header(kind=FrameType.SHUTDOWN, stream=0),
        header(kind=99),
        header(channel=1),
        header(kind=FrameType.HELLO, channel=1, stream=0),
        header(reserved=1),
        header(stream=0),
        header(kind=FrameType.DATA, length=0),
        header(kind=FrameType.EOF, length=1),
        header(kind=FrameType.CREDIT, length=3),
        header(kind=FrameType.CREDIT, length=8),
    ],
)
def test_a_header_that_breaks_a_rule_is_refused_before_its_payload_is_read(bad: bytes) -> None:
    assert len(bad) == HEADER_SIZE
    with pytest.raises(GuestProtocolError):
        FrameReader().feed(bad)
    reader = FrameReader()
    for byte in bad[:-1]:
        assert reader.feed(bytes([byte])) == []
    with pytest.raises(GuestProtocolError):
        reader.feed(bad[-1:])


def test_a_credit_of_nothing_is_refused() -> None:
    with pytest.raises(GuestProtocolError):
        decode_credit(bytes(4))


# ------------------------------------------------------------------------------------------------------------- fields


@given(st.binary(max_size=200))
def test_any_bytes_are_fields_or_refused(data: bytes) -> None:
    with contextlib.suppress(GuestProtocolError):
        decode_fields(data)


@given(fields)
def test_fields_are_read_as_they_were_written(written: list[tuple[Tag, Value]]) -> None:
    read = decode_fields(encode_fields(written))
    for tag, value in dict(written).items():
        assert (read.integer(tag) if isinstance(value, int) else read.raw(tag)) == value


@given(st.dictionaries(st.sampled_from(sorted(Tag)), st.one_of(int64, st.binary(max_size=50))))
def test_a_getter_gives_a_value_or_refuses(values: dict[int, int | bytes]) -> None:
    read = protocol.Fields(values)
    getters: list[Callable[[Tag], object]] = [
        read.integer,
        read.count,
        lambda tag: read.within(tag, 0, 10),
        read.flag,
        read.raw,
        read.path,
        read.text,
        read.time_ns,
        read.time_us,
        lambda _: read.problem(),
    ]
    for tag in Tag:
        for getter in getters:
            with contextlib.suppress(GuestProtocolError):
                getter(tag)


def test_an_unknown_tag_is_passed_over() -> None:
    unknown = struct.pack("<HI", 9999, 3) + b"abc"
    assert decode_fields(unknown + encode_fields(((Tag.SIZE, 5),))).integer(Tag.SIZE) == 5


@pytest.mark.parametrize(
    "bad",
    [
        struct.pack("<HI", Tag.SIZE, 4) + bytes(4),
        struct.pack("<HI", Tag.SIZE, 9) + bytes(9),
        struct.pack("<HI", Tag.NAME, 2**32 - 1),
        struct.pack("<HI", Tag.TARGET, 3) + b"a\0b",
        b"\1\0\0",
    ],
)
def test_a_field_that_breaks_a_rule_is_refused(bad: bytes) -> None:
    with pytest.raises(GuestProtocolError):
        decode_fields(bad)


@pytest.mark.parametrize("value", ["a\0b", "\ud800"])
def test_a_string_that_cannot_be_sent_is_the_callers_mistake(value: str) -> None:
    with pytest.raises(InvalidRequest):
        encode_fields(((Tag.PATH, value),))


def test_a_number_that_cannot_be_sent_is_the_callers_mistake() -> None:
    with pytest.raises(InvalidRequest):
        encode_fields(((Tag.OFFSET, 2**63),))


@given(st.binary(max_size=60).map(lambda raw: raw.replace(b"\0", b"")))
def test_a_path_of_any_bytes_comes_back_as_it_went(raw: bytes) -> None:
    path = decode_fields(encode_fields(((Tag.PATH, raw),))).path(Tag.PATH)
    assert decode_fields(encode_fields(((Tag.PATH, path),))).raw(Tag.PATH) == raw


def test_text_to_show_holds_no_control_characters_and_no_more_than_its_limit() -> None:
    text = decode_fields(encode_fields(((Tag.MESSAGE, b"\x1b[31m\x9b\xff" + b"x" * 9000),))).text(Tag.MESSAGE, 100)
    assert text.startswith("\ufffd[31m\ufffd\ufffd")
    assert len(text) <= 100


def test_a_time_outside_of_pythons_calendar_becomes_the_nearest_inside() -> None:
    assert decode_fields(encode_fields(((Tag.STARTED_US, 2**62),))).time_us(Tag.STARTED_US).year == 9999
    assert decode_fields(encode_fields(((Tag.STARTED_US, -(2**62)),))).time_us(Tag.STARTED_US).year == 1
    assert decode_fields(encode_fields(((Tag.MTIME_NS, 1_500_000_000),))).time_ns(Tag.MTIME_NS) == datetime(
        1970, 1, 1, 0, 0, 1, 500_000, tzinfo=UTC
    )


# ------------------------------------------------------------------------------------------------------------ records


@given(st.binary(max_size=300), cuts)
def test_any_bytes_in_any_pieces_are_records_or_refused(data: bytes, sizes: list[int]) -> None:
    def read(pieces: list[bytes]) -> list[protocol.Fields] | None:
        reader, records = RecordReader(), []
        try:
            for piece in pieces:
                records += reader.feed(piece)
            reader.finish()
        except GuestProtocolError:
            return None
        return records

    assert read([data]) == read(split(data, sizes))


@given(st.lists(fields, max_size=6), cuts)
def test_records_are_read_as_they_were_written_however_they_are_cut(
    records: list[list[tuple[Tag, Value]]], sizes: list[int]
) -> None:
    data = b"".join(encode_record(*record) for record in records)
    reader = RecordReader()
    read = [record for piece in split(data, sizes) for record in reader.feed(piece)]
    reader.finish()
    assert read == [decode_fields(encode_fields(record)) for record in records]


def test_a_record_that_is_too_long_is_refused_before_it_is_kept() -> None:
    with pytest.raises(GuestProtocolError):
        RecordReader().feed(struct.pack("<I", MAX_RECORD + 1))


def test_half_a_record_at_the_end_is_refused() -> None:
    reader = RecordReader()
    assert reader.feed(encode_record((Tag.SIZE, 1))[:-1]) == []
    with pytest.raises(GuestProtocolError):
        reader.finish()


names = st.binary(min_size=1, max_size=40).map(lambda raw: raw.replace(b"\0", b"\1").decode("utf-8", "surrogateescape"))


@given(st.dictionaries(names, st.binary(max_size=100), max_size=10))
def test_extended_attributes_are_decoded_as_they_were_encoded(xattrs: dict[str, bytes]) -> None:
    assert decode_xattrs(encode_xattrs(xattrs)) == xattrs


@given(st.binary(max_size=80))
def test_any_bytes_are_extended_attributes_or_a_violation(raw: bytes) -> None:
    with contextlib.suppress(GuestProtocolError):
        found = decode_xattrs(raw)
        assert all(name and isinstance(value, bytes) for name, value in found.items())
        assert sum(len(value) for value in found.values()) <= len(raw)


def test_more_extended_attributes_than_are_asked_for_are_a_violation() -> None:
    with pytest.raises(GuestProtocolError):
        decode_xattrs(b"a\0" + struct.pack("<I", 5000) + bytes(5000))
