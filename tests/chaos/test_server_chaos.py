"""A server that is killed at any moment loses nothing that it acknowledged, does nothing twice, and leaves nothing.

Four clients work (`server_clients.py`), in two tenants, over REST and through `atoll.connect`, while `atoll serve` is
killed again and again, also while it starts. A webhook gets the events. `ATOLL_SERVER_KILLS` is how often, and that
PostgreSQL has its turn too: `make chaos SERVER_KILLS=100`. The seed is printed and can be given: `ATOLL_CHAOS_SEED`. It
repeats what is drawn, not how the machine runs.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

import atoll
from atoll.testing.leaks import Ledger
from atoll.testing.server import RunningServer
from atoll.testing.waiting import SLOWNESS, eventually
from tests.chaos.model import Broken
from tests.chaos.orphans import orphans
from tests.chaos.server_clients import ChaosClient, ConnectHands, RestHands
from tests.conftest import REPORTED
from tests.postgresql import Postgresql, running

KILLS = int(os.environ.get("ATOLL_SERVER_KILLS", "8"))
SEED = os.environ.get("ATOLL_CHAOS_SEED") or secrets.token_hex(4)
MOST_OPERATIONS = 12
"""A server is killed once it has answered so many at most, and a moment later."""
MOMENTS_S = (0.0, 0.01, 0.1)
LIFE_S = 3.0 * SLOWNESS
"""How long it lives at most."""
EARLY = 0.15
"""How many are killed twice, the first time while they only start."""
START_S = 1.0
DATABASES = ("sqlite", "postgresql") if "ATOLL_SERVER_KILLS" in os.environ else ("sqlite",)
TENANTS = ("default", "other")
CONNECTED = ("d0", "o0")
"""The clients that use `atoll.connect`."""


class Receiver:
    """Where a webhook sends events: what came, and how often."""

    def __init__(self) -> None:
        self.events: dict[int, dict[str, Any]] = {}
        """By the id of their delivery."""
        self.times: Counter[int] = Counter()
        self.url = ""

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook"
        async with server:
            yield

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            fields = dict(line.split(": ", 1) for line in head.splitlines()[1:] if line)
            body = json.loads(await reader.readexactly(int(fields["content-length"])))
            self.events[int(fields["atoll-delivery"])] = body
            self.times[int(fields["atoll-delivery"])] += 1
            writer.write(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # its sender was killed
        finally:
            writer.close()


class ServerChaos:
    def __init__(self, server: RunningServer, receiver: Receiver) -> None:
        self._server = server
        self._receiver = receiver
        self._random = random.Random(SEED)
        self._hands: dict[str, RestHands] = {}
        self._webhooks: dict[str, str] = {}
        self._acknowledged: dict[int, int] = {}
        """Deliveries that the server knows to have arrived, and how often they had then."""
        self.clients: list[ChaosClient] = []
        self.hands: list[RestHands] = []
        self._closing = AsyncExitStack()
        self.kills = Counter[str]()

    async def begin(self) -> None:
        await anyio.to_thread.run_sync(self._server.start)
        await self._new_hands(TENANTS[0]).ask("POST", "tenants", {"name": TENANTS[1]})
        for tenant in TENANTS:
            self._hands[tenant] = self._new_hands(tenant)
            made = await self._hands[tenant].ask("POST", "webhooks", {"url": self._receiver.url})
            self._webhooks[tenant] = made.json()["webhook"]["id"]
            for number in range(2):
                name = f"{tenant[0]}{number}"
                hands = await self._connect(tenant) if name in CONNECTED else self._new_hands(tenant)
                self.clients.append(ChaosClient(name, hands, random.Random(f"{SEED}-{name}")))

    async def _connect(self, tenant: str) -> ConnectHands:
        engine = await atoll.connect(self._server.url, self._server.key, tenant=tenant)
        self._closing.push_async_callback(engine.aclose)
        return ConnectHands(engine)

    def _new_hands(self, tenant: str) -> RestHands:
        hands = RestHands(lambda: self._server.url, self._server.key, tenant, self._random)
        self._closing.push_async_callback(hands.aclose)
        self.hands.append(hands)
        return hands

    async def aclose(self) -> None:
        await self._closing.aclose()

    async def kill_again_and_again(self) -> None:
        """Kill the server KILLS times. After the last it is up."""
        for _ in range(KILLS):
            await self._live()
            await anyio.to_thread.run_sync(self._server.kill)
            self.kills["serving"] += 1
            if self._random.random() < EARLY:
                await self._die_early(self._random.uniform(0, START_S))
                self.kills["starting"] += 1
            await anyio.to_thread.run_sync(self._server.start)
            await self._check_deliveries()

    async def _live(self) -> None:
        """Until a few operations more are done, or for a while."""
        done = self.done() + self._random.randrange(MOST_OPERATIONS)
        with anyio.move_on_after(LIFE_S):
            while self.done() < done:
                await anyio.sleep(0.005)
        await anyio.sleep(self._random.uniform(0, self._random.choice(MOMENTS_S)))

    def done(self) -> int:
        return sum(client.done.total() for client in self.clients)

    async def _die_early(self, after_s: float) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._start_in_vain)
            await eventually(lambda: self._server.is_running, "its process is there")
            await anyio.sleep(after_s)
            self._server.signal(signal.SIGKILL)
        await anyio.to_thread.run_sync(self._server.kill)

    async def _start_in_vain(self) -> None:
        try:
            await anyio.to_thread.run_sync(self._server.start)
        except AssertionError as error:
            if "ended with -9" not in str(error):
                raise

    # ---- what must be true ----

    async def _deliveries(self) -> dict[int, str]:
        """All of them, with their status."""
        found: dict[int, str] = {}
        for tenant, id in self._webhooks.items():
            after: dict[str, str] = {}
            while True:
                path = f"webhooks/{id}/deliveries"
                page = (await self._hands[tenant].ask("GET", path, params={"limit": 1000, **after})).json()
                found |= {each["id"]: each["status"] for each in page["items"]}
                if page["next"] is None:
                    break
                after = {"after": page["next"]}
        return found

    async def _check_deliveries(self) -> None:
        """What the server knew to have arrived did not come again; note what it knows now."""
        for id, times in self._acknowledged.items():
            if self._receiver.times[id] != times:
                raise Broken(f"the delivery {id} came again after it was acknowledged: {self._receiver.events[id]}")
        for id, status in (await self._deliveries()).items():
            if status == "delivered":
                self._acknowledged.setdefault(id, self._receiver.times[id])

    async def check_events(self) -> None:
        """All events arrive; of what was created and destroyed there is one event each."""
        await eventually(self._all_arrived, "all deliveries are made")
        await self._check_deliveries()
        counts = Counter(
            (event["type"], event["sandbox_id"]) for event in self._receiver.events.values() if event["id"] is not None
        )
        for client in self.clients:
            wanted = [("created", id) for id in client.created] + [("destroyed", id) for id in client.destroyed]
            for each in wanted:
                if counts[each] != 1:
                    raise Broken(f"the event {each} came {counts[each]} times, not once")
        asked_for = {id for client in self.clients for id in client.created}
        for event in self._receiver.events.values():
            strange = event["type"] == "created" and event["sandbox_id"] not in asked_for
            # What a client of atoll.connect gave up on is undone.
            undone = event["sandbox"][:2] in CONNECTED and counts["destroyed", event["sandbox_id"]] == 1
            if strange and not undone:
                raise Broken(f"a sandbox was created that nobody asked for: {event}")

    async def _all_arrived(self) -> bool:
        return set((await self._deliveries()).values()) == {"delivered"}

    async def check_audit(self) -> None:
        """What was answered is in the audit log."""
        logged: set[str] = set()
        for hands in self._hands.values():
            after: dict[str, str] = {}
            while True:
                page = (await hands.ask("GET", "audit", params={"limit": 1000, **after})).json()
                logged |= {each["request_id"] for each in page["items"]}
                if page["next"] is None:
                    break
                after = {"after": page["next"]}
        answered = {id for hands in self.hands for id in hands.audited}
        if missing := answered - logged:
            raise Broken(f"{len(missing)} of {len(answered)} requests that were answered are not in the audit log")

    def told(self) -> str:
        done, hidden = Counter[str](), Counter[str]()
        for client in self.clients:
            done += client.done
            hidden += client.hidden
        counts = ", ".join(f"{kind} {count}" for kind, count in sorted(done.items()))
        again = sum(count - 1 for count in self._receiver.times.values())
        return (
            f"{dict(self.kills)}; {counts}; outcomes unknown, or undone: {dict(hidden)}; "
            f"{len(self._receiver.times)} deliveries, {again} again as their answer was lost"
        )


@pytest.fixture(scope="module")
def postgresql() -> Iterator[Postgresql]:
    with running() as server:
        yield server


@pytest.mark.skipif(os.geteuid() != 0, reason="copies sandboxes while they run, which takes a freezer: needs root")
@pytest.mark.timeout((120 + 10 * KILLS) * SLOWNESS)
@pytest.mark.parametrize("database", DATABASES)
async def test_a_server_that_is_killed_at_any_moment_loses_nothing_and_does_nothing_twice(
    make_state_dir: Callable[[], Path],
    ledger: Ledger,
    record_property: Callable[[str, object], None],
    request: pytest.FixtureRequest,
    database: str,
) -> None:
    state_dir, receiver = make_state_dir(), Receiver()
    environment = {"ATOLL_WEBHOOK_ALLOW": "127.0.0.1", "PYTHONFAULTHANDLER": "1"}
    if database == "postgresql":
        environment["ATOLL_DATABASE_URL"] = request.getfixturevalue("postgresql").create()
    server = RunningServer(state_dir, (), environment)
    print(f"seed {SEED}, {KILLS} kills: ATOLL_CHAOS_SEED={SEED} ATOLL_SERVER_KILLS={KILLS}", flush=True)
    began = time.monotonic()
    chaos = ServerChaos(server, receiver)
    try:
        async with receiver.listening():
            await chaos.begin()
            over = False
            async with anyio.create_task_group() as tasks:
                for client in chaos.clients:
                    tasks.start_soon(client.run, lambda: over)
                await chaos.kill_again_and_again()
                over = True
            for client in chaos.clients:
                await client.check(whole=True)
                await client.end()
            await chaos.check_events()
            await chaos.check_audit()
            server.stop()
    except BaseException as error:
        error.add_note(f"with the seed {SEED}, after {chaos.told()}")
        if server.is_running:  # it says where it stands
            server.signal(signal.SIGABRT)
            server.kill()
        error.add_note(server.log.read_text()[-6000:])
        raise
    finally:
        server.kill()
        await chaos.aclose()
    await eventually(lambda: not ledger.all_of(state_dir), "nothing is left of it", bound_s=10 * SLOWNESS)
    assert orphans(ledger, state_dir) == []
    assert os.listdir(state_dir / "server" / "instances") == []
    record_property(
        REPORTED, f"{database}, seed {SEED}, {KILLS} kills, {time.monotonic() - began:.0f} s, {chaos.told()}"
    )
