"""Events and deliveries, on both databases: their order, and that each change is told once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import pytest

from atoll import Limits, SandboxInfo
from atoll.server.events import Events
from atoll.server.server import Server
from atoll.server.webhooks import Webhooks
from atoll.testing.waiting import eventually


def seen(status: str, name: str = "box", **more: Any) -> SandboxInfo:
    """A sandbox as `Engine.list` shows it."""
    return SandboxInfo.model_validate(
        {
            "id": f"atoll-{name}",
            "name": name,
            "status": status,
            "image": "host",
            "runtime": "crun",
            "limits": Limits(),
            "user": "user",
            "created_at": datetime.now(UTC),
            **more,
        }
    )


async def types(events: Events, after: int = 0) -> list[str]:
    return [event.type for event in await events.read("default", after)]


class Listed:
    """What another process would find: the sandboxes of the tenant `default`."""

    def __init__(self, *infos: SandboxInfo) -> None:
        self.infos = [*infos]

    async def __call__(self) -> Mapping[str, Sequence[SandboxInfo]]:
        return {"default": self.infos}


async def nothing(*_: object) -> None:
    """Deliver nothing."""


@pytest.mark.parametrize(
    ("statuses", "wanted"),
    [
        ("provisioning running", "created"),
        ("running paused running", "created paused resumed"),
        ("running sleeping running", "created slept woke"),
        ("running shutdown paused", "created shutdown woke paused"),
        ("running error sleeping", "created died slept"),
        ("error", "created died"),
        ("sleeping", "created slept"),
        ("running running running", "created"),
    ],
)
async def test_a_change_of_status_is_an_event(server: Server, statuses: str, wanted: str) -> None:
    for status in statuses.split():
        await server.events.saw("default", seen(status, reason="why" if status == "error" else None))
    assert await types(server.events) == wanted.split()
    assert {event.reason for event in await server.events.read("default", 0) if event.type == "died"} <= {"why"}


async def test_the_end_of_a_lifetime_is_told_apart_from_a_destruction(server: Server) -> None:
    over = datetime.now(UTC) - timedelta(seconds=1)
    for name, expires_at in (("expired", over), ("destroyed", None)):
        await server.events.saw("default", seen("running", name, expires_at=expires_at))
        await server.events.gone("default", f"atoll-{name}")
        await server.events.gone("default", f"atoll-{name}")
    await server.events.saw("default", seen("running", "sleeps", expires_at=over))
    await server.events.saw("default", seen("sleeping", "sleeps"))
    assert await types(server.events) == "created expired created destroyed created expired slept".split()


async def test_what_two_processes_see_is_told_once(server: Server) -> None:
    listed = Listed(seen("running"))
    others = [Events(server.database, listed, nothing) for _ in range(3)]
    for status in ("running", "sleeping", "running"):
        listed.infos = [seen(status)]
        async with anyio.create_task_group() as tasks:
            for each in others:
                tasks.start_soon(each.look)
    listed.infos = []
    for each in others:
        await each.look()
    assert await types(server.events) == ["created", "slept", "woke", "destroyed"]


async def test_what_happened_while_no_server_ran_is_told_by_the_next(server: Server) -> None:
    await server.events.saw("default", seen("running"))
    await server.events.saw("default", seen("running", "removed"))
    restarted = Events(server.database, Listed(seen("error", reason="killed")), nothing)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(restarted.watch)
        with anyio.fail_after(10):
            while len(await types(server.events)) < 4:
                await anyio.sleep(0.01)
        tasks.cancel_scope.cancel()
    assert sorted((await types(server.events))[2:]) == ["destroyed", "died"]


async def test_a_list_that_is_older_than_what_was_done_here_is_not_believed(server: Server) -> None:
    async def slow() -> Mapping[str, Sequence[SandboxInfo]]:
        found = [seen("running")]
        await events.saw("default", seen("sleeping"))
        return {"default": found}

    events = Events(server.database, slow, nothing)
    await events.saw("default", seen("running"))
    await events.look()
    assert await types(events) == ["created", "slept"]


async def test_a_follower_misses_nothing_of_many_writers(server: Server) -> None:
    writers = [server.events, Events(server.database, Listed(), nothing)]
    got: list[int] = []

    async def follow() -> None:
        async with aclosing(server.events.follow("default", 0)) as events:  # type: ignore[type-var]
            async for event in events:
                got.append(event.id)
                if len(got) == 60:
                    return

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(follow)
        tasks.start_soon(server.events.poll)
        async with anyio.create_task_group() as writing:
            for number in range(60):
                writing.start_soon(writers[number % 2].record, "default", "updated", seen("running"))
        with anyio.fail_after(20):
            while len(got) < 60:
                await anyio.sleep(0.01)
        tasks.cancel_scope.cancel()
    assert got == sorted(set(got))


async def test_a_tenant_takes_its_events_and_webhooks_with_it(server: Server) -> None:
    await server.tenants.create("gone")
    await server.webhooks.create("gone", "https://example.com/")
    await server.events.saw("gone", seen("running"))
    await server.delete_tenant("gone")
    await server.tenants.create("gone")
    assert await server.events.read("gone", 0) == []
    assert await server.webhooks.list("gone") == []


async def test_of_several_processes_one_makes_a_delivery(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    async def post(_: Webhooks, delivery: Any, _secret: str) -> int:
        sent.append(delivery.id)
        await anyio.sleep(0.01)
        return 200

    monkeypatch.setattr(Webhooks, "_post", post)
    webhook, _ = await server.webhooks.create("default", "https://example.com/")
    for number in range(10):
        await server.events.saw("default", seen("running", f"box{number}"))
    assert server.settings.state_dir is not None
    processes = [server.webhooks, Webhooks(server.database, server.settings.state_dir, None)]

    async def all_done() -> bool:
        found = await server.webhooks.deliveries("default", webhook.id)
        return [each.status for each in found] == ["delivered"] * 10

    async with anyio.create_task_group() as tasks:
        for each in processes:
            tasks.start_soon(each.deliver)
        await eventually(all_done, "all deliveries are made")
        tasks.cancel_scope.cancel()
    assert sorted(sent) == sorted(set(sent))
    assert len(sent) == 10
