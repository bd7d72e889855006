"""A server on loopback that plays the internet, and what it can serve."""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import anyio
from anyio.abc import ByteStream

from atoll.reactive import Graph
from atoll.runtime.engine import LocalEngine
from tests.egress.world import World, serving


class Site:
    """A server on loopback that plays the internet: what each path answers."""

    def __init__(self) -> None:
        self.pages: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.port = 0
        self.held: anyio.Event | None = None
        """Answers wait for this."""
        self.git_root: Path | None = None
        """Where the repositories are that are served."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def rule(self) -> str:
        return f"127.0.0.1:{self.port}"

    def page(self, path: str, body: str | bytes, *, kind: str = "text/plain; charset=utf-8", status: int = 200) -> str:
        content = body.encode() if isinstance(body, str) else body
        head = f"HTTP/1.1 {status} Fine\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n\r\n"
        self.pages[path] = head.encode() + content
        return self.url + path

    def redirect(self, path: str, to: str) -> str:
        self.pages[path] = f"HTTP/1.1 302 Found\r\nLocation: {to}\r\nContent-Length: 0\r\n\r\n".encode()
        return self.url + path

    async def answer(self, stream: ByteStream) -> None:
        data = b""
        while b"\r\n\r\n" not in data:
            data += await stream.receive()
        path = data.split()[1].decode()
        self.asked.append(path)
        if self.git_root is not None and ("git-upload-pack" in path):
            await stream.send(await self._git(self.git_root, data, path, stream))
            return
        if self.held is not None:
            await self.held.wait()
        await stream.send(self.pages.get(path, b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"))

    @staticmethod
    async def _git(root: Path, data: bytes, path: str, stream: ByteStream) -> bytes:
        """What git's own program for servers answers."""
        head, _, body = data.partition(b"\r\n\r\n")
        lines = (line.partition(b":") for line in head.split(b"\r\n")[1:])
        headers = {name.decode().lower(): value.strip().decode() for name, _, value in lines}
        while len(body) < int(headers.get("content-length", 0)):
            body += await stream.receive()
        place, _, query = path.partition("?")
        environment = {
            **os.environ,
            "GIT_PROJECT_ROOT": str(root),
            "GIT_HTTP_EXPORT_ALL": "1",
            "PATH_INFO": place,
            "QUERY_STRING": query,
            "REQUEST_METHOD": head.split()[0].decode(),
            "CONTENT_TYPE": headers.get("content-type", ""),
            "CONTENT_LENGTH": str(len(body)),
            "HTTP_CONTENT_ENCODING": headers.get("content-encoding", ""),
            "GIT_PROTOCOL": headers.get("git-protocol", ""),
        }
        done = await anyio.run_process(["git", "http-backend"], input=body, env=environment)
        given, _, content = done.stdout.partition(b"\r\n\r\n")
        return b"HTTP/1.1 200 OK\r\n%b\r\nContent-Length: %d\r\n\r\n%b" % (given, len(content), content)


@asynccontextmanager
async def serving_site() -> AsyncIterator[Site]:
    site = Site()

    async def answer(stream: ByteStream) -> None:
        with suppress(anyio.BrokenResourceError, anyio.EndOfStream):  # the client has left
            await site.answer(stream)

    async with serving(answer) as site.port:
        yield site


@contextmanager
def names_for(graph: Graph, host: LocalEngine, site: Site) -> Iterator[World]:
    """Names that lead to the site, for sandboxes and for the graph."""
    world = World()
    world.servers = {("*", 80): site.port}
    graph.connector = host.egress_servers.connector = world.connector
    yield world
    host.egress_servers.connector = None


def publish_repository(site: Site, directory: Path) -> None:
    """A repository that the site serves as git's own servers do."""

    def git(*words: str) -> None:
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.com", "-c", "init.defaultBranch=main"]
        subprocess.run(["git", *identity, *words], cwd=directory, check=True, capture_output=True)

    git("init", "work")
    (directory / "work/a.ts").write_text("let a = 1\nlet b = 2\n")
    (directory / "work/b.ts").write_text("let c = 3\n")
    (directory / "work/c.js").write_text("0\n")
    git("-C", "work", "add", ".")
    git("-C", "work", "commit", "-m", "all")
    git("clone", "--bare", "work", "sea/tide")
    git("-C", "sea/tide", "config", "http.receivepack", "false")
    site.git_root = directory


TYPESCRIPT = Path(__file__).parents[2] / "clients/typescript/node_modules/typescript"


def publish_typescript(site: Site) -> None:
    """The compiler as a package that npm installs."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz", compresslevel=1) as tar:
        tar.add(TYPESCRIPT, "package")
    about = json.loads((TYPESCRIPT / "package.json").read_text())
    version = about["version"]
    site.page("/typescript.tgz", made.getvalue(), kind="application/octet-stream")
    about["dist"] = {"tarball": "http://npm.example.com/typescript.tgz"}
    site.page(
        "/typescript",
        json.dumps({"name": "typescript", "dist-tags": {"latest": version}, "versions": {version: about}}),
        kind="application/json",
    )
