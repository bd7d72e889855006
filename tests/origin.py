"""A server on loopback that stands for hosts elsewhere, over TLS, and remembers every byte that it was sent.

Its certificate is signed by an authority that tests trust as the machine's own. What it answers, the path says.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import anyio
from anyio.abc import ByteStream, SocketStream
from anyio.streams.tls import TLSStream
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_GONE = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, ssl.SSLError)


class TestAuthority:
    """Vouches for whatever hosts a test wants."""

    __test__ = False

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "the world's authority")])
        certificate = (
            self._builder(self._name, self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.path = directory / "world.pem"
        self.path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def server_context(self, *hosts: str) -> ssl.SSLContext:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            self._builder(x509.Name([]), key)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(host) for host in hosts]), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        file = self._directory / f"{hosts[0]}.pem"
        file.write_bytes(
            certificate.public_bytes(serialization.Encoding.PEM)
            + key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(file)
        context.set_alpn_protocols(["http/1.1"])
        return context

    def client_context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.path))

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
        )


@dataclass
class Asked:
    """A request as it came."""

    head: bytes
    body: bytes

    @property
    def line(self) -> bytes:
        return self.head.partition(b"\r\n")[0]

    def all(self, header: str) -> list[bytes]:
        lines = (line.partition(b":") for line in self.head.split(b"\r\n")[1:])
        return [value.strip() for name, _, value in lines if name.decode().lower() == header]


@dataclass
class Origin:
    port: int
    asked: list[Asked] = field(default_factory=list)
    connections: int = 0
    raw: bytes = b""
    """All that came, of every connection, after TLS."""
    upgraded: bytes = b""
    """What came after a change of protocol."""
    stored: bytes = b""
    """What it says for `/stored`."""


@asynccontextmanager
async def origin(context: ssl.SSLContext | None) -> AsyncIterator[Origin]:
    """A server with this certificate, or without TLS."""
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    served = Origin(listener.extra(anyio.abc.SocketAttribute.local_port))

    async def serve(stream: SocketStream) -> None:
        served.connections += 1
        async with stream:
            with suppress(*_GONE):
                spoken: ByteStream = stream
                if context is not None:
                    spoken = await TLSStream.wrap(
                        stream, server_side=True, ssl_context=context, standard_compatible=False
                    )
                await _converse(served, spoken)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        yield served
        tasks.cancel_scope.cancel()
    await listener.aclose()


async def _converse(served: Origin, stream: ByteStream) -> None:
    buffer = b""

    async def more() -> bytes:
        data = await stream.receive()
        served.raw += data
        return data

    while True:
        while b"\r\n\r\n" not in buffer:
            buffer += await more()
        head, _, buffer = buffer.partition(b"\r\n\r\n")
        asked = Asked(head, b"")
        length = int((asked.all("content-length") or [b"0"])[0])
        if asked.all("expect"):
            await stream.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        if asked.all("transfer-encoding"):
            while b"0\r\n\r\n" not in buffer:
                buffer += await more()
            asked.body, _, buffer = buffer.partition(b"0\r\n\r\n")
        while len(buffer) < length:
            buffer += await more()
        if length:
            asked.body, buffer = buffer[:length], buffer[length:]
        served.asked.append(asked)
        path = asked.line.split()[1].partition(b"?")[0]
        if path == b"/upgrade":
            await stream.send(b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n")
            await stream.send(head)
            while True:
                data = await more()
                served.upgraded += data
                await stream.send(data)
        await _answer(stream, path, asked, served.stored)
        if path in (b"/close", b"/leave", b"/nonsense"):
            return


async def _answer(stream: ByteStream, path: bytes, asked: Asked, stored: bytes) -> None:
    body = stored if path == b"/stored" else b"hello\n"
    extra = b""
    if path == b"/echo":  # what came, in the answer's header and body
        body = asked.head
        extra = b"X-Echo: " + b" ".join(asked.all("authorization")) + b"\r\n"
    elif path == b"/moved":
        extra = b"Location: https://other.test/caught\r\n"
    elif path == b"/large":
        body = bytes(range(256)) * 4096
    elif path == b"/length":
        body = str(len(asked.body)).encode()
    if path == b"/pieces":  # a byte at a time, each in a chunk of its own
        await stream.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for byte in asked.head:
            await stream.send(b"1\r\n%c\r\n" % byte)
        await stream.send(b"0\r\nX-Trailer: " + b" ".join(asked.all("authorization")) + b"\r\n\r\n")
        return
    if path == b"/nonsense":
        await stream.send(b"220 mail.test\r\n\r\n")
        return
    if path == b"/close":
        await stream.send(b"HTTP/1.0 200 OK\r\n\r\n" + body)
        return
    status = b"302 Found" if path == b"/moved" else b"200 OK"
    if path == b"/reason":  # what came, in the answer's first line
        status = b"200 " + b" ".join(asked.all("authorization"))
    if asked.line.startswith(b"HEAD "):
        await stream.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body))
        return
    await stream.send(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n%s\r\n%s" % (status, len(body), extra, body))
