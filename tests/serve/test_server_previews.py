"""Previews of the server: on its port, by host name and by path, with URLs that stay."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import anyio
import httpx2
import pytest

import atoll
from atoll import Preview, Settings
from atoll.server.server import Server
from atoll.testing.server import RunningServer, key_file, running_server
from atoll.testing.waiting import BOUND_S
from tests.serve.conftest import answers, read_all

PROGRAM = """
import http.server, json
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        if self.headers.get("Upgrade") == "websocket":
            self.send_response(101); self.send_header("Upgrade", "websocket"); self.send_header("Connection", "Upgrade")
            self.end_headers(); self.wfile.write(b"echo:" + self.rfile.read(5)); self.close_connection = True
            return
        body = json.dumps({"path": self.path, "headers": dict(self.headers)}).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body)))
        self.send_header("Set-Cookie", "a=b; Domain=atoll.localhost; Path=/"); self.end_headers()
        self.wfile.write(body)
    def do_POST(self):
        body = str(len(self.rfile.read(int(self.headers["Content-Length"])))).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
"""


class Exposed(NamedTuple):
    server: RunningServer
    preview: Preview
    sandbox: atoll.Sandbox

    @property
    def host(self) -> str:
        return urlsplit(self.preview.url).netloc.partition(":")[0] + f":{self.server.port}"

    @property
    def headers(self) -> dict[str, str]:
        return {"Host": self.host, "Atoll-Token": self.preview.token}


@pytest.fixture(scope="module")
async def exposed(state_dir: Path) -> AsyncIterator[Exposed]:
    """A server that was started after a port was exposed by one before it."""
    async with atoll.open(state_dir) as engine:
        sandbox = await engine.create("web")
        await sandbox.files.write_text("server.py", PROGRAM)
        await sandbox.spawn(["python3", "server.py"])
        async with Server.open(Settings(state_dir=state_dir)) as before:
            key_file(state_dir).write_text(before.first_key.get_secret_value() if before.first_key else "")
            preview = await before.previews.expose("default", sandbox.info, 8000, wait_s=BOUND_S)
            assert await before.previews.expose("default", sandbox.info, 8000) == preview
        with running_server(state_dir) as server:
            yield Exposed(server, preview, sandbox)
        await sandbox.destroy()


async def test_a_preview_keeps_its_url_across_servers(exposed: Exposed) -> None:
    async with httpx2.AsyncClient() as client:
        answer = await client.get(exposed.server.url + "/x?y=1", headers=exposed.headers)
    assert answer.status_code == 200
    seen = answer.json()
    assert seen["path"] == "/x?y=1"
    assert exposed.preview.token not in answer.text
    assert seen["headers"]["X-Forwarded-Proto"] == "http"
    assert answer.headers["Atoll-Request-Id"].startswith("req_")
    assert answer.headers["Set-Cookie"] == "a=b; Path=/", "not for the neighbours below the domain"


async def test_requests_to_previews_and_to_the_api_share_a_connection(exposed: Exposed) -> None:
    """As on the connections of a reverse proxy."""
    below = f"/preview/8000-web/z?atoll_token={exposed.preview.token}"
    limits = httpx2.Limits(max_connections=1)
    async with httpx2.AsyncClient(limits=limits, base_url=exposed.server.url) as client:
        for _ in range(3):
            assert (await client.get("/healthz")).json()["status"] == "ok"
            assert (await client.get("/a", headers=exposed.headers)).json()["path"] == "/a"
            assert (await client.post("/a", content=b"a" * 300_000, headers=exposed.headers)).text == "300000"
            assert (await client.get(below)).json()["path"] == "/z"


async def test_requests_that_follow_one_another_at_once_are_each_answered(exposed: Exposed) -> None:
    preview = f"GET /a HTTP/1.1\r\nHost: {exposed.host}\r\nAtoll-Token: {exposed.preview.token}\r\n\r\n"
    ours = "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    last = ours.replace("\r\n\r\n", "\r\nConnection: close\r\n\r\n")

    def say() -> bytes:
        with socket.create_connection(("127.0.0.1", exposed.server.port), timeout=BOUND_S) as connected:
            connected.sendall((ours + preview + preview + ours + preview + last).encode())
            return read_all(connected)

    found = answers(await anyio.to_thread.run_sync(say))
    assert [b'"path"' in each.body for each in found] == [False, True, True, False, True, False]


@pytest.mark.parametrize("by", ["host", "path"])
async def test_without_its_token_a_preview_is_not_there(exposed: Exposed, by: str) -> None:
    told = set()
    async with httpx2.AsyncClient(base_url=exposed.server.url) as client:
        for label, token in (("8000-web", "wrong" * 6), ("8000-web", ""), ("8000-other", exposed.preview.token)):
            headers = {"Atoll-Token": token} if token else {}
            if by == "host":
                answer = await client.get("/", headers={**headers, "Host": f"{label}.atoll.localhost"})
            else:
                answer = await client.get(f"/preview/{label}/", headers=headers)
            told.add((answer.status_code, answer.text))
    assert len(told) == 1
    assert next(iter(told))[0] == 404


async def test_a_websocket_of_a_preview_passes(exposed: Exposed) -> None:
    head = f"GET /ws HTTP/1.1\r\nHost: {exposed.host}\r\nAtoll-Token: {exposed.preview.token}\r\n"
    head += "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"

    def say() -> bytes:
        with socket.create_connection(("127.0.0.1", exposed.server.port), timeout=BOUND_S) as connected:
            connected.sendall(head.encode() + b"Sec-WebSocket-Version: 13\r\n\r\nhello")
            return read_all(connected)

    said = await anyio.to_thread.run_sync(say)
    assert said.startswith(b"HTTP/1.1 101")
    assert said.endswith(b"echo:hello")


@pytest.mark.parametrize(
    "framing", ["Content-Length: 4\r\nTransfer-Encoding: chunked", "Content-Length : 4", "A: b\r\n c"]
)
async def test_an_ambiguous_request_to_a_preview_is_refused(exposed: Exposed, framing: str) -> None:
    head = f"POST / HTTP/1.1\r\nHost: {exposed.host}\r\nAtoll-Token: {exposed.preview.token}\r\n{framing}\r\n\r\n"

    def say() -> bytes:
        with socket.create_connection(("127.0.0.1", exposed.server.port), timeout=BOUND_S) as connected:
            connected.sendall(head.encode() + b"0\r\n\r\nGET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            return read_all(connected)

    found = answers(await anyio.to_thread.run_sync(say))
    assert [each.status for each in found] == [400]
