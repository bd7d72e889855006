"""Recovery: what is finished, undone and removed after a process died in the middle of an operation; expired sandboxes.

Owns which of these is done, in which order, and which processes are waited for first. It is for the whole state
directory, whichever namespace its engine has. Not here: how a sandbox is removed (the engine), how an interrupted
operation on one is reconciled (`lifecycle.py`), and how a session is ended (`state/leases.py`). Used by the engine,
when a state directory is opened and for garbage collection.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import anyio

from atoll.contract.driver import Driver
from atoll.contract.errors import AtollError, SandboxError
from atoll.contract.model import RuntimeName, SandboxInfo
from atoll.runtime.lifecycle.lifecycle import Lifecycle
from atoll.runtime.state.leases import SessionLeases
from atoll.runtime.state.store import StateStore, now

if TYPE_CHECKING:
    from atoll.runtime.lifetimes import BackgroundTasks

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 5.0
_KEEPERS_S = 0.2
"""How long a keeper has to end an expired sandbox in good order, and to tell its clients, before it is removed."""
_log = logging.getLogger(__name__)


class ChooseDriver(Protocol):
    def __call__(self, wanted: RuntimeName | None) -> Driver: ...


class RemoveSandbox(Protocol):
    async def __call__(
        self, id: str, entry: str | None, driver: Driver | None, *, abandoned: bool = False, expired: bool = False
    ) -> None: ...


class Recovery:
    def __init__(
        self,
        store: StateStore,
        lifecycle: Lifecycle,
        leases: SessionLeases,
        *,
        choose: ChooseDriver,
        remove: RemoveSandbox,
        sleep: Callable[[str], Awaitable[None]],
    ) -> None:
        """`sleep` puts a sandbox to sleep whose lifetime is over, unless that was renewed."""
        self._store = store
        self._lifecycle = lifecycle
        self._leases = leases
        self._choose = choose
        self._remove = remove
        self._sleep = sleep
        self._watching = False
        self._look_earlier = anyio.Event()
        self._next_look = now()

    def is_needed(self) -> bool:
        """Whether an operation was interrupted, or one is in progress that may be, or a lifetime is over."""
        store = self._store
        return bool(
            store.abandoned()
            or store.interrupted()
            or store.in_progress_ids()
            or self._leases.abandoned()
            or store.expired()
            or store.due_to_sleep()
        )

    def finish_created(self) -> None:
        """Commit sandboxes that lack nothing else: their creation was interrupted, or their removal before it began."""
        for id in self._store.abandoned():
            with contextlib.suppress(AtollError):
                manifest = self._store.read(id)
                if manifest is not None and not manifest.spec.ephemeral:
                    pid = self._choose(manifest.runtime).pid(self._store.directory(id))
                    if self._store.is_complete(manifest, running=pid is not None):
                        self._store.finish_created(id)

    async def remove_abandoned(self) -> list[str]:
        """Remove abandoned and expired sandboxes, ephemeral ones that have ended, and sessions whose processes died.

        Returns the ids of what was removed.
        """
        removed = await self.remove_expired()
        self.finish_created()
        await self._leases.end_abandoned()
        for id in self._store.abandoned():
            with contextlib.suppress(AtollError):
                is_usable = self._store.is_alive(id) and not self._store.claim_interrupted(id)
                try:
                    manifest = self._store.read(id)
                except SandboxError as error:
                    if is_usable or error.details["reason"] == "newer":
                        continue  # it may be ephemeral; and another Atoll's is left to that one
                    manifest = None
                if manifest and manifest.spec.ephemeral and is_usable:
                    continue
                driver = self._choose(manifest.runtime) if manifest else None
                await self._remove(id, manifest.entry if manifest else None, driver, abandoned=True)
                removed.append(id)
        return removed

    async def _sleep_at_end(self) -> None:
        """Put the sandboxes to sleep whose lifetime is over and that are not to be destroyed."""
        for id in self._store.due_to_sleep():
            try:
                await self._sleep(id)
            except AtollError as error:  # it is tried again later; until then its keeper has it frozen, or ended it
                _log.warning("the sandbox %s could not be put to sleep at the end of its lifetime: %s", id, error)

    async def remove_expired(self) -> list[str]:
        """Remove the sandboxes whose lifetime is over, or put them to sleep. Returns the ids of those that are removed;
        their checkpoints stay."""
        await self._sleep_at_end()
        removed = []
        for id in self._store.expired():
            try:
                try:
                    manifest = self._store.read(id)
                except SandboxError:
                    manifest = None
                driver = self._choose(manifest.runtime) if manifest else None
                await self._remove(id, manifest.entry if manifest else None, driver, expired=True)
            except AtollError as error:  # it is tried again later; until then it cannot be used
                _log.warning("the expired sandbox %s could not be removed: %s", id, error)
            else:
                removed.append(id)
        return removed

    def watch_expiries(self, tasks: BackgroundTasks, *new: SandboxInfo) -> None:
        """Remove sandboxes as their lifetimes end, or put them to sleep, in the background, for as long as any has
        one. `new` are those to which this process has given one: they may end before the one that is waited for."""
        if not self._watching and self._store.expiries():
            self._watching = True
            tasks.start_soon(self._watch_expiries)
        elif any(info.expires_at is not None and info.expires_at < self._next_look for info in new):
            self._look_earlier.set()

    async def _watch_expiries(self) -> None:
        try:
            while moments := self._store.expiries().values():
                left_s = (min(moments) - now()).total_seconds()
                # Another process may create one meanwhile, and removing may have failed. Its keeper ends it first.
                wait_s = min(max(left_s, 0) + _KEEPERS_S, _LONGEST_PAUSE_S)
                self._look_earlier, self._next_look = anyio.Event(), now() + timedelta(seconds=wait_s)
                with anyio.move_on_after(wait_s):
                    await self._look_earlier.wait()
                await self.remove_expired()
        except OSError:  # a full disk, for example: the next engine does it
            _log.exception("expired sandboxes could not be removed")
        finally:
            self._watching = False

    async def reconcile(self) -> None:
        """Finish or undo the interrupted operations on committed sandboxes."""
        for id in self._store.interrupted():
            with contextlib.suppress(AtollError):
                await self._lifecycle.reconcile(id)

    def begin(self, tasks: BackgroundTasks) -> None:
        """Finish or undo what processes that died have interrupted, and remove what expires, in the background."""
        self.finish_created()
        if self.is_needed():
            tasks.start_soon(self.recover)
        self.watch_expiries(tasks)

    async def recover(self) -> None:
        """Remove and reconcile all that was interrupted, then remove unreferenced layers.

        Operations that are in progress now are waited for: a program that one of them has started may hold its locks
        for a moment after the process that started it died.
        """
        waited_for = self._store.in_progress_ids()
        pause_s = _FIRST_PAUSE_S
        try:
            while True:
                waited_for &= self._store.in_progress_ids()
                await self.remove_abandoned()
                await self.reconcile()
                if not waited_for:
                    break
                await anyio.sleep(pause_s)
                pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
            await self._lifecycle.remove_unreferenced(timeout_s=1)
        except (
            AtollError,
            OSError,
        ):  # a full disk, for example: it is tried again when the state directory is next opened
            _log.exception("recovery of interrupted operations failed")
