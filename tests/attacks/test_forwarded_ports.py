"""A hostile server behind a forwarded port, and too many clients before it: floods, silence, no room."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import pytest

from atoll import Sandbox
from atoll.runtime.previews import forward
from atoll.testing.inside import Peak, read_until

MIB = 1024 * 1024

SERVER = """
import os, socket, sys, threading
what, port = sys.argv[1], int(sys.argv[2])
def serve(client):
    try:
        while what == "flood":
            client.sendall(os.urandom(65536))
        while what == "echo":
            client.sendall(client.recv(65536) or sys.exit())
        threading.Event().wait()
    except OSError:
        client.close()
with socket.create_server(("127.0.0.1", port), backlog=128) as server:
    print("listening", flush=True)
    while True:
        threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
"""


@asynccontextmanager
async def forwarded(sandbox: Sandbox, what: str, port: int) -> AsyncIterator[int]:
    process = await sandbox.spawn(["python3", "-I", "-c", SERVER, what, str(port)])
    try:
        await read_until(process, b"listening\n")
        async with sandbox.forward(port) as local:
            yield local
    finally:
        await process.kill()


@pytest.fixture(autouse=True)
def _no_bugs(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


async def _still_answers(bystander: Sandbox) -> None:
    with anyio.fail_after(20):
        assert (await bystander.exec("echo fine")).stdout == "fine\n"


async def test_a_server_that_floods_clients_that_do_not_read_takes_no_memory(prey: Sandbox, bystander: Sandbox) -> None:
    peak = Peak(os.getpid())
    async with forwarded(prey, "flood", 4001) as local, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(await anyio.connect_tcp("127.0.0.1", local)) for _ in range(4)]
        for client in clients:  # each has begun, and reads no more
            assert await client.receive(1)
        await _still_answers(bystander)
    assert peak.growth_bytes < 32 * MIB


async def test_a_server_that_does_not_read_stops_its_client_and_no_other_sandbox(
    prey: Sandbox, bystander: Sandbox
) -> None:
    peak = Peak(os.getpid())
    async with forwarded(prey, "silent", 4002) as local:
        client = await anyio.connect_tcp("127.0.0.1", local)
        sent = 0
        with anyio.move_on_after(1):
            while sent < 256 * MIB:
                await client.send(bytes(MIB))
                sent += MIB
        assert sent < 64 * MIB
        await _still_answers(bystander)
        await anyio.aclose_forcefully(client)
    assert peak.growth_bytes < 64 * MIB


async def test_clients_beyond_the_limit_wait_for_those_before_them(
    prey: Sandbox, bystander: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "MAX_CONNECTIONS", 2)
    async with forwarded(prey, "echo", 4003) as local, AsyncExitStack() as stack:
        first, *others = [
            await stack.enter_async_context(await anyio.connect_tcp("127.0.0.1", local)) for _ in range(3)
        ]
        for client in (first, *others):
            await client.send(b"x")
        served = [first, others[0]]
        with anyio.fail_after(20):
            for client in served:
                assert await client.receive() == b"x"
        with anyio.move_on_after(0.2) as waited:
            await others[1].receive()
        assert waited.cancelled_caught
        await first.aclose()
        with anyio.fail_after(20):
            assert await others[1].receive() == b"x"
        await _still_answers(bystander)
