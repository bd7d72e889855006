"""The messages of a conversation: recorded as they happen, saved to a file, loaded and continued.

Owns the file format, and how an interrupted conversation is completed: a model must be shown a result for every call
that it made. Not here: what is added to a conversation (`loop.py`). Used by `loop.py` and by `atoll agent --history`.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
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
_UNKNOWN = "This call was interrupted: it is not known whether it did anything."


Record = Callable[[ModelResponse | ToolReturnPart], Awaitable[None]]
"""Keeps what happened in a conversation elsewhere, such as in a database. When it returns, it is kept."""


class History:
    """A conversation. A run adds every message to it at once, so nothing is lost however the run ends.

    `record` is awaited with each answer of the model before its calls are made, and with each result before the model
    is asked again. What it raises ends the run.
    """

    def __init__(self, messages: Sequence[ModelMessage] = (), *, record: Record | None = None) -> None:
        self.messages: list[ModelMessage] = list(messages)
        """As pydantic-ai's message types."""
        self.record = record
        self._is_held = False

    def __len__(self) -> int:
        return len(self.messages)

    def __bool__(self) -> bool:
        return bool(self.messages)

    @property
    def text(self) -> str:
        """The last text of the model."""
        for message in reversed(self.messages):
            if isinstance(message, ModelResponse):
                return message.text or ""
        return ""

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the history for one run.

        Raises:
            InvalidRequest: another run holds it.
        """
        if self._is_held:
            raise InvalidRequest("another run is using this conversation; wait for its end, or use a copy")
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False

    def complete(self) -> None:
        """Add a result to every call that has none: that it was interrupted."""
        left = list(self._unanswered())
        if left:
            self.messages.append(ModelRequest(parts=[interrupted(call) for call in left]))

    def _unanswered(self) -> Iterator[ToolCallPart]:
        # The results of calls are in the next message: only the last message can be without.
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
        """Read the output of `dump`.

        Raises:
            InvalidRequest: it is not a saved conversation, or one of a newer Atoll.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"not a saved conversation: {error}") from None
        version = data.get("atoll_history") if isinstance(data, dict) else None
        if version != _VERSION:
            raise InvalidRequest(
                "not a saved conversation: it has no field 'atoll_history'"
                if version is None
                else f"the conversation has format version {version!r}; this Atoll reads {_VERSION}"
            )
        try:
            return cls(ModelMessagesTypeAdapter.validate_python(data.get("messages")))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise InvalidRequest(f"the conversation is invalid at messages.{where}: {first['msg']}") from None

    def save(self, path: Path | str) -> None:
        """Write the conversation atomically, to a file that only its owner can read. A symlink stays a symlink.

        Raises:
            OSError: it cannot be written. The old file, if there was one, is unchanged.
        """
        target = os.path.realpath(path)
        # An unpredictable name: an existing file could be readable for other users.
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
        """Read a file that `save` wrote.

        Raises:
            InvalidRequest: it cannot be read, or is not a saved conversation.
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
    # O_NONBLOCK, so that opening a FIFO does not wait for a writer. Only regular files are read: others may not end.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), encoding="utf-8") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("not a regular file")
        return file.read()


def interrupted(call: ToolCallPart) -> ToolReturnPart:
    """The result of a call that was interrupted."""
    return ToolReturnPart(call.tool_name, _UNKNOWN, call.tool_call_id, outcome="interrupted")
