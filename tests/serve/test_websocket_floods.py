"""WebSockets through the door: sizes, floods, and clients that do not read. With an app of the test's own."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import pytest
from anyio.abc import SocketStream
from starlette.types import Receive, Scope, Send

from atoll.surfaces.door import listen
from atoll.surfaces.door.connection import CONTROL_FRAMES_PER_S, MAX_FRAGMENTS, WEBSOCKET_BYTES, Door
from atoll.testing.waiting import BOUND_S, eventually

KEY = b"dGhlIHNhbXBsZSBub25jZQ=="
TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10


class EchoApp:
    """Sends back the length of each message. Accepts when it is let."""

    def __init__(self) -> None:
        self.let = anyio.Event()
        self.let.set()
        self.received = 0
        self.reads = anyio.Event()
        self.reads.set()
        self.ended = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        assert (await receive())["type"] == "websocket.connect"
        await self.let.wait()
        await send({"type": "websocket.accept"})
        while True:
            await self.reads.wait()
            message = await receive()
            if message["type"] == "websocket.disconnect":
                self.ended += 1
                return
            self.received += 1
            await send({"type": "websocket.send", "text": str(len(message.get("bytes") or message["text"]))})


@asynccontextmanager
async def echoing(**options: Any) -> AsyncIterator[tuple[EchoApp, int, Door]]:
    app, door = EchoApp(), Door()
    ready = anyio.Event()
    url = ""

    def on_ready(given: str) -> None:
        nonlocal url
        url = given
        ready.set()

    async with anyio.create_task_group() as tasks:

        async def serve() -> None:
            await listen(
                app, "127.0.0.1", 0, on_ready=on_ready, on_stop=lambda: None, grace_s=1, door=door, websockets=True
            )

        tasks.start_soon(serve)
        await ready.wait()
        with anyio.fail_after(BOUND_S):
            yield app, int(url.rpartition(":")[2]), door
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def upgraded(port: int, early: bytes = b"", *, accept: bool = True) -> AsyncIterator[SocketStream]:
    async with await anyio.connect_tcp("127.0.0.1", port) as stream:
        head = b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        await stream.send(head + b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: " + KEY + b"\r\n\r\n" + early)
        if accept:
            said = b""
            while b"\r\n\r\n" not in said:
                said += await stream.receive(1)
            assert said.startswith(b"HTTP/1.1 101")
        yield stream


def frame(kind: int, payload: bytes = b"", *, fin: bool = True, length: int | None = None) -> bytes:
    size = len(payload) if length is None else length
    mask = os.urandom(4)
    first = bytes([(0x80 if fin else 0) | kind])
    if size < 126:
        head = first + bytes([0x80 | size])
    elif size < 65536:
        head = first + b"\xfe" + struct.pack("!H", size)
    else:
        head = first + b"\xff" + struct.pack("!Q", size)
    return head + mask + bytes(byte ^ mask[at % 4] for at, byte in enumerate(payload))


async def close_code(stream: SocketStream) -> int | None:
    """The code with which the server closes. None: it closed without one."""
    data = b""
    try:
        async for piece in stream:
            data += piece
    except anyio.BrokenResourceError:
        pass
    while data:
        kind, size = data[0] & 0x0F, data[1] & 0x7F
        if kind == CLOSE:
            return int(struct.unpack("!H", data[2:4])[0])
        data = data[2 + size :]
    return None


async def test_messages_pass_also_those_sent_with_the_request() -> None:
    async with echoing() as (_, port, _door), upgraded(port, frame(TEXT, b"early")) as stream:
        assert (await stream.receive(3)) == b"\x81\x015"
        await stream.send(frame(BINARY, b"a" * 70_000))
        assert (await stream.receive(7)) == b"\x81\x0570000"


async def test_a_message_that_is_too_large_ends_the_connection_before_it_is_sent() -> None:
    async with echoing() as (_, port, _door), upgraded(port) as stream:
        await stream.send(frame(BINARY, length=WEBSOCKET_BYTES + 1))
        assert await close_code(stream) == 1009


async def test_fragments_count_together() -> None:
    async with echoing() as (_, port, _door), upgraded(port) as stream:
        piece = b"a" * (WEBSOCKET_BYTES // 4)
        await stream.send(frame(BINARY, piece, fin=False))
        for _ in range(3):
            await stream.send(frame(0, piece, fin=False))
        await stream.send(frame(0, b"a", fin=False))
        assert await close_code(stream) == 1009


@pytest.mark.parametrize("kind", [PING, PONG, 0], ids=["pings", "pongs", "empty fragments"])
async def test_a_flood_of_frames_that_bring_nothing_ends_the_connection(kind: int) -> None:
    async with echoing() as (app, port, _door), upgraded(port) as stream:
        if kind == 0:
            await stream.send(frame(TEXT, b"a", fin=False))
        with anyio.move_on_after(BOUND_S):
            try:
                for _ in range(200):
                    await stream.send(frame(kind, fin=kind != 0) * CONTROL_FRAMES_PER_S)
            except anyio.BrokenResourceError:
                pass
        assert await close_code(stream) in (1008, None)
        await eventually(lambda: app.ended == 1, "the app was told")


async def test_a_message_of_too_many_fragments_ends_the_connection() -> None:
    async with echoing() as (_, port, _door), upgraded(port) as stream:
        await stream.send(frame(TEXT, b"a", fin=False) + frame(0, b"a", fin=False) * (2 * MAX_FRAGMENTS))
        assert await close_code(stream) == 1008


async def test_a_flood_of_messages_waits_outside_while_the_app_does_not_read() -> None:
    async with echoing() as (app, port, _door), upgraded(port) as stream:
        app.reads = anyio.Event()
        sent = 0
        flood = frame(TEXT, b"") * 10_000
        with anyio.move_on_after(1):
            while True:
                await stream.send(flood)
                sent += len(flood)
        assert sent < 16 * 1024 * 1024, "the kernel's buffers hold the rest"
        assert app.received <= 1


async def test_nothing_is_read_ahead_without_bound_before_the_app_accepts() -> None:
    async with echoing() as (app, port, _door):
        app.let = anyio.Event()
        async with upgraded(port, accept=False) as stream:
            flood, sent = frame(TEXT, b"") * 20_000, 0
            with anyio.move_on_after(1), suppress(anyio.BrokenResourceError):
                while True:
                    await stream.send(flood)
                    sent += len(flood)
            app.let.set()
        assert sent < 16 * 1024 * 1024, "the kernel's buffers hold the rest"


async def test_a_connection_that_became_a_websocket_is_counted_until_it_ends() -> None:
    async with echoing() as (_, port, door):
        async with upgraded(port):
            assert door.clients == {"127.0.0.1": 1}
        await eventually(lambda: not door.clients, "it is counted no more")


async def test_compression_is_not_offered() -> None:
    async with echoing() as (_, port, _door):
        connected = socket.create_connection(("127.0.0.1", port))
        with connected:
            head = b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            head += b"Sec-WebSocket-Extensions: permessage-deflate\r\nSec-WebSocket-Version: 13\r\n"
            connected.sendall(head + b"Sec-WebSocket-Key: " + KEY + b"\r\n\r\n")
            connected.setblocking(False)
            await anyio.wait_readable(connected)
            assert b"permessage-deflate" not in connected.recv(4096)
