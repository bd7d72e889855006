"""A page of a pattern for tests: a server on loopback, in the test's own loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from pydantic import SecretStr

from atoll.reactive import RunningPattern
from atoll.surfaces.web import patterns


@asynccontextmanager
async def page_of(
    running: RunningPattern, *, port: int = 0, token: str | None = None, address: str = "127.0.0.1"
) -> AsyncIterator[str]:
    """The URL of the page, without a slash at its end. The server has ended after the context."""
    ready = anyio.Event()
    urls: list[str] = []

    def announce(url: str) -> None:
        urls.append(url)
        ready.set()

    async def serve() -> None:
        secret = None if token is None else SecretStr(token)
        await patterns.listen(running, address, port, token=secret, on_ready=announce)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(serve)
        await ready.wait()
        try:
            yield urls[0].removesuffix("/")
        finally:
            tasks.cancel_scope.cancel()
