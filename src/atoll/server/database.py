"""The server's database: SQLite in the state directory, or PostgreSQL.

Owns the connections, how a transaction begins and ends, and that the tables are those of this version when it is open.
Not here: the tables (`tables.py`), how they change (`migrations/`), and what is in them. Used by all of `server/`.

SQLite has one writer at a time. A transaction that writes takes its place when it begins (BEGIN IMMEDIATE): one that
read first could not become a writer after another has written. The transactions of this process queue for it here,
those of others in SQLite, which polls. `synchronous` is NORMAL, so that a commit waits for no disk: nothing is lost
when processes die, and what a power failure may lose is of its last moments. Where that would matter (a key that was
revoked), `write(durable=True)` waits for the disk.

A statement is never cut by a cancelled task: it is short, and how it ended would not be known.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import anyio
import anyio.to_thread
import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, StatementError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from atoll.contract.errors import DatabaseUnavailable, InvalidRequest
from atoll.drivers import locks
from atoll.server import migrations

if TYPE_CHECKING:
    from pydantic import SecretStr

T = TypeVar("T")
_DRIVERS = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg"}
_FORMS = "postgresql+asyncpg://USER:PASSWORD@HOST/NAME or sqlite+aiosqlite:////ABSOLUTE/PATH"
RECENT_S = 1.0
"""How old a record may be that is used without asking the database: another process's change is seen within this."""
_BUSY_S = 10
"""How long a transaction waits for another process's, or for PostgreSQL."""
_MIGRATION_S = 300
_CONNECTIONS = 8
_CHECKPOINT_ROWS = 1000
"""After so many appended rows the write-ahead log is copied into the database."""
_MAX_RECENT = 10_000
_MIGRATION_LOCK = 0x41746F6C6C
"""The key of PostgreSQL's advisory lock."""


