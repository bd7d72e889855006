"""The tools that every agent may have without a bundle: `get_current_time` and `echo`.

They are for trying an agent out, and run here: no sandbox is made for them. Used by `workspace.py`.
"""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from atoll.contract.errors import InvalidRequest
from atoll.tools.tool import Hints, Input, Tool, ToolSet

BUILTIN_TOOLS = ("get_current_time", "echo")


class TimeInput(Input):
    timezone: str = "UTC"
    """An IANA time zone, such as Europe/Berlin."""


class EchoInput(Input):
    text: str = ""
    """What is to be said back."""


async def _time(given: TimeInput, _context: object) -> str:
    try:
        zone = ZoneInfo(given.timezone) if given.timezone != "UTC" else UTC
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise InvalidRequest(f"there is no time zone {given.timezone[:80]!r}; UTC and Europe/Berlin are some") from None
    return datetime.now(zone).isoformat(timespec="seconds")


async def _echo(given: EchoInput, _context: object) -> str:
    return given.text


def builtin_tools() -> ToolSet:
    """All of them."""
    hints = Hints(read_only=True)
    return ToolSet(
        [
            Tool("get_current_time", "The current date and time.", TimeInput, None, _time, hints=hints),
            Tool("echo", "Say a text back, unchanged.", EchoInput, None, _echo, hints=hints),
        ]
    )
