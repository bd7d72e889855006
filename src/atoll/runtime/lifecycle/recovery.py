"""What processes left that died at work, and how it is put in order.

Knows what is finished, what is undone, and who is waited for before. Refuses to know how a sandbox is removed
(`host.py`), taken up (`life.py`) or ended with its session (`leases.py`).
"""

from __future__ import annotations

import contextlib
import logging
from typing import Protocol

import anyio

from atoll.contract.driver import Driver
from atoll.contract.errors import AtollError
from atoll.contract.model import RuntimeName
from atoll.runtime.lifecycle.lifecycle import Lifecycle
from atoll.runtime.state.leases import SessionLeases
from atoll.runtime.state.store import StateStore

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 5.0
_log = logging.getLogger(__name__)


class Choose(Protocol):
    def __call__(self, wanted: RuntimeName | None) -> Driver: ...


class Remove(Protocol):
    async def __call__(self, id: str, name: str | None, driver: Driver | None, *, abandoned: bool) -> None: ...


class Recovery:
    def __init__(
        self, store: StateStore, life: Lifecycle, leases: SessionLeases, *, choose: Choose, remove: Remove
    ) -> None:
        self._store = store
        self._lifecycle = life
        self._leases = leases
        self._choose = choose
        self._remove = remove

    def is_needed(self) -> bool:
        """Whether something was left, or may be by those that are at work now."""
        store = self._store
        return bool(store.abandoned() or store.interrupted() or store.at_work() or self._leases.abandoned())

    def finish_created(self) -> None:
        """Finish what only lacks its last step: the making of a sandbox that runs, or the removal of one not begun."""
        for id in self._store.abandoned():
            with contextlib.suppress(AtollError):
                manifest = self._store.read(id)
                if manifest is not None and not manifest.spec.ephemeral:
                    pid = self._choose(manifest.runtime).pid(self._store.directory(id))
                    if self._store.is_complete(manifest, running=pid is not None):
                        self._store.finish_created(id)

    async def remove_abandoned(self) -> list[str]:
        """Remove what was not finished, ephemeral sandboxes that have ended, and sessions whose owners died.

        Returns the ids of what was removed.
        """
        collected = []
        self.finish_created()
        await self._leases.end_abandoned()
        for id in self._store.abandoned():
            with contextlib.suppress(AtollError):
                manifest = self._store.read(id)
                lives = self._store.is_alive(id) and not self._store.claim_interrupted(id)
                if manifest and manifest.spec.ephemeral and lives:
                    continue
                driver = self._choose(manifest.runtime) if manifest else None
                await self._remove(id, manifest.spec.name if manifest else None, driver, abandoned=True)
                collected.append(id)
        return collected

    async def reconcile(self) -> None:
        """Finish or undo what was being done to sandboxes that stay."""
        for id in self._store.interrupted():
            with contextlib.suppress(AtollError):
                await self._lifecycle.reconcile(id)

    async def recover(self) -> None:
        """Put in order all that was left, and free what is nobody's then.

        Whoever is at work now is waited for: what such a one has just begun may outlive it by a moment, with its locks.
        """
        waited_for = self._store.at_work()
        pause_s = _FIRST_PAUSE_S
        try:
            while True:
                waited_for &= self._store.at_work()
                await self.remove_abandoned()
                await self.reconcile()
                if not waited_for:
                    break
                await anyio.sleep(pause_s)
                pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
            await self._lifecycle.remove_unreferenced(timeout_s=1)
        except (AtollError, OSError):  # a full disk, for one: the next to open the state directory tries again
            _log.exception("what was left half done could not be put in order")
