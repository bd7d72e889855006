"""The two ends of a preview as attackers have them: bytes to one, and a server inside that says anything."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import anyio
from anyio.abc import ByteStream

from atoll import Preview
from atoll.runtime.sandbox import Sandbox
from tests.http_client import host_of

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@dataclass
class Inside:
    """A server inside that is the test's own, and what it was sent."""

    preview: Preview
    seen: list[bytearray] = field(default_factory=list)
    """A piece per connection."""

    @property
    def all(self) -> bytes:
        return b"|".join(bytes(each) for each in self.seen)

    def request(self, first: str = "GET / HTTP/1.1", *lines: str, body: bytes = b"", token: bool = True) -> bytes:
        """A request with its host and token, and whatever else is said."""
        own = [f"Host: {host_of(self.preview)}", *([f"Atoll-Token: {self.preview.token}"] if token else [])]
        return "\r\n".join([first, *own, *lines, "", ""]).encode("latin-1") + body


Script = Callable[[ByteStream, bytearray], Awaitable[None]]


def saying(answer: bytes) -> Script:
    """A server that gives this answer to whatever looks like a request, and goes on until its client leaves."""

    async def script(stream: ByteStream, seen: bytearray) -> None:
        answered = 0
        async for data in stream:
            seen.extend(data)
            for _ in range(seen.count(b"\r\n\r\n") - answered):
                answered += 1
                await stream.send(answer)

    return script


def ending(answer: bytes) -> Script:
    """A server that gives this answer to the first request and closes the connection."""

    async def script(stream: ByteStream, seen: bytearray) -> None:
        while b"\r\n\r\n" not in seen:
            seen.extend(await stream.receive())
        await stream.send(answer)
        await stream.send_eof()

    return script


@asynccontextmanager
async def serving(sandbox: Sandbox, script: Script) -> AsyncIterator[Inside]:
    """A port inside that is exposed, with `script` for each connection to it."""
    async with sandbox.listen() as listener, anyio.create_task_group() as group:
        inside = Inside(await sandbox.expose(listener.port))

        async def handle(stream: ByteStream) -> None:
            seen = bytearray()
            inside.seen.append(seen)
            async with stream:
                with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                    await script(stream, seen)

        async def accept() -> None:
            async for stream in listener:
                group.start_soon(handle, stream)

        group.start_soon(accept)
        try:
            yield inside
        finally:
            await sandbox.unexpose(listener.port)
            group.cancel_scope.cancel()
