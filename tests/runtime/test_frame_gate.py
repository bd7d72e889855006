"""What a remote client may send: `FrameGate` lets nothing through that the keeper or the guest would refuse."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest
from hypothesis import given, strategies as st

from atoll.contract.errors import GuestProtocolError, InvalidRequest
from atoll.contract.protocol import (
    HEADER,
    HEADER_SIZE,
    INITIAL_CREDIT,
    MAX_PAYLOAD,
    Action,
    FrameType,
    Op,
    Tag,
    decode_fields,
    encode_fields,
    encode_frame,
)
from atoll.runtime.guest.exec_request import Environment, ExecRequest, OwnVariables
from atoll.runtime.guest.frame_gate import MAX_CREDIT, FrameGate, FrameRefused, SpawnFrame
from atoll.runtime.guest.frames import encode_credit
from atoll.runtime.guest.link import encode_open

CHANNELS = 11
ENVIRONMENT = Environment({"TOKEN": "secret"})


def opened(op: Op, *fields: tuple[Tag, int | str], stream: int = 1) -> bytes:
    return encode_frame(FrameType.OPEN, stream, encode_open(op, encode_fields(fields)))


def passed(gate: FrameGate, chunk: bytes) -> bytes:
    """What the keeper gets."""
    return b"".join(each.encode(ENVIRONMENT) if isinstance(each, SpawnFrame) else each for each in gate.admit(chunk))


def frames(data: bytes) -> Iterator[tuple[int, int, int, int, bytes]]:
    position = 0
    while position < len(data):
        length, kind, channel, reserved, stream = HEADER.unpack_from(data, position)
        end = position + HEADER_SIZE + length
        assert end <= len(data), "only whole frames are passed on"
        yield kind, channel, reserved, stream, data[position + HEADER_SIZE : end]
        position = end


# ---- what passes ----


def test_a_command_gets_the_environment_of_the_sandbox_and_its_own_variables_on_top() -> None:
    request = ExecRequest(["env"], "user", env={"OWN": "1", "TOKEN": "mine"}, pty=(24, 80))
    sent = encode_frame(FrameType.OPEN, 1, encode_open(Op.SPAWN, request.encode(OwnVariables())))
    assert b"PATH=" not in sent
    assert passed(FrameGate(), sent)[HEADER_SIZE:] == encode_open(Op.SPAWN, request.encode(ENVIRONMENT))


def test_frames_pass_unchanged_in_whatever_pieces_they_come() -> None:
    stream = [
        opened(Op.WRITE, (Tag.PATH, "x")),
        encode_frame(FrameType.DATA, 1, b"a" * 1000),
        opened(Op.ATTACH, (Tag.PROC, 3), stream=2),
        encode_frame(FrameType.CONTROL, 2, encode_fields(((Tag.ACTION, Action.SIGNAL), (Tag.SIGNAL, 9)))),
        encode_credit(2, 1, 4096),
        encode_frame(FrameType.EOF, 1),
        encode_frame(FrameType.RESET, 2),
    ]
    whole = b"".join(stream)
    for size in (1, 7, 13, 500, len(whole)):
        gate = FrameGate()
        assert b"".join(passed(gate, whole[i : i + size]) for i in range(0, len(whole), size)) == whole


def test_frames_of_a_stream_that_has_ended_are_dropped_and_its_number_is_free() -> None:
    gate = FrameGate()
    passed(gate, opened(Op.STAT, (Tag.PATH, "/")))
    assert gate.returned(encode_frame(FrameType.END, 1, encode_fields(((Tag.KIND, 2),)))) == (False, False)
    late = encode_frame(FrameType.RESET, 1)
    again = opened(Op.STAT, (Tag.PATH, "/"))
    assert passed(gate, late + again + late) == again + late


def test_credit_of_the_guest_lets_more_data_pass() -> None:
    gate = FrameGate()
    passed(gate, opened(Op.WRITE, (Tag.PATH, "x")))
    full = encode_frame(FrameType.DATA, 1, b"a" * INITIAL_CREDIT)
    assert passed(gate, full) == full
    more = encode_credit(1, 0, 10)
    gate.returned(more[:5])
    gate.returned(more[5:])
    passed(gate, encode_frame(FrameType.DATA, 1, b"a" * 10))
    with pytest.raises(FrameRefused, match="1 bytes more than the credit"):
        gate.admit(encode_frame(FrameType.DATA, 1, b"a"))


def test_credit_that_was_used_may_be_given_again() -> None:
    gate = FrameGate()
    passed(gate, encode_frame(FrameType.OPEN, 1, encode_open(Op.READ, b"", MAX_CREDIT)))
    with pytest.raises(FrameRefused, match="at a time"):
        gate.admit(encode_credit(1, 1, 1))
    data = encode_frame(FrameType.DATA, 1, b"b" * 1000, channel=1)
    for piece in (data[:4], data[4:500], data[500:]):
        gate.returned(piece)
    assert passed(gate, encode_credit(1, 1, 1000))


@pytest.mark.parametrize(
    ("result", "killed"),
    [
        (((Tag.SIGNAL, 9),), True),
        (((Tag.EXIT_CODE, 137),), True),
        (((Tag.EXIT_CODE, 0),), False),
        (((Tag.ERRNO, 2),), False),
    ],
)
def test_it_says_when_a_process_may_have_been_killed(result: tuple[tuple[Tag, int], ...], killed: bool) -> None:
    gate = FrameGate()
    passed(gate, opened(Op.SPAWN, (Tag.SHELL, "x")))
    assert gate.returned(encode_frame(FrameType.END, 1, encode_fields(result))) == (killed, False)


def test_it_says_when_the_keeper_has_ended() -> None:
    assert FrameGate().returned(encode_frame(FrameType.GONE, 0)) == (False, True)


def test_an_environment_that_does_not_fit_into_a_frame_is_an_error_of_the_request() -> None:
    (spawn,) = FrameGate().admit(opened(Op.SPAWN, (Tag.SHELL, "x" * 20_000)))
    assert isinstance(spawn, SpawnFrame)
    with pytest.raises(InvalidRequest, match="is the most"):
        spawn.encode(Environment({f"V{i}": "x" * 10_000 for i in range(25)}))


# ---- what does not ----


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (encode_frame(FrameType.FREEZE, 0, encode_fields(((Tag.ACTION, 1),))), "type 34"),
        (encode_frame(FrameType.RECONFIGURE, 0), "type 36"),
        (encode_frame(FrameType.SHUTDOWN, 0), "type 10"),
        (encode_frame(FrameType.HELLO, 0), "type 1 "),
        (encode_frame(FrameType.EVENT, 1), "type 8"),
        (encode_frame(FrameType.END, 1), "type 9"),
        (HEADER.pack(0, 200, 0, 0, 1), "type 200"),
        (encode_frame(FrameType.OPEN, 0), "stream number 0"),
        (encode_frame(FrameType.RESET, 2**20), "stream number"),
        (HEADER.pack(MAX_PAYLOAD + 1, FrameType.DATA, 0, 0, 1), "is the most"),
        (HEADER.pack(0, FrameType.RESET, 0, 1, 1), "reserved"),
        (HEADER.pack(0, FrameType.RESET, 1, 0, 1), "channel 1"),
        (HEADER.pack(1, FrameType.DATA, CHANNELS, 0, 1) + b"x", "channel 11"),
        (encode_frame(FrameType.DATA, 1), "0 bytes"),
        (encode_frame(FrameType.EOF, 1, b"x"), "1 bytes"),
        (encode_frame(FrameType.CREDIT, 1, b"x"), "1 bytes"),
        (encode_frame(FrameType.OPEN, 1), "malformed fields"),
        (encode_frame(FrameType.OPEN, 1, b"\x03"), "malformed fields"),
        (opened(Op.PS, (Tag.IDLE, 1)), "field 11"),
        (opened(Op.PS, (Tag.WAITING, 1)), "field 12"),
        (opened(Op.LISTEN, (Tag.PORT, 1), (Tag.IDLE, 1)), "field 11"),
        (opened(Op.READ, (Tag.PATH, "x"), (Tag.SHELL, "x")), "field 21"),
        (encode_frame(FrameType.OPEN, 1, encode_fields(((Tag.OP, 99),))), "operation 99"),
        (encode_frame(FrameType.OPEN, 1, encode_fields(((Tag.OP, Op.READ), (Tag.WINDOW, MAX_CREDIT + 1)))), "window"),
        (encode_frame(FrameType.OPEN, 1, encode_fields(((Tag.OP, Op.READ), (Tag.WINDOW, -1)))), "malformed"),
        (opened(Op.SPAWN, (Tag.ENV, "novalue")), "variable"),
        (opened(Op.SPAWN, (Tag.ENV, "=x")), "variable"),
        (opened(Op.READ, (Tag.PATH, "x")) * 2, "open already"),
        (
            opened(Op.READ, (Tag.PATH, "x")) + encode_frame(FrameType.CONTROL, 1, encode_fields(((Tag.ACTION, 1),))),
            "CONTROL",
        ),
        (
            opened(Op.ATTACH, (Tag.PROC, 1)) + encode_frame(FrameType.CONTROL, 1, encode_fields(((Tag.ACTION, 3),))),
            "CONTROL",
        ),
        (
            opened(Op.ATTACH, (Tag.PROC, 1))
            + encode_frame(FrameType.CONTROL, 1, encode_fields(((Tag.ACTION, 1), (Tag.PATH, "x")))),
            "field 60",
        ),
        (
            opened(Op.WRITE, (Tag.PATH, "x")) + encode_frame(FrameType.EOF, 1) + encode_frame(FrameType.DATA, 1, b"x"),
            "EOF",
        ),
        (opened(Op.WRITE, (Tag.PATH, "x")) + encode_frame(FrameType.DATA, 1, b"x" * (INITIAL_CREDIT + 1)), "credit"),
        (opened(Op.READ, (Tag.PATH, "x")) + encode_credit(1, 1, 0), "credit of 0"),
    ],
)
def test_what_only_this_machine_may_send_and_what_is_malformed_is_refused(sent: bytes, why: str) -> None:
    with pytest.raises(FrameRefused, match=why):
        FrameGate().admit(sent)


# ---- anything at all ----

_numbers = st.sampled_from((0, 1, 2, 3, 2**20 - 1, 2**20, 2**31)) | st.integers(0, 2**32 - 1)
_values = (
    st.integers(-(2**63), 2**63 - 1) | st.integers(0, 200) | st.text("aZ=/\0é", max_size=20) | st.binary(max_size=20)
)


@st.composite
def _fields(draw: st.DrawFn) -> bytes:
    parts = []
    for tag, value in draw(st.lists(st.tuples(st.sampled_from(list(Tag)), _values), max_size=6)):
        raw = (
            struct.pack("<q", value)
            if isinstance(value, int)
            else value
            if isinstance(value, bytes)
            else value.encode()
        )
        parts.append(struct.pack("<HI", tag, len(raw)) + raw)
    start = encode_fields(((Tag.OP, draw(st.sampled_from(list(Op)))), (Tag.WINDOW, draw(st.integers(0, 2**25)))))
    return start + b"".join(parts)


@st.composite
def _frame(draw: st.DrawFn) -> bytes:
    kind = draw(st.sampled_from((2, 3, 4, 5, 6, 7)) | st.integers(0, 255))
    payload = draw(st.one_of(_fields(), st.binary(max_size=40), st.just(b""), st.just(struct.pack("<I", 4096))))
    channel = draw(st.sampled_from((0, 0, 1, 3, 10, 11)))
    return HEADER.pack(len(payload), kind, channel, draw(st.sampled_from((0, 0, 0, 1))), draw(_numbers)) + payload


class Keeper:
    """The rules of `take_client_frame` in `drivers/keeper/relay.c`, and of `guest/frame.c` and `guest/stream.c`."""

    def __init__(self) -> None:
        self.credit: dict[int, list[int]] = {}
        self.allowed: dict[int, list[int]] = {}
        self.eof: set[tuple[int, int]] = set()

    def take(self, data: bytes) -> None:
        for kind, channel, reserved, stream, payload in frames(data):
            assert not reserved
            assert len(payload) <= MAX_PAYLOAD
            assert 1 <= stream < 2**20
            assert channel < CHANNELS
            assert kind in (2, 3, 4, 5, 6, 7)
            assert not channel or kind in (3, 4, 5)
            if kind == FrameType.OPEN:
                fields = decode_fields(payload)  # raises where the guest would end the sandbox
                assert stream not in self.credit
                assert Tag.IDLE not in fields
                assert 0 <= fields.count(Tag.WINDOW, 0) <= MAX_CREDIT
                self.credit[stream] = [fields.count(Tag.WINDOW, 0)] * CHANNELS
                self.allowed[stream] = [INITIAL_CREDIT] * CHANNELS
            elif kind == FrameType.DATA:
                assert payload
                assert (stream, channel) not in self.eof
                self.allowed[stream][channel] -= len(payload)
                assert self.allowed[stream][channel] >= 0
            elif kind == FrameType.EOF:
                assert not payload
                self.eof.add((stream, channel))
            elif kind == FrameType.CREDIT:
                (more,) = struct.unpack("<I", payload)
                self.credit[stream][channel] += more
                assert 0 < self.credit[stream][channel] <= MAX_CREDIT
            elif kind == FrameType.RESET:
                assert not payload
            else:
                decode_fields(payload)


@given(st.lists(_frame(), max_size=12), st.binary(max_size=30), st.integers(1, 64))
def test_what_passes_is_acceptable_to_the_keeper_whatever_is_sent(sent: list[bytes], tail: bytes, size: int) -> None:
    gate, keeper = FrameGate(), Keeper()
    whole = b"".join(sent) + tail
    try:
        for i in range(0, len(whole), size):
            keeper.take(passed(gate, whole[i : i + size]))
    except (FrameRefused, InvalidRequest):
        return
    except GuestProtocolError as error:
        raise AssertionError("malformed fields were passed on") from error


@given(st.lists(_frame(), max_size=12), st.binary(max_size=600), st.integers(1, 64))
def test_whatever_a_keeper_sends_is_noted_without_an_error(sent: list[bytes], tail: bytes, size: int) -> None:
    gate = FrameGate()
    passed(gate, opened(Op.READ, (Tag.PATH, "x")) + opened(Op.SPAWN, (Tag.SHELL, "x"), stream=2))
    whole = b"".join(sent) + tail
    for i in range(0, len(whole), size):
        gate.returned(whole[i : i + size])
