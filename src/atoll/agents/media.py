"""What a model is shown of the images, sounds, films and documents that tools have returned.

Owns which model takes what, by its provider, and what becomes of the rest: its kind, type, size and URL, as text. A
conversation keeps what tools have returned; what is sent of it is decided for each request, because the model of a
conversation may change. Not here: what a tool may return (`bundles/results.py`).

A URL goes to providers that fetch it themselves. This process fetches none: who wrote a URL is unknown, and what it
names may be something that only this machine can reach. pydantic-ai would fetch those that a provider does not, so none
of these is passed on; nor is any to a compatible server that an operator runs, which may be in a network of its own.
"""

from __future__ import annotations

import mimetypes
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from pydantic_ai.messages import (
    AudioUrl,
    BinaryContent,
    DocumentUrl,
    ImageUrl,
    ModelMessage,
    ModelRequest,
    ToolReturnPart,
    VideoUrl,
)
from pydantic_ai.models import Model
from pydantic_ai.models.function import FunctionModel
from pydantic_ai.models.wrapper import WrapperModel

from atoll.tools.tool import ContentPart, ImagePart, MediaKind, MediaPart

MAX_SENT_BYTES = 16 * 1024 * 1024
"""Of all that one request shows a model, so that it is within what providers take (32 MB, as base64): what is older is
text."""
_IMAGES = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp"})
_PDF = "application/pdf"
_FETCHING = {"anthropic": "api.anthropic.com", "openai": "api.openai.com"}
"""Who fetches URLs, by pydantic-ai's module: compatible servers at other addresses are sent none."""
_URLS: dict[MediaKind, type[ImageUrl | AudioUrl | VideoUrl | DocumentUrl]] = {
    "image": ImageUrl,
    "audio": AudioUrl,
    "video": VideoUrl,
    "document": DocumentUrl,
}
_KINDS: dict[type, MediaKind] = {each: kind for kind, each in _URLS.items()}
_MediaUrl = ImageUrl | AudioUrl | VideoUrl | DocumentUrl
_Media = BinaryContent | _MediaUrl


@dataclass(frozen=True)
class AcceptedMedia:
    """What a model takes in the result of a tool."""

    types: frozenset[str] = frozenset()
    """Of content that is sent to it."""
    urls: frozenset[MediaKind] = frozenset()
    """Of URLs that its provider fetches."""
    is_any: bool = False
    """It takes everything."""

    def takes(self, part: _Media) -> bool:
        if self.is_any:
            return True
        if isinstance(part, BinaryContent):
            return part.media_type in self.types
        kind = _KINDS[type(part)]
        # By its name: providers, and pydantic-ai, treat other documents in other ways.
        is_known = kind != "document" or urlsplit(part.url).path.lower().endswith(".pdf")
        return kind in self.urls and part.url.lower().startswith("https://") and is_known


NOTHING = AcceptedMedia()


def accepted_by(model: Model) -> AcceptedMedia:
    """What a model takes. Of one that is not known: images, if they are content."""
    while isinstance(model, WrapperModel):
        model = model.wrapped
    if isinstance(model, FunctionModel):  # a script, which fetches nothing
        return AcceptedMedia(is_any=True)
    name, host = model.model_name, urlsplit(model.base_url or "").hostname
    read: frozenset[MediaKind] = frozenset({"image", "document"})
    if _is(model, "anthropic", "AnthropicModel"):
        return AcceptedMedia(_IMAGES | {_PDF}, read if host == _FETCHING["anthropic"] else frozenset())
    if host == _FETCHING["openai"] and _is(model, "openai", "OpenAIResponsesModel"):
        return AcceptedMedia(_IMAGES | {_PDF}, read)
    if host == _FETCHING["openai"] and _is(model, "openai", "OpenAIChatModel"):
        sounds = {"audio/wav", "audio/mpeg"} if "audio" in name else set()
        return AcceptedMedia(_IMAGES | {_PDF} | sounds, frozenset({"image"}))
    if _is(model, "bedrock", "BedrockConverseModel"):
        films = {"video/mp4", "video/webm", "video/quicktime"} if "nova" in name else set()
        documents = {_PDF} if "nova" in name or "anthropic" in name else set()
        return AcceptedMedia(_IMAGES | documents | films)
    return AcceptedMedia(_IMAGES)