class Database:
    """An open database, with the tables of this version."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._writing = engine.execution_options(atoll_writes=True)
        self._durable = engine.execution_options(atoll_writes=True, atoll_durable=True)
        self._turn = anyio.Lock()
        self._thread = ThreadPoolExecutor(1, "atoll-database")
        self._stepping: sa.Connection | None = None
        """SQLite's connection for `transact` and `look`, which only the thread uses."""
        self._appender: SqliteAppender | None = None
        """SQLite's connection for `append`, used by the task that has the turn."""
        self._remote: AsyncConnection | None = None
        """PostgreSQL's."""

    @classmethod
    async def open(cls, url: SecretStr | str | None, state_dir: Path) -> Database:
        """Connect, and bring the tables to this version; of several processes that do so at once, one does it.

        `url` unset: SQLite, in `server/server.db` of the state directory.

        Raises:
            InvalidRequest: the URL is wrong, or the database is of a newer version.
            DatabaseUnavailable: it does not answer.
        """
        database = cls(_connect(_parse(url, state_dir)))
        try:
            await database._migrate()
        except BaseException:
            await database.aclose()
            raise
        return database

    @property
    def is_sqlite(self) -> bool:
        return self._engine.dialect.name == "sqlite"

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """A connection for statements that change nothing. Each sees what was committed before it.

        Raises:
            DatabaseUnavailable: it does not answer.
        """
        with anyio.CancelScope(shield=True), _translating():
            async with self._engine.connect() as connection:
                yield connection

    @asynccontextmanager
    async def write(self, *, durable: bool = False) -> AsyncIterator[AsyncConnection]:
        """A transaction: all of the block's statements or, if it raises, none. `durable`: it is on the disk at the end.

        Raises:
            DatabaseUnavailable: it does not answer.
        """
        engine = self._durable if durable else self._writing
        async with self._queue():
            with anyio.CancelScope(shield=True), _translating():
                async with engine.begin() as connection:
                    yield connection

    async def transact(self, work: Callable[[sa.Connection], T]) -> T:
        """A transaction for what is done often: all of the statements of `work` or, if it raises, none. With SQLite it
        is one step of a thread, not several for each statement, and takes a third of the time of `write`.

        Raises:
            DatabaseUnavailable: it does not answer.
        """
        if not self.is_sqlite:
            async with self.write() as connection:
                return await connection.run_sync(work)
        return await self._in_thread(self._transact, work)

    async def look(self, work: Callable[[sa.Connection], T]) -> T:
        """As `transact`, for `work` that changes nothing.

        Raises:
            DatabaseUnavailable: it does not answer.
        """
        if not self.is_sqlite:
            async with self.read() as connection:
                return await connection.run_sync(work)
        return await self._in_thread(lambda asked: asked(self._kept()), work)

    async def _in_thread(
        self, step: Callable[[Callable[[sa.Connection], T]], T], work: Callable[[sa.Connection], T]
    ) -> T:
        async with self._taking_turn():
            with anyio.CancelScope(shield=True), _translating():
                return await asyncio.get_running_loop().run_in_executor(self._thread, step, work)
            raise AssertionError("a shielded scope is not cancelled")

    def _transact(self, work: Callable[[sa.Connection], T]) -> T:
        connection = self._kept()
        try:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            found = work(connection)
            connection.exec_driver_sql("COMMIT")
        except BaseException:
            try:
                connection.exec_driver_sql("ROLLBACK")
            except DBAPIError:
                self._end_stepping()
            raise
        return found

    async def append(self, table: sa.Table, rows: Sequence[Mapping[str, Any]]) -> None:
        """Insert rows, all or none, on a connection that is kept for this: a transaction of the pool takes ten times
        as long.

        Raises:
            DatabaseUnavailable: it does not answer.
        """
        async with self._taking_turn():
            with anyio.CancelScope(shield=True), _translating():
                if not self.is_sqlite:
                    await self._append_remotely(table, rows)
                    return
                if self._appender is None:
                    self._appender = SqliteAppender(self._engine)
                await self._appender.append(table, rows)

    async def _append_remotely(self, table: sa.Table, rows: Sequence[Mapping[str, Any]]) -> None:
        """PostgreSQL's driver sends them as one statement."""
        if self._remote is None:
            self._remote = await self._engine.execution_options(isolation_level="AUTOCOMMIT").connect()
        try:
            await self._remote.execute(sa.insert(table), rows)
        except BaseException:
            broken, self._remote = self._remote, None
            await broken.invalidate()
            await broken.close()
            raise

    def _kept(self) -> sa.Connection:
        """SQLite's connection for what is done in one step. Only the thread uses it."""
        if self._stepping is None:
            engine = sa.create_engine(f"sqlite:///{self._engine.url.database}", isolation_level="AUTOCOMMIT")
            sa.event.listen(engine, "connect", _configure_sqlite)
            self._stepping = engine.connect()
        return self._stepping

    def _end_stepping(self) -> None:
        if self._stepping is not None:
            stepping, self._stepping = self._stepping, None
            stepping.invalidate()
            stepping.close()
            stepping.engine.dispose()

    @asynccontextmanager
    async def _taking_turn(self) -> AsyncIterator[None]:
        """What SQLite lets only one do at a time. While another process holds its lock, each transaction before this
        one waits for `_BUSY_S`; all of them together are not waited for."""
        try:
            with anyio.fail_after(_BUSY_S):
                await self._turn.acquire()
        except TimeoutError as error:
            raise _unavailable(error) from None
        try:
            yield
        finally:
            self._turn.release()

    @asynccontextmanager
    async def _queue(self) -> AsyncIterator[None]:
        if not self.is_sqlite:
            yield
            return
        async with self._taking_turn():
            yield

    async def aclose(self) -> None:
        with anyio.CancelScope(shield=True):
            if self._appender is not None:
                self._appender.close()
            if self._stepping is not None:
                await asyncio.get_running_loop().run_in_executor(self._thread, self._end_stepping)
            self._thread.shutdown()
            if self._remote is not None:
                await self._remote.close()
            await self._engine.dispose()

    # ---- migrations ----

    async def _migrate(self) -> None:
        with _translating():
            if await self._revision() == migrations.HEAD:
                return
            async with self._migration_lock() as connection:
                await connection.run_sync(migrations.upgrade)

    async def _revision(self) -> str | None:
        """Of the tables. None: there are none."""
        async with self._engine.connect() as connection:
            if not await connection.run_sync(lambda sync: sa.inspect(sync).has_table("alembic_version")):
                return None
            found = await connection.execute(sa.text("SELECT version_num FROM alembic_version"))
            return found.scalar_one_or_none()

    @asynccontextmanager
    async def _migration_lock(self) -> AsyncIterator[AsyncConnection]:
        """A transaction in which no other process migrates."""
        if self.is_sqlite:
            lock = Path(f"{self._engine.url.database}.lock")
            async with locks.locked(lock, _MIGRATION_S, "migrating the server's database"), self.write() as connection:
                yield connection
        else:
            async with self._engine.begin() as connection:
                await connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
                yield connection


