"""The E2B SDK with nothing but a domain: https for the API, for a sandbox's own plane and for its ports."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import websockets.sync.client
from e2b import Sandbox

from atoll.testing.server import RunningServer, running_server
from atoll.testing.waiting import BOUND_S

DOMAIN = "boxes.localhost"
ECHO = """
import asyncio, base64, hashlib
GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
async def serve(reader, writer):
    head = await reader.readuntil(b"\\r\\n\\r\\n")
    names = dict(line.split(b": ", 1) for line in head.split(b"\\r\\n")[1:-2])
    names = {name.lower(): value for name, value in names.items()}
    if key := names.get(b"sec-websocket-key"):
        accept = base64.b64encode(hashlib.sha1(key + GUID).digest())
        writer.write(b"HTTP/1.1 101 Switching Protocols\\r\\nUpgrade: websocket\\r\\nConnection: Upgrade\\r\\n")
        writer.write(b"Sec-WebSocket-Accept: " + accept + b"\\r\\n\\r\\n")
        writer.write(b"\\x81\\x05hello")
        await writer.drain()
        await reader.read()
    else:
        body = names[b"host"]
        writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(body) + body)
    writer.close()
async def main():
    async with await asyncio.start_server(serve, "127.0.0.1", 8000) as server:
        print("ready", flush=True)
        await server.serve_forever()
asyncio.run(main())
"""


@pytest.fixture(scope="module")
def server(state_dir: Path) -> Iterator[RunningServer]:
    with running_server(state_dir, "--tls-self-signed", environment={"ATOLL_DOMAIN": DOMAIN}) as server:
        yield server


@pytest.fixture(autouse=True)
def redirected(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a domain whose names lead to the server, and a certificate that the machine trusts."""
    resolve = socket.getaddrinfo

    def resolve_here(host: Any, *args: Any, **options: Any) -> Any:
        return resolve("127.0.0.1" if str(host).endswith(f".{DOMAIN}") else host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve_here)
    monkeypatch.setenv("E2B_DOMAIN", f"{DOMAIN}:{server.port}")
    monkeypatch.setenv("E2B_API_KEY", server.key)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority(server)))


def authority(server: RunningServer) -> Path:
    return server.state_dir / "server/tls/ca.pem"


def test_api_sandbox_and_ports_are_reached_by_their_names_over_https(server: RunningServer) -> None:
    trusted = ssl.create_default_context(cafile=authority(server))
    with Sandbox.create(timeout=120) as box:
        box.files.write("echo.py", ECHO)
        assert box.files.read("echo.py") == ECHO
        assert box.commands.run("echo over https").stdout == "over https\n"
        assert httpx2.get(box.download_url("echo.py"), verify=trusted, timeout=BOUND_S).text == ECHO
        serving = box.commands.run("python3 echo.py", background=True)
        assert next(iter(serving))[0] == "ready\n"
        host = box.get_host(8000)
        assert host == f"8000-{box.sandbox_id}.{DOMAIN}:{server.port}"
        assert httpx2.get(f"https://{host}/", verify=trusted, timeout=BOUND_S).text == host
        with websockets.sync.client.connect(f"wss://{host}/", ssl=trusted, open_timeout=BOUND_S) as socket_:
            assert socket_.recv(timeout=BOUND_S) == "hello"
        closed = httpx2.get(f"https://{box.get_host(9)}/", verify=trusted, timeout=BOUND_S)
        assert (closed.status_code, closed.json()["port"]) == (502, 9)
