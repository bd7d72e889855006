"""A server with the REST API on a port of loopback, in this process, and clients of it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx2
import uvicorn
from fastapi import FastAPI

from atoll import Settings
from atoll.server.server import Server
from atoll.surfaces import rest


class Served:
    """A running server, and the keys of its tenants."""

    def __init__(self, server: Server, url: str, key: str) -> None:
        self.server = server
        self.url = url
        self.key = key
        """The operator's."""

    def client(self, key: str | None = None, **headers: str) -> httpx2.AsyncClient:
        """A client with this key, else the operator's."""
        sent = {"X-API-Key": self.key if key is None else key, **headers}
        return httpx2.AsyncClient(base_url=self.url, headers=sent, timeout=60)

    async def tenant(self, name: str, **options: Any) -> str:
        """A new tenant's administrator's key."""
        await self.server.tenants.create(name, **options)
        return (await self.server.keys.create("test", tenant=name, role="admin"))[1].get_secret_value()


class _QuietServer(uvicorn.Server):
    """Leaves signals alone."""

    @contextmanager
    def capture_signals(self):
        yield


@asynccontextmanager
async def serving(state_dir: Path, *, run: bool = True, **settings: Any) -> AsyncIterator[Served]:
    """The app with all routes of REST, and what goes on in the background if it is to `run`."""
    async with Server.open(Settings(state_dir=state_dir, **settings)) as server, anyio.create_task_group() as tasks:
        app = FastAPI(title="Atoll")
        rest.install(app, server)
        config = uvicorn.Config(app, port=0, log_config=None, lifespan="on", timeout_graceful_shutdown=2)
        listening = _QuietServer(config)
        ended = anyio.Event()

        async def listen() -> None:
            with anyio.CancelScope(shield=True):
                await listening.serve()
            ended.set()

        server.events.watch_s = 0.1
        if run:
            tasks.start_soon(server.run)
        tasks.start_soon(listen)
        while not listening.started:
            await anyio.sleep(0.01)
        port = listening.servers[0].sockets[0].getsockname()[1]
        key = server.first_key or (await server.keys.create("test", tenant=None, role="admin"))[1]
        try:
            yield Served(server, f"http://127.0.0.1:{port}", key.get_secret_value())
        finally:
            listening.should_exit = True
            with anyio.CancelScope(shield=True):
                await ended.wait()
            tasks.cancel_scope.cancel()


async def read_events(response: httpx2.Response) -> AsyncGenerator[dict[str, Any]]:
    """The server-sent events of an answer: `event`, `id` and `data`."""
    event: dict[str, Any] = {}
    async for line in response.aiter_lines():
        if not line:
            if event:
                yield event
            event = {}
        elif not line.startswith(":"):
            name, _, value = line.partition(": ")
            event[name] = json.loads(value) if name == "data" else value
