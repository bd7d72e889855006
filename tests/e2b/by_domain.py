"""A program with the E2B SDK and nothing but a domain: https for the API, for a sandbox's own plane and for its ports.

A process of its own (`test_tls.py`): the SDK reads once which certificates are trusted.
"""

from __future__ import annotations

import os
import socket
import ssl
import time
from typing import Any

import httpx2
import websockets.sync.client
from e2b import Sandbox, SandboxNetworkOpts, SandboxState

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

ECHO_TLS = """
import http.server, ssl
class Echo(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        body = self.headers["Host"].encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
server = http.server.ThreadingHTTPServer(("127.0.0.1", 8443), Echo)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain("cert.pem", "key.pem")
server.socket = context.wrap_socket(server.socket, server_side=True)
print("ready", flush=True)
server.serve_forever()
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

network: SandboxNetworkOpts = {"mask_request_host": "${PORT}.inside.example:81", "https_ports": [8443]}
with Sandbox.create(timeout=120, network=network) as box:
    box.files.write("echo.py", ECHO)
    box.files.write("echo_tls.py", ECHO_TLS)
    box.commands.run(
        "openssl req -x509 -newkey rsa:2048 -keyout key.pem -out cert.pem -days 1 -nodes -subj /CN=localhost"
    )
    for program in ("echo.py", "echo_tls.py"):
        assert next(iter(box.commands.run(f"python3 {program}", background=True)))[0] == "ready\n"
    with httpx2.Client(verify=trusted, timeout=BOUND_S) as client:
        for port in (8000, 8443, 8000):  # over one connection of the client, and others inside
            assert client.get(f"https://{box.get_host(port)}/").text == f"{port}.inside.example:81"
    shown = box.get_info().network
    assert shown["mask_request_host"] == "${PORT}.inside.example:81"
    assert shown["https_ports"] == [8443]

# A program that ends a response by closing the connection, without an alert of TLS, and no mask.
with Sandbox.create(timeout=120, network={"https_ports": [8443]}) as box:
    closing = ECHO_TLS.replace("HTTP/1.1", "HTTP/1.0").replace('self.send_header("Content-Length", str(len(body)))', "")
    assert "Content-Length" not in closing
    box.files.write("echo_tls.py", closing)
    box.commands.run(
        "openssl req -x509 -newkey rsa:2048 -keyout key.pem -out cert.pem -days 1 -nodes -subj /CN=localhost"
    )
    assert next(iter(box.commands.run("python3 echo_tls.py", background=True)))[0] == "ready\n"
    host = box.get_host(8443)
    told = httpx2.get(f"https://{host}/", verify=trusted, timeout=BOUND_S)
    assert (told.status_code, told.text) == (200, host)

# A port that speaks no TLS, though it was said to.
with Sandbox.create(timeout=120, network={"https_ports": [8000]}) as box:
    box.files.write("echo.py", ECHO)
    assert next(iter(box.commands.run("python3 echo.py", background=True)))[0] == "ready\n"
    refused = httpx2.get(f"https://{box.get_host(8000)}/", verify=trusted, timeout=BOUND_S)
    assert (refused.status_code, refused.json()["port"]) == (502, 8000)

with Sandbox.create(timeout=120, lifecycle={"on_timeout": "pause", "auto_resume": True}) as box:
    box.files.write("echo.py", ECHO)
    assert next(iter(box.commands.run("python3 echo.py", background=True)))[0] == "ready\n"
    box.set_timeout(1)
    until = time.monotonic() + BOUND_S
    while box.get_info().state != SandboxState.PAUSED:
        assert time.monotonic() < until, "it was not paused at the end of its time-out"
        time.sleep(0.05)
    host = box.get_host(8000)
    assert httpx2.get(f"https://{host}/", verify=trusted, timeout=BOUND_S).text == host  # the program is still there
    assert box.get_info().state == SandboxState.RUNNING
    assert box.get_info().end_at is not None
