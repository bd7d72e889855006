"""The way out of a sandbox, attacked from inside: who may use it, how much of the host it takes, and where it leads.

What a client can say to the proxy is tried in `tests/egress/test_attacks.py`, without a sandbox in between.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import anyio
import pytest
from anyio.abc import ByteStream

from atoll.contract.driver import Capabilities
from atoll.contract.network import NetworkPolicy
from atoll.runtime.egress import server as egress_server
from atoll.runtime.engine import LocalEngine
from atoll.runtime.sandbox import Sandbox
from atoll.testing.waiting import eventually
from tests.attacks.programs import running
from tests.egress.world import World, on_loopback, serving

SOCKS = """
import socket, sys
s = socket.create_connection(('127.0.0.1', 1023)); s.sendall(b'\\x05\\x01\\x00'); s.recv(2)
name = sys.argv[1].encode()
s.sendall(b'\\x05\\x01\\x00\\x03' + bytes([len(name)]) + name + int(sys.argv[2]).to_bytes(2, 'big'))
print(s.recv(10)[1])
"""
MANY = """
import resource, socket, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),) * 2)
held = []
for number in range(int(sys.argv[1])):
    s = socket.socket(); s.settimeout(0.5)
    try:
        s.connect(('127.0.0.1', 1023)); s.sendall(sys.argv[2].encode().decode('unicode_escape').encode('latin-1'))
        held.append(s)
    except OSError:
        break
print(len(held), flush=True)
time.sleep(1000)
"""
SQUAT = "import socket, time; s = socket.create_server(('127.0.0.1', 1023)); print(1, flush=True); time.sleep(1000)"
PYTHON = ("python3", "-I", "-S", "-c")


@pytest.fixture
async def world(engine: LocalEngine) -> AsyncIterator[World]:
    async with on_loopback(engine) as world:
        yield world


@pytest.fixture
async def box(engine: LocalEngine, world: World) -> AsyncIterator[Sandbox]:
    """May go anywhere that is public."""
    async with await engine.create(network=NetworkPolicy(allow=["*", "0.0.0.0/0", "::/0"])) as sandbox:
        yield sandbox


async def test_the_loopback_of_the_host_is_not_reached_by_any_name(box: Sandbox, world: World) -> None:
    reached = False

    async def secret(stream: ByteStream) -> None:
        nonlocal reached
        reached = True

    async with serving(secret) as port:
        world.servers[("127.0.0.1", port)] = port
        world.name("pretty.test", ["127.0.0.1"])
        for host in ("127.0.0.1", "::1", "::ffff:127.0.0.1", "pretty.test", "2130706433", "0177.0.0.1", "0.0.0.0"):
            said = await box.exec([*PYTHON, SOCKS, host, str(port)], timeout_s=20)
            assert said.stdout in {"2\n", "8\n"}, host
    assert not reached
    assert world.dialled == []


@pytest.mark.runtimes("crun")
async def test_a_thousand_connections_that_say_nothing_take_a_bounded_share_and_are_given_back(
    box: Sandbox, engine: LocalEngine, bystander: Sandbox
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    tunnel, beginning = "CONNECT example.com:443 HTTP/1.0\\r\\n\\r\\n", "GET http://exa"
    async with running(box, *PYTHON, MANY, "700", tunnel), running(box, *PYTHON, MANY, "300", beginning):
        for _ in range(20):
            assert (await bystander.exec(["true"], timeout_s=10)).ok
            # Two ends of each are in this process: the proxy's, and that of the server which stands for the outside.
            assert len(os.listdir("/proc/self/fd")) - before <= 2 * engine.egress_servers.share + 16
    said = await box.exec("curl -sS --max-time 30 http://example.com/", timeout_s=40)
    assert "GET / HTTP/1.1" in said.stdout, "what was taken is given back"


async def test_who_reads_nothing_makes_the_host_hold_nothing(box: Sandbox, world: World) -> None:
    sent = 0

    async def flood(stream: ByteStream) -> None:
        nonlocal sent
        with suppress(anyio.BrokenResourceError):
            while True:
                await stream.send(bytes(1 << 20))
                sent += 1

    async def stalled() -> bool:
        before = sent
        await anyio.sleep(0.2)
        return before == sent > 0

    async with serving(flood) as port:
        world.servers[("*", 9)] = port
        before = _resident_bytes()
        async with running(box, *PYTHON, MANY, "8", "CONNECT example.com:9 HTTP/1.0\\r\\n\\r\\n"):
            await eventually(stalled, "the server is held back")
            assert _resident_bytes() - before < 96 * 1024 * 1024


async def test_a_program_that_takes_the_port_loses_its_own_way_out_and_gains_nothing(
    engine: LocalEngine, box: Sandbox, capabilities: Capabilities, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(egress_server, "_HANDOVER_TIMEOUT_S", 0.2)
    await box.set_network(None)
    if capabilities.saves_epoll_waiters:  # the guest has the port, and hands it to the host alone
        assert "Address already in use" in (await box.exec([*PYTHON, SQUAT], user="root", timeout_s=20)).stderr
        await box.set_network(NetworkPolicy(allow="example.com"))
        assert engine.egress_servers.serves(box.id)
        return
    async with running(box, *PYTHON, SQUAT, user="root"):
        await box.set_network(NetworkPolicy(allow="example.com"))
        assert not engine.egress_servers.serves(box.id)
        assert not (await box.exec("curl -sS --max-time 1 http://example.com/", timeout_s=20)).ok


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
