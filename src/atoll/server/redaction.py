"""Values of secrets in what comes out of a workspace: found, and replaced by the secret's name.

Owns in which forms a value is looked for: as it is, and as programs write it without meaning to hide it, such as in an
`Authorization` header, a URL, JSON or a dump; and as a part of one, where Atoll itself has cut a text. A tool that
means to hide one can: what it cuts, shifts or encrypts is not found. Not here: who may have a value at all
(`configs.py`), and placeholders (`runtime/secrets/`). Used by `workspaces.py`, for results of tools before the model,
the history, events and logs have them.
"""

from __future__ import annotations

import base64
import html
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any
from urllib.parse import quote, quote_plus

from anyio.lowlevel import checkpoint
from pydantic import SecretStr

from atoll.bundles.workspace import MAX_LOG_BYTES, WorkspaceInstance
from atoll.tools.tool import ContentPart, ImagePart, MediaPart, TextPart, ToolResult

SHORTEST_REDACTED = 6
"""Characters of a secret that is looked for. A shorter one would be found by chance."""
_LONGEST_ENCODED = 4096
"""Characters of a secret that is looked for in encoded forms too."""
_SHORTEST_LINE = 20
"""Characters of a line that is looked for by itself: keys have lines of 64."""
_SHORTEST_PART = 4
"""Characters of a part of a value that is looked for where a text was cut."""
_CUTS = ("…", "left out", "cut here")
"""What notes have that say where something is missing: those of commands, of code and of messages."""
_MOST_CUTS = 64
"""Of one kind in one text: each form is compared at each, which takes 2 µs."""
_BREAK = r"(?:\s|\\[nrt])*"
_LONGEST_CHARACTER = 4
_AT_ONCE_CHARS = 256 * 1024
"""Other work of the server goes on after each search of so long a text: 8 MiB take 2 to 4 ms for one form."""


class SecretRedaction:
    """Takes the values of secrets out of what comes back from a workspace."""

    def __init__(self, secrets: Mapping[str, SecretStr]) -> None:
        forms: dict[str, tuple[str, bool]] = {}
        for name, secret in secrets.items():
            for form, has_breaks in _forms(secret.get_secret_value()):
                if len(form) >= SHORTEST_REDACTED:
                    forms.setdefault(form, (name, has_breaks))
        # The longest first: one may be a part of another.
        self._forms = sorted(((form, *about) for form, about in forms.items()), key=lambda each: -len(each[0]))

    async def text(self, text: str, *, begins_late: bool = False, ends_early: bool = False) -> str:
        """The text, with `[the secret NAME]` for each value in it. It may be cut at its beginning or at its end."""
        unbroken = _unbroken(text)
        for form, name, has_breaks in self._forms:
            found = f"[the secret {name}]"
            if form in text:
                text = text.replace(form, found)
            if has_breaks and form in unbroken:
                pattern = _BREAK.join(map(re.escape, form))
                text = re.sub(pattern, lambda _, found=found: found, text)  # type: ignore[misc]
                unbroken = _unbroken(text)
            if len(text) > _AT_ONCE_CHARS:
                await checkpoint()
        ends = [0] * begins_late + [len(text)] * (ends_early and not text[-1:].isspace())
        return await self._without_parts(text, ends) if self._forms else text

    async def _without_parts(self, text: str, ends: Iterable[int]) -> str:
        """The text without the parts of values that a cut has left before and behind it."""
        cuts = [*_cuts_of(text), *((end, end) for end in ends)]
        found = []
        for begin, end in cuts:
            found += [self._part_before(text, begin), self._part_after(text, end)]
            await checkpoint()
        reached, pieces = 0, list[str]()
        for begin, end, name in sorted(span for span in found if span is not None):
            if begin >= reached:
                pieces += [text[reached:begin], f"[a part of the secret {name}]"]
                reached = end
        return "".join([*pieces, text[reached:]]) if pieces else text

    def _part_before(self, text: str, at: int) -> tuple[int, int, str] | None:
        """The longest beginning of a value that ends there: where it begins, its end, and whose it is."""
        while at and text[at - 1].isspace():
            at -= 1
        longest: tuple[int, int, str] | None = None
        for form, name, has_breaks in self._forms:
            begin = at
            if size := _beginning(text[max(0, at - len(form)) : at], form):
                begin = at - size
            elif has_breaks:
                packed = "".join(text[max(0, at - 2 * len(form)) : at].split())
                left = _beginning(packed[-len(form) :], form)
                while left:
                    begin -= 1
                    left -= not text[begin].isspace()
            if begin < (at if longest is None else longest[0]):
                longest = begin, at, name
        return longest

    def _part_after(self, text: str, at: int) -> tuple[int, int, str] | None:
        """The longest end of a value that begins there."""
        while at < len(text) and (text[at].isspace() or text[at] == "\ufffd"):
            at += 1
        longest: tuple[int, int, str] | None = None
        for form, name, has_breaks in self._forms:
            end = at
            if size := _ending(text[at : at + len(form)], form):
                end = at + size
            elif has_breaks:
                packed = "".join(text[at : at + 2 * len(form)].split())
                left = _ending(packed[: len(form)], form)
                while left:
                    left -= not text[end].isspace()
                    end += 1
            if end > (at if longest is None else longest[1]):
                longest = at, end, name
        return longest

    async def result(self, result: ToolResult) -> ToolResult:
        if not self._forms:
            return result
        content: str | tuple[ContentPart, ...]
        if isinstance(result.content, str):
            content = await self.text(result.content)
        else:
            content = tuple([await self._part(part) for part in result.content])
        return result.model_copy(update={"content": content, "structured": await self._all(result.structured)})

    async def instance(self, instance: WorkspaceInstance) -> WorkspaceInstance:
        message = None if instance.message is None else await self.text(instance.message)
        is_full = len(instance.log.encode()) > MAX_LOG_BYTES - _LONGEST_CHARACTER
        log = await self.text(instance.log, begins_late=is_full, ends_early=True)
        return instance.model_copy(update={"log": log, "message": message})

    async def _part(self, part: ContentPart) -> ContentPart:
        if isinstance(part, ImagePart):
            shown = await self.text(part.data)
            return part if shown == part.data else TextPart(text="[an image with the value of a secret in it]")
        if isinstance(part, MediaPart):
            if await self.text(part.url) == part.url:
                return part
            if part.url.startswith("data:"):
                return TextPart(text=f"[{part.kind} with the value of a secret in it]")
        return TextPart(text=await self.text(part.text))

    async def _all(self, value: Any) -> Any:
        if isinstance(value, str):
            return await self.text(value)
        if isinstance(value, dict):
            return {await self.text(key): await self._all(each) for key, each in value.items()}
        return [await self._all(each) for each in value] if isinstance(value, list | tuple) else value


