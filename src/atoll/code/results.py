"""What became of an execution, and what a model is shown of it.

Owns the models of results. Everything in them comes from code and is hostile: a model is shown only images that are
some. Not here: how results come about (`executor.py`), and what a person is shown (`surfaces/cli/cells.py`). Used by
these, by `audit.py` and `tool.py`, and by the surfaces.
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from atoll.code.messages import PartMessage
from atoll.tools.image_files import image_content, image_type
from atoll.tools.tool import ContentPart, TextPart

NO_OUTPUT = "[no output; print what you want to see]"
"""What a model reads of an execution that showed nothing."""
_MAX_IMAGES = 10
"""Images of an execution that a model is shown."""
_MAX_VALUE_CHARS = 20_000
"""What a model is shown of one value."""


class CallRecord(BaseModel):
    """One call of a tool by code."""

    model_config = ConfigDict(frozen=True)

    tool: str
    arguments: Mapping[str, Any]
    started_at: datetime
    duration_s: float
    result_bytes: int
    error: str | None = None
    """Why it failed or was refused. Unset: it succeeded."""


class OutboxFile(BaseModel):
    """A file that code has left in the directory `outbox` of its working directory."""

    model_config = ConfigDict(frozen=True)

    path: str
    """Relative to the outbox."""
    size_bytes: int
    data: bytes | None
    """Unset: it is too large to come with the result; it is still in the sandbox."""


class ExecutionFailure(BaseModel):
    """Why an execution ended early."""

    model_config = ConfigDict(frozen=True)

    type: str
    message: str
    traceback: str = ""
    line: int | None = None
    """The line of the code."""


class RichPart(BaseModel):
    """A value that code has shown, in one or more forms by MIME type. Binary forms are base64."""

    model_config = ConfigDict(frozen=True)

    role: Literal["value", "display"]
    data: Mapping[str, Any]


class ExecutionResult(BaseModel):
    """What became of an execution."""

    model_config = ConfigDict(frozen=True)

    success: bool
    output: str
    """stdout."""
    stderr: str = ""
    error: ExecutionFailure | None = None
    parts: tuple[RichPart, ...] = ()
    """What was displayed, in order; the value of the last line, if there is one, has the role `value`."""
    warnings: tuple[str, ...] = ()
    calls: tuple[CallRecord, ...] = ()
    files: tuple[OutboxFile, ...] = ()
    duration_s: float = 0.0
    timed_out: bool = False
    out_of_memory: bool = False
    session_replaced: bool = False
    """True: its process is gone, and with it the variables. Files are there."""
    suspended: bool = False
    """True: it has not ended. The session is on disk, and `CodeExecutor.resume` goes on with it."""
    output_file: str | None = None
    """Where in the sandbox the whole of stdout is, if `output` is not all of it."""

    @property
    def text(self) -> str:
        """What a model reads of it: output, values, errors and warnings, and no result of a tool."""
        lines = [self.output.rstrip("\n")] if self.output.strip() else []
        if self.stderr.strip():
            lines.append(f"[stderr]\n{self.stderr.rstrip()}")
        lines += [_shortened(str(part.data["text/plain"])) for part in self.parts if "text/plain" in part.data]
        if self.error is not None:
            lines.append(self.error.traceback.rstrip() or f"{self.error.type}: {self.error.message}")
        lines += [f"[warning: {each}]" for each in self.warnings]
        lines += [f"[file: outbox/{each.path}, {each.size_bytes} bytes]" for each in self.files]
        if self.output_file is not None:
            lines.append(f"[the whole output is in {self.output_file}]")
        if self.timed_out:
            lines.append("[the time limit was reached]")
        if self.suspended:
            lines.append("[suspended: a call waits for an approval]")
        if self.session_replaced:
            lines.append("[the session was restarted: its variables are lost, its files are there]")
        return "\n".join(lines) or NO_OUTPUT

    @property
    def content(self) -> tuple[ContentPart, ...]:
        """The same with the images that were shown, for a model that sees. Those that no model could be shown are
        described."""
        shown: list[ContentPart] = [TextPart(text=self.text)]
        images = [image for part in self.parts if (image := _image(part)) is not None]
        for number, image in enumerate(images[:_MAX_IMAGES], 1):
            content = image_content(image, len(image), f"image {number}")
            shown += [TextPart(text=content)] if isinstance(content, str) else content
        if len(images) > _MAX_IMAGES:
            shown.append(TextPart(text=f"[{len(images) - _MAX_IMAGES} more images are not shown]"))
        return tuple(shown)


def _shortened(text: str) -> str:
    if len(text) <= _MAX_VALUE_CHARS:
        return text
    half = _MAX_VALUE_CHARS // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters are left out]\n{text[-half:]}"


def _image(part: RichPart) -> bytes | None:
    """The image of a value, as bytes. What the code says of it is not believed."""
    for kind in ("image/png", "image/jpeg"):
        with contextlib.suppress(ValueError):
            data = base64.b64decode(str(part.data.get(kind, "")), validate=True)
            if image_type(data) is not None:
                return data
    return None


def rich_part(part: PartMessage) -> RichPart:
    """What a kernel has shown, as a part of a result."""
    return RichPart(role="value" if part.role == "value" else "display", data=part.data)
