"""Idempotency keys: requests that come twice, at once, and again after the server's death."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import anyio
import pytest
import sqlalchemy as sa

from atoll.contract.errors import IdempotencyMismatch, InvalidRequest, TenantNotFound
from atoll.server import tables
from atoll.server.idempotency import IdempotentEntry
from atoll.server.server import Server
from atoll.settings import Settings

REQUEST = ("default", "key-1", "hash", "POST /api/v1/sandboxes")
DIES = """
import anyio, os, signal
from atoll.server.server import Server
from atoll.settings import Settings
async def main():
    async with Server.open(Settings.from_environment()) as server:
        async with server.idempotency.once("default", "key-1", "hash", "POST /api/v1/sandboxes") as entry:
            print(entry.resource, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
anyio.run(main)
"""


async def carry_out(server: Server, done: list[str], body: bytes = b"made") -> IdempotentEntry:
    async with server.idempotency.once(*REQUEST) as entry:
        if entry.replay is None:
            done.append(entry.resource)
            await anyio.lowlevel.checkpoint()
            entry.complete(201, body)
    return entry


async def test_a_request_that_comes_again_gets_the_same_answer_also_after_a_restart(settings: Settings) -> None:
    done: list[str] = []
    async with Server.open(settings) as server:
        first = await carry_out(server, done)
        again = await carry_out(server, done)
    async with Server.open(settings) as server:
        later = await carry_out(server, done)
    for entry in (again, later):
        assert entry.replay is not None
        assert (entry.replay.status, entry.replay.body, entry.resource) == (201, b"made", first.resource)
    assert done == [first.resource]


async def test_of_requests_at_once_one_is_carried_out_and_the_others_wait_for_its_answer(
    settings: Settings, server: Server
) -> None:
    done: list[str] = []
    async with Server.open(settings) as other, anyio.create_task_group() as tasks:
        for each in (server, other):
            for _ in range(5):
                tasks.start_soon(carry_out, each, done)
    assert len(done) == 1


@pytest.mark.parametrize(("request_hash", "path"), [("other", REQUEST[3]), ("hash", "POST /api/v1/volumes")])
async def test_a_key_of_another_request_is_refused(server: Server, request_hash: str, path: str) -> None:
    await carry_out(server, [])
    with pytest.raises(IdempotencyMismatch):
        async with server.idempotency.once("default", "key-1", request_hash, path):
            pass
    await server.tenants.create("acme")
    async with server.idempotency.once("acme", "key-1", request_hash, path) as entry:
        assert entry.replay is None  # keys are each tenant's own


async def test_a_request_that_fails_can_be_sent_again(server: Server) -> None:
    with pytest.raises(ValueError, match="failed"):
        async with server.idempotency.once(*REQUEST):
            raise ValueError("failed")
    with anyio.CancelScope() as scope:
        async with server.idempotency.once(*REQUEST) as entry:
            scope.cancel()
            await anyio.lowlevel.checkpoint()
    assert scope.cancelled_caught
    done: list[str] = []
    entry = await carry_out(server, done)
    assert (entry.interrupted, len(done)) == (False, 1)


async def test_a_request_whose_process_was_killed_is_known_to_be_interrupted(
    settings: Settings, tmp_path: Path
) -> None:
    environment = {"ATOLL_STATE_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
    if settings.database_url is not None:
        environment["ATOLL_DATABASE_URL"] = settings.database_url.get_secret_value()
    killed = subprocess.run([sys.executable, "-c", DIES], env=environment, stdout=subprocess.PIPE, check=False)
    assert killed.returncode == -9
    name = killed.stdout.decode().strip()
    async with Server.open(settings) as server:
        for _ in range(2):  # until it has an answer
            with suppress(ValueError):
                async with server.idempotency.once(*REQUEST) as entry:
                    assert (entry.interrupted, entry.resource, entry.replay) == (True, name, None)
                    raise ValueError("its outcome is not known")
        async with server.idempotency.once(*REQUEST) as entry:
            assert entry.interrupted
            entry.complete(201, b"found")
        async with server.idempotency.once(*REQUEST) as entry:
            assert entry.replay is not None
            assert entry.replay.body == b"found"
        assert len([*(tmp_path / "server/instances").iterdir()]) == 1


async def test_answers_are_kept_for_a_day(settings: Settings) -> None:
    done: list[str] = []
    async with Server.open(settings) as server:
        await carry_out(server, done)
        day_ago = datetime.now(UTC) - timedelta(hours=24, seconds=1)
        async with server.database.write() as connection:
            await connection.execute(sa.update(tables.idempotency).values(started_at=day_ago))
    async with Server.open(settings) as server:
        assert (await carry_out(server, done)).replay is None
    assert len(done) == 2


async def test_a_wrong_key_and_a_tenant_that_is_gone_are_refused(server: Server) -> None:
    for key in ("", "a b", "x" * 256, "ä", "a\n"):
        with pytest.raises(InvalidRequest, match="idempotency key"):
            async with server.idempotency.once("default", key, "hash", "POST /x"):
                pass
    with pytest.raises(TenantNotFound):
        async with server.idempotency.once("gone", "key-1", "hash", "POST /x"):
            pass
