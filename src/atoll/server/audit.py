"""The audit log of the server: who did what, and how it ended.

Owns the events and their order. Rows are only added: no statement here changes or removes one, and triggers in the
database refuse both (`migrations/`). How long they are kept is the operator's to decide, and to do, outside of the
server (docs/deploy.md). Not here: which requests are recorded (`surfaces/rest/`), and connections of sandboxes, which
have a log of their own (`runtime/egress/audit.py`).

`record` is awaited before a request is answered, so events are committed in groups: while one group is written, those
that come wait together for the next.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import anyio
import sqlalchemy as sa

from atoll.contract.errors import AtollError
from atoll.contract.frozen import Field, Frozen
from atoll.server.database import Database
from atoll.server.tables import audit
from atoll.server.tenants import Tenant
from atoll.tools.tool import readable

MAX_PAGE = 1000
MAX_DETAILS = 64
"""Entries of `AuditEvent.details`. Their values are cut to `MAX_TEXT` characters, as all texts are."""
MAX_TEXT = 1000


class AuditEvent(Frozen):
    """One thing that was done, or refused. It holds nothing secret: a caller leaves values out."""

    id: int = 0
    """Counts up. 0: it is not stored yet."""
    time: datetime = Field(default_factory=lambda: datetime.now(UTC))
    request_id: str
    tenant: str | None = None
    """In which it was done. Unset: it was of the server, or the caller was not known."""
    key: str | None = None
    """The id of the API key. Unset: the caller was not known, or it was the command line of this machine."""
    key_name: str | None = None
    client: str | None = None
    """The address that the request came from."""
    action: str
    """What was asked for: the operation's name, such as `sandboxes_create`."""
    resource: str | None = None
    """What it was done to: `sandbox/demo`. Unset: nothing of its own."""
    status: int
    """As HTTP counts: 200, 403, 404 …"""
    details: dict[str, str] = Field(default_factory=dict)


class AuditTrail:
    """The events of all tenants."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: list[tuple[dict[str, Any], asyncio.Future[None]]] = []
        self._writer: asyncio.Task[None] | None = None

    async def record(self, event: AuditEvent) -> None:
        """Store an event. When this returns, it is committed; a caller that is cancelled has it stored all the same.

        Raises:
            DatabaseUnavailable: it may not be stored.
        """
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((_row(event), written))
        if self._writer is None:
            self._writer = asyncio.create_task(self._write(), name="atoll audit")
        await written

    async def query(
        self,
        tenant: Tenant | None,
        *,
        before: int | None = None,
        limit: int = 100,
        action: str | None = None,
        key: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> list[AuditEvent]:
        """The latest events, newest first; those `before` an id, for the next page. `tenant` unset: of all.

        A tenant sees its own, not those of an earlier tenant of its name.
        """
        query = sa.select(audit).order_by(audit.c.id.desc()).limit(min(limit, MAX_PAGE))
        if tenant is not None:
            query = query.where(audit.c.tenant == tenant.name, audit.c.time >= tenant.created_at)
        if before is not None:
            query = query.where(audit.c.id < before)
        for column, wanted in ((audit.c.action, action), (audit.c.key, key)):
            if wanted is not None:
                query = query.where(column == wanted)
        if since is not None:
            query = query.where(audit.c.time >= since)
        if until is not None:
            query = query.where(audit.c.time < until)
        async with self._database.read() as connection:
            rows = (await connection.execute(query)).mappings()
            return [AuditEvent.model_validate(dict(row)) for row in rows]

    async def aclose(self) -> None:
        """Wait until all events are stored."""
        with anyio.CancelScope(shield=True):
            if self._writer is not None:
                await asyncio.wait([self._writer])

    async def _write(self) -> None:
        while self._waiting:
            group, self._waiting = self._waiting, []
            failure: AtollError | None = None
            try:
                await self._database.append(audit, [row for row, _ in group])
            except AtollError as error:
                failure = error
            for _, written in group:
                if not written.done():  # a caller that was cancelled has given up on it
                    written.set_result(None) if failure is None else written.set_exception(failure)
        self._writer = None


def _row(event: AuditEvent) -> dict[str, Any]:
    values = event.model_dump(exclude={"id", "details"})
    cut = {name: _storable(value) if isinstance(value, str) else value for name, value in values.items()}
    details = {_storable(key): _storable(value) for key, value in [*event.details.items()][:MAX_DETAILS]}
    return {**cut, "details": details}


def _storable(text: str) -> str:
    """As every database can hold it. Events of all tenants are written together: one that cannot be stored would have
    the others fail."""
    return readable(text[:MAX_TEXT]).replace("\0", "\\0")[:MAX_TEXT]
