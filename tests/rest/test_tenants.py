from __future__ import annotations

import anyio
import httpx2
import pytest

from atoll import Limits
from atoll.server.tenants import Quotas, TenantPolicy
from tests.rest.serving import Served

SANDBOXES = "/api/v1/sandboxes"


async def test_a_sleeping_sandbox_counts_and_its_use_is_never_refused(served: Served) -> None:
    """However it is woken, and also when the quota was lowered since."""
    key = await served.tenant("sleeper", quotas=Quotas(sandboxes=2, memory_bytes=64 * 2**20))
    async with served.client(key) as client:
        limits = {"memory_bytes": 64 * 2**20}
        (await client.post("/api/v1/sandboxes", json={"name": "one", "limits": limits})).raise_for_status()
        checkpoint = (await client.post("/api/v1/sandboxes/one/checkpoints", json={})).json()["id"]
        await served.server.tenants.update("sleeper", quotas=Quotas(sandboxes=2, memory_bytes=16 * 2**20))
        for use in (
            lambda: client.post("/api/v1/sandboxes/one/exec", json={"command": "true"}),
            lambda: client.get("/api/v1/sandboxes/one/files/list", params={"path": "/"}),
            lambda: client.post("/api/v1/sandboxes/one/wake"),
            lambda: client.post("/api/v1/sandboxes/one/restore", json={"checkpoint": checkpoint}),
        ):
            assert (await client.post("/api/v1/sandboxes/one/sleep")).json()["status"] == "sleeping"
            assert (await client.get("/api/v1/me")).json()["usage"]["memory_bytes"] == 64 * 2**20
            two = await client.post("/api/v1/sandboxes", json={"name": "two", "limits": {"memory_bytes": 8 * 2**20}})
            assert (two.status_code, two.json()["details"]["quota"]) == (403, "memory_bytes")
            assert (await use()).status_code == 200
            assert (await client.get("/api/v1/sandboxes/one")).json()["status"] == "running"
        assert (await client.delete("/api/v1/sandboxes/one?checkpoints=true")).status_code == 204


async def test_a_tenant_is_created_changed_and_deleted(client: httpx2.AsyncClient) -> None:
    made = await client.post(
        "/api/v1/tenants",
        json={"name": "acme", "policy": {"images": ["host"], "max_ttl_s": 60}, "quotas": {"sandboxes": 1}},
    )
    assert made.status_code == 201, made.text
    assert made.json()["policy"]["max_ttl_s"] == 60
    assert (await client.post("/api/v1/tenants", json={"name": "acme"})).json()["code"] == "tenant_exists"
    changed = await client.patch("/api/v1/tenants/acme", json={"quotas": {"sandboxes": 2}})
    assert changed.json()["quotas"]["sandboxes"] == 2
    assert changed.json()["policy"]["max_ttl_s"] == 60
    assert "acme" in [each["name"] for each in (await client.get("/api/v1/tenants")).json()["items"]]
    assert (await client.delete("/api/v1/tenants/acme")).status_code == 204
    assert (await client.get("/api/v1/tenants/acme")).json()["code"] == "tenant_not_found"


async def test_a_key_cannot_do_more_than_its_scopes_nor_make_one_that_can(
    served: Served, client: httpx2.AsyncClient
) -> None:
    made = await client.post("/api/v1/keys", json={"name": "reader", "scopes": ["sandboxes:read"]})
    async with served.client(made.json()["text"]) as reader:
        assert (await reader.get(SANDBOXES)).status_code == 200
        refused = await reader.post(SANDBOXES, json={})
        assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
        assert (await reader.get("/api/v1/tenants")).status_code == 403
        assert (await reader.get("/api/v1/keys")).status_code == 403
    narrow = await client.post("/api/v1/keys", json={"name": "k", "role": "admin", "scopes": ["keys", "audit"]})
    async with served.client(narrow.json()["text"]) as keeper:
        for wanted in ({"name": "x"}, {"name": "x", "role": "admin"}, {"name": "x", "server": True}):
            assert (await keeper.post("/api/v1/keys", json=wanted)).status_code == 403
        assert (await keeper.get("/api/v1/tenants")).status_code == 403
        elsewhere = await keeper.get("/api/v1/keys", headers={"Atoll-Tenant": "elsewhere"})
        assert elsewhere.status_code == 403


