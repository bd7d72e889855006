"""Warm pools: a create claims a warm sandbox that fits its spec, no other create gets it, and the pool is refilled."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest

import atoll
from atoll import (
    Capabilities,
    Engine,
    GcResult,
    InvalidRequest,
    LaunchFailed,
    Limits,
    SandboxDied,
    SandboxExists,
    Settings,
    Unenforceable,
)
from atoll.contract.model import RuntimeName
from atoll.runtime.engine import LocalEngine
from atoll.runtime.lifecycle import warm_pool
from atoll.testing.inside import client
from atoll.testing.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll import Sandbox


def waiting(engine: Engine) -> set[str]:
    """The ids of the warm sandboxes; `-` before one that is being created or claimed."""
    names = os.listdir(engine.state_dir / "warm")
    return {name if name.startswith("-") else name.partition(".")[2] for name in names}


async def ready(engine: Engine, count: int) -> set[str]:
    """The ids of the warm sandboxes, once there are `count`."""

    async def full() -> bool:
        return [each.ready for each in await engine.warm_pools()] == [count]

    await eventually(full, f"{count} warm sandboxes are ready")
    return waiting(engine)


@asynccontextmanager
async def warm(engine: Engine, count: int, **kind: object) -> AsyncIterator[set[str]]:
    """A warm pool of `count` sandboxes for as long as the context lasts."""
    try:
        shown = await engine.warm(count, **kind)  # type: ignore[arg-type]
        assert (shown.count, shown.ready) == (count, count)
        yield waiting(engine)
    finally:
        await engine.warm(0, **kind)  # type: ignore[arg-type]
        assert await engine.warm_pools() == []
        assert waiting(engine) == set()


async def look(sandbox: Sandbox) -> str:
    """What can be seen inside, except what differs between any two sandboxes."""
    line = (
        "id; pwd; env | grep -v HOSTNAME | sort; ulimit -n; sed s/$(hostname)// /etc/hosts; cat /proc/1/cmdline; "
        "ls -aR /home /tmp /run"
    )
    return (await sandbox.exec(line)).stdout


@pytest.mark.core
async def test_a_claimed_sandbox_looks_like_a_new_one(engine: Engine, capabilities: Capabilities) -> None:
    limits = Limits(memory_bytes=64 << 20 if capabilities.memory_limit else None, open_files=64)
    options = {"limits": limits, "env": {"MODE": "test"}, "user": "root"}
    new = await engine.create("box-1", **options)  # type: ignore[arg-type]
    async with warm(engine, 2, limits=limits) as ids:
        assert [info.name for info in await engine.list()] == ["box-1"], "warm sandboxes are not listed"
        before = datetime.now(UTC)
        with pytest.raises(SandboxExists):
            await engine.create("box-1", **options)  # type: ignore[arg-type]
        taken = await engine.create("box-2", **options)  # type: ignore[arg-type]
        assert taken.id in ids
        assert before < taken.info.created_at < datetime.now(UTC)
        varying = {"id", "name", "created_at", "last_used_at", "pid"}
        assert taken.info.model_dump(exclude=varying) == new.info.model_dump(exclude=varying)
        assert taken.info in await engine.list()
        assert await taken.processes() == []
        assert len(await taken.ps()) == len(await new.ps())
        assert (await taken.exec("hostname; uname -n")).stdout == "box-2\nbox-2\n"
        assert (await taken.exec("getent hosts box-2")).stdout.split() == ["127.0.0.1", "box-2"]
        assert await look(taken) == await look(new)
        assert taken.id not in await ready(engine, 2), "the pool was refilled"
        await new.destroy()
        if capabilities.memory_limit:
            fill = ["python3", "-c", "x = bytearray(200_000_000)"]
            if capabilities.process_oom:
                assert (await taken.exec(fill)).out_of_memory
            else:
                with pytest.raises(SandboxDied):
                    await taken.exec(fill)
        # From here on it is like any other sandbox: it sleeps, wakes with its name and files, and is destroyed.
        if capabilities.process_oom:
            await taken.exec("echo 1 > /srv/kept")
            await taken.sleep()
            assert (await taken.exec("cat /srv/kept; hostname")).stdout == "1\nbox-2\n"
        await taken.destroy()


@pytest.mark.core
async def test_a_create_claims_a_warm_sandbox_only_where_the_spec_fits(
    engine: Engine, runtime_name: RuntimeName, capabilities: Capabilities
) -> None:
    with pytest.raises(InvalidRequest, match="0 to 1000"):
        await engine.warm(-1)
    if not capabilities.pids_limit:
        with pytest.raises(Unenforceable):
            await engine.warm(1, limits=Limits(pids=10))
    assert await engine.warm_pools() == []
    async with warm(engine, 1) as ids:
        async with await engine.create(limits=Limits(open_files=99)) as other:
            assert other.id not in ids
        assert waiting(engine) == ids
        if capabilities.freeze:
            async with await engine.create(pause_after_s=0.05) as pausing:
                assert pausing.id in ids

                async def paused() -> bool:
                    return [info.status for info in await engine.list()] == ["paused"]

                await eventually(paused, "it pauses by itself")
        ids = await ready(engine, 1)
        body = """