class RecentReads(Generic[T]):
    """What was read by an id, used again for `RECENT_S`; one read serves all who ask meanwhile.

    What is forgotten is read anew by all who ask from then on, also if it is just being read. An error is not kept.
    """

    def __init__(self, read: Callable[[str], Awaitable[T]]) -> None:
        self._read = read
        self._found: dict[str, tuple[float, T]] = {}
        self._reading: dict[str, asyncio.Task[T]] = {}

    async def get(self, id: str) -> T:
        found = self._found.get(id)
        if found is not None and time.monotonic() - found[0] < RECENT_S:
            return found[1]
        task = self._reading.get(id)
        if task is None:
            task = self._reading[id] = asyncio.create_task(self._load(id))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # perhaps no caller waits now
        return await asyncio.shield(task)

    async def _load(self, id: str) -> T:
        task, began = asyncio.current_task(), time.monotonic()
        try:
            value = await self._read(id)
            if self._reading.get(id) is task:
                if len(self._found) >= _MAX_RECENT:
                    self._found.clear()
                self._found[id] = began, value
            return value
        finally:
            if self._reading.get(id) is task:
                del self._reading[id]

    def forget(self, id: str) -> None:
        self._found.pop(id, None)
        self._reading.pop(id, None)

    def forget_all(self) -> None:
        self._found.clear()
        self._reading.clear()


