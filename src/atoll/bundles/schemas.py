"""What a model is told about the tools of a bundle, without executing any of it."""

from __future__ import annotations

from typing import Any

from atoll.tools.tool import StrictModel


class ToolSchema(StrictModel):
    """A tool as a model sees it."""

    name: str
    description: str
    input_schema: dict[str, Any]
    """A JSON schema of the type `object`."""