async def test_the_audit_log_has_who_did_what_and_how_it_ended(client: httpx2.AsyncClient, box: str) -> None:
    done = await client.patch(f"{SANDBOXES}/{box}", json={"labels": {"x": "1"}})
    refused = await client.patch(f"{SANDBOXES}/nobody", json={"labels": {"x": "1"}})
    found = (await client.get("/api/v1/audit", params={"action": "sandboxes_update", "limit": 2})).json()
    assert [(each["request_id"], each["resource"], each["status"]) for each in found["items"]] == [
        (refused.headers["atoll-request-id"], "sandboxes/nobody", 404),
        (done.headers["atoll-request-id"], f"sandboxes/{box}", 200),
    ]
    assert found["items"][0]["tenant"] == "default"
    more = await client.get("/api/v1/audit", params={"after": found["next"], "limit": 1}) if found["next"] else None
    assert more is None or more.json()["items"][0]["id"] < found["items"][1]["id"]


async def test_who_one_is(client: httpx2.AsyncClient, box: str) -> None:
    me = (await client.get("/api/v1/me")).json()
    assert (me["key"]["role"], me["tenant"]["name"]) == ("admin", "default")
    assert me["usage"]["sandboxes"] >= 1


async def test_a_quota_holds_under_fifty_creates_at_once(served: Served) -> None:
    key = await served.tenant("small", quotas=Quotas(sandboxes=3))
    async with served.client(key) as small:
        statuses: list[int] = []

        async def create() -> None:
            answer = await small.post(SANDBOXES, json={})
            statuses.append(answer.status_code)
            if answer.status_code == 403:
                assert answer.json()["code"] == "quota_exceeded"
                assert answer.json()["details"]["allowed"] == 3

        async with anyio.create_task_group() as tasks:
            for _ in range(50):
                tasks.start_soon(create)
        assert sorted(statuses) == [201] * 3 + [403] * 47
        names = [each["name"] for each in (await small.get(SANDBOXES)).json()["items"]]
        forked = await small.post(f"{SANDBOXES}/{names[0]}/fork", json={"count": 2})
        assert (forked.status_code, forked.json()["code"]) == (403, "quota_exceeded")
        pool = await small.put("/api/v1/warm-pools", json={"count": 1})
        assert (pool.status_code, pool.json()["code"]) == (403, "quota_exceeded")
        for name in names:
            await small.delete(f"{SANDBOXES}/{name}")


async def test_requests_beyond_the_rate_are_refused_with_when_to_come_back(served: Served) -> None:
    key = await served.tenant("slow", quotas=Quotas(requests_per_minute=2))
    async with served.client(key) as slow:
        statuses = [(await slow.get("/api/v1/me")).status_code for _ in range(2)]
        refused = await slow.get("/api/v1/me")
    assert statuses == [200, 200]
    assert (refused.status_code, refused.json()["code"]) == (429, "rate_limited")
    assert 1 <= int(refused.headers["retry-after"]) <= 30


@pytest.mark.parametrize(
    ("wanted", "what"),
    [
        ({"image": "python:3.12"}, "image"),
        ({"mounts": [{"source": "/etc", "target": "/m"}]}, "mount"),
        ({"network": {"allow": ["example.com"]}}, "network rule"),
        ({"runtime": "runsc"}, "runtime"),
        ({"limits": {"memory_bytes": 2**30}}, "limit"),
        ({"ttl_s": 3600}, None),
    ],
)
async def test_what_the_policy_does_not_allow_is_refused(
    served: Served, wanted: dict[str, object], what: str | None
) -> None:
    policy = TenantPolicy(runtimes=("crun",), max_ttl_s=60, max_limits=Limits(memory_bytes=2**29))
    name = f"policy-{(what or 'ttl').replace(' ', '-')}"
    async with served.client(await served.tenant(name, policy=policy)) as tenant:
        refused = await tenant.post(SANDBOXES, json=wanted)
    assert (refused.status_code, refused.json()["code"]) == (403, "forbidden"), refused.text
    if what is not None:
        assert what in refused.json()["message"]


@pytest.mark.parametrize(
    ("moment", "status"),
    [
        ("2026-01-31T12:00:00Z", 200),
        ("2026-01-31T12:00:00+02:00", 200),
        ("2026-01-31T12:00:00", 400),
        ("2026-01-31", 400),
        ("0.5", 400),
        ("1700000000", 400),
        ("0001-01-01T00:00:00+23:00", 400),
    ],
)
async def test_a_moment_of_the_audit_log_has_a_date_a_time_and_a_zone(
    client: httpx2.AsyncClient, moment: str, status: int
) -> None:
    for bound in ("since", "until"):
        answer = await client.get("/api/v1/audit", params={bound: moment})
        assert answer.status_code == status, answer.text
