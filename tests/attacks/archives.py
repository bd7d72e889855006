"""Exported sandboxes made by hand, byte by byte, so that nothing in them need be as it should."""

from __future__ import annotations

import hashlib
import json
import subprocess
from typing import Any

ROOT = b"layers/0/root"


def member(
    name: bytes,
    kind: bytes = b"0",
    content: bytes = b"",
    *,
    link: bytes = b"",
    mode: bytes = b"0000644",
    uid: bytes = b"0000000",
    size: bytes | None = None,
    pax: list[tuple[bytes, bytes]] | None = None,
    spoil: tuple[int, bytes] | None = None,
) -> bytes:
    """A member of a tar. `spoil` writes over its header at a place, before the header's own checksum is made."""
    before = b""
    if pax is not None:
        before = member(b"pax", b"x", b"".join(record(key, value) for key, value in pax))
    header = bytearray(512)
    fields = [
        (0, name[:100]),
        (100, mode),
        (108, uid),
        (116, b"0000000"),
        (124, b"%011o" % len(content) if size is None else size),
        (136, b"%011o" % 0),
        (148, b" " * 8),
        (156, kind),
        (157, link[:100]),
        (257, b"ustar\x0000"),
        *([spoil] if spoil else []),
    ]
    for at, value in fields:
        header[at : at + len(value)] = value
    header[148:156] = b"%06o\0 " % sum(header)
    return before + bytes(header) + content + bytes(-len(content) % 512)


def record(key: bytes, value: bytes) -> bytes:
    rest = b" %b=%b\n" % (key, value)
    size = len(rest) + len(str(len(rest)))
    size = len(rest) + len(str(size))
    return b"%d" % size + rest


def directory(name: bytes, **more: Any) -> bytes:
    return member(name, b"5", mode=b"0000755", **more)


def manifest(**changes: Any) -> bytes:
    said = {
        "format": "atoll-sandbox",
        "version": 1,
        "name": "hostile",
        "exported_at": "2026-01-01T00:00:00Z",
        "image": {"reference": "host", "digest": f"sha256:{'0' * 64}"},
        "layers": [{"trees": ["root", "usr"]}],
        "limits": {},
        "env": {},
        "user": "user",
        **changes,
    }
    return member(b"atoll-sandbox.json", content=json.dumps(said).encode())


def whole(*members: bytes, first: bytes | None = None, root: bool = True) -> bytes:
    """A tar that ends as it should, with a checksum that is right."""
    body = (manifest() if first is None else first) + (directory(ROOT) if root else b"") + b"".join(members)
    return body + member(b"sha256", content=hashlib.sha256(body).hexdigest().encode() + b"\n") + bytes(1024)


def packed(data: bytes) -> bytes:
    return subprocess.run(["zstd", "-q", "-c", "-1"], input=data, capture_output=True, check=True).stdout
