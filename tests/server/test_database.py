"""The database: its tables after each migration, several processes at once, and what is refused."""

from __future__ import annotations

import contextlib
import re
import shutil
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import anyio
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.exc import DBAPIError, IntegrityError

from atoll.contract.errors import ConfigNotFound, DatabaseUnavailable, InvalidRequest
from atoll.server import database, migrations, tables
from atoll.server.audit import AuditEvent
from atoll.server.database import Database, RecentReads
from atoll.server.server import Server
from atoll.settings import Settings
from atoll.testing.waiting import BOUND_S, eventually

SCRIPTS = ScriptDirectory(str(Path(migrations.__file__).parent))
REVISIONS = [script.revision for script in reversed([*SCRIPTS.walk_revisions()])]
OPEN = """
import anyio, sys
from atoll.server.server import Server
from atoll.settings import Settings
async def main():
    sys.stdin.read(1)
    async with Server.open(Settings.from_environment()) as server:
        print(server.first_key is not None, [tenant.name for tenant in await server.tenants.list()])
print("ready", flush=True)
anyio.run(main)
"""


def test_the_head_is_the_last_revision() -> None:
    assert SCRIPTS.get_heads() == [migrations.HEAD]
    assert [f"{number:04}" for number in range(1, len(REVISIONS) + 1)] == REVISIONS


@pytest.mark.parametrize("revision", [None, *REVISIONS])
async def test_a_database_of_each_revision_becomes_one_of_today(
    new_url: Callable[[], str], tmp_path: Path, revision: str | None
) -> None:
    url = new_url()
    if revision is not None:
        older = Database(database_engine(url, tmp_path))
        async with older.write() as connection:
            await connection.run_sync(migrations.upgrade, revision)
            await connection.execute(sa.text("INSERT INTO tenants VALUES ('kept', '2026-01-01', false, '{}', '{}')"))
        await older.aclose()
    opened = await Database.open(url, tmp_path)
    try:
        async with opened.read() as connection:
            assert await connection.run_sync(differences) == []
            found = (await connection.execute(sa.select(tables.tenants.c.name))).scalars().all()
            assert found == ([] if revision is None else ["kept"])
    finally:
        await opened.aclose()


def database_engine(url: str, state_dir: Path):
    from atoll.server.database import _connect, _parse

    return _connect(_parse(url, state_dir))


def differences(connection: sa.Connection) -> list:
    context = MigrationContext.configure(connection, opts={"compare_type": True})
    return compare_metadata(context, tables.metadata)


async def test_a_database_of_a_newer_version_is_refused(new_url: Callable[[], str], tmp_path: Path) -> None:
    url = new_url()
    database = await Database.open(url, tmp_path)
    async with database.write() as connection:
        await connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    await database.aclose()
    with pytest.raises(InvalidRequest, match="newer version of Atoll"):
        await Database.open(url, tmp_path)


