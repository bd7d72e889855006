"""What processes left that died at work, and how it is put in order.

Knows what is finished, what is undone, and who is waited for before. Refuses to know how a sandbox is removed
(`host.py`), taken up (`life.py`) or ended with its session (`sessions.py`).
"""

from __future__ import annotations

import contextlib
import logging
from typing import Protocol

import anyio

from atoll.contract.driver import Driver
from atoll.contract.errors import AtollError
from atoll.contract.model import RuntimeName
from atoll.runtime.lifecycle.lifecycle import Life
from atoll.runtime.state.leases import Sessions
from atoll.runtime.state.store import Records

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 5.0
_log = logging.getLogger(__name__)


class Choose(Protocol):
    def __call__(self, wanted: RuntimeName | None) -> Driver: ...


class Remove(Protocol):
    async def __call__(self, id: str, name: str | None, driver: Driver | None, *, abandoned: bool) -> None: ...


class Recovery:
    def __init__(self, records: Records, life: Life, sessions: Sessions, *, choose: Choose, remove: Remove) -> None:
        self._records = records
        self._life = life
        self._sessions = sessions
        self._choose = choose
        self._remove = remove

    def is_needed(self) -> bool:
        """Whether something was left, or may be by those that are at work now."""
        records = self._records
        return bool(records.abandoned() or records.interrupted() or records.at_work() or self._sessions.left())

    def adopt(self) -> None:
        """Finish what only lacks its last step: the making of a sandbox that runs, or the removal of one not begun."""
        for id in self._records.abandoned():
            with contextlib.suppress(AtollError):
                manifest = self._records.read(id)
                if manifest is not None and not manifest.spec.ephemeral:
                    pid = self._choose(manifest.runtime).pid(self._records.directory(id))
                    if self._records.was_made(manifest, running=pid is not None):
                        self._records.adopt(id)

    async def collect(self) -> list[str]:
        """Remove what was not finished, ephemeral sandboxes that have ended, and sessions whose owners died.

        Returns the ids of what was removed.
        """
        collected = []
        self.adopt()
        await self._sessions.collect()
        for id in self._records.abandoned():
            with contextlib.suppress(AtollError):
                manifest = self._records.read(id)
                lives = self._records.is_alive(id) and not self._records.is_half_taken(id)
                if manifest and manifest.spec.ephemeral and lives:
                    continue
                driver = self._choose(manifest.runtime) if manifest else None
                await self._remove(id, manifest.spec.name if manifest else None, driver, abandoned=True)
                collected.append(id)
        return collected

    async def take_up(self) -> None:
        """Finish or undo what was being done to sandboxes that stay."""
        for id in self._records.interrupted():
            with contextlib.suppress(AtollError):
                await self._life.take_up(id)

    async def recover(self) -> None:
        """Put in order all that was left, and free what is nobody's then.

        Whoever is at work now is waited for: what such a one has just begun may outlive it by a moment, with its locks.
        """
        waited_for = self._records.at_work()
        pause_s = _FIRST_PAUSE_S
        try:
            while True:
                waited_for &= self._records.at_work()
                await self.collect()
                await self.take_up()
                if not waited_for:
                    break
                await anyio.sleep(pause_s)
                pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
            await self._life.collect(patience_s=1)
        except (AtollError, OSError):  # a full disk, for one: the next to open the state directory tries again
            _log.exception("what was left half done could not be put in order")
