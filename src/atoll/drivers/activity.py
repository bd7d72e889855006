"""What a keeper writes to the file `activity` in a sandbox's directory: when the sandbox was used, and by how many.

Owns the layout of the file, as `write_activity` in `keeper/timing.c` writes it, and the keeper's count of time. Used by
`keeper_client.py` and, for lifetimes that use renews, by `runtime/state/expiries.py`. Imports nothing heavy, because
`atoll exec` imports it.
"""

from __future__ import annotations

import os
import struct
from typing import NamedTuple

RECORDED_EVERY_MS = 1000
"""By how much `Activity.used_ms` may be older than the last use (`ACTIVITY_MS` in `keeper/timing.c`)."""
_LAYOUT = struct.Struct("<qqqq")


class Activity(NamedTuple):
    used_ms: int = 0
    """When the sandbox was last started or used, in milliseconds since 1970. 0: never."""
    streams: int = 0
    """Operations that were open then, some of which may be those of clients that are gone."""
    unanswered_ms: int = 0
    """Since when the guest has not answered. 0: it does, as far as is known."""
    used_now: int = 0
    """Whether a client that is connected has an operation open."""


def read_activity(directory: str) -> Activity:
    """The activity of the sandbox with this directory."""
    try:
        fd = os.open(f"{directory}/activity", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return Activity()
    try:
        return Activity(*_LAYOUT.unpack(os.read(fd, _LAYOUT.size)))
    except (OSError, struct.error):
        return Activity()
    finally:
        os.close(fd)
