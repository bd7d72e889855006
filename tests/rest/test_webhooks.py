from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import h11
import httpx2
import pytest
from anyio.abc import SocketStream

from atoll.server.webhooks import ATTEMPT_TIMEOUT_S
from atoll.testing.waiting import eventually
from tests.rest.serving import Served, serving

WEBHOOKS = "/api/v1/webhooks"


class Receiver:
    """An HTTP server that takes deliveries, and answers them as it is told."""

    def __init__(self) -> None:
        self.url = ""
        self.answers: list[int] = []
        """Statuses of the next answers; 200 when there are none left."""
        self.got: list[tuple[dict[str, str], bytes]] = []

    async def handle(self, stream: SocketStream) -> None:
        connection = h11.Connection(h11.SERVER)
        headers: dict[str, str] = {}
        body = b""
        async with stream:
            while True:
                event = connection.next_event()
                if event is h11.NEED_DATA:
                    try:
                        connection.receive_data(await stream.receive())
                    except anyio.EndOfStream:
                        return
                elif isinstance(event, h11.Request):
                    headers = {name.decode(): value.decode() for name, value in event.headers}
                elif isinstance(event, h11.Data):
                    body += event.data
                else:
                    break
            self.got.append((headers, body))
            status = self.answers.pop(0) if self.answers else 200
            await stream.send(f"HTTP/1.1 {status} X\r\nContent-Length: 0\r\n\r\n".encode())


@asynccontextmanager
async def receiving() -> AsyncIterator[Receiver]:
    receiver = Receiver()
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as tasks:
        receiver.url = f"http://127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}/hook?a=b"
        tasks.start_soon(listener.serve, receiver.handle)
        yield receiver
        tasks.cancel_scope.cancel()


async def deliveries(client: httpx2.AsyncClient, webhook: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = (await client.get(f"{WEBHOOKS}/{webhook}/deliveries")).json()["items"]
    return items


@asynccontextmanager
async def a_webhook(client: httpx2.AsyncClient, url: str, *types: str) -> AsyncIterator[dict[str, Any]]:
    answer = await client.post(WEBHOOKS, json={"url": url, "types": types})
    assert answer.status_code == 201, answer.text
    made = answer.json()
    yield made
    assert (await client.delete(f"{WEBHOOKS}/{made['webhook']['id']}")).status_code == 204


async def test_a_delivery_is_signed_and_retried_until_it_is_acknowledged_and_never_after(
    served: Served, client: httpx2.AsyncClient, box: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.server.webhooks, "delays_s", (0.05,) * 5)
    async with receiving() as receiver, a_webhook(client, receiver.url, "updated") as made:
        receiver.answers = [500, 302]
        await client.patch(f"/api/v1/sandboxes/{box}", json={"labels": {"w": "1"}})
        id = made["webhook"]["id"]

        async def delivered() -> bool:
            return [each["status"] for each in await deliveries(client, id)] == ["delivered"]

        await eventually(delivered, "the delivery is acknowledged")
        (found,) = await deliveries(client, id)
        assert (found["attempts"], found["response_status"], found["error"]) == (3, 200, None)
        served.server.webhooks.wake()
        await (await client.post(f"{WEBHOOKS}/{id}/test")).aread()
        await eventually(lambda: len(receiver.got) == 4, "the test arrives")
        headers, body = receiver.got[2]
        moment, signature = (part.partition("=")[2] for part in headers["atoll-signature"].split(","))
        assert abs(int(moment) - time.time()) < 30
        wanted = hmac.new(made["secret"].encode(), f"{moment}.".encode() + body, hashlib.sha256).hexdigest()
        assert signature == wanted
        assert headers["atoll-delivery"] == str(found["id"])
        assert b'"type":"updated"' in body
        assert [headers["atoll-event"] for headers, _ in receiver.got] == ["updated"] * 3 + ["test"]


async def test_hosts_that_never_answer_do_not_delay_what_other_tenants_get(served: Served) -> None:
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with (
        listener,  # it accepts no connection, so that nothing is ever answered
        receiving() as receiver,
        served.client(await served.tenant("silent")) as silent,
        served.client(await served.tenant("waiting")) as waiting,
    ):
        url = f"http://127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}/"
        made = [(await silent.post(WEBHOOKS, json={"url": url})).json()["webhook"]["id"] for _ in range(20)]
        for webhook in made * 2:
            assert (await silent.post(f"{WEBHOOKS}/{webhook}/test")).status_code < 300

        async def got() -> bool:
            return bool(receiver.got)

        async with a_webhook(waiting, receiver.url) as other:
            assert (await waiting.post(f"{WEBHOOKS}/{other['webhook']['id']}/test")).status_code < 300
            await eventually(got, "the other tenant's delivery has arrived", bound_s=ATTEMPT_TIMEOUT_S / 2)
        for webhook in made:
            assert (await silent.delete(f"{WEBHOOKS}/{webhook}")).status_code == 204


async def test_a_delivery_survives_the_server_and_is_not_sent_again_after_an_acknowledgement(
    make_state_dir: Callable[[], Path],
) -> None:
    state_dir = make_state_dir()
    async with receiving() as receiver:
        receiver.answers = [200, 500]
        async with serving(state_dir, webhook_allow="127.0.0.1") as served, served.client() as client:
            served.server.webhooks.delays_s = (0.5, 0.1)
            made = (await client.post(WEBHOOKS, json={"url": receiver.url})).json()["webhook"]["id"]
            for _ in range(2):
                await client.post(f"{WEBHOOKS}/{made}/test")
            await eventually(lambda: len(receiver.got) == 2, "both arrive")

            async def answered() -> bool:
                return sorted(each["attempts"] for each in await deliveries(client, made)) == [1, 1]

            await eventually(answered, "both are answered")
            key = served.key
        async with serving(state_dir, webhook_allow="127.0.0.1") as served, served.client(key) as client:

            async def all_delivered() -> bool:
                return [each["status"] for each in await deliveries(client, made)] == ["delivered", "delivered"]

            await eventually(all_delivered, "the second is sent again")
        assert len(receiver.got) == 3


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.2/",
        "http://10.0.0.1/hook",
        "https://[::1]/",
        "http://169.254.169.254/latest",
        "http://[::ffff:10.0.0.1]/",
        "http://127.0.0.1.:80/",
    ],
)
async def test_addresses_that_are_not_public_are_refused(client: httpx2.AsyncClient, url: str) -> None:
    answer = await client.post(WEBHOOKS, json={"url": url})
    assert answer.status_code in (400, 403), answer.text


