from __future__ import annotations

from typing import Any

import anyio
import httpx2
import pytest
import sqlalchemy as sa

from atoll.server.tables import idempotency
from atoll.server.tenants import TenantPolicy
from tests.rest.serving import Served, read_events

SANDBOXES = "/api/v1/sandboxes"


async def test_a_sandbox_is_created_listed_found_and_deleted(client: httpx2.AsyncClient) -> None:
    made = await client.post("/api/v1/sandboxes", json={"name": "plain", "labels": {"team": "red"}})
    assert made.status_code == 201, made.text
    assert made.headers["location"] == "/api/v1/sandboxes/plain"
    assert made.json()["status"] == "running"
    assert made.json()["labels"] == {"team": "red"}
    for wanted in ("plain", made.json()["id"]):
        found = await client.get(f"/api/v1/sandboxes/{wanted}")
        assert found.json()["id"] == made.json()["id"]
    listed = await client.get("/api/v1/sandboxes", params={"label": "team=red"})
    assert [each["name"] for each in listed.json()["items"]] == ["plain"]
    assert (await client.delete("/api/v1/sandboxes/plain")).status_code == 204
    gone = await client.get("/api/v1/sandboxes/plain")
    assert gone.status_code == 404
    assert gone.json() == {
        "code": "sandbox_not_found",
        "message": "no sandbox has the name or id 'plain'",
        "details": {"name": "plain"},
        "request_id": gone.headers["atoll-request-id"],
    }


async def test_no_route_answers_without_a_key(served: Served) -> None:
    async with httpx2.AsyncClient(base_url=served.url) as nobody:
        for path in ("/api/v1/sandboxes", "/api/v1/sandboxes/x", "/api/nothing", "/api/v1/me"):
            answer = await nobody.get(path)
            assert answer.status_code == 401, path
            assert answer.json()["code"] == "unauthenticated"
        assert (await nobody.post("/api/v1/sandboxes", content=b"{")).status_code == 401


async def test_a_create_that_is_sent_again_is_answered_again_and_done_once(client: httpx2.AsyncClient) -> None:
    body = {"labels": {"once": "yes"}}
    answers = [await client.post(SANDBOXES, json=body, headers={"Idempotency-Key": "k1"}) for _ in range(2)]
    assert [each.status_code for each in answers] == [201, 201]
    assert answers[0].json() == answers[1].json()
    assert answers[1].headers["idempotency-replayed"] == "true"
    assert "atoll.dev/request" not in answers[0].text
    listed = (await client.get(SANDBOXES, params={"label": "once"})).json()["items"]
    assert [each["labels"] for each in listed] == [{"once": "yes"}]
    other = await client.post(SANDBOXES, json={}, headers={"Idempotency-Key": "k1"})
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_mismatch")
    await client.delete(f"{SANDBOXES}/{listed[0]['name']}")


async def test_creates_with_one_key_at_the_same_time_make_one_sandbox(client: httpx2.AsyncClient) -> None:
    names: list[str] = []

    async def create() -> None:
        answer = await client.post(SANDBOXES, json={"labels": {"race": "1"}}, headers={"Idempotency-Key": "k2"})
        names.append(answer.json()["name"])

    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(create)
    assert len(set(names)) == 1
    await client.delete(f"{SANDBOXES}/{names[0]}")


@pytest.mark.parametrize("reached", ["nothing", "the sandbox"])
async def test_a_create_whose_server_died_is_finished_by_the_next(
    served: Served, client: httpx2.AsyncClient, reached: str
) -> None:
    key, body = f"died-{reached[:3]}", {"name": f"died-{reached[:3]}", "labels": {"a": "b"}}
    first = await client.post(SANDBOXES, json=body, headers={"Idempotency-Key": key})
    if reached == "nothing":
        await client.delete(f"{SANDBOXES}/{body['name']}")
    # As the row is when the process was killed before the answer was stored.
    async with served.server.database.write() as connection:
        row = sa.update(idempotency).where(idempotency.c.key == key)
        await connection.execute(row.values(status=None, body=None, instance="0" * 16))
    again = await client.post(SANDBOXES, json=body, headers={"Idempotency-Key": key})
    assert again.status_code == 201, again.text
    assert (again.json()["id"] == first.json()["id"]) == (reached == "the sandbox")
    assert again.json()["labels"] == {"a": "b"}
    await client.delete(f"{SANDBOXES}/{body['name']}")


async def test_a_name_that_someone_else_took_meanwhile_is_not_given_to_an_interrupted_create(
    served: Served, client: httpx2.AsyncClient
) -> None:
    body = {"name": "taken"}
    await client.post(SANDBOXES, json=body, headers={"Idempotency-Key": "k3"})
    await client.delete(f"{SANDBOXES}/taken")
    await client.post(SANDBOXES, json=body)
    async with served.server.database.write() as connection:
        row = sa.update(idempotency).where(idempotency.c.key == "k3")
        await connection.execute(row.values(status=None, body=None, instance="0" * 16))
    again = await client.post(SANDBOXES, json=body, headers={"Idempotency-Key": "k3"})
    assert (again.status_code, again.json()["code"]) == (409, "sandbox_exists")
    await client.delete(f"{SANDBOXES}/taken")


