"""A world of names and addresses that is all on loopback: what is dialled there is dialled here, or not at all.

Rules about other addresses are tried with a resolver and a dialer of ours: names mean what a test says, and a
connection to any address goes to a server of the test's own, or to nobody.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from ipaddress import ip_address
from pathlib import Path

import anyio
from anyio.abc import ByteStream, SocketAttribute

from atoll.contract.network import Address, AuditRecord, NetworkPolicy, PackageIndexes
from atoll.runtime.egress import audit
from atoll.runtime.egress.policy import PolicyEvaluator
from atoll.runtime.egress.proxy import Connector, EgressProxy, Interceptor
from atoll.runtime.engine import LocalEngine

SITE = "93.184.216.34"
"""A public address. Nothing is ever sent there."""


class World:
    """`names` says where each name is, one answer after another and the last for ever; `servers`, who is where."""

    def __init__(self) -> None:
        self.names: dict[str, list[list[str]]] = {}
        self.servers: dict[tuple[str, int], int] = {}
        """The port on this machine's loopback behind an address and a port. The address `*` is any."""
        self.looked_up: list[str] = []
        self.dialled: list[str] = []
        self.connector = Connector(resolve=self._resolve, dial=self._dial)

    def name(self, name: str, *answers: Sequence[str]) -> None:
        self.names[name] = [list(answer) for answer in answers]

    def _resolve(self, name: str) -> Sequence[Address]:
        self.looked_up.append(name)
        answers = self.names.get(name)
        if not answers:
            raise OSError(-2, "Name or service not known")
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        return [ip_address(each) for each in answer]

    async def _dial(self, address: Address, port: int) -> ByteStream:
        self.dialled.append(f"{address} {port}")
        here = self.servers.get((str(address), port)) or self.servers.get(("*", port))
        if here is None:
            raise ConnectionRefusedError(111, "Connection refused")
        return await anyio.connect_tcp("127.0.0.1", here)


@asynccontextmanager
async def serving(handler: Callable[[ByteStream], Awaitable[None]]) -> AsyncIterator[int]:
    """A server on loopback; gives its port."""
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as group:

        async def handle(stream: ByteStream) -> None:
            async with stream:
                await handler(stream)

        group.start_soon(listener.serve, handle)
        yield listener.extra(SocketAttribute.local_port)
        group.cancel_scope.cancel()


async def everything(stream: ByteStream) -> bytes:
    return b"".join([chunk async for chunk in stream])


async def echo(stream: ByteStream) -> None:
    async for chunk in stream:
        await stream.send(chunk)
    await stream.send_eof()


async def mirror(stream: ByteStream) -> None:
    """An HTTP server that answers each request with what it got, and closes."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += await stream.receive()
    head, _, body = data.partition(b"\r\n\r\n")
    lines = {line.partition(b":")[0].lower(): line.partition(b":")[2].strip() for line in head.split(b"\r\n")[1:]}
    while len(body) < int(lines.get(b"content-length", 0)) or (
        b"transfer-encoding" in lines and not body.endswith(b"0\r\n\r\n")
    ):
        body += await stream.receive()
    said = head + b"\r\n\r\n" + body
    await stream.send(b"HTTP/1.1 200 OK\r\nConnection: close\r\nX-Hop: 1\r\n\r\n" + said)


@asynccontextmanager
async def on_loopback(engine: LocalEngine) -> AsyncIterator[World]:
    """The network of all sandboxes of an engine: `example.com`, which answers HTTP on port 80 and echoes on 443."""
    world = World()
    async with serving(mirror) as web, serving(echo) as tls:
        world.name("example.com", [SITE])
        world.servers = {("*", 80): web, ("*", 443): tls}
        engine.egress_servers.connector = world.connector
        yield world
        engine.egress_servers.connector = None


class Proxied:
    """A proxy on a loopback port, and what it wrote down."""

    def __init__(self, port: int, directory: Path) -> None:
        self.port = port
        self._directory = directory
        self.evaluator = PolicyEvaluator()
        self.proxy: EgressProxy

    def records(self) -> list[AuditRecord]:
        return audit.read(self._directory)

    def allow(self, *rules: str, deny: Sequence[str] = (), indexes: PackageIndexes | None = None) -> None:
        self.evaluator = PolicyEvaluator(NetworkPolicy(allow=rules, deny=deny), indexes)
        self.proxy.recheck()

    async def connect(self) -> ByteStream:
        return await anyio.connect_tcp("127.0.0.1", self.port)

    async def say(self, *parts: bytes) -> bytes:
        """What the proxy answers, to its end."""
        async with await self.connect() as stream:
            for part in parts:
                await stream.send(part)
            return await everything(stream)

    async def get(self, url: str, *headers: str) -> bytes:
        head = "\r\n".join([f"GET {url} HTTP/1.1", *(headers or ("Host: x",)), "Connection: close"])
        return await self.say(head.encode() + b"\r\n\r\n")

    async def tunnel(self, target: str) -> bytes:
        return await self.say(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())

    async def socks(self, host: str | bytes, port: int) -> int:
        """SOCKS' answer to a wish to connect."""
        kind = b"\x03" + bytes([len(host)]) + host.encode() if isinstance(host, str) else host
        async with await self.connect() as stream:
            await stream.send(b"\x05\x01\x00")
            assert await stream.receive() == b"\x05\x00"
            await stream.send(b"\x05\x01\x00" + kind + port.to_bytes(2, "big"))
            return (await stream.receive())[1]


@asynccontextmanager
async def proxied(
    world: World,
    directory: Path,
    *rules: str,
    deny: Sequence[str] = (),
    indexes: PackageIndexes | None = None,
    interceptor: Interceptor | None = None,
) -> AsyncIterator[Proxied]:
    audit_log = audit.AuditLog(directory)

    async def handle(stream: ByteStream) -> None:
        if await made.proxy.serve(stream):
            await stream.send_eof()
            await everything(stream)

    async with serving(handle) as port:
        made = Proxied(port, directory)
        made.proxy = EgressProxy("box", lambda: made.evaluator, audit_log, world.connector, interceptor)
        made.allow(*rules, deny=deny, indexes=indexes)
        yield made
    audit_log.close()
