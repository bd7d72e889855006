"""What a server costs: the same commands and files over REST and `atoll.connect` as with the engine itself."""

from __future__ import annotations

import json
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, closing
from functools import partial
from pathlib import Path
from urllib.parse import quote

import anyio
import anyio.to_thread

import atoll
from atoll.testing.server import RunningServer
from bench import http_load
from bench.baselines import Baselines
from bench.docker import Docker
from bench.footprint import pss_bytes
from bench.lab import Lab
from bench.results import Cell, Frozen, Row, Section, Spread, Table, Target, Value, ratio, times
from bench.sampling import Contender, at_most, in_turns, throughput, timed

HOW = """\
`atoll serve` as a process of its own, over the state directory of the benchmarks. One at a time: `exec(["true"])` of
the engine itself, `POST …/exec` on one connection that is kept open, and `exec` through `atoll.connect`, in the same
sandbox, interleaved; beside them Docker's engine, where one can be started: create, start and inspect an exec over its
socket. Many at once: a program of its own keeps one request in progress on each of its connections, for some seconds.
Busy sandboxes: as many connections as sandboxes, each in its own. The start is from the program's until /readyz answers
200."""

EMBEDDED, REST, CONNECT, DOCKER = "embedded", "REST", "atoll.connect", "Docker over HTTP"
CLIENTS = (1, 16, 64)
LATENCY_BOUND, RATE_BOUND, DOWNLOAD_BOUND, START_BOUND_S, GROWTH_BOUND = 2.5, 500.0, 300e6, 1.5, 1.1
_FILE = "/home/user/large"
_CHUNK_BYTES = 1024 * 1024


class Load(Frozen):
    """What came of requests that were sent for a while."""

    rate: float
    spread: Spread
    errors: dict[str, int]


