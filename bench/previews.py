"""The cost of a preview, per request and per byte."""

from __future__ import annotations

import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from functools import partial
from urllib.parse import urlsplit

import anyio.to_thread

import atoll
from bench.lab import Lab
from bench.results import Cell, Row, Section, Spread, Table, Target, Value, ratio, times
from bench.sampling import Contender, in_turns

HOW = """\
The same small server, inside a sandbox behind `expose` and on the host, and the same client: blocking sockets in a
thread of the process that serves the previews, one keep-alive connection each, interleaved. A request is a GET with
four headers and a response of two bytes; the throughput is that of one response, and of one upload, with a known
length. The added time is the difference between the medians."""

HOST = "host, the server itself"
TRANSFERS = ("download", "upload")
PORT = 8000
_CHUNK_BYTES = 256 * 1024
_SERVER = """
import socket, sys, threading

def serve(connection):
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    rest, zeros = b"", bytes(262144)
    space = memoryview(bytearray(262144))
    while True:
        while b"\\r\\n\\r\\n" not in rest:
            data = connection.recv(65536)
            if not data:
                return
            rest += data
        head, _, rest = rest.partition(b"\\r\\n\\r\\n")
        size = int(head.split(b" ")[1].partition(b"?")[2] or 0)
        if head.startswith(b"POST"):
            size -= len(rest)
            rest = b""
            while size:
                size -= connection.recv_into(space, min(size, len(space)))
            size = 0
        length = size or 2
        answer = b"HTTP/1.1 200 OK\\r\\nContent-Type: text/plain\\r\\nContent-Length: %d\\r\\n\\r\\n" % length
        connection.sendall(answer if size else answer + b"ok")
        while size:
            piece = min(size, len(zeros))
            connection.sendall(zeros[:piece])
            size -= piece

server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print(server.getsockname()[1], flush=True)
while True:
    threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
"""


class Client:
    """A keep-alive connection to the server, through a preview or direct."""

    def __init__(self, port: int, host: str, token: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._headers = f"Host: {host}\r\nAtoll-Token: {token}\r\nUser-Agent: bench\r\nAccept: */*\r\n"
        self._space = memoryview(bytearray(_CHUNK_BYTES))

    def close(self) -> None:
        self._socket.close()

    async def take(self, kind: str, size: int) -> float:
        """One request and its response, in seconds."""
        return await anyio.to_thread.run_sync(getattr(self, kind), size)

    def request(self, _size: int) -> float:
        start = time.perf_counter()
        self._socket.sendall(f"GET / HTTP/1.1\r\n{self._headers}\r\n".encode())
        self._response(2)
        return time.perf_counter() - start

    def download(self, size: int) -> float:
        start = time.perf_counter()
        self._socket.sendall(f"GET /?{size} HTTP/1.1\r\n{self._headers}\r\n".encode())
        self._response(size)
        return time.perf_counter() - start

    def upload(self, size: int) -> float:
        start = time.perf_counter()
        self._socket.sendall(f"POST /?{size} HTTP/1.1\r\n{self._headers}Content-Length: {size}\r\n\r\n".encode())
        for _ in range(size // _CHUNK_BYTES):
            self._socket.sendall(self._space)
        self._response(2)
        return time.perf_counter() - start

    def _response(self, size: int) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            head += self._socket.recv(4096)
        head, _, body = head.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200 "):
            raise RuntimeError(f"the answer was {head[:100]!r}")
        left = size - len(body)
        while left:
            left -= self._socket.recv_into(self._space, min(left, _CHUNK_BYTES))


async def measure(lab: Lab) -> Section:
    size = lab.amount(256, 64) * 1024 * 1024
    async with AsyncExitStack() as stack:
        clients = {HOST: await stack.enter_async_context(_on_host())}
        for runtime in lab.runtimes:
            box = await stack.enter_async_context(lab.sandbox(runtime))
            clients[f"Atoll, {runtime}"] = await stack.enter_async_context(_through_preview(box))
        rounds = lab.amount(1000, 100)
        with lab.progress("requests, interleaved", rounds) as advance:
            taken = await in_turns(_contenders(clients, "request", 0), rounds, advance)
        moved = {}
        for kind in TRANSFERS:
            turns = lab.amount(5, 2)
            with lab.progress(f"{kind} of {size // 1_000_000} MB, interleaved", turns) as advance:
                moved[kind] = await in_turns(_contenders(clients, kind, size), turns, advance)
    rates = {label: [size / statistics.median(moved[kind][label]) for kind in TRANSFERS] for label in clients}
    fastest = f"Atoll, {lab.fastest}"
    added = Spread.of(taken[fastest]).median - Spread.of(taken[HOST]).median
    targets = (
        Target(
            what=f"time that a preview adds to a request with {lab.fastest}, median",
            bound=Value(number=0.0015, unit="s"),
            at_most=True,
            measured=Value(number=added, unit="s"),
        ),
        Target(
            what=f"a preview's throughput with {lab.fastest} (the slower of both directions)",
            bound=Value(number=150e6, unit="B/s"),
            at_most=False,
            measured=Value(number=min(rates[fastest]), unit="B/s"),
        ),
    )
    tables = (times("Requests", taken, against=HOST), _throughput(size, rates))
    return Section(subject="preview", title="Previews", how=HOW, tables=tables, targets=targets)


def _contenders(clients: dict[str, Client], kind: str, size: int) -> list[Contender]:
    return [
        Contender(label, partial(client.take, kind, size), every=2 if "runsc" in label else 1)
        for label, client in clients.items()
    ]


def _throughput(size: int, rates: dict[str, list[float]]) -> Table:
    rows = []
    for label, found in rates.items():
        cells: list[Cell] = []
        for rate, reference in zip(found, rates[HOST], strict=True):
            cells += [Value(number=rate, unit="B/s"), ratio(rate, reference)]
        rows.append(Row(label=label, cells=tuple(cells)))
    columns = ["", *(column for kind in TRANSFERS for column in (kind, "against host"))]
    return Table(title=f"{size // 1_000_000} MB each way", columns=tuple(columns), rows=tuple(rows))


@asynccontextmanager
async def _on_host() -> AsyncIterator[Client]:
    with subprocess.Popen([sys.executable, "-I", "-c", _SERVER, "0"], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        try:
            with closing(Client(int(server.stdout.readline()), "localhost", "none")) as client:
                yield client
        finally:
            server.kill()


@asynccontextmanager
async def _through_preview(box: atoll.Sandbox) -> AsyncIterator[Client]:
    async with await box.spawn(["python3", "-I", "-c", _SERVER, str(PORT)], keep=False):
        preview = await box.expose(PORT, wait_s=30)
        address = urlsplit(preview.url)
        with closing(Client(address.port or 0, address.netloc, preview.token)) as client:
            yield client
        await box.unexpose(PORT)
