"""The tools that every agent may have without a bundle: `get_current_time` and `echo`. They run here, without a
sandbox."""

from __future__ import annotations

from atoll.tools.tool import ToolSet

BUILTIN_TOOLS = ("get_current_time", "echo")


def builtin_tools() -> ToolSet:
    """All of them."""
    raise NotImplementedError
