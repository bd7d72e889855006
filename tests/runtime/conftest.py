"""What tests of the host's side of the protocol share: a scripted peer, and the real guest without isolation.

The peer plays the keeper's part on one end of a socket pair. The guest is the program itself, started on this machine:
tests that use it work below a temporary directory.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path

import anyio
import pytest
from anyio.abc import ByteStream

from atoll.contract.model import Limits, Preview, SandboxInfo, Usage
from atoll.drivers.keeper_stream import KeeperStream
from atoll.runtime.interface import Engine
from atoll.runtime.lifetimes import BackgroundTasks
from atoll.runtime.previews.forward import DialPort
from atoll.runtime.sandbox import Sandbox
from tests.runtime.peer import Peer

GUEST_SOURCES = Path(__file__).parents[2] / "src" / "atoll" / "guest"


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


class Owner:
    """A `SandboxOwner` whose connections a test provides."""

    def __init__(self, host: Host, connect: Callable[[], Awaitable[ByteStream]]) -> None:
        self.tasks = host.tasks
        self._host = host
        self._connect = connect

    @property
    def engine(self) -> Engine:
        raise AssertionError("these sandboxes are not an engine's")

    async def connect(self, id: str) -> ByteStream:
        return await self._connect()

    def take_start(self, id: str) -> Sequence[str]:
        return ()

    def oom_kills(self, id: str) -> int | None:
        return self._host.oom_kills

    async def usage(self, id: str, *, disk: bool = True) -> Usage:
        return Usage(memory_bytes=1, memory_peak_bytes=2, cpu_s=3, pids=4, disk_bytes=5, oom_kills=6)

    async def current_info(self, info: SandboxInfo) -> SandboxInfo:
        return info

    def why_ended(self, info: SandboxInfo) -> str | None:
        return None

    async def destroy(self, info: SandboxInfo) -> None:
        self._host.destroyed += 1

    async def stop(self, id: str) -> None:
        self._host.stopped += 1

    async def expose(self, info: SandboxInfo, port: int, dial: DialPort, *, wait_s: float) -> Preview:
        raise AssertionError("no test exposes a port")

    async def unexpose(self, info: SandboxInfo, port: int) -> None:
        raise AssertionError("no test exposes a port")

    async def list_previews(self, info: SandboxInfo) -> list[Preview]:
        raise AssertionError("no test exposes a port")


class Host:
    """Makes sandboxes over connections that a test provides, and counts what was asked of their owner."""

    def __init__(self, tasks: BackgroundTasks) -> None:
        self.tasks = tasks
        self.destroyed = 0
        self.stopped = 0
        self.oom_kills: int | None = 0

    def sandbox(
        self, connect: Callable[[], Awaitable[ByteStream]], *, user: str = "root", env: dict[str, str] | None = None
    ) -> Sandbox:
        info = SandboxInfo(
            id="id",
            name="one",
            status="running",
            image="host",
            runtime="crun",
            limits=Limits(),
            user=user,
            created_at=datetime.now(UTC),
        )
        return Sandbox(info, Owner(self, connect), env=env or {})


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    tasks = await BackgroundTasks.open()
    yield Host(tasks)
    await tasks.close()


class Wire:
    """Socket pairs: `connect` gives the sandbox one end of each, `peer` the other to the test."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._send, self._receive = anyio.create_memory_object_stream[Peer](8)
        stack.callback(self._send.close)
        stack.callback(self._receive.close)
        self.connections = 0
        self.greets = True
        self.ended = False

    async def connect(self) -> ByteStream:
        if self.ended:
            raise ConnectionRefusedError("the keeper has ended")
        self.connections += 1
        ours, theirs = socket.socketpair()
        peer = Peer(KeeperStream(theirs))
        self._stack.push_async_callback(peer.aclose)
        if self.greets:
            await peer.hello()
        self._send.send_nowait(peer)
        return KeeperStream(ours)

    async def peer(self) -> Peer:
        with anyio.fail_after(10):
            return await self._receive.receive()


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    async with AsyncExitStack() as stack:
        yield Wire(stack)


@pytest.fixture
def scripted(host: Host, wire: Wire) -> Sandbox:
    """A sandbox whose guest is played by `wire.peer()`."""
    return host.sandbox(wire.connect)


# ------------------------------------------------------------------------------------------------------ the real guest


@pytest.fixture(scope="session")
def guest_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The guest: `ATOLL_GUEST`, or the one that `make` built if nothing has changed since, or built here."""
    if given := os.environ.get("ATOLL_GUEST"):
        return Path(given)
    sources = sorted(GUEST_SOURCES.glob("*.[ch]"))
    built = GUEST_SOURCES.parent / "_bin" / "guest"
    if built.exists() and built.stat().st_mtime > max(source.stat().st_mtime for source in sources):
        return built
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.fail("the guest cannot be built: there is no C compiler; set ATOLL_GUEST to a program", pytrace=False)
    program = tmp_path_factory.mktemp("guest") / "atoll-guest"
    units = [str(source) for source in sources if source.suffix == ".c"]
    subprocess.run([compiler, "-O2", "-static", "-std=gnu11", "-o", str(program), *units], check=True, timeout=300)
    return program


@pytest.fixture
async def guest_stream(guest_program: Path, tmp_path: Path) -> AsyncIterator[Callable[[], Awaitable[ByteStream]]]:
    """Connects to a guest of its own each time, that ends with the test."""
    guests: list[subprocess.Popen[bytes]] = []

    async def connect() -> ByteStream:
        ours, theirs = socket.socketpair()
        with theirs:
            guests.append(
                subprocess.Popen([guest_program], stdin=theirs.fileno(), stdout=theirs.fileno(), cwd=tmp_path)
            )
        return KeeperStream(ours)

    yield connect
    for guest in guests:
        guest.terminate()
        try:
            guest.wait(10)
        except subprocess.TimeoutExpired:
            guest.kill()
            guest.wait(10)


@pytest.fixture
def sandbox(host: Host, guest_stream: Callable[[], Awaitable[ByteStream]]) -> Sandbox:
    """A sandbox that is no sandbox: the real guest on this machine, as root."""
    return host.sandbox(guest_stream)
