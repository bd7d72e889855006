"""The audit log: nothing is answered before it is stored, and each tenant sees its own."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from datetime import UTC, datetime, timedelta

import anyio
import pytest

from atoll.contract.errors import DatabaseUnavailable
from atoll.server.audit import MAX_TEXT, AuditEvent
from atoll.server.database import Database, SqliteAppender
from atoll.server.server import Server
from atoll.settings import Settings


def event(number: int, **fields) -> AuditEvent:
    return AuditEvent(**{"request_id": f"r{number}", "action": "sandboxes_create", "status": 201, **fields})


async def test_events_are_stored_before_record_returns_however_many_come_at_once(
    settings: Settings, server: Server
) -> None:
    async with Server.open(settings) as other:

        async def record(number: int) -> None:
            await server.audit.record(event(number))
            stored = {each.request_id for each in await other.audit.query(None, limit=1000)}
            assert f"r{number}" in stored

        async with anyio.create_task_group() as tasks:
            for number in range(40):
                tasks.start_soon(record, number)
        ids = [each.id for each in await other.audit.query(None, limit=1000)]
        assert ids == sorted(set(ids), reverse=True)
        assert len(ids) == 40


async def test_a_text_that_a_database_cannot_hold_does_not_lose_the_events_of_others(server: Server) -> None:
    async with anyio.create_task_group() as tasks:  # they are written together
        tasks.start_soon(
            server.audit.record, event(0, tenant="default", resource="chat/a\0b", details={"\ud800": "\0"})
        )
        for number in range(1, 5):
            tasks.start_soon(server.audit.record, event(number, tenant="other"))
    stored = {each.request_id: each for each in await server.audit.query(None)}
    assert sorted(stored) == ["r0", "r1", "r2", "r3", "r4"]
    assert (stored["r0"].resource, stored["r0"].details) == ("chat/a\\0b", {"\\ud800": "\\0"})


async def test_an_event_is_stored_as_it_is_and_long_texts_are_cut(server: Server) -> None:
    whole = event(
        1, tenant="default", key="k1", key_name="ci", client="192.0.2.7", resource="sandbox/demo", details={"a": "b"}
    )
    await server.audit.record(whole)
    await server.audit.record(event(2, resource="x" * 5000, details={"y": "z" * 5000}))
    cut, stored = await server.audit.query(None)
    assert stored.model_copy(update={"id": 0}) == whole
    assert (len(cut.resource or ""), len(cut.details["y"])) == (MAX_TEXT, MAX_TEXT)


async def test_a_caller_that_is_cancelled_has_its_event_stored(server: Server) -> None:
    with anyio.CancelScope() as scope:
        scope.cancel()
        await server.audit.record(event(1))
    await server.audit.aclose()
    assert [each.request_id for each in await server.audit.query(None)] == ["r1"]


async def test_pages_and_filters(server: Server) -> None:
    for number in range(5):
        await server.audit.record(event(number, key=f"k{number % 2}", action=f"a{number}"))
    first = await server.audit.query(None, limit=2)
    second = await server.audit.query(None, limit=2, before=first[-1].id)
    assert [each.request_id for each in first + second] == ["r4", "r3", "r2", "r1"]
    assert [each.request_id for each in await server.audit.query(None, key="k1")] == ["r3", "r1"]
    assert [each.request_id for each in await server.audit.query(None, action="a2")] == ["r2"]
    assert await server.audit.query(None, until=first[0].time - timedelta(hours=1)) == []
    assert len(await server.audit.query(None, since=datetime.now(UTC) - timedelta(hours=1))) == 5


async def test_a_tenant_does_not_see_what_an_earlier_tenant_of_its_name_did(server: Server) -> None:
    older = await server.tenants.create("acme")
    await server.audit.record(event(1, tenant="acme"))
    await server.audit.record(event(2, tenant="default"))
    assert [each.request_id for each in await server.audit.query(older)] == ["r1"]
    await server.tenants.delete("acme")
    newer = await server.tenants.create("acme")
    assert await server.audit.query(newer) == []
    assert len(await server.audit.query(None)) == 2


async def test_when_the_database_fails_so_does_record_and_later_ones_are_stored(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    await server.audit.record(event(1))

    def fail(*_: object) -> None:
        raise OSError("the disk is gone")

    with monkeypatch.context() as broken:
        broken.setattr(SqliteAppender, "append", fail)
        broken.setattr(Database, "_append_remotely", fail)
        with pytest.raises(DatabaseUnavailable):
            await server.audit.record(event(2))
    await server.audit.record(event(3))
    assert [each.request_id for each in await server.audit.query(None)] == ["r3", "r1"]


async def test_a_transaction_of_another_process_is_waited_for_without_holding_up_others(server: Server) -> None:
    if not server.database.is_sqlite:
        return  # PostgreSQL has no lock of the whole database
    path = server.settings.resolve_state_dir() / "server" / "server.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.audit.record, event(1))
            for _ in range(3):  # the event loop goes on
                assert await server.audit.query(None) == []
            other.execute("COMMIT")
    assert [each.request_id for each in await server.audit.query(None)] == ["r1"]


async def test_the_write_ahead_log_does_not_grow_without_end(server: Server) -> None:
    if not server.database.is_sqlite:
        return
    log = server.settings.resolve_state_dir() / "server" / "server.db-wal"
    sizes = []
    for _ in range(4):
        for number in range(1, 1001):
            await server.audit.record(event(number))
        sizes.append(log.stat().st_size)
    assert sizes[-1] <= 2 * sizes[0]
