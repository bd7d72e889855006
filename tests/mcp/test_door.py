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
    ("Host", "[bad", 400),
    ("Host", "evil@127.0.0.1", 400),
    ("Host", "127.0.0.1/x", 400),
    ("Host", "127.0.0.1:port", 400),
    ("Origin", "http://evil.example", 403),
    ("Origin", "http://127.0.0.1.evil.example", 403),
    ("Origin", "null", 403),
    ("Origin", "http://127.0.0.1", 403),
    ("Origin", "http://127.0.0.1:1", 403),
    ("Origin", "http://localhost", 403),
    ("Origin", "http://localhost:3000", 403),
    ("Origin", "", 403),
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


async def test_only_pages_of_the_very_same_origin_are_let_in(host: Engine) -> None:
    async with listening(host) as url, by_hand(url) as http:
        body = {"jsonrpc": "2.0", "id": 3, "method": "initialize", "params": HANDSHAKE}
        own = url.removesuffix("/mcp")
        port = own.rpartition(":")[2]

        async def status(origin: str, **headers: str) -> int:
            sent = {**http.headers, "Origin": origin, **headers}
            return (await http.client.post(url, json=body, headers=sent)).status_code

        for good, name in (
            (own, "127.0.0.1"),
            (f"http://localhost:{port}", "localhost"),
            (f"http://[::1]:{port}", "[::1]"),
        ):
            assert await status(good, Host=f"{name}:{port}") == 200
        assert await status("http://localhost", Host="localhost") == 200
        assert await status("http://localhost", Host="localhost:80") == 200
        for bad in (
            own.replace("//", "//evil@"),
            own.replace("//", "//evil:word@"),
            own.replace("http:", "https:"),
            own.replace("http:", "ws:"),
            own + "0",
            own + "/",
            own + "@evil.example",
            f"{own}, {own}",
            f"http://localhost:{port}",
            f"http://[::1]:{port}",
            f"http://127.1:{port}",
        ):
            assert await status(bad) == 403, bad


async def test_the_page_of_a_preview_is_another_site_in_either_form(host: Engine) -> None:
    async with await host.create() as sandbox, sandbox.listen() as listener:
        preview = await sandbox.expose(listener.port)
        async with listening(host) as url, by_hand(url) as http:
            for page in (preview.path_url, preview.url):
                origin = "/".join(page.split("/")[:3])
                for name in ("127.0.0.1", "localhost"):
                    headers = {**http.headers, "Origin": origin, "Host": f"{name}:{url.split(':')[2].split('/')[0]}"}
                    body = {"jsonrpc": "2.0", "id": 3, "method": "initialize", "params": HANDSHAKE}
                    answer = await http.client.post(url, json=body, headers=headers)
                    assert answer.status_code == 403, (origin, name)


async def test_behind_a_reverse_proxy_pages_of_its_own_site_are_let_in(host: Engine) -> None:
    async with listening(host, token=SecretStr(TOKEN)) as url, by_hand(url) as http:
        http.client.headers = {"Authorization": f"Bearer {TOKEN}", "Host": "mcp.example.com"}
        await http.begin()
        for origin, status in (
            ("https://mcp.example.com", 200),
            ("http://mcp.example.com", 200),
            ("https://mcp.example.com:8443", 403),
            ("https://user@mcp.example.com", 403),
            ("https://example.com", 403),
        ):
            http.client.headers["Origin"] = origin
            assert (await http.post("tools/list")).status_code == status, origin


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