async with atoll.open(sys.argv[1], settings=atoll.Settings(runtime=sys.argv[2])) as other:
    box = await other.create("brief", ephemeral=True)
    say(box.id, (await box.exec("hostname")).stdout.strip())
"""
        async with client(engine.state_dir, runtime_name, body) as brief:
            id, hostname = (await brief.line()).split()
            await brief.succeeds()
        assert (id in ids, hostname) == (True, "brief")

        async def ended() -> bool:
            await engine.remove_abandoned()
            return await engine.list() == []

        await eventually(ended, "an ephemeral one ends with its last client")


async def test_of_many_creates_at_once_each_claims_its_own_sandbox(engine: Engine, runtime_name: RuntimeName) -> None:
    each, count = (10, 6) if runtime_name == "crun" else (2, 2)  # the others are slower and claim in the same way
    body = f"""
sys.stdin.readline()
async def one(name):
    box = await engine.create(name)
    say(box.id, name, (await box.exec("hostname")).stdout.strip())
async with anyio.create_task_group() as group:
    for number in range({each}):
        group.start_soon(one, f"of-{{os.getpid()}}-{{number}}")
"""
    async with (
        warm(engine, count) as ids,
        client(engine.state_dir, runtime_name, body) as left,
        client(engine.state_dir, runtime_name, body) as right,
    ):
        for process in (left, right):
            assert process.stdin is not None
            await process.stdin.send(b"go\n")
        lines = [(await process.line()).split() for process in (left, right) for _ in range(each)]
        assert len({id for id, _, _ in lines}) == 2 * each
        assert all(name == hostname for _, name, hostname in lines)
        assert ids <= {id for id, _, _ in lines}, "every warm sandbox was claimed"
        await left.succeeds()
        await right.succeeds()
        assert not await ready(engine, count) & {id for id, _, _ in lines}, "the pool was refilled with new sandboxes"
        async with anyio.create_task_group() as group:
            for info in await engine.list():
                group.start_soon(engine.destroy, info.name)


KILLED = """
import os, random, signal, sys
import anyio, atoll
import anyio._backends._asyncio, atoll.runtime.engine  # once for all children

async def take(number, after_s):
    async with atoll.open(sys.argv[1], settings=atoll.Settings(runtime=sys.argv[2])) as engine:
        signal.setitimer(signal.ITIMER_REAL, after_s)  # not handled: it kills as SIGKILL does
        box = await engine.create(f"victim-{number}")
        os.write(1, f"{box.id} {box.name}\\n".encode())  # in one call, so that no half line is read

chance = random.Random(int(sys.argv[3]))
for number in range(int(sys.argv[4])):
    after_s = chance.choice([0.003, 0.006, 0.012, 0.05]) * (0.2 + chance.random())
    child = os.fork()
    if child == 0:
        anyio.run(take, number, after_s)
        os._exit(0)
    os.waitpid(child, 0)
