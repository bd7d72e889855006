"""Pax records: what is encoded is parsed as it was, and anything else is refused."""

from __future__ import annotations

import io
import tarfile

import pytest

from atoll.runtime import pax

MALFORMED = {
    "no length": b"path=x\n",
    "a length of nothing": b"0 path=x\n",
    "a length with a leading zero": b"010 path=x\n",
    "a length with a sign": b"+9 path=x\n",
    "a length that ends before the record": b"3 path=x\n",
    "a length that ends within the record": b"9 path=xy\n",
    "a length beyond the end": b"11 path=x\n",
    "an absurd length": b"9" * 30 + b" path=x\n",
    "no value": b"7 path\n",
    "no key": b"5 =x\n",
    "no end": b"9 path=xy",
    "a key that comes twice": b"9 path=x\n9 path=y\n",
    "padding behind it": b"9 path=x\n\0",
}


@pytest.mark.parametrize("size", [1, 2, 3, 90, 91, 92, 93, 94, 988, 989, 990, 991, 99_999])
def test_a_record_is_parsed_as_it_was_encoded_whatever_its_length(size: int):
    value = b"=\n\0\xff "[:size].ljust(size, b"v")
    records = {b"SCHILY.xattr.user.name": value, b"path": "größe".encode()}
    assert pax.parse_records(b"".join(pax.encode_record(*record) for record in records.items())) == records


@pytest.mark.parametrize("key", [b"", b"SCHILY.xattr.user.a=b"])
def test_a_key_that_cannot_be_read_back_is_not_written(key: bytes):
    with pytest.raises(ValueError, match="key"):
        pax.encode_record(key, b"value")


def test_records_are_those_that_tarfile_writes():
    info = tarfile.TarInfo("directory/" * 20 + "name")
    info.pax_headers = {"comment": "größe"}
    header = io.BytesIO(info.tobuf(tarfile.PAX_FORMAT)).read()
    size = int(header[124:135], 8)
    assert pax.parse_records(header[512 : 512 + size]) == {b"path": info.name.encode(), b"comment": "größe".encode()}


@pytest.mark.parametrize("content", MALFORMED.values(), ids=MALFORMED)
def test_what_is_not_exactly_a_list_of_records_is_refused(content: bytes):
    with pytest.raises(pax.MalformedPax):
        pax.parse_records(content)


def test_a_number_is_decimal_and_has_one_spelling():
    assert [pax.parse_number(text) for text in (b"0", b"7", b"9223372036854775807")] == [0, 7, 2**63 - 1]
    for text in (b"", b"-1", b"+1", b"01", b" 1", b"1\n", b"1_0", b"0x1", b"9223372036854775808", b"9" * 40):
        with pytest.raises(pax.MalformedPax):
            pax.parse_number(text)