class SqliteAppender:
    """A connection that only inserts, without a thread: a row takes 30 µs, of which no disk is waited for. To hand it
    to a thread takes ten times as long, and with many clients the two wait for each other's interpreter lock.

    What may take long is done in a thread all the same: waiting for a transaction of another process, and copying the
    write-ahead log into the database.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._dialect = engine.dialect
        self._connection = sqlite3.connect(
            str(engine.url.database), timeout=0, isolation_level=None, check_same_thread=False
        )
        for pragma in ("synchronous=NORMAL", "wal_autocheckpoint=0"):
            self._connection.execute(f"PRAGMA {pragma}")
        self._statements: dict[sa.Table, tuple[str, Mapping[str, Callable[[Any], Any] | None]]] = {}
        self._appended = 0

    async def append(self, table: sa.Table, rows: Sequence[Mapping[str, Any]]) -> None:
        """All of the rows or none. One call at a time."""
        statement, processors = self._statement(table)
        given = [
            [value if (process := processors[name]) is None else process(value) for name, value in row.items()]
            for row in rows
        ]
        try:
            self._insert(statement, given)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                raise
            await anyio.to_thread.run_sync(self._insert_after_others, statement, given)
        self._appended += len(rows)
        if self._appended >= _CHECKPOINT_ROWS:
            self._appended = 0
            await anyio.to_thread.run_sync(self._connection.execute, "PRAGMA wal_checkpoint(PASSIVE)")

    def _statement(self, table: sa.Table) -> tuple[str, Mapping[str, Callable[[Any], Any] | None]]:
        """The text that inserts a row with all columns but the one that counts up, and what makes their values."""
        if table not in self._statements:
            columns = [column for column in table.columns if not column.primary_key]
            names = ", ".join(f'"{column.name}"' for column in columns)
            text = f'INSERT INTO "{table.name}" ({names}) VALUES ({", ".join("?" * len(columns))})'  # noqa: S608
            makers = {
                each.name: each.type.dialect_impl(self._dialect).bind_processor(self._dialect) for each in columns
            }
            self._statements[table] = text, makers
        return self._statements[table]

    def _insert(self, statement: str, given: list[list[Any]]) -> None:
        if len(given) == 1:  # a transaction of its own
            self._connection.execute(statement, given[0])
            return
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            self._connection.executemany(statement, given)
            self._connection.execute("COMMIT")
        except BaseException:
            self._connection.rollback()
            raise

    def _insert_after_others(self, statement: str, given: list[list[Any]]) -> None:
        self._connection.execute(f"PRAGMA busy_timeout={_BUSY_S * 1000}")
        try:
            self._insert(statement, given)
        finally:
            self._connection.execute("PRAGMA busy_timeout=0")

    def close(self) -> None:
        self._connection.close()


def _parse(url: SecretStr | str | None, state_dir: Path) -> sa.URL:
    if url is None:
        return sa.URL.create(_DRIVERS["sqlite"], database=str(state_dir / "server" / "server.db"))
    try:
        parsed = sa.make_url(url if isinstance(url, str) else url.get_secret_value())
    except ArgumentError:
        raise InvalidRequest(f"the database's URL (ATOLL_DATABASE_URL) is not one; write {_FORMS}") from None
    kind = parsed.get_backend_name()
    if kind not in _DRIVERS or parsed.drivername not in (kind, _DRIVERS[kind]):
        raise InvalidRequest(f"{parsed.drivername!r} is not a kind of database (ATOLL_DATABASE_URL); write {_FORMS}")
    if kind == "sqlite" and not os.path.isabs(parsed.database or ""):
        raise InvalidRequest(f"the database's path must be absolute (ATOLL_DATABASE_URL); write {_FORMS}")
    return parsed.set(drivername=_DRIVERS[kind])


def _connect(url: sa.URL) -> AsyncEngine:
    options: dict[str, Any] = {"pool_size": _CONNECTIONS, "max_overflow": 0, "pool_timeout": _BUSY_S}
    if url.get_backend_name() == "postgresql":
        options["connect_args"] = {"timeout": _BUSY_S, "command_timeout": _BUSY_S}
        return create_async_engine(url, pool_pre_ping=True, **options)
    path = Path(url.database or "")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    engine = create_async_engine(url, **options)
    sa.event.listen(engine.sync_engine, "connect", _configure_sqlite)
    sa.event.listen(engine.sync_engine, "begin", _begin_sqlite)
    return engine


def _configure_sqlite(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # transactions begin in `_begin_sqlite` only
    cursor = connection.cursor()
    pragmas = (f"busy_timeout={_BUSY_S * 1000}", "journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON")
    for pragma in pragmas:
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: sa.Connection) -> None:
    options = connection.get_execution_options()
    if options.get("atoll_writes"):
        connection.exec_driver_sql(f"PRAGMA synchronous={'FULL' if options.get('atoll_durable') else 'NORMAL'}")
        connection.exec_driver_sql("BEGIN IMMEDIATE")


@contextmanager
def _translating() -> Iterator[None]:
    """Errors of the database that are not about what was stored. The driver's own message may have the URL."""
    try:
        yield
    except IntegrityError:
        raise
    except StatementError as error:
        if _is_of_value(error):
            raise InvalidRequest(
                "a text has a NUL character, or a time or a number is out of range: the server's database cannot hold "
                "it"
            ) from error
        raise _unavailable(error) from error
    except (sqlite3.Error, sa.exc.TimeoutError, OSError) as error:
        raise _unavailable(error) from error


def _is_of_value(error: StatementError) -> bool:
    """Whether the database works, and what was given to it is the reason: PostgreSQL's class 22 of errors, and what
    its driver or SQLAlchemy cannot convert."""
    state = getattr(error.orig, "sqlstate", None)
    cause = error.orig.__cause__ if isinstance(error, DBAPIError) and error.orig is not None else error.orig
    return str(state or "").startswith("22") or isinstance(cause, OverflowError | ValueError)


def _unavailable(error: Exception) -> DatabaseUnavailable:
    return DatabaseUnavailable(
        "the server's database failed or does not answer; try again", hint=f"{type(error).__name__}: {error}"
    )
