"""`atoll serve` as a process: its routes without a tenant, its start and its end."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine

from atoll import Settings
from atoll.server.server import Server
from atoll.surfaces.serve.app import make_app
from atoll.testing.server import RunningServer

CLOSED = ("/metrics", "/api/v1/sandboxes", "/api/v1/nothing")


def test_it_says_that_it_answers_and_that_it_is_ready(strict_server: RunningServer) -> None:
    for path, status in (("/healthz", "ok"), ("/readyz", "ready")):
        answer = httpx2.get(strict_server.url + path)
        assert (answer.status_code, answer.json()["status"]) == (200, status)
        assert answer.headers["Atoll-Request-Id"].startswith("req_")


@pytest.mark.parametrize("path", CLOSED)
def test_nothing_of_the_api_answers_without_a_key(strict_server: RunningServer, path: str) -> None:
    answer = httpx2.get(strict_server.url + path)
    assert answer.status_code == 401
    told = answer.json()
    assert told["code"] == "unauthenticated"
    assert told["request_id"] == answer.headers["Atoll-Request-Id"]


def test_the_documentation_needs_no_other_host_and_runs_no_script(strict_server: RunningServer) -> None:
    page = httpx2.get(strict_server.url + "/docs")
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    assert "<script" not in page.text
    assert not re.search(r"""(src|href)=["']?(https?:)?//|url\(""", page.text)
    document = httpx2.get(strict_server.url + "/openapi.json").json()
    assert all(path in page.text for path in document["paths"])
    assert "<code>X-API-Key: KEY</code>" in page.text
    assert not re.search(r'(id|href)="[^"]* ', page.text)  # a name of two words can be linked to


async def test_it_is_not_ready_while_its_database_does_not_answer(
    make_state_dir: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Server.open(Settings(state_dir=make_state_dir())) as server:
        transport = httpx2.ASGITransport(make_app(server))
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            assert (await client.get("/readyz")).status_code == 200

            def fail(_: AsyncEngine) -> None:
                raise OperationalError("SELECT 1", {}, ConnectionError("gone"))

            monkeypatch.setattr(AsyncEngine, "connect", fail)
            answer = await client.get("/readyz")
    assert (answer.status_code, answer.json()["code"]) == (503, "database_unavailable")
    assert answer.json()["request_id"] == answer.headers["Atoll-Request-Id"]


def test_a_browser_at_the_servers_address_finds_the_documentation(strict_server: RunningServer) -> None:
    answer = httpx2.get(strict_server.url)
    assert (answer.status_code, answer.headers["Location"]) == (303, "/docs")
