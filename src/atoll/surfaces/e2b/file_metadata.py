"""Metadata of files: words that a client gives with an upload, and that stay with the file.

Owns how they are sent (`X-Metadata-*` headers), what they may be, and how they are kept: extended attributes of the
file, `user.e2b.` and the key. They go where the file goes, into checkpoints too, and programs inside may set and read
them; so what is read is hostile, and only what is text is shown. Used by `transfer.py` and `filesystem.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

METADATA_PREFIX = "user.e2b."
MAX_METADATA_BYTES = 4096
"""Of one file: names with their prefix, and values."""
_HEADER = "x-metadata-"
_MAX_KEY_BYTES = 255 - len(METADATA_PREFIX)


def given_metadata(headers: Headers) -> dict[str, str]:
    """What the headers of an upload say. Keys are lower case, because headers are.

    Raises:
        HTTPException: a key or a value is not printable ASCII, or they are too long.
    """
    given = {name.removeprefix(_HEADER): value for name, value in headers.items() if name.startswith(_HEADER)}
    for key, value in given.items():
        if not 0 < len(key) <= _MAX_KEY_BYTES:
            raise HTTPException(
                400, f"the metadata key {key[:300]!r} has {len(key)} bytes; 1 to {_MAX_KEY_BYTES} are allowed"
            )
        if not all(" " <= each <= "~" for each in key + value):
            raise HTTPException(400, f"the metadata {key!r} are not printable ASCII")
    size = sum(len(METADATA_PREFIX) + len(key) + len(value) for key, value in given.items())
    if size > MAX_METADATA_BYTES:
        raise HTTPException(400, f"the metadata take {size} bytes; {MAX_METADATA_BYTES} are the most")
    return given


def encode_metadata(metadata: Mapping[str, str]) -> dict[str, bytes]:
    """As extended attributes."""
    return {METADATA_PREFIX + key: value.encode() for key, value in metadata.items()}


def decode_metadata(xattrs: Mapping[str, bytes]) -> dict[str, str]:
    """Those of the extended attributes that are text: a program inside may have set others."""
    found: dict[str, str] = {}
    for name, value in xattrs.items():
        try:
            found[name.removeprefix(METADATA_PREFIX).encode("utf-8").decode("utf-8")] = value.decode("utf-8")
        except UnicodeError:
            continue
    return found
