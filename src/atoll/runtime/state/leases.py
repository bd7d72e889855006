"""Session leases: a session that ends with its process, also when that is killed, or one that is kept.

Owns the lease files, which say that a living process uses a session, and which sandboxes and checkpoints belong to one.
Not here: what a session is for (`sandbox_pool.py`), and how its sandboxes are destroyed (the engine). Used by the
engine.

    temporary-leases/<session>  locked by the process that uses it. A lease that is not locked is abandoned: its process
                                died, and the session is ended at the next recovery. Empty, or it says that the
                                session's checkpoints stay
    leases/<session>            locked, shared, by all processes that use a session that is kept. One that is not locked
                                means nothing

A session belongs to a namespace (`namespaces.py`). Recovery ends abandoned ones of all namespaces.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path

import anyio

from atoll.contract.errors import AtollError, CheckpointNotFound, SandboxError, SandboxNotFound
from atoll.contract.model import Checkpoint
from atoll.drivers.locks import is_held, lock_within, open_lock
from atoll.runtime.state.namespaces import entry_of, split_entry

_KEEPS = b"checkpoints stay\n"
"""In the lease of a session whose checkpoints outlive it."""
_LOCK_TIMEOUT_S = 1.0
"""Recovery in another process holds a lease for a moment, to test whether it is abandoned."""


class SessionLeases:
    """The sessions of one namespace. The first argument of `names`, `checkpoints`, `destroy` and `delete` is the
    namespace that they are to work in, which in recovery may be another."""

    def __init__(
        self,
        state_dir: Path,
        namespace: str,
        *,
        names: Callable[[str], Iterable[str]],
        checkpoints: Callable[[str], Iterable[Checkpoint]],
        destroy: Callable[[str, str], Awaitable[object]],
        delete: Callable[[str, str], Awaitable[None]],
    ) -> None:
        self._namespace = namespace
        self._root = state_dir / "temporary-leases"
        self._kept = state_dir / "leases"
        for directory in (self._root, self._kept):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._names = names
        self._checkpoints = checkpoints
        self._destroy = destroy
        self._delete = delete

    @contextlib.asynccontextmanager
    async def temporary(self, session: str, *, keeps_checkpoints: bool = False) -> AsyncIterator[None]:
        """Use a session alone. When the context ends, or this process, its sandboxes are removed, and their checkpoints
        unless it keeps them.

        Raises:
            SandboxError: another process uses it, or a part of it could not be removed; recovery tries that again.
        """
        entry = entry_of(self._namespace, session)
        async with self._leased(self._root / entry, _LOCK_TIMEOUT_S):
            if keeps_checkpoints:
                (self._root / entry).write_bytes(_KEEPS)
            try:
                yield
            finally:
                with anyio.CancelScope(shield=True):
                    await self._end(entry)

    @contextlib.asynccontextmanager
    async def kept(self, session: str, *, on_last_release: Callable[[], Awaitable[None]] | None) -> AsyncIterator[None]:
        """Use a session, as other processes may at the same time. `on_last_release` is called when the context ends and
        no other process uses it."""
        entry = entry_of(self._namespace, session)
        try:
            async with self._leased(self._kept / entry, _LOCK_TIMEOUT_S, shared=True):
                yield
        finally:
            with anyio.CancelScope(shield=True):
                if await self._was_last(entry) and on_last_release is not None:
                    await on_last_release()

    async def _was_last(self, entry: str) -> bool:
        # Of two that end at once the later one finds that it was the last: each has unlocked before it tests.
        with contextlib.suppress(SandboxError):
            async with self._leased(self._kept / entry, 0):
                (self._kept / entry).unlink()
            return True
        return False

    def abandoned(self) -> list[str]:
        """The entries of temporary sessions, of all namespaces, whose processes died."""
        return [entry.name for entry in os.scandir(self._root) if entry.is_file() and not is_held(Path(entry))]

    async def end_abandoned(self) -> None:
        """End the sessions whose processes died. One that cannot be ended is tried again at the next recovery."""
        for entry in self.abandoned():
            with contextlib.suppress(AtollError):
                async with self._leased(self._root / entry, 0):
                    await self._end(entry)

    @contextlib.asynccontextmanager
    async def _leased(self, lease: Path, timeout_s: float, *, shared: bool = False) -> AsyncIterator[None]:
        while True:
            fd = open_lock(lease)
            try:
                if not await lock_within(fd, timeout_s, shared=shared):
                    raise SandboxError(f"another process uses the session {split_entry(lease.name)[1]!r}")
                if os.fstat(fd).st_nlink:  # else its last user has just ended it, and removed this very file
                    yield
                    return
            finally:
                os.close(fd)

    async def _end(self, entry: str) -> None:
        """Destroy its sandboxes and delete their checkpoints. A failure does not prevent the removal of the others."""
        namespace, session = split_entry(entry)
        prefix = f"{session}."
        keeps = (self._root / entry).stat().st_size > 0
        checkpoints = [
            each.id for each in self._checkpoints(namespace) if not keeps and each.sandbox.startswith(prefix)
        ]
        ends: list[Callable[[], Awaitable[object]]] = [
            partial(self._destroy, namespace, name) for name in self._names(namespace) if name.startswith(prefix)
        ]
        ends += [partial(self._delete, namespace, id) for id in checkpoints]
        failures: list[AtollError] = []
        for end in ends:
            try:
                await end()
            except (SandboxNotFound, CheckpointNotFound):
                continue
            except AtollError as error:
                failures.append(error)
        if failures:
            raise failures[0]
        (self._root / entry).unlink(missing_ok=True)
