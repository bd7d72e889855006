"""Pax records, the key-value pairs of a tar's extension headers: one strict parser, and the encoder.

Owns the syntax, "LENGTH KEY=VALUE\\n" with LENGTH counting the whole record. Not here: which keys mean what, and the
bound on how many bytes of them are read. Used for archives that a sandbox or an unknown author wrote: by
`guest/copying.py`, and by `archive/worker.py`, which runs without the package. So it imports nothing but the standard
library.

`tarfile` is not used for either: it reads headers of any size, keeps the last of two records with one key, and writes a
value that is not UTF-8, such as an access control list, only with a `hdrcharset` record that changes all others.
"""

from __future__ import annotations

import re

_LENGTH = re.compile(rb"([1-9][0-9]{0,18}) ")
_NUMBER = re.compile(rb"0|[1-9][0-9]{0,18}")
_MAX_NUMBER = 2**63 - 1


class MalformedPax(ValueError):
    """The bytes are not pax records."""


def parse_records(content: bytes) -> dict[bytes, bytes]:
    """All records in `content`, which holds nothing else.

    Raises:
        MalformedPax: a length is wrong, a key is empty or comes twice, or a record has no value.
    """
    records: dict[bytes, bytes] = {}
    at = 0
    while at < len(content):
        length = _LENGTH.match(content, at)
        if length is None:
            raise MalformedPax("a pax record has no length")
        end = at + int(length[1])
        key, equals, value = content[length.end() : end].partition(b"=")
        if end > len(content) or not key or not equals or not value.endswith(b"\n"):
            raise MalformedPax("a pax record is not of the form LENGTH KEY=VALUE")
        if key in records:
            raise MalformedPax("a pax record comes twice")
        records[key] = value[:-1]
        at = end
    return records


def parse_number(text: bytes) -> int:
    """A decimal number of at most 63 bits, without sign, spaces and leading zeros.

    Raises:
        MalformedPax: it is none.
    """
    number = int(text) if _NUMBER.fullmatch(text) else -1
    if not 0 <= number <= _MAX_NUMBER:
        raise MalformedPax("a number is malformed")
    return number


def encode_record(key: bytes, value: bytes) -> bytes:
    """
    Raises:
        ValueError: the key is empty or holds "=", which would end it.
    """
    if not key or b"=" in key:
        raise ValueError(f"{key!a} cannot be the key of a pax record")
    rest = b" " + key + b"=" + value + b"\n"
    size = len(rest)
    while size != len(rest) + len(b"%d" % size):
        size = len(rest) + len(b"%d" % size)
    return b"%d" % size + rest
