"""What leaves a sandbox: by policy, through whoever is connected to it, whatever becomes of it and of them."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import atoll
from atoll import Capabilities, NetworkPolicy, Sandbox
from atoll.contract.model import RuntimeName
from atoll.runtime.egress import server as egress_server
from atoll.runtime.engine import LocalEngine
from atoll.testing.inside import client, until_running
from atoll.testing.waiting import eventually
from tests.egress.world import SITE, World, mirror, on_loopback, serving

FETCH = "curl -sS --max-time 20 http://example.com/hello"
"""Through the proxy, if there is one."""
HOLD = [
    "bash",
    "-c",
    "exec 3<>/dev/tcp/127.0.0.1/1023; printf 'CONNECT example.com:443 HTTP/1.0\\r\\n\\r\\n' >&3; cat <&3",
]
"""A connection that stays open, and says what it is told."""
WORK = "while :; do curl -sS --max-time 5 http://example.com/work | head -1 >> log 2>&1; sleep 0.05; done"


@pytest.fixture(scope="module")
async def world(engine: LocalEngine) -> AsyncIterator[World]:
    async with on_loopback(engine) as world:
        yield world


@pytest.fixture
async def box(engine: LocalEngine, world: World) -> AsyncIterator[Sandbox]:
    async with await engine.create(network=NetworkPolicy(allow=["example.com"])) as sandbox:
        yield sandbox


async def fetches(sandbox: Sandbox) -> bool:
    said = await sandbox.exec(FETCH, timeout_s=40)
    return said.ok and "GET /hello HTTP/1.1" in said.stdout


@pytest.mark.core
async def test_what_is_allowed_leaves_and_what_is_not_is_told_which_rule_is_missing(box: Sandbox) -> None:
    assert await fetches(box)
    said = await box.exec(
        "curl -sS http://other.test/; curl -sS https://other.test/; curl -sS -x '' http://example.com/"
    )
    assert "to allow it, add the rule other.test:80" in said.stdout
    assert "CONNECT tunnel failed, response 403" in said.stderr
    assert "resolve host: example.com" in said.stderr, "without the proxy there is no way out"
    socks = "curl -sS --socks5-hostname 127.0.0.1:1023 http://example.com/hello"
    assert "GET /hello" in (await box.exec(socks)).stdout
    records = await box.audit()
    assert [(r.sandbox, r.protocol, r.host, r.port, r.verdict) for r in records] == [
        (box.name, "http", "example.com", 80, "allowed"),
        (box.name, "http", "other.test", 80, "denied"),
        (box.name, "connect", "other.test", 443, "denied"),
        (box.name, "socks", "example.com", 80, "allowed"),
    ]
    assert records[0].address == SITE
    assert records[0].sent_bytes > 50
    assert records[0].received_bytes > 100


@pytest.mark.core
async def test_without_a_policy_no_process_serves_the_sandbox(
    engine: LocalEngine, sandbox: Sandbox, capabilities: Capabilities
) -> None:
    said = await sandbox.exec("curl -sS http://example.com")
    if capabilities.saves_epoll_waiters:
        assert said.stdout.startswith("No connection leaves this sandbox")  # the guest says so
    else:
        assert "Could not resolve host" in said.stderr
    assert not engine.egress_servers.serves(sandbox.id)
    assert await sandbox.audit() == []
    assert sandbox.info.network is None


async def test_a_policy_changes_live_for_commands_that_start_and_connections_that_are_open(
    sandbox: Sandbox, world: World
) -> None:
    assert not await fetches(sandbox)
    await sandbox.set_network(NetworkPolicy(allow=["example.com"]))
    assert sandbox.info.network == NetworkPolicy(allow=["example.com"])
    assert await fetches(sandbox)
    async with await sandbox.spawn(HOLD, keep=False) as held:
        assert b"200 Connection established" in (await anext(held)).data  # type: ignore[union-attr]
        await sandbox.set_network(NetworkPolicy(allow=["example.com:80"]))
        async for event in held:  # it is cut, and so the command ends
            assert isinstance(event, atoll.Exited)
    assert await fetches(sandbox)
    await sandbox.set_network(None)
    assert not await fetches(sandbox)
    assert [r.reason is None for r in await sandbox.audit()] == [True, False, True]


async def test_when_the_process_that_serves_is_killed_another_that_is_connected_takes_over(
    engine: LocalEngine, runtime_name: RuntimeName, box: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(egress_server, "_WATCH_INTERVAL_S", 0.1)
    body = """
