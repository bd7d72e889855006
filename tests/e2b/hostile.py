"""A client that keeps to no rule: requests byte by byte, and what the server holds while they are answered."""

from __future__ import annotations

import base64
import json
import os
import socket
import struct
from pathlib import Path
from typing import Any

import httpx2
from e2b import Sandbox

from atoll.testing.server import RunningServer
from atoll.testing.waiting import BOUND_S

STREAM = "application/connect+json"


def memory_bytes(server: RunningServer) -> int:
    """What the server's process holds in memory now."""
    return int(Path(f"/proc/{server.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors(server: RunningServer) -> int:
    return len(os.listdir(f"/proc/{server.pid}/fd"))


def tenant(server: RunningServer, name: str, **body: Any) -> str:
    """A new tenant's administrator's key."""
    with httpx2.Client(base_url=server.url, headers=server.headers, timeout=BOUND_S) as operator:
        operator.post("/api/v1/tenants", json={"name": name, **body}).raise_for_status()
        made = operator.post("/api/v1/keys", json={"name": name, "role": "admin"}, headers={"Atoll-Tenant": name})
    return str(made.json()["text"])


def headers(box: Sandbox, **more: str) -> dict[str, str]:
    """Of requests for a sandbox's own plane."""
    return {"E2b-Sandbox-Id": box.sandbox_id, "X-Access-Token": box._envd_access_token or "", **more}


def envelope(message: dict[str, Any]) -> bytes:
    data = json.dumps(message).encode()
    return struct.pack(">BI", 0, len(data)) + data


def stdin(text: bytes) -> dict[str, str]:
    return {"stdin": base64.b64encode(text).decode()}


class RawRequest:
    """A request on a connection of its own, whose answer need not be read."""

    def __init__(self, server: RunningServer, box: Sandbox, path: str, body: bytes | None, kind: str) -> None:
        """Without a body, it is sent in chunks, with `send`."""
        self._socket = socket.create_connection(("127.0.0.1", server.port), timeout=BOUND_S)
        length = "Transfer-Encoding: chunked" if body is None else f"Content-Length: {len(body)}"
        lines = [f"{name}: {value}" for name, value in headers(box, **{"Content-Type": kind}).items()]
        head = "\r\n".join([f"POST {path} HTTP/1.1", f"Host: 127.0.0.1:{server.port}", length, *lines, "", ""])
        self._socket.sendall(head.encode() + (body or b""))

    def send(self, message: dict[str, Any]) -> None:
        data = envelope(message)
        self._socket.sendall(b"%x\r\n%b\r\n" % (len(data), data))

    def read_until(self, text: bytes) -> bytes:
        """What comes, until this is in it or the server closes."""
        data = b""
        while text not in data:
            try:
                more = self._socket.recv(65536)
            except ConnectionResetError:
                break
            if not more:
                break
            data += more
        return data

    def close(self) -> None:
        self._socket.close()


def start(server: RunningServer, box: Sandbox, command: list[str]) -> tuple[RawRequest, int]:
    """Start a command with an input. Returns the stream of its events, and its pid."""
    message = {"process": {"cmd": command[0], "args": command[1:]}, "stdin": True}
    request = RawRequest(server, box, "/process.Process/Start", envelope(message), STREAM)
    data = request.read_until(b'"pid":')
    while not (found := data.partition(b'"pid":')[2].partition(b"}"))[1]:
        data += request.read_until(b"}")
    return request, int(found[0])
