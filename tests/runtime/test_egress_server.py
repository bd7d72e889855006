"""The egress server of a sandbox whose guest is hostile, and whose policy cannot be read."""

from __future__ import annotations

import resource
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import anyio
import pytest

from atoll.contract.errors import GuestProtocolError
from atoll.contract.inside import EGRESS_PORT
from atoll.contract.model import SandboxSpec
from atoll.contract.network import NetworkPolicy
from atoll.contract.protocol import EventKind, FrameType, Op, Tag
from atoll.drivers.keeper_stream import KeeperStream
from atoll.runtime.egress import server as egress_server
from atoll.runtime.egress.server import EgressServer, EgressServers
from atoll.runtime.guest.connection import GuestConnection
from atoll.runtime.guest.ports import listen_idle
from atoll.runtime.lifetimes import BackgroundTasks
from atoll.runtime.previews import router
from atoll.testing.waiting import eventually
from tests.runtime.peer import Heard, Peer

pytestmark = pytest.mark.anyio


class Place:
    """A directory with a policy in it, and the egress server that reads it."""

    def __init__(self, tasks: BackgroundTasks, directory: Path) -> None:
        self.tasks = tasks
        self.reads = 0
        self._manifest = directory / "manifest.json"
        self.allow("example.com")
        self.egress = EgressServer(EgressServers(tasks), directory, self._read)

    def _read(self) -> SandboxSpec:
        self.reads += 1
        return SandboxSpec.model_validate_json(self._manifest.read_bytes())

    def allow(self, *rules: str) -> None:
        self.write(SandboxSpec(name="one", network=NetworkPolicy(allow=rules)).model_dump_json())

    def write(self, text: str) -> None:
        fresh = self._manifest.with_name("fresh")
        fresh.write_text(text)
        fresh.replace(self._manifest)

    def allows(self, name: str) -> bool:
        return self.egress.evaluator().check_host(name, 443) is None


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    tasks = await BackgroundTasks.open()
    yield Place(tasks, tmp_path)
    await tasks.close()  # raises what a task has raised


@contextmanager
def descriptors(most: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Guest:
    """Listens when it is asked to, and announces one connection each time."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.connections = 0
        self._ended = anyio.Event()

    async def run(self) -> None:
        with suppress(anyio.IncompleteRead, anyio.BrokenResourceError):
            while True:
                await self.answer(await self.peer.hear())
        self._ended.set()

    async def leave(self, link: GuestConnection) -> None:
        """Have the host hang up, hear it, and close: anyio cannot close under somebody who has just heard something."""
        link.close()
        await eventually(self._ended.is_set, "the guest hears that the host has hung up")
        await self.peer.aclose()

    async def answer(self, heard: Heard) -> None:
        if heard.kind is FrameType.OPEN and heard.fields.integer(Tag.OP) == Op.LISTEN:
            await self.event(heard.stream, EventKind.LISTENING, (Tag.PORT, EGRESS_PORT))
            await self.event(heard.stream, EventKind.ACCEPTED, (Tag.CONN, 1))
        elif heard.kind is FrameType.OPEN:
            self.connections += 1
            await self.event(heard.stream, EventKind.CONNECTED)
            await self.peer.say(FrameType.CREDIT, heard.stream, struct.pack("<I", 100_000))
            await self.peer.data(heard.stream, 1, b"nonsense\r\n\r\n")
        elif heard.kind is FrameType.RESET:
            await self.peer.end(heard.stream)

    async def event(self, stream: int, kind: EventKind, *fields: tuple[Tag, int]) -> None:
        await self.peer.say(FrameType.EVENT, stream, fields=((Tag.EVENT, kind), *fields))


class Liar(Guest):
    """Once it has been told no, it ends the connection with an error that there is not."""

    async def answer(self, heard: Heard) -> None:
        await super().answer(heard)
        if heard.kind is FrameType.EOF:
            await self.peer.end(heard.stream, (Tag.ERRNO, 5000), (Tag.MESSAGE, b"x"))


async def connected(place: Place, kind: type[Guest]) -> tuple[GuestConnection, Guest]:
    ours, theirs = socket.socketpair()
    guest = kind(Peer(KeeperStream(theirs)))
    link = GuestConnection(KeeperStream(ours), "one")
    await guest.peer.hello()
    await link.handshake()
    place.tasks.start_soon(link.run)
    place.tasks.start_soon(guest.run)
    await place.egress.connected(link, listen_idle)
    assert place.egress.is_served
    return link, guest


async def test_a_malformed_end_of_a_connection_that_was_answered_ends_its_sandbox_and_nobody_else(place: Place) -> None:
    link, guest = await connected(place, Liar)
    await eventually(lambda: link.failure is not None, "the guest is found out")
    assert link.failure is not None
    assert link.failure.kind is GuestProtocolError
    await eventually(lambda: not place.egress.is_served, "it is served no more")
    await guest.leave(link)
    place.tasks.require_open()  # none of them has failed


async def test_a_policy_that_cannot_be_read_for_a_while_lets_nothing_pass_meanwhile(place: Place) -> None:
    assert place.allows("example.com")
    place.allow("example.org")
    with descriptors(3):
        assert not place.allows("example.com")
        assert not place.allows("example.org")
    assert not place.allows("example.com")
    assert place.allows("example.org")


async def test_who_cannot_read_a_policy_stops_serving_and_goes_on_when_it_can(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(egress_server, "_WATCH_INTERVAL_S", 0.01)
    link, guest = await connected(place, Guest)
    place.allow("example.org")
    with descriptors(3):
        place.egress.reload_policy()
    await eventually(lambda: guest.connections == 2, "it is served again")
    assert place.allows("example.org")
    await guest.leave(link)


async def test_an_error_that_nobody_expects_ends_neither_the_watch_nor_the_runtime(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(egress_server, "_WATCH_INTERVAL_S", 0.01)
    link, guest = await connected(place, Guest)
    place.write("no manifest")
    tried = place.reads + 2
    await eventually(lambda: place.reads >= tried, "it is looked at again")
    with pytest.raises(ValueError, match="validation error"):
        place.egress.evaluator()
    place.allow("example.org")
    assert place.allows("example.org")
    await guest.leave(link)


async def test_what_leaves_and_what_is_previewed_do_not_take_all_descriptors(place: Place) -> None:
    with descriptors(1024):
        egress_servers = EgressServers(place.tasks)
    assert egress_servers.connections.value + router.MAX_CONNECTIONS <= 1024 - 256
