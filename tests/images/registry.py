"""A real registry on a loopback port, images for it, and a gate that can hold a download half-way."""

from __future__ import annotations

import io
import re
import shutil
import socket
import subprocess
import tarfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path

import anyio
from anyio.abc import ByteReceiveStream, ByteStream, SocketAttribute

BUSYBOX = Path(shutil.which("busybox") or "/usr/bin/busybox")

Entry = tuple[tarfile.TarInfo, bytes]


def file(path: str, content: bytes = b"", *, mode: int = 0o644, uid: int = 0, **fields: object) -> Entry:
    return entry(path, tarfile.REGTYPE, content, mode=mode, uid=uid, **fields)


def entry(path: str, kind: bytes, content: bytes = b"", **fields: object) -> Entry:
    info = tarfile.TarInfo(path)
    info.type = kind
    info.size = len(content)
    for name, value in fields.items():
        setattr(info, name, value)
    return info, content


def link(path: str, target: str) -> Entry:
    return entry(path, tarfile.SYMTYPE, linkname=target)


def rootfs(*more: Entry, accounts: str = "root:x:0:0:root:/root:/bin/sh\n") -> list[Entry]:
    """A root file system that works: busybox, a shell, accounts."""
    return [
        entry("bin", tarfile.DIRTYPE, mode=0o755),
        entry("etc", tarfile.DIRTYPE, mode=0o755),
        file("bin/busybox", BUSYBOX.read_bytes(), mode=0o755),
        link("bin/sh", "busybox"),
        *([file("etc/passwd", accounts.encode())] if accounts else []),
        *more,
    ]


def write_tar(target: Path, entries: Sequence[Entry], mode: str = "w") -> Path:
    with tarfile.open(target, mode, format=tarfile.PAX_FORMAT) as tar:  # type: ignore[call-overload]
        for info, content in entries:
            tar.addfile(info, io.BytesIO(content))
    return target


def make_layout(
    directory: Path,
    entries: Sequence[Entry],
    *,
    env: Sequence[str] = (),
    tag: str = "image",
    user: str | None = "1000",
    workdir: str | None = "/srv",
) -> Path:
    """An OCI layout of one image, made by umoci. `directory` must not exist."""
    layer = write_tar(directory.with_suffix(".layer.tar"), entries)
    image = f"{directory}:{tag}"
    _umoci("init", "--layout", str(directory))
    _umoci("new", "--image", image)
    _umoci("raw", "add-layer", "--image", image, str(layer))
    settings = [f"--config.env={line}" for line in env]
    settings += [f"--config.user={user}"] if user is not None else []
    settings += [f"--config.workingdir={workdir}"] if workdir is not None else []
    if settings:
        _umoci("config", "--image", image, *settings)
    layer.unlink()
    return directory


def _umoci(*arguments: str) -> None:
    subprocess.run(["umoci", *arguments], check=True, capture_output=True, timeout=30)


class Registry:
    """`docker-registry`, in a directory of its own."""

    def __init__(self, directory: Path, *, password_file: Path | None = None) -> None:
        self.port = free_port()
        self.host = f"localhost:{self.port}"
        self._log = directory / "log"
        auth = f"auth: {{htpasswd: {{realm: test, path: {password_file}}}}}\n" if password_file else ""
        config = directory / "config.yml"
        config.write_text(
            "version: 0.1\n"
            "log: {accesslog: {disabled: false}, level: error}\n"
            f"storage: {{filesystem: {{rootdirectory: {directory / 'data'}}}}}\n"
            f"http: {{addr: '127.0.0.1:{self.port}'}}\n" + auth
        )
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                ["docker-registry", "serve", str(config)], stdout=log, stderr=subprocess.STDOUT, cwd=directory
            )
        self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with closing(socket.socket()) as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            assert self._process.poll() is None, self._log.read_text()
            time.sleep(0.02)
        raise AssertionError("the registry does not answer")

    def push(self, layout: Path, name: str, *, tag: str = "image", extra: Sequence[str] = ()) -> str:
        """Push an image; returns its digest in the registry."""
        digest = layout.parent / f"{layout.name}.digest"
        destination = f"docker://{self.host}/{name}"
        command = ["skopeo", "copy", "--quiet", "--dest-tls-verify=false", "--digestfile", str(digest), *extra]
        subprocess.run([*command, f"oci:{layout}:{tag}", destination], check=True, capture_output=True, timeout=30)
        return digest.read_text()

    def requests(self, pattern: str) -> int:
        """How many requests of fetchers so far match."""
        lines = self._log.read_text().splitlines()
        return sum(bool(re.search(rf'"GET /v2/{pattern} HTTP', line)) for line in lines)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(timeout=10)


class Gate:
    """Stands before a registry and holds every blob after its first kilobyte until it is opened."""

    def __init__(self, port: int) -> None:
        self.host = f"localhost:{port}"
        self._open = anyio.Event()
        self.held = anyio.Event()

    def open(self) -> None:
        self._open.set()

    async def _forward(self, upstream_port: int, client: ByteStream) -> None:
        upstream = await anyio.connect_tcp("127.0.0.1", upstream_port)
        asked_blob = False

        async def request() -> None:
            nonlocal asked_blob
            async for chunk in _chunks(client):
                asked_blob = asked_blob or b"/blobs/" in chunk
                await upstream.send(chunk)
            await upstream.aclose()

        async def response() -> None:
            sent = 0
            async for chunk in _chunks(upstream):
                sent += len(chunk)
                if asked_blob and sent > 1024 and not self._open.is_set():
                    await client.send(chunk[:1024])
                    self.held.set()
                    await self._open.wait()
                    chunk = chunk[1024:]
                await client.send(chunk)
            await client.aclose()

        async with upstream, client, anyio.create_task_group() as tasks:
            tasks.start_soon(_quietly, request)
            tasks.start_soon(_quietly, response)


@asynccontextmanager
async def gate_before(registry: Registry) -> AsyncIterator[Gate]:
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        gate = Gate(listener.extra(SocketAttribute.local_port))

        async def serve() -> None:
            await listener.serve(lambda client: gate._forward(registry.port, client))

        tasks.start_soon(serve)
        yield gate
        tasks.cancel_scope.cancel()


async def _chunks(stream: ByteReceiveStream) -> AsyncIterator[bytes]:
    while True:
        try:
            yield await stream.receive()
        except (anyio.EndOfStream, anyio.ClosedResourceError):
            return


async def _quietly(forward) -> None:
    try:
        await forward()
    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
        return


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
