"""Sandboxes that wait: a create takes one that is just what it asks for, nobody else gets it, and another is put up."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest

import atoll
from atoll import Capabilities, InvalidRequest, LaunchFailed, Limits, Runtime, SandboxDied, SandboxExists, Unenforceable
from atoll.contract.model import RuntimeName
from atoll.runtime.lifecycle import warm_pool as shelf
from tests.conformance.inside import client
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll import Sandbox


def waiting(runtime: Runtime) -> set[str]:
    """The ids of those that wait; `-` before one that is being put up or taken."""
    names = os.listdir(runtime.state_dir / "waiting")
    return {name if name.startswith("-") else name.partition(".")[2] for name in names}


async def ready(runtime: Runtime, count: int) -> set[str]:
    """The ids of those that wait, once they are as many."""

    async def full() -> bool:
        return [each.ready for each in await runtime.shelves()] == [count]

    await eventually(full, f"{count} wait")
    return waiting(runtime)


@asynccontextmanager
async def warm(runtime: Runtime, count: int, **kind: object) -> AsyncIterator[set[str]]:
    """So many wait, as long as the context lasts."""
    try:
        shown = await runtime.warm(count, **kind)  # type: ignore[arg-type]
        assert (shown.count, shown.ready) == (count, count)
        yield waiting(runtime)
    finally:
        await runtime.warm(0, **kind)  # type: ignore[arg-type]
        assert await runtime.shelves() == []
        assert waiting(runtime) == set()


async def look(sandbox: Sandbox) -> str:
    """What can be seen inside, but for what is any sandbox's own."""
    line = "id; pwd; env | grep -v HOSTNAME | sort; ulimit -n; cat /etc/hosts /proc/1/cmdline; ls -aR /home /tmp /run"
    return (await sandbox.exec(line)).stdout


@pytest.mark.core
async def test_one_that_waited_cannot_be_told_from_a_new_one(runtime: Runtime, capabilities: Capabilities) -> None:
    limits = Limits(memory_bytes=64 << 20 if capabilities.memory_limit else None, open_files=64)
    options = {"limits": limits, "env": {"MODE": "test"}, "user": "root"}
    new = await runtime.create("box-1", **options)  # type: ignore[arg-type]
    async with warm(runtime, 2, limits=limits) as ids:
        assert [info.name for info in await runtime.list()] == ["box-1"], "those that wait are nobody's"
        before = datetime.now(UTC)
        with pytest.raises(SandboxExists):
            await runtime.create("box-1", **options)  # type: ignore[arg-type]
        taken = await runtime.create("box-2", **options)  # type: ignore[arg-type]
        assert taken.id in ids
        assert before < taken.info.created_at < datetime.now(UTC)
        varying = {"id", "name", "created_at", "last_used_at", "pid"}
        assert taken.info.model_dump(exclude=varying) == new.info.model_dump(exclude=varying)
        assert taken.info in await runtime.list()
        assert await taken.processes() == []
        assert len(await taken.ps()) == len(await new.ps())
        assert (await taken.exec("hostname; uname -n")).stdout == "box-2\nbox-2\n"
        assert await look(taken) == await look(new)
        assert taken.id not in await ready(runtime, 2), "another was put up"
        await new.destroy()
        if capabilities.memory_limit:
            fill = ["python3", "-c", "x = bytearray(200_000_000)"]
            if capabilities.process_oom:
                assert (await taken.exec(fill)).out_of_memory
            else:
                with pytest.raises(SandboxDied):
                    await taken.exec(fill)
        # From here on it is like any other: it sleeps, wakes with its name and files, and is destroyed.
        if capabilities.process_oom:
            await taken.exec("echo 1 > /srv/kept")
            await taken.sleep()
            assert (await taken.exec("cat /srv/kept; hostname")).stdout == "1\nbox-2\n"
        await taken.destroy()


@pytest.mark.core
async def test_what_is_asked_for_otherwise_is_made_anew_or_given_to_one_that_waits(
    runtime: Runtime, runtime_name: RuntimeName, capabilities: Capabilities
) -> None:
    with pytest.raises(InvalidRequest, match="0 to 1000"):
        await runtime.warm(-1)
    if not capabilities.pids_limit:
        with pytest.raises(Unenforceable):
            await runtime.warm(1, limits=Limits(pids=10))
    assert await runtime.shelves() == []
    async with warm(runtime, 1) as ids:
        async with await runtime.create(limits=Limits(open_files=99)) as other:
            assert other.id not in ids
        assert waiting(runtime) == ids
        if capabilities.freeze:
            async with await runtime.create(pause_after_s=0.05) as pausing:
                assert pausing.id in ids

                async def stands_still() -> bool:
                    return [info.status for info in await runtime.list()] == ["warm"]

                await eventually(stands_still, "it stands still by itself")
        ids = await ready(runtime, 1)
        body = """
async with atoll.open(sys.argv[1], settings=atoll.Settings(runtime=sys.argv[2])) as other:
    box = await other.create("brief", ephemeral=True)
    say(box.id, (await box.exec("hostname")).stdout.strip())
"""
        async with client(runtime.state_dir, runtime_name, body) as brief:
            id, hostname = (await brief.line()).split()
            await brief.succeeds()
        assert (id in ids, hostname) == (True, "brief")

        async def ended() -> bool:
            await runtime.collect()
            return await runtime.list() == []

        await eventually(ended, "an ephemeral one ends with its last client")