class RestConnection:
    """A connection that is kept open. Blocking: nothing else runs in this process while it waits."""

    def __init__(self, server: RunningServer) -> None:
        self._server = server
        self._socket = socket.create_connection(("127.0.0.1", server.port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._space = memoryview(bytearray(_CHUNK_BYTES))

    def close(self) -> None:
        self._socket.close()

    async def exec_true(self, request: bytes) -> float:
        start = time.perf_counter()
        self.ask(request)
        return time.perf_counter() - start

    def ask(self, request: bytes) -> int:
        """The length of the answer's body."""
        self._socket.sendall(request)
        head = b""
        while b"\r\n\r\n" not in head:
            if not (data := self._socket.recv(65536)):
                raise RuntimeError("the server closed the connection")
            head += data
        head, _, body = head.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200 "):
            raise RuntimeError(f"the answer was {head[:100]!r} {body[:300]!r}")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        left = length - len(body)
        while left:
            left -= self._socket.recv_into(self._space, min(left, _CHUNK_BYTES))
        return length


async def measure(lab: Lab) -> Section:
    async with AsyncExitStack() as stack:
        server = RunningServer(lab.engine.state_dir, (), {"ATOLL_LOG_LEVEL": "warning"})
        stack.callback(server.stop)
        starts = await anyio.to_thread.run_sync(_starts, server, lab.amount(5, 2))
        box = await stack.enter_async_context(lab.sandbox())
        baselines = stack.enter_context(Baselines(lab.scratch / "server"))
        latency = await _latency(lab, server, box, baselines.docker)
        rates = await _rates(lab, server, box, baselines.docker)
        download = await _download(lab, server, box)
        busy, grown, busy_table = await _busy(lab, server)
    one = Spread.of(latency[REST]).median / Spread.of(latency[EMBEDDED]).median
    targets = (
        target_of("`exec true` over REST with one client, median against the embedded `exec`", LATENCY_BOUND, "×", one),
        target_of(
            f"`exec true` over REST with {CLIENTS[1]} clients", RATE_BOUND, "1/s", rates[REST][1].rate, least=True
        ),
        target_of("download of a file over REST", DOWNLOAD_BOUND, "B/s", download[REST], least=True),
        target_of("start of the server, median", START_BOUND_S, "s", statistics.median(starts)),
        target_of("errors of busy sandboxes over one server", 0, "", sum(busy.errors.values())),
        target_of("memory of the server at the end of that, against a third of it", GROWTH_BOUND, "×", grown),
    )
    tables = (
        times("`exec true`, one at a time", latency, against=EMBEDDED),
        _rate_table(rates),
        _download_table(download),
        busy_table,
    )
    return Section(subject="server", title="The server", how=HOW, tables=tables, targets=targets)


def target_of(what: str, bound: float, unit: str, measured: float, *, least: bool = False) -> Target:
    def value(number: float) -> Value:
        return Value.model_validate({"number": number, "unit": unit})

    return Target(what=what, bound=value(bound), at_most=not least, measured=value(measured))


def _starts(server: RunningServer, count: int) -> list[float]:
    """How long the server takes until it is ready. It runs afterwards."""
    taken = []
    for _ in range(count + 1):
        server.stop()
        start = time.perf_counter()
        server.start()
        with closing(RestConnection(server)) as connection:
            connection.ask(request_for(server, "GET", "/readyz"))
        taken.append(time.perf_counter() - start)
    return taken[1:]  # the first makes the database


def request_for(server: RunningServer, method: str, path: str, body: object = None) -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    head = [f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{server.port}", f"X-API-Key: {server.key}"]
    if content:
        head += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
    return "\r\n".join([*head, "", ""]).encode() + content


def _exec_request(server: RunningServer, name: str) -> bytes:
    return request_for(server, "POST", f"/api/v1/sandboxes/{name}/exec", {"command": ["true"]})


@asynccontextmanager
async def _connected(server: RunningServer, box: atoll.Sandbox) -> AsyncIterator[atoll.Sandbox]:
    """The same sandbox, through the server."""
    async with atoll.connect(server.url, server.key) as engine:
        yield await engine.get(box.name)


async def _latency(
    lab: Lab, server: RunningServer, box: atoll.Sandbox, docker: Docker | None
) -> dict[str, list[float]]:
    request = _exec_request(server, box.name)
    async with _connected(server, box) as remote:
        with closing(RestConnection(server)) as connection:
            contenders = [
                Contender(EMBEDDED, lambda: timed(box.exec(["true"]))),
                Contender(REST, partial(connection.exec_true, request)),
                Contender(CONNECT, lambda: timed(remote.exec(["true"]))),
            ]
            if docker is not None:
                contenders.append(Contender(DOCKER, docker.take_exec, every=10))
            for contender in contenders:
                await contender.take()
            rounds = lab.amount(1000, 100)
            with lab.progress("exec true over a server, interleaved", rounds) as advance:
                return await in_turns(contenders, rounds, advance)


async def load_of(server: RunningServer, requests: Sequence[bytes], seconds: float) -> Load:
    order = {"port": server.port, "requests": [each.decode() for each in requests], "seconds": seconds}
    command = [sys.executable, "-I", str(Path(http_load.__file__))]
    done = await anyio.run_process(command, input=json.dumps(order).encode())
    found = json.loads(done.stdout)
    if not found["samples"]:
        raise RuntimeError(f"no request was answered: {found['errors']}")
    spread = Spread.of(found["samples"])
    return Load(rate=len(found["samples"]) / found["seconds"], spread=spread, errors=found["errors"])


async def _rates(lab: Lab, server: RunningServer, box: atoll.Sandbox, docker: Docker | None) -> dict[str, list[Load]]:
    """Requests per second, with each number of clients."""
    seconds = lab.amount(5, 1)
    request = _exec_request(server, box.name)
    found: dict[str, list[Load]] = {}
    async with _connected(server, box) as remote:
        with lab.progress("requests per second", len(CLIENTS)) as advance:
            for clients in CLIENTS:
                loads = {
                    EMBEDDED: await _throughput(box, clients, seconds),
                    REST: await load_of(server, [request] * clients, seconds),
                    CONNECT: await _throughput(remote, clients, seconds),
                }
                if docker is not None:
                    loads[DOCKER] = await anyio.to_thread.run_sync(_docker_load, docker, clients, seconds)
                for label, load in loads.items():
                    found.setdefault(label, []).append(load)
                    if load.errors:
                        raise RuntimeError(f"{label}, {clients} clients: {load.errors}")
                advance()
    return found


async def _throughput(box: atoll.Sandbox, clients: int, seconds: float) -> Load:
    samples: list[float] = []

    async def one() -> None:
        samples.append(await timed(box.exec(["true"])))

    rate = await throughput(one, clients, seconds)
    return Load(rate=rate, spread=Spread.of(samples), errors={})


def _docker_load(docker: Docker, clients: int, seconds: float) -> Load:
    deadline = time.perf_counter() + seconds

    def one(_: int) -> list[float]:
        samples: list[float] = []
        while (start := time.perf_counter()) < deadline:
            docker.exec()
            samples.append(time.perf_counter() - start)
        return samples

    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as threads:
        samples = [each for found in threads.map(one, range(clients)) for each in found]
    return Load(rate=len(samples) / (time.perf_counter() - start), spread=Spread.of(samples), errors={})


def _rate_table(rates: dict[str, list[Load]]) -> Table:
    rows = []
    for label, loads in rates.items():
        cells: list[Cell] = []
        for load in loads:
            cells += [Value(number=load.rate, unit="1/s"), Value(number=load.spread.median, unit="s")]
            cells.append(Value(number=load.spread.p99, unit="s"))
        rows.append(Row(label=label, cells=tuple(cells)))
    columns = [name for clients in CLIENTS for name in (f"{clients} at once", "median", "p99")]
    return Table(title="`exec true`, many at once", columns=("", *columns), rows=tuple(rows))


async def _download(lab: Lab, server: RunningServer, box: atoll.Sandbox) -> dict[str, float]:
    """Bytes per second of one file."""
    size = lab.amount(512, 128) * 1024 * 1024
    made = await box.exec(f"head -c {size} /dev/zero > {_FILE}")
    if made.exit_code != 0:
        raise RuntimeError(f"the file could not be made: {made.stderr}")
    path = f"/api/v1/sandboxes/{box.name}/files?path={quote(_FILE)}"

    async def embedded() -> None:
        async with aclosing(box.files.stream(_FILE)) as chunks:
            if sum([len(chunk) async for chunk in chunks]) != size:
                raise RuntimeError("the file is not complete")

    with closing(RestConnection(server)) as connection:

        async def over_rest() -> None:
            if connection.ask(request_for(server, "GET", path)) != size:
                raise RuntimeError("the file is not complete")

        contenders = [Contender(EMBEDDED, lambda: timed(embedded())), Contender(REST, lambda: timed(over_rest()))]
        rounds = lab.amount(5, 2)
        with lab.progress("download, interleaved", rounds) as advance:
            samples = await in_turns(contenders, rounds, advance)
    return {label: size / statistics.median(taken) for label, taken in samples.items()}


def _download_table(download: dict[str, float]) -> Table:
    rows = [
        Row(label=label, cells=(Value(number=rate, unit="B/s"), ratio(rate, download[EMBEDDED])))
        for label, rate in download.items()
    ]
    return Table(title="Download of a file", columns=("", "throughput", f"against {EMBEDDED}"), rows=tuple(rows))


async def _busy(lab: Lab, server: RunningServer) -> tuple[Load, float, Table]:
    """Many sandboxes at work at once: what came of it, how much the server's memory grew, and a table."""
    count, seconds = lab.amount(200, 20), float(lab.amount(120, 6))
    boxes: list[atoll.Sandbox] = []

    async def create() -> None:
        boxes.append(await lab.create())
        advance()

    memory: list[int] = []

    async def watch() -> None:
        for share in (1 / 3, 1.0):
            await anyio.sleep(start + share * seconds - time.perf_counter())
            memory.append(pss_bytes(server.pid))

    try:
        with lab.progress(f"{count} sandboxes", count) as advance:
            async with at_most(4) as begin:
                for _ in range(count):
                    await begin(create)
        with lab.progress(f"{count} sandboxes busy for {seconds:g} s", 1):
            start = time.perf_counter()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watch)
                load = await load_of(server, [_exec_request(server, box.name) for box in boxes], seconds)
    finally:
        await lab.destroy(boxes)
    cells = (
        Value(number=seconds, unit="s"),
        Value(number=load.rate, unit="1/s"),
        Value(number=load.spread.median, unit="s"),
        Value(number=load.spread.p99, unit="s"),
        Value(number=sum(load.errors.values())),
        *(Value(number=each, unit="B") for each in memory),
    )
    columns = ("", "for", "requests", "median", "p99", "errors", "memory after a third", "at the end")
    row = Row(label=f"{count} sandboxes", cells=cells)
    note = "; ".join(f"{what}: {times_}" for what, times_ in load.errors.items()) or None
    table = Table(title="Busy sandboxes over one server", columns=columns, rows=(row,), note=note)
    return load, memory[-1] / memory[0], table
