"""A program with the E2B SDK and nothing but a domain: https for the API, for a sandbox's own plane and for its ports.

A process of its own (`test_tls.py`): the SDK reads once which certificates are trusted.
"""

from __future__ import annotations

import os
import socket
import ssl
from typing import Any

import httpx2
import websockets.sync.client
from e2b import Sandbox

from atoll.testing.waiting import BOUND_S

DOMAIN, _, PORT = os.environ["E2B_DOMAIN"].partition(":")
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


def resolve_here(host: Any, *args: Any, **options: Any) -> Any:
    """As where the names below the domain lead to the server."""
    return resolve("127.0.0.1" if str(host).endswith(f".{DOMAIN}") else host, *args, **options)


resolve, socket.getaddrinfo = socket.getaddrinfo, resolve_here
trusted = ssl.create_default_context(cafile=os.environ["SSL_CERT_FILE"])
with Sandbox.create(timeout=120) as box:
    box.files.write("echo.py", ECHO)
    assert box.files.read("echo.py") == ECHO
    assert box.commands.run("echo over https").stdout == "over https\n"
    assert httpx2.get(box.download_url("echo.py"), verify=trusted, timeout=BOUND_S).text == ECHO
    serving = box.commands.run("python3 echo.py", background=True)
    assert next(iter(serving))[0] == "ready\n"
    host = box.get_host(8000)
    assert host == f"8000-{box.sandbox_id}.{DOMAIN}:{PORT}"
    assert httpx2.get(f"https://{host}/", verify=trusted, timeout=BOUND_S).text == host
    with websockets.sync.client.connect(f"wss://{host}/", ssl=trusted, open_timeout=BOUND_S) as connected:
        assert connected.recv(timeout=BOUND_S) == "hello"
    closed = httpx2.get(f"https://{box.get_host(9)}/", verify=trusted, timeout=BOUND_S)
    assert (closed.status_code, closed.json()["port"]) == (502, 9)
