"""`forward`: a port of this machine's loopback that is a port inside, byte for byte."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager

import anyio
import pytest
from anyio.abc import ByteStream

from atoll import Engine, InvalidRequest, Sandbox
from atoll.testing.inside import read_until

MIB = 1024 * 1024


@asynccontextmanager
async def serving(
    sandbox: Sandbox, handle: Callable[[ByteStream], Coroutine[None, None, None]], host: str = "127.0.0.1"
) -> AsyncIterator[int]:
    """A server inside that is the test's own; gives its port."""
    async with sandbox.listen(host=host) as listener, anyio.create_task_group() as group:

        async def accept() -> None:
            async for connection in listener:
                group.start_soon(handle, connection)

        group.start_soon(accept)
        yield listener.port
        group.cancel_scope.cancel()


async def echo(stream: ByteStream) -> None:
    async with stream:
        async for data in stream:
            await stream.send(data)
        await stream.send_eof()
        with anyio.move_on_after(5):
            await anyio.sleep_forever()


async def collect_and_answer(stream: ByteStream) -> None:
    """Read to the end of what a client sends, and only then answer: with as much, the other way round."""
    data = b"".join([chunk async for chunk in stream])
    await stream.send(data[::-1])
    await stream.send_eof()
    with anyio.move_on_after(5):
        await anyio.sleep_forever()


async def exchange(port: int, sent: bytes, host: str = "127.0.0.1") -> bytes:
    """What comes back for `sent`, to its end."""
    with anyio.fail_after(60):
        async with await anyio.connect_tcp(host, port) as client:
            await client.send(sent)
            await client.send_eof()
            return b"".join([chunk async for chunk in client])


@pytest.mark.core
async def test_bytes_pass_both_ways_and_each_side_may_end_first(sandbox: Sandbox) -> None:
    large = os.urandom(4 * MIB)
    async with serving(sandbox, collect_and_answer) as port, sandbox.forward(port) as local:
        assert await exchange(local, b"\x00\xff not HTTP") == b"PTTH ton \xff\x00"
        assert await exchange(local, large) == large[::-1]


async def test_many_clients_are_served_at_once(sandbox: Sandbox) -> None:
    async with serving(sandbox, echo) as port, sandbox.forward(port) as local, anyio.create_task_group() as group:

        async def one(number: int) -> None:
            sent = f"client {number}".encode()
            assert await exchange(local, sent) == sent

        for number in range(50):
            group.start_soon(one, number)


async def test_only_the_loopback_of_ipv4_is_listened_on_and_the_port_may_be_chosen(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as found:
        free = found.getsockname()[1]
    async with serving(sandbox, echo) as port, sandbox.forward(port, free) as local:
        assert local == free
        assert await exchange(local, b"x") == b"x"
        for other in ("::1", "127.0.0.2"):
            with pytest.raises(OSError, match="connection"):
                await anyio.connect_tcp(other, local)
        with pytest.raises(InvalidRequest, match=f"cannot listen on 127.0.0.1:{free}: Address already in use; choose"):
            async with sandbox.forward(port, free):
                pytest.fail("the port was taken")


async def test_a_server_on_the_other_loopback_address_is_reached_too(sandbox: Sandbox) -> None:
    async with serving(sandbox, echo, host="::1") as port, sandbox.forward(port) as local:
        assert await exchange(local, b"six") == b"six"


async def test_a_connection_to_nothing_is_reset_and_a_later_one_works(sandbox: Sandbox) -> None:
    async with sandbox.listen() as listener:
        port = listener.port
    async with sandbox.forward(port) as local:
        with pytest.raises((OSError, anyio.BrokenResourceError)):
            await exchange(local, b"")
        async with sandbox.listen(port) as listener, await anyio.connect_tcp("127.0.0.1", local) as client:
            inside = await anext(listener)
            await client.send(b"there")
            assert await inside.receive() == b"there"
            await inside.aclose()


BREAKS_OFF = """
import socket, struct
with socket.create_server(("127.0.0.1", 8000)) as server:
    print("listening", flush=True)
    client, _ = server.accept()
    client.recv(100)
    client.sendall(b"half")
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.recv(100)
    client.close()
"""


async def test_what_breaks_off_inside_never_looks_complete(sandbox: Sandbox) -> None:
    process = await sandbox.spawn(["python3", "-I", "-c", BREAKS_OFF])
    await read_until(process, b"listening\n")
    with anyio.fail_after(20):
        async with sandbox.forward(8000) as local, await anyio.connect_tcp("127.0.0.1", local) as client:
            await client.send(b"go on")
            assert await client.receive() == b"half"
            await client.send(b"and end")
            with pytest.raises(anyio.BrokenResourceError):
                await client.receive()


async def test_it_ends_with_its_context_and_cuts_what_is_open(sandbox: Sandbox) -> None:
    async with serving(sandbox, echo) as port:
        async with sandbox.forward(port) as local:
            client = await anyio.connect_tcp("127.0.0.1", local)
            await client.send(b"x")
            assert await client.receive() == b"x"
        async with client:
            with anyio.fail_after(20), pytest.raises(anyio.BrokenResourceError):
                await client.receive()
        with pytest.raises(OSError, match="connection"):
            await anyio.connect_tcp("127.0.0.1", local)
        with pytest.raises(ZeroDivisionError):
            async with sandbox.forward(port):
                raise ZeroDivisionError


async def test_a_connection_wakes_a_sandbox_that_sleeps(engine: Engine, sandbox: Sandbox) -> None:
    async with sandbox.forward(8000) as local:
        await sandbox.sleep()
        with pytest.raises((OSError, anyio.BrokenResourceError)):
            await exchange(local, b"")  # nothing listens there
        status = {info.name: info.status for info in await engine.list()}
        assert status[sandbox.name] == "running"


@pytest.mark.parametrize(("port", "local_port"), [(0, 0), (65536, 0), (-1, 0), (80, -1), (80, 65536)])
async def test_a_port_that_is_none_is_an_invalid_request(sandbox: Sandbox, port: int, local_port: int) -> None:
    with pytest.raises(InvalidRequest, match="65535"):
        async with sandbox.forward(port, local_port):
            pytest.fail("it was listened on")
