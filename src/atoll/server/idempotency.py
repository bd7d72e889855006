"""Idempotency keys: a request that a client sends again is answered again, and carried out once.

Owns what is stored of a request until a day after it, and what is known of one whose process died. Not here: the
header, the hash of a request, and what is done (`surfaces/rest/`). The answers are stored as they are: one with a
secret in it must not be given to `complete`.

A row is written before the work begins, with the name of what will be made. Each start of the server is an instance
with a random id, which holds a lock in `server/instances/` for as long as it lives: a row whose instance holds none was
interrupted. Which part of its work was done, only its resource can tell.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from atoll.contract.errors import IdempotencyMismatch, InvalidRequest, TenantNotFound
from atoll.drivers import locks
from atoll.server.database import Database
from atoll.server.tables import idempotency, tenants

KEPT_S = 24 * 3600
"""How long an answer is kept."""
KEY_RULE = "1 to 255 printable characters of ASCII, without spaces"
_KEY = re.compile(r"[!-~]{1,255}")
_CLEANED_S = 3600
_POLL_S = 0.05


class IdempotentReplay:
    """The answer to a request that was carried out before."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status = status
        self.body = body


class IdempotentEntry:
    """One request with a key, in `Idempotency.once`."""

    def __init__(self, resource: str, *, interrupted: bool = False, replay: IdempotentReplay | None = None) -> None:
        self.resource = resource
        """The name of what the request makes, chosen before the work began and the same each time."""
        self.interrupted = interrupted
        """True: the process that began it died. The resource may exist, or not, or not any more."""
        self.replay = replay
        """The answer to give. Unset: the request is to be carried out, and `complete` called."""
        self.completed: IdempotentReplay | None = None

    def complete(self, status: int, body: bytes) -> None:
        """Set the answer. It is stored at the end of the block, and nothing is if this is not called: the request can
        then be sent again."""
        self.completed = IdempotentReplay(status, body)


class Idempotency:
    """The idempotency keys of a server's tenants."""

    def __init__(self, database: Database, instances: Path, instance: str, lock: int) -> None:
        self._database = database
        self._instances = instances
        self.instance = instance
        """The id of this process."""
        self._lock: int | None = lock
        self._running: dict[tuple[str, str], anyio.Event] = {}
        self._cleaned_at = float("-inf")

    @classmethod
    async def open(cls, database: Database, state_dir: Path) -> Idempotency:
        instances = state_dir / "server" / "instances"
        instances.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_dead_locks(instances)
        instance = os.urandom(8).hex()
        return cls(database, instances, instance, _claim(instances / instance))

    @asynccontextmanager
    async def once(
        self, tenant: str, key: str, request_hash: str, path: str, *, resource: str | None = None
    ) -> AsyncIterator[IdempotentEntry]:
        """The block carries the request out, unless `replay` is set. If another task does so now, wait for its answer.

        `path` is the method and the path, `resource` the name that the client chose; unset, it gets one. Of an
        interrupted request that raises again, the next says `interrupted` too; after any other, nothing is stored.

        Raises:
            InvalidRequest: the key is not allowed.
            IdempotencyMismatch: the key was used with another request.
            TenantNotFound: the tenant is gone.
        """
        if not _KEY.fullmatch(key):
            raise InvalidRequest(f"the idempotency key is not allowed; allowed are {KEY_RULE}")
        await self._remove_old()
        entry = await self._begin(tenant, key, request_hash, path, resource or f"sandbox-{os.urandom(4).hex()}")
        if entry.replay is not None:
            yield entry
            return
        try:
            yield entry
        finally:
            with anyio.CancelScope(shield=True):
                try:
                    await self._end(tenant, key, entry)
                finally:
                    self._running.pop((tenant, key)).set()

    def is_alive(self, instance: str) -> bool:
        """Whether the process of this instance lives."""
        return locks.is_held(self._instances / instance)

    async def aclose(self) -> None:
        """Closing twice does nothing."""
        if self._lock is not None:
            (self._instances / self.instance).unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None

    # ---- one request ----

    async def _begin(self, tenant: str, key: str, request_hash: str, path: str, resource: str) -> IdempotentEntry:
        new = {
            "tenant": tenant,
            "key": key,
            "path": path,
            "request_hash": request_hash,
            "resource": resource,
            "instance": self.instance,
        }
        while True:
            if (running := self._running.get((tenant, key))) is not None:
                await running.wait()
                continue
            self._running[tenant, key] = anyio.Event()
            begun = False
            try:
                entry = await self._take(new)
                begun = entry is not None and entry.replay is None
            finally:
                if not begun:
                    self._running.pop((tenant, key)).set()
            if entry is not None:
                return entry
            await anyio.sleep(_POLL_S)  # another process is at it

    async def _take(self, new: dict[str, Any]) -> IdempotentEntry | None:
        """Begin the request, or say how it stands. None: another process carries it out."""
        where = sa.and_(idempotency.c.tenant == new["tenant"], idempotency.c.key == new["key"])
        try:
            async with self._database.write() as connection:
                await connection.execute(sa.insert(idempotency).values(**new, started_at=datetime.now(UTC)))
                return IdempotentEntry(new["resource"])
        except IntegrityError:
            pass
        async with self._database.write() as connection:
            row = (await connection.execute(sa.select(idempotency).where(where).with_for_update())).one_or_none()
            if row is None:
                owner = sa.select(tenants.c.name).where(tenants.c.name == new["tenant"])
                if (await connection.execute(owner)).one_or_none() is None:
                    raise TenantNotFound(new["tenant"])
                return None  # it has just been removed
            if (row.path, row.request_hash) != (new["path"], new["request_hash"]):
                raise IdempotencyMismatch(
                    "this idempotency key was used with another request; use a new key for each request, and the same "
                    "one only to send a request again"
                )
            if row.status is not None:
                return IdempotentEntry(row.resource, replay=IdempotentReplay(row.status, row.body))
            if row.instance != self.instance and self.is_alive(row.instance):
                return None
            await connection.execute(sa.update(idempotency).where(where).values(instance=self.instance))
            return IdempotentEntry(row.resource, interrupted=True)

    async def _end(self, tenant: str, key: str, entry: IdempotentEntry) -> None:
        where = sa.and_(idempotency.c.tenant == tenant, idempotency.c.key == key)
        async with self._database.write() as connection:
            if entry.completed is not None:
                answer = {"status": entry.completed.status, "body": entry.completed.body}
                await connection.execute(sa.update(idempotency).where(where).values(answer))
            elif not entry.interrupted:
                await connection.execute(sa.delete(idempotency).where(where))

    # ---- cleaning ----

    async def _remove_old(self) -> None:
        now = time.monotonic()
        if now - self._cleaned_at < _CLEANED_S:
            return
        self._cleaned_at = now
        old = idempotency.c.started_at < datetime.now(UTC) - timedelta(seconds=KEPT_S)
        async with self._database.write() as connection:
            await connection.execute(sa.delete(idempotency).where(old))


def _claim(path: Path) -> int:
    """Make a lock file and hold it. One that others see before it is held is removed by them, as of the dead."""
    while True:
        lock = locks.open_lock(path)
        if locks.try_lock(lock) and path.exists():
            return lock
        os.close(lock)


def _remove_dead_locks(instances: Path) -> None:
    for name in os.listdir(instances):
        with suppress(FileNotFoundError):
            lock = os.open(instances / name, os.O_RDWR | os.O_CLOEXEC)
            try:
                if locks.try_lock(lock):
                    (instances / name).unlink()
            finally:
                os.close(lock)
