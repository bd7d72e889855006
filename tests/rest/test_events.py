from __future__ import annotations

import signal
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import anyio
import httpx2
import pytest

import atoll
from tests.rest.serving import Served, read_events

EVENTS = "/api/v1/events"


class Reader:
    """Reads the events of one stream, as they come."""

    def __init__(self, events: AsyncGenerator[dict[str, Any]]) -> None:
        self._events = events

    async def next(self, sandbox: str | None = None) -> dict[str, Any]:
        """The next event, of this sandbox."""
        with anyio.fail_after(15):
            async for event in self._events:
                if sandbox is None or event["data"].get("sandbox") == sandbox:
                    return event
        raise AssertionError("the stream ended")


@asynccontextmanager
async def following(client: httpx2.AsyncClient, path: str = EVENTS, **headers: str) -> AsyncIterator[Reader]:
    async with client.stream("GET", path, headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        async with aclosing(read_events(answer)) as events:
            yield Reader(events)


async def test_a_stream_tells_what_is_done_through_the_server(client: httpx2.AsyncClient) -> None:
    async with following(client) as events:
        await client.post("/api/v1/sandboxes", json={"name": "told"})
        for verb in ("pause", "resume", "sleep", "wake", "shutdown"):
            (await client.post(f"/api/v1/sandboxes/told/{verb}")).raise_for_status()
        await client.delete("/api/v1/sandboxes/told")
        found = [await events.next("told") for _ in range(7)]
    assert [each["event"] for each in found] == [
        "created",
        "paused",
        "resumed",
        "slept",
        "woke",
        "shutdown",
        "destroyed",
    ]
    ids = [int(each["id"]) for each in found]
    assert ids == sorted(ids)
    assert found[0]["data"]["details"]["image"] == "host"


async def test_a_client_that_comes_back_has_missed_nothing(client: httpx2.AsyncClient, box: str) -> None:
    async with following(client) as events:
        await client.patch(f"/api/v1/sandboxes/{box}", json={"labels": {"a": "1"}})
        first = await events.next(box)
    for value in ("2", "3"):
        await client.patch(f"/api/v1/sandboxes/{box}", json={"labels": {"a": value}})
    async with following(client, **{"Last-Event-ID": first["id"]}) as events:
        missed = [await events.next(box) for _ in range(2)]
    stored = await client.get(EVENTS, params={"after": first["id"], "follow": False})
    assert [f"id: {each['id']}" for each in missed] == [
        line for line in stored.text.splitlines() if line.startswith("id")
    ]


async def test_changes_of_other_processes_and_deaths_with_their_reason_are_seen(
    served: Served, client: httpx2.AsyncClient
) -> None:
    async with following(client) as events, atoll.open(served.server.settings.state_dir) as other:
        sandbox = await other.create("foreign")
        assert (await events.next("foreign"))["event"] == "created"
        await sandbox.status()
        assert sandbox.info.pid is not None
        import os

        os.kill(sandbox.info.pid, signal.SIGKILL)
        died = await events.next("foreign")
        assert died["event"] == "died"
        assert died["data"]["reason"]
        await other.destroy("foreign")
        assert (await events.next("foreign"))["event"] == "destroyed"


async def test_the_end_of_a_lifetime_is_told_as_such(client: httpx2.AsyncClient) -> None:
    async with following(client, "/api/v1/events?types=expired") as events:
        await client.post("/api/v1/sandboxes", json={"name": "short", "ttl_s": 1})
        expired = await events.next("short")
    assert expired["data"]["details"] == {"on_expiry": "destroy"}


async def test_a_sandbox_that_sleeps_at_the_end_of_its_lifetime_says_both(client: httpx2.AsyncClient) -> None:
    async with following(client) as events:
        made = await client.post("/api/v1/sandboxes", json={"name": "dozing", "ttl_s": 1, "on_expiry": "sleep"})
        assert made.json()["on_expiry"] == "sleep", made.text
        found = [await events.next("dozing") for _ in range(3)]
    assert [each["event"] for each in found] == ["created", "expired", "slept"]
    assert found[1]["data"]["details"] == {"on_expiry": "sleep"}
    assert (await client.get("/api/v1/sandboxes/dozing")).json()["status"] == "sleeping"
    refused = await client.post("/api/v1/sandboxes", json={"on_expiry": "sleep"})
    assert (refused.status_code, refused.json()["code"]) == (400, "invalid_request")
    await client.delete("/api/v1/sandboxes/dozing")


async def test_the_stream_of_one_sandbox_ends_with_it(client: httpx2.AsyncClient) -> None:
    await client.post("/api/v1/sandboxes", json={"name": "one"})
    async with client.stream("GET", "/api/v1/sandboxes/one/events") as answer:
        await client.delete("/api/v1/sandboxes/one")
        with anyio.fail_after(10):
            found = [each["event"] async for each in read_events(answer)]
    assert found == ["destroyed"]


async def test_a_key_that_is_revoked_ends_its_streams(served: Served, client: httpx2.AsyncClient) -> None:
    made = (await client.post("/api/v1/keys", json={"name": "streaming"})).json()
    async with served.client(made["text"]) as member, member.stream("GET", EVENTS) as answer:
        assert answer.status_code == 200
        (await client.delete(f"/api/v1/keys/{made['key']['id']}")).raise_for_status()
        with anyio.fail_after(2):
            found = [each async for each in read_events(answer)]
    assert [each["event"] for each in found] == ["error"]
    assert found[0]["data"]["code"] == "unauthenticated"


async def test_a_tenant_that_is_disabled_has_no_streams(served: Served, client: httpx2.AsyncClient) -> None:
    key = await served.tenant("disabled")
    async with served.client(key) as member, member.stream("GET", EVENTS) as answer:
        (await client.patch("/api/v1/tenants/disabled", json={"disabled": True})).raise_for_status()
        with anyio.fail_after(4):
            assert [each["data"]["code"] async for each in read_events(answer)] == ["unauthenticated"]
        assert (await member.get("/api/v1/me")).status_code == 403


async def test_events_that_are_no_longer_kept_are_told(
    served: Served, client: httpx2.AsyncClient, box: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.server.events.KEPT_PER_TENANT", 2)
    for value in ("1", "2", "3", "4"):
        await client.patch(f"/api/v1/sandboxes/{box}", json={"labels": {"b": value}})
    await served.server.events.prune()
    stored = await client.get(EVENTS, params={"after": 0, "follow": False})
    assert [line for line in stored.text.splitlines() if line.startswith("event")] == [
        "event: lost",
        "event: updated",
        "event: updated",
    ]


@pytest.mark.parametrize("last", ["x", "-1", "1e3", "9" * 19])
async def test_an_id_that_is_none_is_refused(client: httpx2.AsyncClient, last: str) -> None:
    answer = await client.get(EVENTS, headers={"Last-Event-ID": last})
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request")
