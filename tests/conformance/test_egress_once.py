"""What leaves a sandbox, where that is the same with all runtimes: tried with the fastest."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

import atoll
from atoll import Engine, NetworkPolicy
from atoll.runtime.engine import LocalEngine
from atoll.testing.inside import client
from tests.conformance.test_egress import fetches
from tests.egress.world import World, on_loopback


@pytest.fixture
async def engine(state_dir: Path) -> AsyncIterator[LocalEngine]:
    async with atoll.open(state_dir) as engine:
        assert isinstance(engine, LocalEngine)
        yield engine


@pytest.fixture
async def world(engine: LocalEngine) -> AsyncIterator[World]:
    async with on_loopback(engine) as world:
        yield world


async def test_a_policy_that_another_process_sets_holds_here_too(state_dir: Path, engine: Engine, world: World) -> None:
    body = "await engine.set_network(sys.argv[3], atoll.NetworkPolicy(allow=['example.com'])); say('set')"
    async with (
        await engine.create() as sandbox,
        client(state_dir, sandbox.info.runtime, body, sandbox.name) as other,
    ):
        assert await other.line() == "set"
        await other.succeeds()
        assert await fetches(sandbox)


async def test_one_that_waited_is_given_the_policy_that_it_is_created_with(engine: Engine, world: World) -> None:
    await engine.warm(1)
    try:
        async with await engine.create(network=NetworkPolicy(allow="example.com")) as taken:
            assert await fetches(taken)
    finally:
        await engine.wait_refilled()
        await engine.warm(0)


async def test_a_pool_gives_its_policy_to_each_and_another_where_it_is_asked_to(engine: Engine, world: World) -> None:
    async with engine.pool("netted", network=NetworkPolicy(allow="example.com")) as pool:
        try:
            assert await fetches(await pool.get())
            assert not await fetches(await pool.get("alone", network=None))
        finally:
            await pool.aclose()


async def test_git_clones_from_a_server_that_a_rule_names(engine: Engine, world: World, tmp_path: Path) -> None:
    made = f"""
cd {tmp_path} && git init -q work && cd work && echo hello > file && git add file
git -c user.name=x -c user.email=x@example.com commit -qm first
cd .. && git clone -q --bare work repo.git && git -C repo.git update-server-info
"""
    subprocess.run(["bash", "-ec", made], check=True, capture_output=True)
    world.name("git.test", ["127.0.0.1"])
    with anyio.fail_after(50):
        async with await anyio.open_process(
            ["python3", "-u", "-m", "http.server", "--bind", "127.0.0.1", "--directory", str(tmp_path), "0"],
            stderr=subprocess.DEVNULL,
        ) as server:
            assert server.stdout is not None
            port = int((await server.stdout.receive()).split(b" port ")[1].split()[0])
            world.servers[("127.0.0.1", port)] = port
            clone = f"git clone -q http://git.test:{port}/repo.git && cat repo/file"
            async with await engine.create(network=NetworkPolicy(allow=["git.test"])) as box:
                refused = await box.exec(clone)
                assert "403" in refused.stderr
                (record, *_) = await box.audit()
                assert record.reason is not None
                assert record.reason.endswith(f"to allow it, add the rule 127.0.0.1:{port}")
                await box.set_network(NetworkPolicy(allow=["git.test", f"127.0.0.1:{port}"]))
                done = await box.exec(clone)
                assert done.stdout == "hello\n", done.stderr
            server.kill()
