"""Who has a session: one that ends with its process, also when that is killed, or one that is kept.

Knows the lease that says that somebody lives who has a session, and what is a session's. Refuses to know what a session
is for, and how its sandboxes are ended (`host.py`).

    temporary-leases/<session>  in the state directory, locked by who has it. What stands here and is not locked was left by
                        somebody who died, and is ended by whoever next puts things in order
    leases/<session>      the same of a session that is kept, which several may have at once. Its being here says nothing
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

_LOCK_TIMEOUT_S = 1.0
"""For who looks whether a lease that was made in this moment was left."""


class SessionLeases:
    def __init__(
        self,
        state_dir: Path,
        *,
        names: Callable[[], Iterable[str]],
        checkpoints: Callable[[], Iterable[Checkpoint]],
        destroy: Callable[[str], Awaitable[None]],
        delete: Callable[[str], Awaitable[None]],
    ) -> None:
        self._root = state_dir / "temporary-leases"
        self._kept = state_dir / "leases"
        for directory in (self._root, self._kept):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._names = names
        self._checkpoints = checkpoints
        self._destroy = destroy
        self._delete = delete

    @contextlib.asynccontextmanager
    async def temporary(self, session: str) -> AsyncIterator[None]:
        """Have a session. When the context ends, or this process, nothing of it stays.

        Raises:
            SandboxError: somebody else has it, or something of it could not be ended; others will try that again.
        """
        async with self._leased(self._root / session, _LOCK_TIMEOUT_S):
            try:
                yield
            finally:
                with anyio.CancelScope(shield=True):
                    await self._end(session)

    @contextlib.asynccontextmanager
    async def kept(self, session: str, *, on_last_release: Callable[[], Awaitable[None]] | None) -> AsyncIterator[None]:
        """Have a session, as others may at the same time. `on_last_release` is called when the context ends and nobody
        else has it."""
        try:
            async with self._leased(self._kept / session, _LOCK_TIMEOUT_S, shared=True):
                yield
        finally:
            with anyio.CancelScope(shield=True):
                if await self._is_deserted(session) and on_last_release is not None:
                    await on_last_release()

    async def _is_deserted(self, session: str) -> bool:
        # Of two who leave at once the later one finds that it is the last: each has let go before it looks.
        with contextlib.suppress(SandboxError):
            async with self._leased(self._kept / session, 0):
                (self._kept / session).unlink()
            return True
        return False

    def abandoned(self) -> list[str]:
        """Those whose owners died."""
        return [session for session in os.listdir(self._root) if not is_held(self._root / session)]

    async def end_abandoned(self) -> None:
        """End what was left, as far as it can be."""
        for session in self.abandoned():
            with contextlib.suppress(AtollError):
                async with self._leased(self._root / session, 0):
                    await self._end(session)

    @contextlib.asynccontextmanager
    async def _leased(self, lease: Path, timeout_s: float, *, shared: bool = False) -> AsyncIterator[None]:
        while True:
            fd = open_lock(lease)
            try:
                if not await lock_within(fd, timeout_s, shared=shared):
                    raise SandboxError(f"another process uses the session {lease.name!r}")
                if os.fstat(fd).st_nlink:  # else who had it before has just ended it, and removed this very file
                    yield
                    return
            finally:
                os.close(fd)

    async def _end(self, session: str) -> None:
        """Destroy its sandboxes and delete their checkpoints. One that cannot be ended does not keep the others."""
        prefix = f"{session}."
        checkpoints = [each.id for each in self._checkpoints() if each.sandbox.startswith(prefix)]
        ends = [partial(self._destroy, name) for name in self._names() if name.startswith(prefix)]
        failures: list[AtollError] = []
        for end in (*ends, *(partial(self._delete, id) for id in checkpoints)):
            try:
                await end()
            except (SandboxNotFound, CheckpointNotFound):
                continue
            except AtollError as error:
                failures.append(error)
        if failures:
            raise failures[0]
        (self._root / session).unlink(missing_ok=True)
