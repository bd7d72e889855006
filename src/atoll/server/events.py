"""Events: what happened to the sandboxes of tenants, in order, by any process.

Owns the rows and their sequence, how changes are noticed, and how readers follow them without loss. There are two
sources. What is done through this server is seen at once (`saw`, `gone`), before it is answered. What other processes
do, and deaths with their reasons, is seen by a watcher that compares `Engine.list` with what was last known. Both tell
only how a sandbox is; which events that makes is decided against the rows of `sandbox_states`, in the transaction that
writes the events: each change is one event, however many processes see it, and what happened while no server ran is
noticed by the next.

Not here: deliveries to webhooks (`webhooks.py`), which are written in the same transaction, and HTTP.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, get_args

import anyio
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from atoll.contract.frozen import Field, Frozen
from atoll.contract.model import SandboxInfo, Status
from atoll.server.database import Database
from atoll.server.tables import events, sandbox_states

EventType = Literal[
    "created",
    "paused",
    "resumed",
    "slept",
    "woke",
    "shutdown",
    "died",
    "expired",
    "destroyed",
    "checkpointed",
    "restored",
    "updated",
    "lost",
]
EVENT_TYPES: tuple[EventType, ...] = get_args(EventType)
KEPT_S = 7 * 24 * 3600
KEPT_PER_TENANT = 10_000
"""Older events are removed; one of the type `lost` stands in for them, for those who resume before it."""
WATCH_S = 1.0
"""How often changes by others are looked for, at most."""
_WATCH_SHARE = 0.03
"""Of one core: looking takes no more than this, up to some ten thousand sandboxes."""
_WATCH_MOST_S = 15.0
_POLL_S = 1.0
"""How often events that another process wrote are looked for, while someone follows."""
_PRUNE_S = 600.0
_BATCH = 500
_SEQUENCE_LOCK = 0x41746F6C6C45
"""PostgreSQL gives numbers before it commits: writers take turns, so that no number appears after a higher one."""
_SAME_EXPIRY_S = 10.0
"""A lifetime that each use renews is not stored each time."""
_STARTED: tuple[Status, ...] = ("running", "paused")


class SandboxEvent(Frozen):
    """Something that happened to a sandbox."""

    id: int
    """Counts up, among all tenants. The `id` of a server-sent event."""
    time: datetime
    """When it was noticed."""
    tenant: str
    type: EventType
    """`lost`: events before this one are no longer kept."""
    sandbox: str | None = None
    """Its name. Unset: the event is about no single sandbox."""
    sandbox_id: str | None = None
    reason: str | None = None
    """Why it died. Else unset."""
    details: dict[str, str] = Field(default_factory=dict)


class _KnownSandbox(Frozen):
    """How a sandbox was when it was last seen."""

    id: str
    tenant: str
    name: str
    status: str
    expires_at: datetime | None = None


NewEvent = dict[str, Any]
OnWritten = Callable[[AsyncConnection, Sequence[SandboxEvent]], Awaitable[None]]
ListSandboxes = Callable[[], Awaitable[Mapping[str, Sequence[SandboxInfo]]]]


class Events:
    """The events of a server. `on_written` is called in the transaction that writes them."""

    def __init__(self, database: Database, list_sandboxes: ListSandboxes, on_written: OnWritten) -> None:
        self._database = database
        self._list = list_sandboxes
        self._on_written = on_written
        self._known: dict[str, _KnownSandbox] = {}
        self._seen_at: dict[str, float] = {}
        self._last = 0
        self._changed = anyio.Event()
        self._followers = 0
        self._pruned_at = float("-inf")
        self.watch_s = WATCH_S
        self.on_commit: Callable[[], None] = lambda: None
        """Called after events were written here."""

    # ---- what is seen ----

    async def saw(self, tenant: str, info: SandboxInfo) -> None:
        """Say how a sandbox is after something was done to it here. When this returns, its events are stored."""
        self._seen_at[info.id] = time.monotonic()
        await self._observe(tenant, [info])
        self._seen_at[info.id] = time.monotonic()

    async def gone(self, tenant: str, id: str) -> None:
        """Say that a sandbox was destroyed here."""
        self._seen_at[id] = time.monotonic()
        await self._observe(tenant, [], gone=[id])

    async def record(self, tenant: str, type: EventType, info: SandboxInfo, **details: str) -> None:
        """Store an event that its status does not tell: a checkpoint, say."""
        async with self._database.write() as connection:
            await self._take_turn(connection)
            written = await self._insert(connection, [_event(tenant, type, info.name, info.id, details=details)])
        self._publish(written)

    async def _observe(self, tenant: str, infos: Iterable[SandboxInfo], *, gone: Sequence[str] = ()) -> None:
        changed = []
        for info in infos:
            known = self._known.get(info.id)
            if _differs(known, info):
                changed.append(info)
            elif known is not None and known.expires_at != info.expires_at:
                self._known[info.id] = known.model_copy(update={"expires_at": info.expires_at})
        if not changed and not gone:
            return
        ids = [*(info.id for info in changed), *gone]
        async with self._database.write() as connection:
            await self._take_turn(connection)
            stored = await self._read_states(connection, ids)
            new: list[NewEvent] = []
            for info in changed:
                new += _changes(tenant, stored.get(info.id), info)
                await self._store_state(connection, tenant, info, exists=info.id in stored)
            new += [_ended(self._known.get(id, stored[id])) for id in gone if id in stored]
            if gone:
                await connection.execute(sa.delete(sandbox_states).where(sandbox_states.c.id.in_(gone)))
            written = await self._insert(connection, new)
        for info in changed:
            self._known[info.id] = _KnownSandbox(
                id=info.id, tenant=tenant, name=info.name, status=info.status, expires_at=info.expires_at
            )
        for id in gone:
            self._known.pop(id, None)
        self._publish(written)

    async def _take_turn(self, connection: AsyncConnection) -> None:
        if not self._database.is_sqlite:
            await connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_SEQUENCE_LOCK)))

    async def _read_states(self, connection: AsyncConnection, ids: Sequence[str]) -> dict[str, _KnownSandbox]:
        found: dict[str, _KnownSandbox] = {}
        for start in range(0, len(ids), _BATCH):
            query = sa.select(sandbox_states).where(sandbox_states.c.id.in_(ids[start : start + _BATCH]))
            for row in await connection.execute(query):
                found[row.id] = _KnownSandbox.model_validate(row._asdict())
        return found

    async def _store_state(self, connection: AsyncConnection, tenant: str, info: SandboxInfo, *, exists: bool) -> None:
        values = {"tenant": tenant, "name": info.name, "status": info.status, "expires_at": info.expires_at}
        if exists:
            await connection.execute(sa.update(sandbox_states).where(sandbox_states.c.id == info.id).values(values))
        else:
            await connection.execute(sa.insert(sandbox_states).values(id=info.id, **values))

    async def _insert(self, connection: AsyncConnection, new: Sequence[NewEvent]) -> list[SandboxEvent]:
        written = []
        for each in new:
            id = (await connection.execute(sa.insert(events).values(each).returning(events.c.id))).scalar_one()
            written.append(SandboxEvent(id=id, **each))
        if written:
            await self._on_written(connection, written)
        return written

    def _publish(self, written: Sequence[SandboxEvent]) -> None:
        if written:
            self._advance(written[-1].id)
            self.on_commit()

    def _advance(self, last: int) -> None:
        if last > self._last:
            self._last = last
            changed, self._changed = self._changed, anyio.Event()
            changed.set()

    # ---- watching ----

    async def watch(self) -> None:
        """Look for changes that others made, until this is cancelled."""
        async with self._database.read() as connection:
            for row in await connection.execute(sa.select(sandbox_states)):
                self._known[row.id] = _KnownSandbox.model_validate(row._asdict())
        lately: deque[float] = deque(maxlen=8)
        while True:
            began = time.monotonic()
            await self.look()
            lately.append(time.monotonic() - began)
            if began - self._pruned_at > _PRUNE_S:
                self._pruned_at = began
                await self.prune()
            # The quickest of them was the least disturbed by others: what looking costs by itself.
            await anyio.sleep(min(max(self.watch_s, min(lately) / _WATCH_SHARE), _WATCH_MOST_S))

    async def look(self) -> None:
        """Compare all sandboxes with what was last known of them."""
        began = time.monotonic()
        found = await self._list()
        # What was done here meanwhile may be newer than the list.
        skipped = {id for id, seen_at in self._seen_at.items() if seen_at >= began}
        self._seen_at = {id: seen_at for id, seen_at in self._seen_at.items() if seen_at >= began}
        gone_of: dict[str, list[str]] = {}
        present = {info.id for infos in found.values() for info in infos}
        self._known = {id: known for id, known in self._known.items() if known.tenant in found}
        for known in self._known.values():
            if known.id not in present and known.id not in skipped:
                gone_of.setdefault(known.tenant, []).append(known.id)
        for tenant, infos in found.items():
            await self._observe(
                tenant, [info for info in infos if info.id not in skipped], gone=gone_of.get(tenant, ())
            )

    async def prune(self) -> None:
        """Remove events that are too old or too many."""
        oldest = datetime.now(UTC) - timedelta(seconds=KEPT_S)
        async with self._database.write() as connection:
            for tenant in (await connection.execute(sa.select(events.c.tenant).distinct())).scalars().all():
                of_tenant = events.c.tenant == tenant
                many = sa.select(events.c.id).where(of_tenant).order_by(events.c.id.desc()).offset(KEPT_PER_TENANT)
                old = sa.select(sa.func.max(events.c.id)).where(of_tenant, events.c.time < oldest)
                found = [(await connection.execute(query)).scalar_one_or_none() for query in (many.limit(1), old)]
                last = max((id for id in found if id is not None), default=None)
                if last is None:
                    continue
                await connection.execute(sa.delete(events).where(of_tenant, events.c.id < last))
                marked: dict[str, Any] = {
                    "type": "lost",
                    "sandbox": None,
                    "sandbox_id": None,
                    "reason": None,
                    "details": {},
                }
                await connection.execute(sa.update(events).where(events.c.id == last).values(marked))

    # ---- reading ----

    async def latest(self) -> int:
        """The id of the last event. What is followed after it is what happens from now on."""
        async with self._database.read() as connection:
            last: int = (await connection.execute(sa.select(sa.func.max(events.c.id)))).scalar_one_or_none() or 0
        self._advance(last)
        return last

    async def read(
        self,
        tenant: str,
        after: int,
        *,
        sandbox_id: str | None = None,
        types: Sequence[EventType] | None = None,
        limit: int = _BATCH,
    ) -> list[SandboxEvent]:
        """Events of a tenant after an id, the oldest first."""
        query = sa.select(events).where(events.c.tenant == tenant, events.c.id > after)
        if sandbox_id is not None:
            query = query.where(sa.or_(events.c.sandbox_id == sandbox_id, events.c.type == "lost"))
        if types:
            query = query.where(events.c.type.in_((*types, "lost")))
        async with self._database.read() as connection:
            rows = await connection.execute(query.order_by(events.c.id).limit(limit))
            return [SandboxEvent.model_validate(row._asdict()) for row in rows]

    async def follow(
        self,
        tenant: str,
        after: int,
        *,
        sandbox_id: str | None = None,
        types: Sequence[EventType] | None = None,
    ) -> AsyncIterator[SandboxEvent]:
        """Events of a tenant after an id, then those that happen, for ever."""
        self._followers += 1
        try:
            while True:
                changed, reached = self._changed, self._last
                batch = await self.read(tenant, after, sandbox_id=sandbox_id, types=types)
                for event in batch:
                    yield event
                    after = event.id
                if not batch:
                    after = max(after, reached)
                    await changed.wait()
        finally:
            self._followers -= 1

    async def poll(self) -> None:
        """Notice events that other processes wrote, until this is cancelled."""
        while True:
            await anyio.sleep(_POLL_S)
            if self._followers:
                await self.latest()


def _differs(known: _KnownSandbox | None, info: SandboxInfo) -> bool:
    if info.status == "provisioning":
        return False  # it is described when it is complete
    if known is None or (known.status, known.name) != (info.status, info.name):
        return True
    if known.expires_at is None or info.expires_at is None:
        return known.expires_at is not info.expires_at
    return abs((known.expires_at - info.expires_at).total_seconds()) > _SAME_EXPIRY_S


def _changes(tenant: str, known: _KnownSandbox | None, info: SandboxInfo) -> list[NewEvent]:
    """The events between what was known of a sandbox and how it is."""

    def event(type: EventType, **values: Any) -> NewEvent:
        return _event(tenant, type, info.name, info.id, **values)

    before, now = known.status if known else None, info.status
    found = [event("created", details={"image": info.image, "runtime": info.runtime})] if known is None else []
    if before == now or (known is None and now == "running"):
        return found
    pauses = now == "paused" and info.on_expiry == "pause"
    if known is not None and (pauses or now in ("sleeping", "shutdown")) and _is_over(known.expires_at):
        found.append(event("expired", details={"on_expiry": "pause" if pauses else "sleep"}))
    if now in _STARTED and before in ("sleeping", "shutdown", "error"):
        found.append(event("woke"))
    if now == "paused":
        found.append(event("paused"))
    elif now == "running" and before == "paused":
        found.append(event("resumed"))
    elif now == "sleeping":
        found.append(event("slept"))
    elif now == "shutdown":
        found.append(event("shutdown"))
    elif now == "error":
        found.append(event("died", reason=info.reason))
    return found


def _ended(known: _KnownSandbox) -> NewEvent:
    if _is_over(known.expires_at):
        return _event(known.tenant, "expired", known.name, known.id, details={"on_expiry": "destroy"})
    return _event(known.tenant, "destroyed", known.name, known.id)


def _is_over(moment: datetime | None) -> bool:
    return moment is not None and moment <= datetime.now(UTC)


def _event(
    tenant: str,
    type: EventType,
    name: str,
    id: str,
    *,
    reason: str | None = None,
    details: Mapping[str, str] | None = None,
) -> NewEvent:
    return {
        "time": datetime.now(UTC),
        "tenant": tenant,
        "type": type,
        "sandbox": name,
        "sandbox_id": id,
        "reason": reason,
        "details": dict(details or {}),
    }