def test_of_two_processes_that_start_at_once_one_migrates_and_one_gets_the_first_key(
    new_url: Callable[[], str], tmp_path: Path
) -> None:
    environment = {"ATOLL_STATE_DIR": str(tmp_path), "ATOLL_DATABASE_URL": new_url(), "PATH": "/usr/bin:/bin"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", OPEN], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    said = sorted(process.communicate()[0] for process in started)
    assert said == ["False ['default']\n", "True ['default']\n"]


async def test_a_transaction_that_raises_leaves_nothing(server: Server) -> None:
    async def write() -> None:
        async with server.database.write() as connection:
            await connection.execute(sa.insert(tables.model_usage).values(tenant="default", month="2026-01", tokens=1))
            await connection.execute(sa.insert(tables.model_usage).values(tenant="default", month="2026-01", tokens=2))

    with pytest.raises(IntegrityError):
        await write()
    async with server.database.read() as connection:
        assert (await connection.execute(sa.select(tables.model_usage))).all() == []


async def test_two_servers_write_to_one_database_at_once(settings: Settings) -> None:
    async with Server.open(settings) as one, Server.open(settings) as other, anyio.create_task_group() as tasks:
        for server in (one, other):
            for _ in range(20):
                tasks.start_soon(server.quotas.spend_tokens, "default", 1)
    async with Server.open(settings) as third:
        assert await third.quotas.tokens("default") == 40


@pytest.mark.parametrize("verb", ["UPDATE audit SET status = 1", "DELETE FROM audit"])
async def test_the_database_refuses_to_change_the_audit_log(server: Server, verb: str) -> None:
    await server.audit.record(AuditEvent(request_id="r1", action="sandboxes_create", status=201))
    with pytest.raises((DBAPIError, DatabaseUnavailable)) as refused:
        async with server.database.write() as connection:
            await connection.execute(sa.text(verb))
    assert "append-only" in str(refused.value) + str(refused.value.__cause__)
    assert len(await server.audit.query(None)) == 1


async def test_an_operator_removes_old_entries_as_the_page_on_deployment_says(server: Server) -> None:
    page = (Path(__file__).parents[2] / "docs/deploy.md").read_text()
    name = "SQLite" if server.database.is_sqlite else "PostgreSQL"
    (script,) = re.findall(rf"```sql\n-- {name}\n(.*?)```", page, re.DOTALL)
    for days in (364, 366):
        old = datetime.now(UTC) - timedelta(days=days)
        await server.audit.record(AuditEvent(request_id=f"{days}", time=old, action="sandboxes_create", status=201))
    async with server.database._engine.connect() as connection:
        connection = await connection.execution_options(isolation_level="AUTOCOMMIT")
        for line in script.strip().splitlines():
            await connection.exec_driver_sql(line)
    assert [event.request_id for event in await server.audit.query(None)] == ["364"]
    with pytest.raises((DBAPIError, DatabaseUnavailable)):
        async with server.database.write() as connection:
            await connection.execute(sa.delete(tables.audit))


async def test_a_copy_that_sqlite_writes_while_the_server_runs_has_all_that_was_committed(tmp_path: Path) -> None:
    async with Server.open(Settings(state_dir=tmp_path / "state")) as server:
        await server.tenants.create("acme")
        with sqlite3.connect(tmp_path / "state/server/server.db") as other:
            other.execute(f"VACUUM INTO '{tmp_path}/copy.db'")
        other.close()
        await server.tenants.create("later")
    shutil.rmtree(tmp_path / "state/server")
    (tmp_path / "state/server").mkdir()
    (tmp_path / "copy.db").rename(tmp_path / "state/server/server.db")
    async with Server.open(Settings(state_dir=tmp_path / "state")) as server:
        assert [tenant.name for tenant in await server.tenants.list()] == ["acme", "default"]
        assert server.first_key is None


async def test_other_users_of_the_machine_cannot_read_the_database(tmp_path: Path) -> None:
    async with Server.open(Settings(state_dir=tmp_path / "state")):
        files = [tmp_path / "state", *(tmp_path / "state").rglob("*")]
        assert {path.name for path in files} >= {"server.db", "server.db-wal", "instances"}
        assert [path for path in files if path.stat().st_mode & 0o077] == []
        assert stat.S_IMODE((tmp_path / "state/server").stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "url",
    ["mysql://root:hunter2@h/x", "sqlite+aiosqlite:///hunter2.db", "hunter2", "postgresql+psycopg://u:hunter2@h/x"],
)
async def test_a_wrong_url_is_refused_without_its_password(tmp_path: Path, url: str) -> None:
    with pytest.raises(InvalidRequest, match="ATOLL_DATABASE_URL") as refused:
        await Database.open(url, tmp_path)
    assert "hunter2" not in f"{refused.value} {refused.value.hint}"


async def test_a_database_that_does_not_answer_is_said_to(tmp_path: Path) -> None:
    with pytest.raises(DatabaseUnavailable) as refused:
        await Database.open(f"postgresql://user:hunter2@/none?host={tmp_path}", tmp_path)
    assert "hunter2" not in f"{refused.value} {refused.value.hint}"


async def test_a_value_that_it_cannot_hold_is_not_said_to_be_its_failure(server: Server) -> None:
    far = datetime.max.replace(tzinfo=timezone(-timedelta(hours=23)))
    with pytest.raises(InvalidRequest, match="out of range"):
        await server.audit.query(None, until=far)
    with contextlib.suppress(InvalidRequest, ConfigNotFound):  # SQLite holds it
        await server.configs.get("default", "cfg_\0")


async def test_a_row_is_read_once_for_all_who_ask_and_anew_when_it_was_forgotten_meanwhile() -> None:
    asked: list[anyio.Event] = []

    async def read(_id: str) -> int:
        asked.append(anyio.Event())
        number = len(asked)
        await asked[-1].wait()
        return number

    recent = RecentReads(read)
    got: list[int] = []

    async def ask() -> None:
        got.append(await recent.get("a"))

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(ask)
        await eventually(lambda: len(asked) == 1, "read")
        recent.forget("a")  # as a key that is revoked while it is read
        tasks.start_soon(ask)
        await eventually(lambda: len(asked) == 2, "read anew")
        asked[1].set()
        await eventually(lambda: got == [2], "answered")
        asked[0].set()
    assert got == [2, 1, 1, 1]
    assert await recent.get("a") == 2


async def test_while_another_process_holds_sqlite_each_write_fails_soon_however_many_wait(
    make_state_dir: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_BUSY_S", 0.2)
    state_dir, refused = make_state_dir(), []
    (state_dir / "server").mkdir(parents=True)
    opened = await Database.open(None, state_dir)

    async def write() -> None:
        try:
            async with opened.write():
                pass
        except DatabaseUnavailable:
            refused.append(write)

    with contextlib.closing(sqlite3.connect(state_dir / "server" / "server.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with anyio.fail_after(BOUND_S):
            async with anyio.create_task_group() as tasks:
                for _ in range(200):  # one after the other, they would take 40 s
                    tasks.start_soon(write)
    assert len(refused) == 200
    await write()
    assert len(refused) == 200
    await opened.aclose()