async def test_secrets_are_written_and_never_read(served: Served, client: httpx2.AsyncClient) -> None:
    made = await client.post(
        SANDBOXES,
        json={
            "name": "secretive",
            "env": {"PLAIN": "plain"},
            "secret_env": {"CLEAR": "in-clear-inside"},
            "secrets": {"TOKEN": {"value": "very-secret-value", "hosts": ["example.com"]}},
        },
    )
    assert made.status_code == 201, made.text
    shown = made.text + (await client.get(f"{SANDBOXES}/secretive")).text + (await client.get("/api/v1/audit")).text
    assert "very-secret-value" not in shown
    assert "in-clear-inside" not in shown
    inside = await (await served.server.engines.get("default")).get("secretive")
    assert (await inside.exec('echo "$PLAIN $CLEAR"')).stdout == "plain in-clear-inside\n"
    await client.delete(f"{SANDBOXES}/secretive")
    refused = await client.post(
        SANDBOXES, json={"secrets": {"T": {"value": "very-secret-value", "hosts": ["not a host"]}}}
    )
    assert refused.status_code == 400
    assert "very-secret" not in refused.text


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"labels": {"atoll.dev/request": "x"}}, "reserved"),
        ({"name": "Not A Name"}, "lower-case"),
        ({"nmae": "x"}, "nmae"),
        ({"ttl_s": "60"}, "ttl_s"),
        ({"limits": {"memory_bytes": 1}}, "memory_bytes"),
        ({"env": {"1x": ""}}, "environment variable"),
        ([], "body"),
    ],
)
async def test_a_create_that_is_not_valid_says_what_is_wrong(client: httpx2.AsyncClient, body: Any, said: str) -> None:
    refused = await client.post(SANDBOXES, json=body)
    assert (refused.status_code, refused.json()["code"]) == (400, "invalid_request"), refused.text
    assert said in refused.text


async def test_a_sandbox_that_ends_with_a_connection_needs_one(client: httpx2.AsyncClient) -> None:
    refused = await client.post(SANDBOXES, json={"ephemeral": True})
    assert (refused.status_code, refused.json()["code"]) == (422, "unenforceable")
    assert "atoll.connect" in refused.json()["message"]


async def test_a_path_names_its_own_methods(client: httpx2.AsyncClient) -> None:
    for path, methods in {"": "GET, POST", "/import": "POST", "/x": "DELETE, GET, PATCH"}.items():
        assert (await client.options(f"{SANDBOXES}{path}")).headers["allow"] == methods


async def test_lists_come_in_pages_whatever_comes_or_goes(served: Served) -> None:
    async with served.client(await served.tenant("pages")) as tenant:
        for name in ("a", "b", "c"):
            (await tenant.post(SANDBOXES, json={"name": name, "labels": {"n": name}})).raise_for_status()
        first = (await tenant.get(SANDBOXES, params={"limit": 2})).json()
        assert [each["name"] for each in first["items"]] == ["a", "b"]
        await tenant.delete(f"{SANDBOXES}/b")
        second = (await tenant.get(SANDBOXES, params={"limit": 2, "after": first["next"]})).json()
        assert ([each["name"] for each in second["items"]], second["next"]) == (["c"], None)
        for query, names in {
            "prefix=a": ["a"],
            "label=n=c": ["c"],
            "label=n": ["a", "c"],
            "label=n=a&label=n=c": [],
            "status=running": ["a", "c"],
            "status=sleeping&status=paused": [],
        }.items():
            assert [each["name"] for each in (await tenant.get(f"{SANDBOXES}?{query}")).json()["items"]] == names, query
        for query in ("limit=0", "limit=1001", "status=odd", "unknown=1", "label=atoll.dev/request"):
            assert (await tenant.get(f"{SANDBOXES}?{query}")).status_code == 400, query


async def test_labels_lifetime_and_limits_are_changed(client: httpx2.AsyncClient, box: str) -> None:
    path = f"{SANDBOXES}/{box}"
    changed = (await client.patch(path, json={"labels": {"p": "1", "q": "2"}, "ttl_s": 600})).json()
    assert changed["expires_at"] is not None
    changed = (await client.patch(path, json={"labels": {"q": None}, "ttl_s": None})).json()
    assert (changed["labels"]["p"], "q" in changed["labels"], changed["expires_at"]) == ("1", False, None)
    assert (await client.post(f"{path}/extend", json={"ttl_s": 60})).json()["expires_at"] is not None
    await client.patch(path, json={"ttl_s": None})
    limits = await client.patch(f"{path}/limits", json={"limits": {"pids": 500}})
    assert limits.json()["pids"] == 500, limits.text
    assert (await client.get(f"{path}/limits")).json() == limits.json()


