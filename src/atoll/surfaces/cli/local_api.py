"""The REST API over a server's data in this process: for commands that work with a server or without one.

Owns how a request reaches the routes without HTTP, streams included, and who it comes from: the user of this machine,
who may do everything. A command has one client then, whether `ATOLL_URL` names a server or not. Not here: the routes
(`surfaces/rest/`), and what is sent (`client/http.py`). Used by the commands `configs` and `chat`.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import anyio
import httpx2
from fastapi import FastAPI
from pydantic import SecretStr

from atoll.client.http import HttpClient
from atoll.contract.names import DEFAULT_NAMESPACE
from atoll.server.keys import SCOPES, ApiKey
from atoll.surfaces import rest
from atoll.surfaces.rest.caller import Caller

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream

    from atoll.server.server import Server
    from atoll.surfaces.cli.command import CommandContext

_HOST = "http://this-machine"


@asynccontextmanager
async def api(context: CommandContext) -> AsyncIterator[HttpClient]:
    """A client of the data in the state directory. Its tenant is the namespace of the options.

    Raises:
        TenantNotFound: there is no such tenant.
    """
    _, tenant = context.resolved_place()
    async with context.open_server() as server:
        transport = LocalTransport(server, tenant or DEFAULT_NAMESPACE)
        client = HttpClient(_HOST, SecretStr("-"), tenant=None, trust=None, transport=transport)
        try:
            yield client
        finally:
            await client.aclose()


class LocalCaller(Caller):
    """The user of this machine, who has no key that could be revoked."""

    async def require_valid(self) -> None:
        pass


class LocalTransport(httpx2.AsyncBaseTransport):
    """Gives requests to the routes, in the name of the user of this machine."""

    def __init__(self, server: Server, tenant: str) -> None:
        self._server = server
        self._tenant = tenant
        self._app = FastAPI()
        rest.install(self._app, server)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        exchange = _Exchange(await request.aread())
        query = request.url.query
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": request.method,
            "headers": [(name.lower(), value) for name, value in request.headers.raw],
            "scheme": "http",
            "path": request.url.path,
            "raw_path": request.url.raw_path.partition(b"?")[0],
            "query_string": query,
            "root_path": "",
            "server": ("this-machine", 80),
            "client": None,
            "state": {"caller": await self._caller()},
        }
        return await exchange.begin(asyncio.create_task(self._run(scope, exchange)))

    async def _run(self, scope: dict[str, Any], exchange: _Exchange) -> None:
        try:
            await self._app(scope, exchange.receive, exchange.send)
        finally:
            exchange.end()

    async def _caller(self) -> Caller:
        user = pwd.getpwuid(os.getuid()).pw_name
        key = ApiKey(
            id="local",
            tenant=None,
            name=f"command line of {user}",
            role="admin",
            scopes=SCOPES,
            created_at=datetime.now(UTC),
        )
        tenant = await self._server.tenants.get(self._tenant)
        engine = await self._server.engines.get(self._tenant)
        return LocalCaller(key, tenant, engine, f"req_{secrets.token_hex(8)}", self._server, "")


class _Exchange(httpx2.AsyncByteStream):
    """One request and its answer, whose body is read as it comes."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._left = anyio.Event()
        self._head: asyncio.Future[tuple[int, list[tuple[bytes, bytes]]]] = asyncio.get_running_loop().create_future()
        self._sending, received = anyio.create_memory_object_stream[bytes](16)
        self._received: MemoryObjectReceiveStream[bytes] = received
        self._task: asyncio.Task[None] | None = None

    async def begin(self, task: asyncio.Task[None]) -> httpx2.Response:
        self._task = task
        waited: list[asyncio.Future[Any]] = [task, self._head]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not self._head.done():
            await task  # it has failed before it answered
        status, headers = self._head.result()
        return httpx2.Response(status, headers=headers, stream=self)

    async def receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._head.set_result((message["status"], message["headers"]))
            return
        if message.get("body") and not self._left.is_set():
            await self._sending.send(message["body"])

    def end(self) -> None:
        self._sending.close()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for data in self._received:
            yield data

    async def aclose(self) -> None:
        self._left.set()
        self._received.close()
        if self._task is not None:
            await asyncio.wait([self._task])
            if not self._task.cancelled():
                self._task.exception()  # what failed was answered