from atoll.runtime.egress import server as egress_server
from tests.egress.world import World
world = World()
world.name("example.com", ["93.184.216.34"])
world.servers = {("*", 80): int(sys.argv[4])}
engine.egress_servers.connector = world.connector
egress_server._WATCH_INTERVAL_S = 0.1
sandbox = await engine.get(sys.argv[3])
await sandbox.connect()
say("connected")
while not engine.egress_servers.serves(sandbox.id):
    await anyio.sleep(0.01)
say("serving")
await anyio.sleep_forever()
"""
    assert await fetches(box)
    async with serving(mirror) as web, client(engine.state_dir, runtime_name, body, box.name, str(web)) as other:
        assert await other.line() == "connected"
        assert await fetches(box), "who came first serves"
        await box.aclose()
        assert await other.line() == "serving"
        assert await fetches(box), "the other serves"
        assert not engine.egress_servers.serves(box.id)
        other.send_signal(signal.SIGKILL)
        await other.ends()
        await eventually(lambda: engine.egress_servers.serves(box.id), "it is taken back")
        assert await fetches(box)
    # Nobody's records are lost.
    assert [record.verdict for record in await box.audit()] == ["allowed"] * 4


async def test_while_nobody_is_connected_nothing_leaves_and_who_comes_next_serves(
    state_dir: Path, runtime_name: RuntimeName, engine: LocalEngine, world: World
) -> None:
    settings = atoll.Settings(runtime=runtime_name)
    async with atoll.open(state_dir, settings=settings) as first:
        sandbox = await first.create("left-alone", network=NetworkPolicy(allow="example.com"))
        assert isinstance(first, LocalEngine)
        first.egress_servers.connector = world.connector
        await sandbox.spawn(WORK)
        await until_running(sandbox, "curl")
    async with await engine.get("left-alone") as found:
        assert found.info.network == NetworkPolicy(allow="example.com")
        await found.connect()

        async def works() -> bool:
            return "HTTP" in (await found.exec("cat log")).stdout

        await eventually(works, "the command that was left reaches the outside again")


async def test_a_sandbox_that_sleeps_wakes_with_its_policy(box: Sandbox, runtime_name: RuntimeName) -> None:
    if runtime_name == "runsc":  # its processes go on, and so does what they were told
        await box.spawn(WORK)
        await until_running(box, "curl")
    await box.sleep()
    assert await fetches(box)
    if runtime_name == "runsc":
        await box.files.remove("log", missing_ok=True)
        await eventually(lambda: box.files.exists("log"), "a process that slept reaches the outside")
    await box.pause()
    assert await fetches(box)


async def test_forks_and_what_was_restored_have_the_policy_that_holds_now(box: Sandbox, engine: LocalEngine) -> None:
    await box.checkpoint("wide")
    if box.info.runtime == "runsc":
        assert engine.egress_servers.serves(box.id), "its processes went on, and so does this"
    assert await fetches(box)
    (wide,) = await box.fork(names=["wide-fork"])
    async with wide:
        assert await fetches(wide)
        assert [record.sandbox for record in await wide.audit()] == ["wide-fork"]
    await box.set_network(NetworkPolicy(allow=["other.test"]))
    await box.restore("wide")
    assert not await fetches(box)
    (narrow,) = await box.fork(names=["narrow-fork"], checkpoint="wide")
    async with narrow:
        assert not await fetches(narrow)
        assert "add the rule example.com:80" in (await narrow.exec(FETCH)).stdout
    await engine.delete_checkpoint("wide", sandbox=box.name)


async def test_a_listening_proxy_does_not_keep_a_sandbox_from_going_to_sleep(engine: LocalEngine, world: World) -> None:
    policy = NetworkPolicy(allow="example.com")
    async with await engine.create(network=policy, pause_after_s=0.2) as sandbox:
        assert await fetches(sandbox)

        async def stands_still() -> bool:
            return [info.status for info in await engine.list() if info.name == sandbox.name] == ["paused"]

        if engine.runtimes()[sandbox.info.runtime].freeze:
            await eventually(stands_still, "it stands still")
        assert await fetches(sandbox)
