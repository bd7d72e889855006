"""When the lifetime of a sandbox is over, and what happens then.

Owns the text of an entry `expiries/<id>`, and how use renews a lifetime: not by writing, but by reading when the keeper
saw the sandbox used (`drivers/activity.py`). The keeper counts the same (`lifetime_ms` in `drivers/keeper/timing.c`).
Not here: the entries themselves (`store.py`), and who puts a sandbox to sleep or removes it (`lifecycle/recovery.py`).
Imports nothing heavy, because `atoll exec` imports it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from atoll.drivers.activity import RECORDED_EVERY_MS, read_activity

if TYPE_CHECKING:
    from atoll.contract.model import OnExpiry

_TEXT = re.compile(r"([0-9]+)(?:\+([0-9]+))?([sp]?)")
_LETTERS: dict[OnExpiry, str] = {"destroy": "", "sleep": "s", "pause": "p"}
_THEN = {letter: then for then, letter in _LETTERS.items()}


class Expiry(NamedTuple):
    """The end of a sandbox's lifetime: `MS`, `MS+MS` if use renews it, with an `s` behind it if it is put to sleep,
    or a `p` if it is paused."""

    ends_ms: int
    """In milliseconds since 1970, unless use renews it."""
    renewal_ms: int = 0
    """It lives so long after each use. 0: use does not renew it."""
    then: OnExpiry = "destroy"
    """What is done with it then."""

    @classmethod
    def parse(cls, text: str) -> Expiry:
        """
        Raises:
            ValueError: it is not the text of an entry.
        """
        found = _TEXT.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is not the end of a lifetime")
        return cls(int(found[1]), int(found[2] or 0), _THEN[found[3]])

    def __str__(self) -> str:
        renewal = f"+{self.renewal_ms}" if self.renewal_ms else ""
        return f"{self.ends_ms}{renewal}{_LETTERS[self.then]}"

    def end_ms(self, directory: str, is_alive: Callable[[], bool]) -> int:
        """When it is over, as far as is known now, of the sandbox with this directory. `is_alive`: its keeper lives.

        It is at least `renewal_ms` after the last use, and at most a second more.
        """
        if not self.renewal_ms:
            return self.ends_ms
        activity = read_activity(directory)
        if activity.used_now and is_alive():
            return max(self.ends_ms, now_ms() + self.renewal_ms)
        return max(self.ends_ms, activity.used_ms + self.renewal_ms + RECORDED_EVERY_MS)


def now_ms() -> int:
    return time.time_ns() // 1_000_000
