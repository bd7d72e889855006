"""The connection to a keeper: a caller that waits may be cancelled, or it be closed, just when its socket is ready."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest

from atoll.drivers.keeper_stream import KeeperStream


@pytest.fixture
def pair() -> Iterator[tuple[KeeperStream, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield KeeperStream(ours), theirs


@contextlib.contextmanager
def reported() -> Iterator[list[dict[str, Any]]]:
    """What callbacks of the event loop have raised."""
    loop, found = asyncio.get_running_loop(), list[dict[str, Any]]()
    before = loop.get_exception_handler()
    loop.set_exception_handler(lambda _loop, context: found.append(context))
    try:
        yield found
    finally:
        loop.set_exception_handler(before)


async def in_one_round(make_ready: Callable[[], object], end: Callable[[], object]) -> None:
    """Call `end` in the round of the loop that finds a socket ready, before that is told to who waits for it."""
    loop = asyncio.get_running_loop()

    def ready_then_end() -> None:
        make_ready()
        loop.call_soon(end)  # what is ready is asked for after this, and run after it

    loop.call_soon(ready_then_end)
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("way", ["receive", "send"])
@pytest.mark.parametrize("how", ["cancelled", "closed"])
async def test_it_ends_in_the_moment_in_which_its_socket_is_ready(
    pair: tuple[KeeperStream, socket.socket], way: str, how: str
) -> None:
    stream, other = pair
    with contextlib.suppress(BlockingIOError):
        while way == "send":
            stream.socket.send(bytes(65536))
    waiting = asyncio.create_task(stream.receive() if way == "receive" else stream.send(b"x"))
    closing: list[asyncio.Task[None]] = []

    def end() -> None:
        if how == "cancelled":
            waiting.cancel()
        else:
            closing.append(asyncio.create_task(stream.aclose()))

    def make_ready() -> None:
        if way == "receive":
            other.send(b"x")
        with contextlib.suppress(BlockingIOError):
            other.setblocking(False)
            while way == "send":
                other.recv(1 << 20)

    with reported() as errors:
        for _ in range(5):
            await asyncio.sleep(0)  # it waits
        await in_one_round(make_ready, end)
        with contextlib.suppress(asyncio.CancelledError, anyio.ClosedResourceError):
            await waiting
        await asyncio.gather(*closing)
    assert errors == []


async def test_what_is_sent_arrives_and_the_end_is_told(pair: tuple[KeeperStream, socket.socket]) -> None:
    stream, other = pair
    there = KeeperStream(other)
    data = bytes(range(256)) * 8192
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stream.send, data)
        got = b""
        while len(got) < len(data):
            got += await there.receive()
    assert got == data
    await stream.send_eof()
    with pytest.raises(anyio.EndOfStream):
        await there.receive()
    await there.aclose()
    with pytest.raises(anyio.BrokenResourceError):
        await stream.send(data)
    await stream.aclose()
    await stream.aclose()
    with pytest.raises(anyio.ClosedResourceError):
        await stream.receive()
