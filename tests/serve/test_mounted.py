"""/mcp on the server: by API key, each tenant with sandboxes of its own."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import httpx2
import pytest
import sqlalchemy as sa

from atoll import Settings
from atoll.server.server import Server
from atoll.server.tables import previews
from atoll.server.tenants import Quotas
from atoll.testing.server import RunningServer
from atoll.testing.waiting import BOUND_S, eventually
from tests.mcp.serving import HANDSHAKE, Http

TENANT = "acme"


@pytest.fixture(scope="module")
async def server(strict_server: RunningServer) -> AsyncIterator[Server]:
    """The data of the running server, as the commands `atoll tenants` and `atoll keys` have it."""
    async with Server.open(Settings(state_dir=strict_server.state_dir)) as opened:
        await opened.tenants.create(TENANT, quotas=Quotas(sandboxes=1))
        yield opened


async def test_an_mcp_session_belongs_to_the_tenant_of_its_key(strict_server: RunningServer, server: Server) -> None:
    _, key = await server.keys.create(tenant=TENANT, name="mcp", role="member")
    mine = {"Authorization": f"Bearer {key.get_secret_value()}"}
    url = strict_server.url + "/mcp"
    async with httpx2.AsyncClient(timeout=BOUND_S, headers=mine) as client:
        session = Http(url, client)
        await session.begin()
        assert (await session.shell("echo $((6 * 7))"))["stdout"] == "42\n"
        other = await server.engines.get(TENANT)
        assert len(await other.list()) == 1
        assert await (await server.engines.get("default")).list() == []
        refused = await session.post("tools/call", name="sandbox_create", arguments={"sandbox": "second"})
        (line,) = [line for line in refused.text.splitlines() if line.startswith("data: ")]
        told = json.loads(line.removeprefix("data: "))["result"]
        assert told["isError"], "its quota is one sandbox"
        assert "quota" in json.dumps(told)
        async with httpx2.AsyncClient(timeout=BOUND_S, headers=strict_server.headers) as foreign:
            stolen = Http(url, foreign)
            stolen.session = session.session
            assert (await stolen.post("tools/list")).status_code == 404, "another tenant's session is none"
        await client.delete(url, headers=session.headers)
    await eventually(lambda: _is_empty(server), "its sandboxes ended with it")


async def _is_empty(server: Server) -> bool:
    return await (await server.engines.get(TENANT)).list() == []


async def test_mcp_does_not_answer_without_a_key_and_its_streams_end_with_theirs(
    strict_server: RunningServer, server: Server
) -> None:
    url = strict_server.url + "/mcp"
    body = {"jsonrpc": "2.0", "id": 3, "method": "initialize", "params": HANDSHAKE}
    answer = httpx2.post(url, json=body)
    assert (answer.status_code, answer.json()["code"]) == (401, "unauthenticated")
    made, key = await server.keys.create(tenant=TENANT, name="stream", role="member")
    async with httpx2.AsyncClient(timeout=BOUND_S, headers={"X-API-Key": key.get_secret_value()}) as client:
        session = Http(url, client)
        await session.begin()
        async with client.stream("GET", url, headers=session.headers) as stream:
            assert stream.status_code == 200
            await server.keys.revoke(made.id)
            async for _ in stream.aiter_bytes():
                pass
        assert (await session.post("tools/list")).status_code == 401


async def test_a_port_that_a_model_shows_has_a_url_of_the_server_until_its_sandbox_ends(
    strict_server: RunningServer, server: Server
) -> None:
    _, key = await server.keys.create(tenant=TENANT, name="browse", role="member")
    url = strict_server.url + "/mcp"
    async with httpx2.AsyncClient(timeout=BOUND_S, headers={"X-API-Key": key.get_secret_value()}) as client:
        session = Http(url, client)
        await session.begin()
        await session.shell("(python3 -m http.server 8000 --bind 127.0.0.1 >/dev/null 2>&1 &)")
        answer = await session.post("tools/call", name="browse", arguments={"port": 8000})
        (line,) = [line for line in answer.text.splitlines() if line.startswith("data: ")]
        shown = urlsplit(json.loads(line.removeprefix("data: "))["result"]["structuredContent"]["url"])
        assert shown.port == strict_server.port
        assert (shown.hostname or "").endswith(".atoll.localhost")
        target = f"{strict_server.url}/?{shown.query}"
        assert (await client.get(target, headers={"Host": shown.netloc})).status_code == 200
        await client.delete(url, headers=session.headers)

        async def has_none() -> bool:
            async with server.database.read() as connection:
                return (await connection.execute(sa.select(previews))).first() is None

        await eventually(has_none, "the preview ended with its sandbox")
        assert (await client.get(target, headers={"Host": shown.netloc})).status_code == 404
    await eventually(lambda: _is_empty(server), "its sandboxes ended with it")


async def test_a_tenant_that_is_made_anew_has_nothing_of_the_sessions_of_its_name(
    strict_server: RunningServer, server: Server
) -> None:
    url = strict_server.url + "/mcp"
    old = ""
    async with httpx2.AsyncClient(timeout=BOUND_S, headers=strict_server.headers, base_url=strict_server.url) as op:
        for _ in range(2):
            assert (await op.post("/api/v1/tenants", json={"name": "again"})).status_code == 201
            _, key = await server.keys.create(tenant="again", name="mcp", role="member")
            async with httpx2.AsyncClient(timeout=BOUND_S, headers={"X-API-Key": key.get_secret_value()}) as client:
                session = Http(url, client)
                if old:
                    session.session = old
                    assert (await session.post("tools/list")).status_code == 404
                    session = Http(url, client)
                await session.begin()
                assert (await session.shell("echo hi"))["stdout"] == "hi\n"
                old = session.session
            assert (await op.delete("/api/v1/tenants/again", params={"destroy": "true"})).status_code == 204
