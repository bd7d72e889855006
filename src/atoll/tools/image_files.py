"""Image files as a model can be shown them.

Owns which files those are, their size in pixels, and what is refused: a provider that is sent an image which it cannot
read, or a larger one than it allows, refuses the whole conversation from then on. So only PNG, JPEG, GIF and WebP that
are whole and within the limits of all providers are shown. Nothing is decoded here: a file of a sandbox is hostile. Not
here: how an image is written in each protocol (`export.py`, `agents/loop.py`). Used by `pool.py` and `coding.py`.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Mapping

from atoll.tools.tool import ContentPart, ImagePart, TextPart, readable
from atoll.tools.view import View, media_type

MAX_IMAGE_BYTES = 3_700_000
"""Of the file: providers allow 5 MB in base64."""
MAX_IMAGE_PIXELS = 8000
"""Width and height that providers allow."""


def image_type(data: bytes) -> str | None:
    """The media type of an image that a model can be shown, by its first bytes. None: it is something else."""
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for magic, kind in _MAGIC.items() if data.startswith(magic)), None)


async def binary_content(view: View, path: str, head: bytes, name: str) -> str | tuple[ContentPart, ...]:
    """What a model is shown of a file that is not text: the image or, of another, a note with its size and type.
    `head` is how it begins, and `name` what the model calls it."""
    files = view.sandbox.files
    if image_type(head) is None:
        return f"[{readable(name)}: {(await files.stat(path)).size} bytes of {media_type(head, path)}, not a text file]"
    data = await files.read_bytes(path, limit=MAX_IMAGE_BYTES + 1)
    size = len(data) if len(data) <= MAX_IMAGE_BYTES else (await files.stat(path)).size
    return image_content(data, size, readable(name))


def image_content(data: bytes, size: int, name: str) -> str | tuple[ContentPart, ...]:
    """What a model is shown of an image file: the image with a line about it or, where that cannot be, the line with
    the reason. `data` is the file, or at least its beginning if `size` is more than `MAX_IMAGE_BYTES`."""
    kind = image_type(data) or ""
    about = f"{name}: {kind}, {size} bytes"
    if size > MAX_IMAGE_BYTES:
        return f"[{about}: more than the {MAX_IMAGE_BYTES / 1e6:g} MB that can be shown; make a smaller copy of it]"
    try:
        width, height = _MEASURES[kind](data)
    except (ValueError, struct.error, IndexError):
        return f"[{about}: it is damaged or incomplete, and not shown]"
    about = f"{name}: {kind}, {width}x{height} pixels, {size} bytes"
    if not (0 < width <= MAX_IMAGE_PIXELS and 0 < height <= MAX_IMAGE_PIXELS):
        return f"[{about}: more than the {MAX_IMAGE_PIXELS} pixels that can be shown; make a smaller copy of it]"
    return TextPart(text=f"[{about}]"), ImagePart(data=base64.b64encode(data).decode(), mime_type=kind)


_MAGIC = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF87a": "image/gif",
    b"GIF89a": "image/gif",
}


def _png(data: bytes) -> tuple[int, int]:
    if data[12:16] != b"IHDR" or data[-8:-4] != b"IEND":
        raise ValueError
    return _pair(">II", data, 16)


def _gif(data: bytes) -> tuple[int, int]:
    if not data.rstrip(b"\0").endswith(b";"):
        raise ValueError
    return _pair("<HH", data, 6)


def _jpeg(data: bytes) -> tuple[int, int]:
    if b"\xff\xd9" not in data[-64:]:  # some cameras write a little more after the end
        raise ValueError
    at = 2
    while data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # fill
            at += 1
        elif 0xC0 <= marker <= 0xCF and marker not in {0xC4, 0xC8, 0xCC}:
            height, width = _pair(">HH", data, at + 5)
            return width, height
        else:
            at += 2 + struct.unpack_from(">H", data, at + 2)[0]
    raise ValueError


def _webp(data: bytes) -> tuple[int, int]:
    if struct.unpack_from("<I", data, 4)[0] + 8 > len(data):
        raise ValueError
    match data[12:16]:
        case b"VP8 ":
            width, height = _pair("<HH", data, 26)
            return width & 0x3FFF, height & 0x3FFF
        case b"VP8L":
            bits = struct.unpack_from("<I", data, 21)[0]
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"VP8X":
            return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
    raise ValueError


def _pair(form: str, data: bytes, at: int) -> tuple[int, int]:
    first, second = struct.unpack_from(form, data, at)
    return first, second


_MEASURES: Mapping[str, Callable[[bytes], tuple[int, int]]] = {
    "image/png": _png,
    "image/jpeg": _jpeg,
    "image/gif": _gif,
    "image/webp": _webp,
}
