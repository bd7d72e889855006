"""Which requests are accepted over HTTP: host names, origins, tokens, handshakes, sizes."""

from __future__ import annotations

import pytest
from pydantic import SecretStr

import atoll
from atoll import Engine, InvalidRequest
from atoll.surfaces.mcp import ServerConfig, app
from atoll.surfaces.mcp.http import listen
from tests.mcp.serving import HANDSHAKE, by_hand, listening

TOKEN = "a-token-of-some-length"


REQUESTS = (
    ("Host", "evil.example", 421),
    ("Host", "127.0.0.1.evil.example:80", 421),
    ("Host", "[bad", 421),
    ("Origin", "http://evil.example", 403),
    ("Origin", "http://127.0.0.1.evil.example", 403),
    ("Origin", "null", 403),
    ("Origin", "http://localhost:3000", 200),
    ("Mcp-Protocol-Version", "2026-07-28", 400),
    ("Mcp-Protocol-Version", "nonsense", 400),
    ("Content-Type", "text/plain", 400),
)


async def test_requests_with_a_foreign_host_or_origin_are_refused(host: Engine) -> None:
    async with listening(host) as url, by_hand(url) as http:
        body = {"jsonrpc": "2.0", "id": 3, "method": "initialize", "params": HANDSHAKE}
        for header, value, status in REQUESTS:
            answer = await http.client.post(url, json=body, headers={**http.headers, header: value})
            assert answer.status_code == status, (header, value, answer.text)
            if header == "Mcp-Protocol-Version":
                told = answer.json()
                assert (told["id"], told["error"]["code"]) == (3, -32022)
                assert "2025-11-25" in told["error"]["data"]["supported"]


NO_HANDSHAKES = (
    ("GET", b"", 400),
    ("DELETE", b"", 400),
    ("OPTIONS", b"", 405),
    ("POST", b"", 400),
    ("POST", b"[]", 400),
    ("POST", b'{"jsonrpc":"2.0","id":1,"method":"tools/list"}', 400),
    ("POST", b'{"jsonrpc":"2.0","method":"notifications/initialized"}', 400),
    ("POST", b'{"jsonrpc":"2.0","id":1,"method":"initialize","params":{}}', 400),
)


async def test_only_a_handshake_begins_a_session(host: Engine) -> None:
    async with listening(host, sessions=1) as url, by_hand(url) as http:
        for method, body, status in NO_HANDSHAKES:
            answer = await http.client.request(method, url, content=body, headers=http.headers)
            assert answer.status_code == status, (method, body, answer.text)
            assert "Mcp-Session-Id" not in answer.headers
            assert not list((host.state_dir / "temporary-leases").iterdir())
        await http.begin()
        # There is nothing to resume, and the request is not an error.
        since = {**http.headers, "Last-Event-ID": "1"}
        async with http.client.stream("GET", url, headers=since) as answer:
            assert answer.status_code == 200


async def test_requests_without_the_token_are_refused(host: Engine) -> None:
    async with listening(host, token=SecretStr(TOKEN)) as url, by_hand(url) as http:
        for wrong in (None, "Bearer", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer caf\xe9"):
            http.client.headers = {} if wrong is None else {b"Authorization": wrong.encode("latin-1")}
            for method in ("POST", "GET", "DELETE"):
                answer = await http.client.request(method, url)
                assert answer.status_code == 401
                assert answer.headers["WWW-Authenticate"] == "Bearer"
        http.client.headers = {"Authorization": f"Bearer {TOKEN}"}
        await http.begin()
        assert (await http.shell("echo in"))["stdout"] == "in\n"
        http.client.headers = {
            "Authorization": f"Bearer {TOKEN}",
            "Host": "mcp.example.com",
        }  # that of a server in front
        assert (await http.post("tools/list")).status_code == 200
        http.client.headers |= {"Origin": "http://evil.example"}
        assert (await http.post("tools/list")).status_code == 403
        http.client.headers = {}
        assert (await http.post("tools/list")).status_code == 401  # the session's id is no way in


async def test_what_is_too_large_is_refused_before_it_is_read(host: Engine) -> None:
    async with listening(host) as url, by_hand(url) as http:
        answer = await http.client.post(url, content=b"x" * (16 * 1024 * 1024 + 1), headers=http.headers)
        assert answer.status_code == 413
        assert (await http.client.get(url.replace("/mcp", "/other"))).status_code == 404


async def test_listening_beyond_loopback_needs_a_token(host: Engine) -> None:
    with pytest.raises(InvalidRequest, match="ATOLL_MCP_TOKEN"):
        await listen(host, ServerConfig(), "0.0.0.0", 0)
    with pytest.raises(InvalidRequest, match="needs a token"):
        app(host, hosts=None)
    app(host, hosts=None, token=SecretStr(TOKEN))
    for wrong in ("", " " * 20, f"{TOKEN}\n", "short"):
        with pytest.raises(InvalidRequest, match="16 characters or more"):
            app(host, hosts=None, token=SecretStr(wrong))
    for host_and_port in ("localhost:8000", "http://localhost", "[::1]", ""):
        with pytest.raises(InvalidRequest, match="without a port"):
            app(host, hosts=["localhost", "::1", "Example.COM", host_and_port])


def test_a_token_that_is_too_short_is_refused_and_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_MCP_TOKEN", "hunter2")
    with pytest.raises(InvalidRequest, match="fewer than 16 characters") as caught:
        atoll.Settings.from_environment()
    assert "hunter2" not in str(caught.value)