async def test_what_a_sandbox_uses_now_and_used_before(served: Served, client: httpx2.AsyncClient, box: str) -> None:
    now = (await client.get(f"{SANDBOXES}/{box}/stats")).json()
    assert now["disk_bytes"] >= 0
    await served.server.history.take()
    history = (await client.get(f"{SANDBOXES}/{box}/stats/history")).json()
    assert history["interval_s"] == 10
    assert (
        history["samples"][-1]["memory_bytes"] == pytest.approx(now["memory_bytes"], rel=2) or not now["memory_bytes"]
    )


async def test_the_network_is_set_within_the_policy(served: Served) -> None:
    policy = TenantPolicy(networks=("*.example.com:443",))
    async with served.client(await served.tenant("networked", policy=policy)) as tenant:
        await tenant.post(SANDBOXES, json={"name": "net"})
        path = f"{SANDBOXES}/net/network"
        assert (await tenant.get(path)).json() == {"policy": None}
        set_to = await tenant.put(path, json={"policy": {"allow": ["api.example.com:443"]}})
        assert set_to.json() == {"policy": {"allow": ["api.example.com:443"], "deny": []}}
        denied = {"policy": {"allow": ["api.example.com:443"], "deny": ["198.51.100.0/24"]}}
        assert (await tenant.put(path, json=denied)).json() == denied
        for rule in ("*", "api.example.com", "10.0.0.1:443", "registries"):
            refused = await tenant.put(path, json={"policy": {"allow": [rule]}})
            assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
        assert (await tenant.get(f"{path}/audit")).json() == {"items": [], "next": None}


async def test_a_port_keeps_its_url_until_it_is_taken_back(client: httpx2.AsyncClient, box: str) -> None:
    path = f"{SANDBOXES}/{box}/ports"
    first, again = [(await client.post(path, json={"port": 8000})).json() for _ in range(2)]
    assert first == again
    assert (await client.get(path)).json()["items"] == [first]
    assert (await client.delete(f"{path}/8000")).status_code == 204
    assert (await client.get(path)).json()["items"] == []
    assert (await client.post(path, json={"port": 8000})).json()["token"] != first["token"]
    await client.delete(f"{path}/8000")
    refused = await client.post(path, json={"port": 9, "wait_s": 0.1})
    assert (refused.status_code, refused.json()["code"]) == (409, "port_refused")


async def test_images_and_warm_pools(client: httpx2.AsyncClient, served: Served) -> None:
    assert "host" in [each["reference"] for each in (await client.get("/api/v1/images")).json()["items"]]
    assert (await client.post("/api/v1/images", json={"reference": "host"})).json()["kind"] == "host"
    async with client.stream(
        "POST", "/api/v1/images", json={"reference": "host"}, headers={"Accept": "text/event-stream"}
    ) as answer:
        assert [each["event"] async for each in read_events(answer)][-1] == "done"
    gone = await client.delete("/api/v1/images/docker.io/library/nothing:1")
    assert gone.status_code == 404, gone.text
    async with served.client(await served.tenant("imageless", policy=TenantPolicy(images=()))) as tenant:
        assert (await tenant.get("/api/v1/images")).json()["items"] == []
        assert (await tenant.post("/api/v1/images", json={"reference": "host"})).status_code == 403
        assert (await tenant.delete("/api/v1/images/host")).status_code == 403
    pool = await client.put("/api/v1/warm-pools", json={"count": 1})
    assert pool.json()["ready"] == 1, pool.text
    assert len((await client.get("/api/v1/warm-pools")).json()["items"]) == 1
    assert (await client.delete("/api/v1/warm-pools")).status_code == 204


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/api/v1/nothing", 404, "not_found"),
        ("PUT", "/api/v1/me", 405, "method_not_allowed"),
        ("GET", "/elsewhere", 404, "not_found"),
        ("GET", "/api/v1/sandboxes/%00", 404, "sandbox_not_found"),
        ("GET", "/api/v1/sandboxes/..%2fx", 404, "not_found"),
    ],
)
async def test_what_http_itself_refuses_has_the_same_shape(
    client: httpx2.AsyncClient, method: str, path: str, status: int, code: str
) -> None:
    refused = await client.request(method, path)
    assert (refused.status_code, refused.json()["code"]) == (status, code)
    assert set(refused.json()) == {"code", "message", "details", "request_id"}
    assert refused.json()["request_id"] == refused.headers["atoll-request-id"]


async def test_an_error_of_the_server_itself_tells_nothing(
    served: Served, client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise RuntimeError("a path of this machine")

    monkeypatch.setattr(served.server.quotas, "usage", fail)
    refused = await client.get("/api/v1/me")
    assert (refused.status_code, refused.json()["code"]) == (500, "internal")
    assert "path" not in refused.text