"""


async def test_a_process_that_is_killed_while_it_claims_leaves_the_sandbox_warm_or_claimed_or_collectable(
    engine: Engine, runtime_name: RuntimeName
) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    state = engine.state_dir
    turns, rounds, count = (2, 8, 3) if runtime_name == "crun" else (1, 2, 1)
    async with warm(engine, count):
        for turn in range(turns):
            await engine.warm(count)
            command = [sys.executable, "-c", KILLED, str(state), runtime_name, str(seed + turn), str(rounds)]
            done = await anyio.run_process(command, stderr=subprocess.STDOUT)
            lines = [line.split() for line in done.stdout.decode().splitlines()]
            assert all(len(words) == 2 for words in lines), done.stdout.decode()
            given = dict(lines)
            await engine.gc()
            assert not {name for name in await ready(engine, count) if name.startswith("-")}
            names = {info.id: info.name for info in await engine.list()}
            assert given.items() <= names.items(), "a claim that was reported is a claim"
            assert not names.keys() & waiting(engine)
            for name in names.values():
                sandbox = await engine.get(name)
                assert (await sandbox.exec("hostname")).stdout == f"{name}\n"
                await sandbox.destroy()
            left = {*os.listdir(state / "sandboxes"), *os.listdir(state / "uncommitted")}
            assert left == waiting(engine), "only warm sandboxes are left"


@pytest.fixture
async def fastest(state_dir: Path, any_settings: Settings) -> AsyncIterator[Engine]:
    """For tests that would give the same with every runtime."""
    async with atoll.open(state_dir, settings=any_settings) as engine:
        yield engine


async def collects_nothing(engine: Engine) -> bool:
    return await engine.gc() == GcResult()


async def test_a_dead_or_outdated_warm_sandbox_is_never_claimed(fastest: Engine, tmp_path: Path) -> None:
    engine = fastest
    root = tmp_path / "image"
    (root / "etc").mkdir(parents=True)
    (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    image = f"dir:{root}"
    async with warm(engine, 1, image=image) as stale:
        with pytest.raises(InvalidRequest, match="atoll warm"):
            await engine.images.remove(image)
        await eventually(partial(collects_nothing, engine), "what others have just removed is gone")
        assert waiting(engine) == stale
        (root / "etc/passwd").write_text("root:x:0:0:changed:/root:/bin/sh\n")
        async with await engine.create(image=image) as sandbox:
            assert sandbox.id not in stale
            assert "changed" in await sandbox.files.read_text("/etc/passwd")

        async def replaced() -> bool:
            return [each.ready for each in await engine.warm_pools()] == [1] and not waiting(engine) & stale

        await eventually(replaced, "the outdated sandbox is replaced")
        dead = waiting(engine)
        (id,) = dead
        os.kill(int((engine.state_dir / "sandboxes" / id / "keeper.lock").read_text()), signal.SIGKILL)
        async with await engine.create(image=image) as sandbox:
            assert sandbox.id not in dead
        assert not await ready(engine, 1) & dead


async def test_create_works_while_the_pool_cannot_be_refilled(
    fastest: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = fastest
    assert isinstance(engine, LocalEngine)
    monkeypatch.setattr(warm_pool, "_RETRY_S", (0.02, 0.1))
    failing = True
    mark_ready = engine._warm_pools._make

    async def fails(*arguments: object) -> None:
        if failing:
            raise LaunchFailed("not today")
        await mark_ready(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(engine._warm_pools, "_make", fails)
    with pytest.raises(LaunchFailed, match="not today"):
        await engine.warm(1)
    assert await engine.warm_pools() == []
    failing = False
    async with warm(engine, 1) as ids:
        failing = True
        for expected in (True, False):
            async with await engine.create() as sandbox:
                assert (sandbox.id in ids) is expected
        await eventually(lambda: "trying again later" in caplog.text, "the failure is logged")
        failing = False
        assert not await ready(engine, 1) & ids


async def test_a_burst_of_claims_is_served_before_a_pool_that_is_half_full_is_refilled(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, runtime_name: RuntimeName
) -> None:
    limits = Limits(open_files=300)  # of no other test: no refill of theirs is left
    for bound in ("_BURST_PAUSE_S", "_LONGEST_BURST_S"):
        monkeypatch.setattr(warm_pool, bound, 60.0)
    created = 0
    launch = warm_pool.WarmPools._create_some

    async def counted(self: warm_pool.WarmPools, count: int, *rest: object) -> None:
        nonlocal created
        created += 1
        await launch(self, count, *rest)  # type: ignore[arg-type]

    async with warm(engine, 4, limits=limits):
        monkeypatch.setattr(warm_pool.WarmPools, "_create_some", counted)
        boxes = [await engine.create(f"burst-{number}", limits=limits) for number in range(2)]
        assert len(waiting(engine)) == 2
        assert created == 0, "half of it is left, and more claims may follow"
        boxes.append(await engine.create("burst-2", limits=limits))
        await ready(engine, 4)
        assert created == 1, "less than half was left"
        for box in boxes:
            await box.destroy()