async def test_of_those_who_come_at_once_each_gets_one_of_its_own(runtime: Runtime, runtime_name: RuntimeName) -> None:
    each, count = (
        (10, 6) if runtime_name == "crun" else (2, 2)
    )  # what differs between them is slow, and not in question
    body = f"""
sys.stdin.readline()
async def one(name):
    box = await runtime.create(name)
    say(box.id, name, (await box.exec("hostname")).stdout.strip())
async with anyio.create_task_group() as group:
    for number in range({each}):
        group.start_soon(one, f"of-{{os.getpid()}}-{{number}}")
"""
    async with (
        warm(runtime, count) as ids,
        client(runtime.state_dir, runtime_name, body) as left,
        client(runtime.state_dir, runtime_name, body) as right,
    ):
        for process in (left, right):
            assert process.stdin is not None
            await process.stdin.send(b"go\n")
        lines = [(await process.line()).split() for process in (left, right) for _ in range(each)]
        assert len({id for id, _, _ in lines}) == 2 * each
        assert all(name == hostname for _, name, hostname in lines)
        assert ids <= {id for id, _, _ in lines}, "all that waited were taken"
        await left.succeeds()
        await right.succeeds()
        assert not await ready(runtime, count) & {id for id, _, _ in lines}, "who takes one puts up another"
        async with anyio.create_task_group() as group:
            for info in await runtime.list():
                group.start_soon(runtime.destroy, info.name)


KILLED = """
import os, random, signal, sys
import anyio, atoll
import anyio._backends._asyncio, atoll.runtime.engine  # once for all that are killed

async def take(number, after_s):
    async with atoll.open(sys.argv[1], settings=atoll.Settings(runtime=sys.argv[2])) as runtime:
        signal.setitimer(signal.ITIMER_REAL, after_s)  # nobody handles it: it kills as SIGKILL does
        box = await runtime.create(f"victim-{number}")
        os.write(1, f"{box.id} {box.name}\\n".encode())  # at once: half of a line tells nothing

chance = random.Random(int(sys.argv[3]))
for number in range(int(sys.argv[4])):
    after_s = chance.choice([0.003, 0.006, 0.012, 0.05]) * (0.2 + chance.random())
    child = os.fork()
    if child == 0:
        anyio.run(take, number, after_s)
        os._exit(0)
    os.waitpid(child, 0)
"""


async def test_whoever_is_killed_while_it_takes_one_leaves_it_waiting_or_its_own_or_to_be_collected(
    runtime: Runtime, runtime_name: RuntimeName
) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    state = runtime.state_dir
    turns, rounds, count = (2, 8, 3) if runtime_name == "crun" else (1, 2, 1)
    async with warm(runtime, count):
        for turn in range(turns):
            await runtime.warm(count)
            command = [sys.executable, "-c", KILLED, str(state), runtime_name, str(seed + turn), str(rounds)]
            done = await anyio.run_process(command, stderr=subprocess.STDOUT)
            lines = [line.split() for line in done.stdout.decode().splitlines()]
            assert all(len(words) == 2 for words in lines), done.stdout.decode()
            given = dict(lines)
            await runtime.gc()
            assert not {name for name in await ready(runtime, count) if name.startswith("-")}
            names = {info.id: info.name for info in await runtime.list()}
            assert given.items() <= names.items(), "who was given one has it"
            assert not names.keys() & waiting(runtime)
            for name in names.values():
                sandbox = await runtime.get(name)
                assert (await sandbox.exec("hostname")).stdout == f"{name}\n"
                await sandbox.destroy()
            left = {*os.listdir(state / "sandboxes"), *os.listdir(state / "transient")}
            assert left == waiting(runtime), "nothing else is left"


@pytest.fixture
async def fastest(state_dir: Path) -> AsyncIterator[Runtime]:
    """For what is the same with all runtimes."""
    async with atoll.open(state_dir) as runtime:
        yield runtime


async def test_what_has_ended_or_stands_on_another_image_is_not_given_to_anybody(
    fastest: Runtime, tmp_path: Path
) -> None:
    runtime = fastest
    root = tmp_path / "image"
    (root / "etc").mkdir(parents=True)
    (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    image = f"dir:{root}"
    async with warm(runtime, 1, image=image) as stale:
        with pytest.raises(InvalidRequest, match="atoll warm"):
            await runtime.images.remove(image)
        assert await runtime.gc() == []
        assert waiting(runtime) == stale
        (root / "etc/passwd").write_text("root:x:0:0:changed:/root:/bin/sh\n")
        async with await runtime.create(image=image) as sandbox:
            assert sandbox.id not in stale
            assert "changed" in await sandbox.files.read_text("/etc/passwd")

        async def replaced() -> bool:
            return [each.ready for each in await runtime.shelves()] == [1] and not waiting(runtime) & stale

        await eventually(replaced, "the stale one is replaced")
        dead = waiting(runtime)
        (id,) = dead
        os.kill(int((runtime.state_dir / "sandboxes" / id / "keeper.lock").read_text()), signal.SIGKILL)
        async with await runtime.create(image=image) as sandbox:
            assert sandbox.id not in dead
        assert not await ready(runtime, 1) & dead


async def test_creating_goes_on_when_none_can_be_put_up(
    fastest: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = fastest
    monkeypatch.setattr(shelf, "_AGAIN_S", (0.02, 0.1))
    failing = True
    put_up = runtime._shelves._make

    async def fails(*arguments: object) -> None:
        if failing:
            raise LaunchFailed("not today")
        await put_up(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(runtime._shelves, "_make", fails)
    with pytest.raises(LaunchFailed, match="not today"):
        await runtime.warm(1)
    assert await runtime.shelves() == []
    failing = False
    async with warm(runtime, 1) as ids:
        failing = True
        for expected in (True, False):
            async with await runtime.create() as sandbox:
                assert (sandbox.id in ids) is expected
        await eventually(lambda: "is tried again" in caplog.text, "it is told")
        failing = False
        assert not await ready(runtime, 1) & ids