def _forms(secret: str) -> Iterator[tuple[str, bool]]:
    """What is looked for, and whether programs break it into lines."""
    for value in _values(secret):
        yield value, False
        for escaped in _escaped(value):
            yield escaped, False
        if len(value) <= _LONGEST_ENCODED:
            for encoded in _encoded(value.encode()):
                yield encoded, True


def _values(secret: str) -> Iterable[str]:
    """The value, without white space around it, and the lines of one that has several: programs indent and quote
    them."""
    lines = [line.strip() for line in secret.splitlines()]
    long = [line for line in lines if len(line) >= _SHORTEST_LINE and not line.startswith("-----")]
    return dict.fromkeys([secret, secret.strip(), *(long if len(lines) > 1 else ())])


def _escaped(value: str) -> Iterator[str]:
    for in_json in (json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]):
        yield in_json
        yield in_json.replace("/", "\\/")
        yield json.dumps(in_json)[1:-1]  # JSON in JSON
    yield repr(value)[1:-1]
    yield html.escape(value)
    yield shlex.quote(value).strip("'")
    yield value.replace("'", "'\\''")
    for in_url in (quote(value), quote(value, safe=""), quote_plus(value)):
        yield in_url
        yield re.sub("%[0-9A-F]{2}", lambda found: found[0].lower(), in_url)


def _encoded(value: bytes) -> Iterator[str]:
    yield value.hex()
    yield value.hex().upper()
    for before in range(3):
        # The characters that are the same whatever stands before and after the value, as in `user:value`.
        first, end = (0, 2, 3)[before], (before + len(value)) * 8 // 6
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            core = encode(b"\0" * before + value).decode()[first:end]
            yield core
            yield quote(core, safe="")


def _cuts_of(text: str) -> Iterator[tuple[int, int]]:
    """Where the notes begin and end that say that something is missing there."""
    for words in _CUTS:
        for at in islice(_places(text, words), _MOST_CUTS):
            if words == "…":
                yield at, at + len(words)
                continue
            begin, end = text.rfind("[", max(0, at - 100), at), text.find("]", at, at + 1000)
            if begin >= 0 and end >= 0:
                yield begin, end + 1


def _places(text: str, words: str) -> Iterator[int]:
    at = text.find(words)
    while at >= 0:
        yield at
        at = text.find(words, at + len(words))


def _beginning(text: str, form: str) -> int:
    """How many characters at the end of a text are the beginning of a value."""
    at = text.find(form[:_SHORTEST_PART])
    while at >= 0 and not form.startswith(text[at:]):
        at = text.find(form[:_SHORTEST_PART], at + 1)
    return len(text) - at if at >= 0 else 0


def _ending(text: str, form: str) -> int:
    """How many characters at the beginning of a text are the end of a value."""
    end = text.rfind(form[-_SHORTEST_PART:]) + _SHORTEST_PART
    while end >= _SHORTEST_PART and not form.endswith(text[:end]):
        end = text.rfind(form[-_SHORTEST_PART:], 0, end - 1) + _SHORTEST_PART
    return max(0, end) if end >= _SHORTEST_PART else 0


def _unbroken(text: str) -> str:
    """Without white space, as it is and as JSON writes it."""
    for written in ("\\n", "\\r", "\\t"):
        text = text.replace(written, " ")
    return "".join(text.split())