def _is(model: Model, module: str, name: str) -> bool:
    """Whether it is one of pydantic-ai's classes, without importing the package of a provider to know it."""
    loaded = sys.modules.get(f"pydantic_ai.models.{module}")
    return loaded is not None and isinstance(model, getattr(loaded, name))


# ------------------------------------------------------------------------------------------------------ what is kept


def content_of(parts: Iterable[ContentPart]) -> str | list[str | _Media]:
    """The parts of a result as a conversation keeps them: one text, a part a line, if all are text. Blank text is left
    out, which providers refuse."""
    kept = [_kept(part) for part in parts if isinstance(part, ImagePart) or part.text.strip()]
    texts = [each for each in kept if isinstance(each, str)]
    return "\n".join(texts) if len(texts) == len(kept) else kept


def _kept(part: ContentPart) -> str | _Media:
    if isinstance(part, ImagePart):
        return BinaryContent.from_data_uri(f"data:{part.mime_type};base64,{part.data}")
    if not isinstance(part, MediaPart):
        return part.text
    if part.url.startswith("data:"):
        return BinaryContent.from_data_uri(part.url)
    # A type that is given is not guessed from the URL, which fails for some.
    guessed = mimetypes.guess_type(urlsplit(part.url).path)[0] or "application/octet-stream"
    return _URLS[part.kind](part.url, media_type=guessed)


def described(part: object) -> str:
    """A part of what a conversation keeps, as text."""
    if isinstance(part, BinaryContent):
        kind: MediaKind = "image" if part.is_image else "audio" if part.is_audio else "video"
        if part.media_type == _PDF:
            kind = "document"
        return f"[{kind}: {part.media_type}, {len(part.data)} bytes]"
    if isinstance(part, _MediaUrl):
        return f"[{_KINDS[type(part)]}] {part.url}"
    return str(part)


# ------------------------------------------------------------------------------------------------------ what is sent


def shown(messages: Sequence[ModelMessage], accepted: AcceptedMedia) -> list[ModelMessage]:
    """The messages of a conversation as a model that takes this much is sent them. Those given are not changed."""
    left_bytes = MAX_SENT_BYTES
    sent: list[ModelMessage] = []
    for message in reversed(messages):
        if isinstance(message, ModelRequest) and any(map(_media_of, message.parts)):
            parts: list[Any] = []
            for part in reversed(message.parts):
                if isinstance(part, ToolReturnPart) and _media_of(part):
                    content, left_bytes = _fitted(part, accepted, left_bytes)
                    part = replace(part, content=content)
                parts.append(part)
            message = replace(message, parts=parts[::-1])
        sent.append(message)
    return sent[::-1]


def has_media(messages: Iterable[ModelMessage]) -> bool:
    """Whether a tool has returned something in them that is not text."""
    return any(_media_of(part) for message in messages if isinstance(message, ModelRequest) for part in message.parts)


def _media_of(part: object) -> list[_Media]:
    content = part.content if isinstance(part, ToolReturnPart) else None
    return [each for each in content if isinstance(each, _Media)] if isinstance(content, list | tuple) else []


def _fitted(part: ToolReturnPart, accepted: AcceptedMedia, left_bytes: int) -> tuple[Any, int]:
    """The content of one result, and how many bytes are left for those before it."""
    fitted: list[Any] = []
    content: Any = part.content
    for each in content:
        size = len(each.data) if isinstance(each, BinaryContent) else 0
        if not isinstance(each, _Media):
            fitted.append(each)
        elif accepted.takes(each) and size <= left_bytes:
            fitted.append(each)
            left_bytes -= size
        else:
            fitted.append(described(each))
    has_any = any(isinstance(each, _Media) for each in fitted)
    return (fitted if has_any else "\n".join(map(str, fitted))), left_bytes
