"""What a tool of a bundle has returned, as a result for a model.

Owns the kinds of parts, and what a model sees of each: text and images as such, all else as its URL. Nothing that comes
from a workspace is trusted: shapes and sizes are checked here, whatever was checked inside. Used by `dispatch.py`.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import Any, Literal, get_args

from atoll.code.messages import ChannelViolation
from atoll.tools.tool import ContentPart, ImagePart, TextPart, ToolResult, readable

PartKind = Literal["text", "image-url", "audio-url", "video-url", "document-url", "web-url", "api-url"]
PART_KINDS: tuple[str, ...] = get_args(PartKind)
MAX_PARTS = 64
MAX_SHOWN_CHARS = 100
"""Of a `data:` URL that no model can be shown."""
IMAGES = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp"})
"""What models that see can be shown."""
_DATA_URL = re.compile(r"data:([a-zA-Z0-9.+-]+/[a-zA-Z0-9.+-]+)(?:;[a-zA-Z0-9=.+_-]+){0,4};base64,", re.ASCII)
_WEB_URL = re.compile(r"https?://[^\s\x00-\x1f\"<>\\]+", re.IGNORECASE)


def read_result(message: dict[str, Any]) -> ToolResult:
    """The result in a message `done`.

    Raises:
        ChannelViolation: the message is not one that the dispatcher sends.
    """
    ok, text, parts = message.get("ok"), message.get("text"), message.get("parts")
    if not isinstance(ok, bool) or (text is None) == (parts is None):
        raise ChannelViolation("the dispatcher sent a result that is none")
    if parts is None:
        if not isinstance(text, str):
            raise ChannelViolation("the dispatcher sent a result that is no text")
        return ToolResult(content=readable(text), is_error=not ok)
    if not isinstance(parts, list) or len(parts) > MAX_PARTS:
        return ToolResult(content=f"the tool returned more than {MAX_PARTS} parts; return fewer", is_error=True)
    return ToolResult(content=tuple(_part(each) for each in parts), is_error=not ok)


def _part(given: Any) -> ContentPart:
    if not isinstance(given, dict) or given.get("kind") not in PART_KINDS:
        raise ChannelViolation("the dispatcher sent a part of an unknown kind")
    kind = given["kind"]
    value = given.get("content" if kind == "text" else "url")
    if not isinstance(value, str):
        raise ChannelViolation("the dispatcher sent a part that is no text")
    if kind == "text":
        return TextPart(text=readable(value))
    if _WEB_URL.fullmatch(value):
        return TextPart(text=f"[{kind.removesuffix('-url')}] {readable(value)}")
    found = _DATA_URL.match(value)
    if found is None:
        return TextPart(text=f"[{kind.removesuffix('-url')}: a URL that is neither http(s):// nor data: with base64]")
    return _embedded(kind.removesuffix("-url"), found[1].lower(), value, found.end())


def _embedded(kind: str, mime_type: str, url: str, at: int) -> ContentPart:
    data = url[at:]
    try:
        size = len(base64.b64decode(data, validate=True))
    except binascii.Error:
        return TextPart(text=f"[{kind}: the data: URL is not base64]")
    if kind == "image" and mime_type in IMAGES and size:
        return ImagePart(data=data, mime_type=mime_type)
    return TextPart(text=f"[{kind}: {mime_type}, {size} bytes] {readable(url[:MAX_SHOWN_CHARS])}…")
