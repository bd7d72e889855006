"""A program that sends the same HTTP requests again and again, on connections that are kept open.

In a process of its own and without a library for HTTP: what is measured is the server, on the cores that this leaves.
Reads what to send from its input, as JSON, and writes what it found to its output. Used by `server.py`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from typing import Any


class LoadConnection(asyncio.Protocol):
    """One connection: the next request is sent when the answer to the last has come."""

    def __init__(self, request: bytes, deadline: float, found: dict[str, Any]) -> None:
        self._request = request
        self._deadline = deadline
        self._found = found
        self._buffer = b""
        self._sent_at = 0.0
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._send()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        at = head.lower().find(b"content-length:")
        length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if len(body) < length:
            return
        now = time.perf_counter()
        self._found["samples"].append(now - self._sent_at)
        if not head.startswith(b"HTTP/1.1 200 "):
            self._found["errors"][head[:40].split(b"\r\n")[0].decode()] += 1
        self._buffer = b""
        if now < self._deadline:
            self._send()
        else:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if time.perf_counter() < self._deadline:
            self._found["errors"]["the connection was lost"] += 1
        self.ended.set_result(None)

    def _send(self) -> None:
        self._sent_at = time.perf_counter()
        self._transport.write(self._request)


async def send(port: int, requests: list[str], seconds: float) -> dict[str, Any]:
    """A connection for each request, for so long."""
    found: dict[str, Any] = {"samples": [], "errors": Counter()}
    loop = asyncio.get_running_loop()
    start = time.perf_counter()
    made = [
        await loop.create_connection(
            lambda request=request: LoadConnection(request.encode(), start + seconds, found),  # type: ignore[misc]
            "127.0.0.1",
            port,
        )
        for request in requests
    ]
    await asyncio.gather(*(protocol.ended for _, protocol in made))
    return {**found, "seconds": time.perf_counter() - start}


if __name__ == "__main__":
    json.dump(asyncio.run(send(**json.load(sys.stdin))), sys.stdout)
