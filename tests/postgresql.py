"""A PostgreSQL for tests: a real one, of the distribution's package, with a directory and a socket of its own.

Knows how one is started and ended. Refuses to know the tables. PostgreSQL does not run as root, so as root it runs as
the package's user.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from atoll.testing.plugin import STRICT
from atoll.testing.waiting import wait_until

# Nothing of it is to survive: no commit waits for a disk.
_OPTIONS = "listen_addresses= fsync=off synchronous_commit=off full_page_writes=off max_connections=50".split()


class Postgresql:
    """A running server."""

    def __init__(self, programs: Path, directory: Path, user: str) -> None:
        self._programs = programs
        self._directory = directory
        self._user = user
        self._made = 0

    def url(self, name: str) -> str:
        return f"postgresql+asyncpg://{self._user}@/{name}?host={self._directory}"

    def create(self) -> str:
        """The URL of a new database."""
        self._made += 1
        self.sql(f"CREATE DATABASE test{self._made}")
        return self.url(f"test{self._made}")

    def empty(self, url: str, tables: Iterable[str]) -> None:
        """Remove all rows, also of tables whose triggers refuse it."""
        statement = f"SET session_replication_role = replica; TRUNCATE {', '.join(tables)} RESTART IDENTITY"
        self.sql(statement, url.rpartition("@/")[2].partition("?")[0])

    def sql(self, statement: str, database: str = "postgres") -> str:
        command = ["psql", "-h", str(self._directory), "-U", self._user, "-XAtq", "-c", statement, database]
        return subprocess.run(
            [self._programs / command[0], *command[1:]], check=True, capture_output=True, text=True
        ).stdout.strip()


def find_programs() -> Path:
    """Where the newest PostgreSQL of the distribution has its programs."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: int(path.parts[-3]))
    if not found:
        message = "PostgreSQL is not installed (Debian's package postgresql)"
        if STRICT:
            pytest.fail(message, pytrace=False)
        pytest.skip(message)
    return found[-1].parent


@contextmanager
def running() -> Iterator[Postgresql]:
    programs = find_programs()
    account = pwd.getpwnam("postgres") if os.geteuid() == 0 else pwd.getpwuid(os.geteuid())
    # Its socket's path may have 107 characters, and its user has to reach it: not below pytest's directory.
    directory = Path(tempfile.mkdtemp(prefix="atoll-postgresql-"))
    os.chown(directory, account.pw_uid, account.pw_gid)
    as_user: dict[str, Any] = (
        {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []} if os.geteuid() == 0 else {}
    )
    try:
        subprocess.run(
            [
                programs / "initdb",
                "--no-sync",
                "--auth=trust",
                "--locale=C",
                "--encoding=UTF8",
                "-D",
                directory / "data",
            ],
            check=True,
            capture_output=True,
            cwd=directory,
            **as_user,
        )
        options = [word for option in _OPTIONS for word in ("-c", option)]
        with (directory / "log").open("wb") as log:
            server = subprocess.Popen(
                [programs / "postgres", "-D", directory / "data", "-k", directory, *options],
                stdout=log,
                stderr=log,
                cwd=directory,
                **as_user,
            )
        try:
            ready = [str(programs / "pg_isready"), "-q", "-h", str(directory)]
            wait_until(
                lambda: server.poll() is not None or subprocess.run(ready, check=False).returncode == 0,
                "PostgreSQL answers",
            )
            assert server.poll() is None, (directory / "log").read_text()
            yield Postgresql(programs, directory, account.pw_name)
        finally:
            server.send_signal(signal.SIGQUIT)  # at once: nothing of it is kept
            server.wait()
    finally:
        shutil.rmtree(directory)
