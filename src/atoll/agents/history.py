"""What was said in a conversation: kept as it happens, saved, and taken up again.

Knows how a conversation is written down, and how one that was cut off is made whole: a model has to be shown a result
for every call that it made. Refuses to know who says what (`loop.py`).
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from pydantic import ValidationError
from pydantic_ai.messages import (
    ModelMessage,
    ModelMessagesTypeAdapter,
    ModelRequest,
    ModelResponse,
    ToolCallPart,
    ToolReturnPart,
)

from atoll.contract.errors import InvalidRequest

_VERSION = 1
_UNKNOWN = "This call was cut off: whether it did anything is not known."


class History:
    """A conversation. A run that is given one adds to it as things happen, and so nothing is lost however it ends."""

    def __init__(self, messages: Sequence[ModelMessage] = ()) -> None:
        self.messages: list[ModelMessage] = list(messages)
        """In pydantic-ai's words."""
        self._is_held = False

    def __len__(self) -> int:
        return len(self.messages)

    def __bool__(self) -> bool:
        return bool(self.messages)

    @property
    def text(self) -> str:
        """What the model said last."""
        for message in reversed(self.messages):
            if isinstance(message, ModelResponse):
                return message.text or ""
        return ""

    @contextmanager
    def held(self) -> Iterator[None]:
        """While this is open, nobody else may add to it.

        Raises:
            InvalidRequest: somebody else does.
        """
        if self._is_held:
            raise InvalidRequest("another run goes on with this conversation; wait for its end, or use a copy")
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False

    def complete(self) -> None:
        """Give every call that has no result one which says that it was cut off."""
        left = list(self._unanswered())
        if left:
            self.messages.append(ModelRequest(parts=[interrupted(call) for call in left]))

    def _unanswered(self) -> Iterator[ToolCallPart]:
        # A call's result stands in the message that follows it: only the end can be unfinished.
        for message in reversed(self.messages):
            if isinstance(message, ModelRequest):
                return
            yield from (part for part in message.parts if isinstance(part, ToolCallPart))

    def dump(self) -> str:
        """This conversation as JSON."""
        messages = ModelMessagesTypeAdapter.dump_python(self.messages, mode="json")
        return json.dumps({"atoll_history": _VERSION, "messages": messages})

    @classmethod
    def parse(cls, text: str) -> Self:
        """What `dump` gave.

        Raises:
            InvalidRequest: it is no conversation, or one of a newer Atoll.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"this is no saved conversation: {error}") from None
        version = data.get("atoll_history") if isinstance(data, dict) else None
        if version != _VERSION:
            raise InvalidRequest(
                "this is no saved conversation: it does not say 'atoll_history'"
                if version is None
                else f"this conversation has version {version!r}; this Atoll knows {_VERSION}"
            )
        try:
            return cls(ModelMessagesTypeAdapter.validate_python(data.get("messages")))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise InvalidRequest(f"this conversation is damaged at messages.{where}: {first['msg']}") from None

    def save(self, path: Path | str) -> None:
        """Write it to a file that its owner alone can read, whole or not at all. A symlink stays one.

        Raises:
            OSError: it cannot be written. What was there before stays.
        """
        target = os.path.realpath(path)
        # A name that nobody else can have thought of: what stands there already may be readable to others.
        descriptor, temporary = tempfile.mkstemp(suffix=".new", prefix=".atoll-", dir=os.path.dirname(target))
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(self.dump())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read what `save` wrote.

        Raises:
            InvalidRequest: it cannot be read, or is no conversation.
        """
        try:
            text = _text(path)
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"the conversation {path} cannot be read: {error}") from None
        try:
            return cls.parse(text)
        except InvalidRequest as error:
            raise InvalidRequest(f"{path}: {error.message}") from None


def _text(path: Path | str) -> str:
    # Opened so that a FIFO does not wait for somebody to write, and read only if it has an end.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), encoding="utf-8") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("it is no file")
        return file.read()


def interrupted(call: ToolCallPart) -> ToolReturnPart:
    return ToolReturnPart(call.tool_name, _UNKNOWN, call.tool_call_id, outcome="interrupted")
