"""What a tool of a bundle has returned, as a result for a model.

Owns the kinds of parts, and what each may be: text, something that models may be shown, or a URL that is text for every
model. Nothing that comes from a workspace is trusted: shapes and sizes are checked here, whatever was checked inside.
Not here: which model takes what (`agents/media.py`). Used by `dispatch.py`, and for what clients return.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import re
from typing import Any, Literal, get_args

from atoll.code.messages import ChannelViolation
from atoll.tools.tool import ContentPart, ImagePart, MediaKind, MediaPart, TextPart, ToolResult, readable

PartKind = Literal["text", "image-url", "audio-url", "video-url", "document-url", "web-url", "api-url"]
PART_KINDS: tuple[str, ...] = get_args(PartKind)
MAX_PARTS = 64
MAX_MEDIA_CHARS = 5 * 1024 * 1024
"""Of one `data:` URL that a model is shown, which is what providers take of an image. A larger one is text."""
IMAGES = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp"})
"""What models that see can be shown."""
_MEDIA: dict[str, frozenset[str]] = {
    "audio": frozenset({"audio/wav", "audio/mpeg", "audio/ogg", "audio/flac", "audio/aac", "audio/aiff"}),
    "video": frozenset({"video/mp4", "video/webm", "video/quicktime", "video/mpeg", "video/x-matroska"}),
    "document": frozenset({"application/pdf"}),
}
"""Of each kind, the types that some model takes."""
_ALIASES = {"audio/mp3": "audio/mpeg", "audio/x-wav": "audio/wav", "audio/wave": "audio/wav", "image/jpg": "image/jpeg"}
_TEXTS = frozenset({"application/json", "application/xml", "application/yaml"})
"""Documents that are text, beside `text/…`."""
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
    name = kind.removesuffix("-url")
    media_kind: MediaKind | None = name if name in _MEDIA or name == "image" else None
    if _WEB_URL.fullmatch(value):
        url = readable(value)
        return TextPart(text=f"[{name}] {url}") if media_kind is None else MediaPart(kind=media_kind, url=url)
    found = _DATA_URL.match(value)
    if found is None:
        return TextPart(text=f"[{name}: a URL that is neither http(s):// nor data: with base64]")
    return _embedded(media_kind or "document", name, found[1].lower(), value[found.end() :])


def _embedded(kind: MediaKind, name: str, mime_type: str, data: str) -> ContentPart:
    try:
        content = base64.b64decode(data, validate=True)
    except binascii.Error:
        return TextPart(text=f"[{name}: the data: URL is not base64]")
    mime_type = _ALIASES.get(mime_type, mime_type)
    part = MediaPart(kind=kind, url=f"data:{mime_type};base64,{data}")
    if name == "document" and (mime_type.startswith("text/") or mime_type in _TEXTS):
        with contextlib.suppress(UnicodeDecodeError):
            return TextPart(text=readable(content.decode("utf-8")))
    if content and name == kind and len(data) <= MAX_MEDIA_CHARS:
        if kind == "image" and mime_type in IMAGES:
            return ImagePart(data=data, mime_type=mime_type)
        if mime_type in _MEDIA.get(kind, ()):
            return part
    return TextPart(text=part.text.replace(f"[{kind}:", f"[{name}:", 1))