async def test_a_name_that_leads_to_a_private_address_is_not_called(
    served: Served, client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def resolve(*_: Any, **__: Any) -> list[Any]:
        return [(2, 1, 6, "", ("10.1.2.3", 443))]

    monkeypatch.setattr("atoll.server.webhooks.anyio.getaddrinfo", resolve)
    monkeypatch.setattr(served.server.webhooks, "delays_s", ())
    async with a_webhook(client, "https://rebinding.example.com/") as made:
        await client.post(f"{WEBHOOKS}/{made['webhook']['id']}/test")

        async def failed() -> bool:
            return (await deliveries(client, made["webhook"]["id"]))[0]["status"] == "failed"

        await eventually(failed, "it has failed")
        (found,) = await deliveries(client, made["webhook"]["id"])
    assert "not public" in found["error"]
    assert "10.1.2.3" not in found["error"]


@pytest.mark.parametrize(
    "url",
    ["", "ftp://example.com/", "https://user:pw@example.com/", "https://exa mple.com/", "https://example.com:99999/"],
)
async def test_a_url_that_cannot_be_called_is_refused(client: httpx2.AsyncClient, url: str) -> None:
    answer = await client.post(WEBHOOKS, json={"url": url})
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request")


async def test_a_webhook_is_changed_and_its_secret_is_shown_once(client: httpx2.AsyncClient) -> None:
    async with a_webhook(client, "https://example.com/a", "died") as made:
        path = f"{WEBHOOKS}/{made['webhook']['id']}"
        changed = await client.patch(path, json={"types": [], "disabled": True})
        assert changed.json() == {**made["webhook"], "types": [], "disabled": True}
        assert (await client.get(path)).json() == changed.json()
        assert made["secret"] not in (await client.get(WEBHOOKS)).text


async def test_one_webhook_too_many_is_a_conflict(served: Served) -> None:
    async with served.client(await served.tenant("many-webhooks")) as client:
        made = [await client.post(WEBHOOKS, json={"url": "https://hook.invalid/"}) for _ in range(21)]
    assert [each.status_code for each in made] == [201] * 20 + [409]
    assert made[-1].json()["code"] == "conflict"
