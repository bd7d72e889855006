"""`SandboxPool`: the sandboxes of a session, which are created when they are used and sleep when they are not."""

from __future__ import annotations

import signal

import anyio
import pytest

from atoll import Engine, InvalidRequest, Sandbox, SandboxError, SandboxNotFound
from atoll.contract.model import RuntimeName
from atoll.testing.inside import client
from atoll.testing.waiting import eventually


@pytest.mark.core
async def test_a_sandbox_is_made_once_however_many_ask_for_it(engine: Engine) -> None:
    async with engine.pool("session-1", env={"A": "pool", "B": "pool"}) as pool:
        assert await pool.list() == []
        found: list[Sandbox] = []

        async def ask() -> None:
            found.append(await pool.get())

        async with anyio.create_task_group() as group:
            for _ in range(10):
                group.start_soon(ask)
        assert len({sandbox.id for sandbox in found}) == 1
        other = await pool.get("other", env={"A": "own"})
        assert other.id != found[0].id
        assert (await found[0].exec("echo $A $B")).stdout == "pool pool\n"
        assert (await other.exec("echo $A")).stdout == "own\n"
        assert [(each.name, each.image, each.status) for each in await pool.list()] == [
            ("default", "host", "running"),
            ("other", "host", "running"),
        ]
        assert all(each.last_used_at is not None for each in await pool.list())
        await pool.destroy("other")
        with pytest.raises(SandboxNotFound):
            await pool.destroy("other")
        await pool.aclose()
        assert await pool.list() == []


async def test_sessions_do_not_see_each_other_and_are_found_again(engine: Engine, runtime_name: RuntimeName) -> None:
    async with engine.pool("one") as one, engine.pool("two") as two:
        await (await one.get("box")).files.write_text("f", "one")
        await (await two.get("box")).files.write_text("f", "two")
        assert await (await one.get("box")).files.read_text("f") == "one"
        assert [each.name for each in await one.list()] == ["box"]
    body = """
async with engine.pool("one") as pool:
    say(await (await pool.get("box")).files.read_text("f"))
"""
    async with client(engine.state_dir, runtime_name, body) as other:
        assert await other.line() == "one"
        await other.succeeds()
    async with engine.pool("one") as one, engine.pool("two") as two:
        await one.aclose()
        assert [each.name for each in await two.list()] == ["box"]
        await two.aclose()


async def test_the_unused_go_to_sleep_and_come_back_with_their_files(engine: Engine) -> None:
    async with engine.pool("tired", sleep_after_s=0.5) as pool:
        sandbox = await pool.get()
        await sandbox.files.write_text("f", "kept")
        # A running command and an open stream count as use.
        assert (await sandbox.exec("sleep 0.8; echo done")).stdout == "done\n"
        process = await sandbox.spawn("sleep 31537201")
        await anyio.sleep(0.8)
        assert [each.status for each in await pool.list()] == ["running"]
        await process.kill()
        await process.wait()

        async def asleep() -> bool:
            return [each.status for each in await pool.list()] == ["sleeping"]

        await eventually(asleep, "it sleeps")
        pool.sleep_after("default", None)
        assert await (await pool.get()).files.read_text("f") == "kept"
        assert [each.status for each in await pool.list()] == ["running"]
        await pool.aclose()


@pytest.mark.parametrize("session", ["", "A", "a.b", "a b", "x" * 33, "../x", "-a"])
async def test_a_session_that_cannot_be_is_refused(engine: Engine, session: str) -> None:
    with pytest.raises(InvalidRequest, match="allowed are"):
        async with engine.pool(session):
            pass


async def test_names_and_times_that_cannot_be_are_refused(engine: Engine) -> None:
    async with engine.pool("strict") as pool:
        for name in ("", "A", "../x", "a b"):
            with pytest.raises(InvalidRequest, match="allowed are"):
                await pool.get(name)
        with pytest.raises(InvalidRequest, match="30 characters"):
            await pool.get("x" * 31)
        with pytest.raises(InvalidRequest, match="above 0"):
            pool.sleep_after("a", 0)
        assert await pool.list() == []
    for seconds in (0, -1):
        with pytest.raises(InvalidRequest, match="above 0"):
            async with engine.pool("strict", sleep_after_s=seconds):
                pass


@pytest.mark.usefixtures("can_freeze")
async def test_a_temporary_session_leaves_nothing_and_is_one_clients_alone(engine: Engine) -> None:
    async with engine.pool("lent", temporary=True) as pool, engine.pool("lent-2") as other:
        await (await pool.get()).checkpoint("mark")
        await (await pool.create("gone")).checkpoint()
        await pool.destroy("gone")
        await other.get()
        with pytest.raises(SandboxError, match="another process uses the session 'lent'"):
            async with engine.pool("lent", temporary=True):
                pass
        await engine.remove_abandoned()  # its process lives, so it stays
        assert [each.name for each in await pool.list()] == ["default"]
    assert [info.name for info in await engine.list()] == ["lent-2.default"]
    assert await engine.checkpoints() == []
    await engine.destroy("lent-2.default")


@pytest.mark.runtimes("crun")
async def test_a_temporary_session_whose_process_is_killed_is_ended_by_the_next(
    engine: Engine, runtime_name: RuntimeName
) -> None:
    body = """
async with engine.pool("lent", temporary=True) as pool:
    await (await pool.get()).checkpoint("mark")
    say("ready")
    await anyio.sleep_forever()
"""
    async with client(engine.state_dir, runtime_name, body) as other:
        assert await other.line() == "ready"
        await engine.remove_abandoned()
        assert [info.name for info in await engine.list()] == ["lent.default"]
        other.send_signal(signal.SIGKILL)
        await other.ends()
    await engine.remove_abandoned()
    assert await engine.list() == []
    assert await engine.checkpoints() == []
