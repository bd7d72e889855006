from __future__ import annotations

import re
from collections.abc import AsyncIterator

import anyio
import httpx2
import pytest
import sqlalchemy as sa

from atoll.server import tables
from atoll.server.tenants import Quotas, TenantPolicy
from tests.rest.serving import Served

SANDBOXES = "/api/v1/sandboxes"


async def test_a_sandbox_is_checkpointed_restored_and_forked(served: Served, client: httpx2.AsyncClient) -> None:
    engine = await served.server.engines.get("default")
    (await client.post(SANDBOXES, json={"name": "origin", "labels": {"kept": "yes"}})).raise_for_status()
    sandbox = await engine.get("origin")
    await sandbox.files.write_bytes("note", b"first")
    made = await client.post(f"{SANDBOXES}/origin/checkpoints", json={"label": "one"})
    assert made.status_code == 201, made.text
    again = await client.post(f"{SANDBOXES}/origin/checkpoints", json={"label": "one"})
    assert (again.status_code, again.json()["code"]) == (409, "checkpoint_exists")
    await sandbox.files.write_bytes("note", b"second")
    restored = await client.post(f"{SANDBOXES}/origin/restore", json={"checkpoint": "one"})
    assert restored.json()["status"] == "running"
    assert await (await engine.get("origin")).files.read_bytes("note") == b"first"
    forks = await client.post(f"{SANDBOXES}/origin/fork", json={"names": ["fork-a", "fork-b"], "checkpoint": "one"})
    assert [each["name"] for each in forks.json()["items"]] == ["fork-a", "fork-b"]
    assert forks.json()["items"][0]["labels"] == {"kept": "yes"}
    listed = (await client.get(f"{SANDBOXES}/origin/checkpoints")).json()["items"]
    id = made.json()["id"]
    assert [each["id"] for each in listed] == [id]
    assert id in [each["id"] for each in (await client.get("/api/v1/checkpoints")).json()["items"]]
    legacy = (await client.get("/api/sandboxes/origin/checkpoints")).json()
    assert legacy == [
        {
            "id": id,
            "spriteId": restored.json()["id"],
            "name": "one",
            "createdAt": legacy[0]["createdAt"],
            "sizeBytes": listed[0]["size_bytes"],
        }
    ]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", legacy[0]["createdAt"])
    for name in ("origin", "fork-a", "fork-b"):
        assert (await client.delete(f"{SANDBOXES}/{name}")).status_code == 204
    created = await client.post(SANDBOXES, json={"name": "reborn", "from_checkpoint": id})
    assert created.status_code == 201, created.text
    assert await (await engine.get("reborn")).files.read_bytes("note") == b"first"
    await client.delete(f"{SANDBOXES}/reborn")
    assert (await client.delete(f"/api/v1/checkpoints/{id}")).status_code == 204
    assert (await client.get(f"/api/v1/checkpoints/{id}")).json()["code"] == "checkpoint_not_found"


async def test_a_sandbox_travels_in_one_file(served: Served, client: httpx2.AsyncClient, box: str) -> None:
    engine = await served.server.engines.get("default")
    await (await engine.get(box)).files.write_bytes("/home/user/luggage", b"x" * 300_000)
    exported = await client.get(f"{SANDBOXES}/{box}/export")
    assert exported.status_code == 200, exported.text
    assert exported.headers["content-disposition"] == f'attachment; filename="{box}.atoll"'
    imported = await client.post(f"{SANDBOXES}/import", params={"name": "travelled"}, content=exported.content)
    assert imported.status_code == 201, imported.text
    assert await (await engine.get("travelled")).files.read_bytes("/home/user/luggage") == b"x" * 300_000
    await client.delete(f"{SANDBOXES}/travelled")
    damaged = await client.post(f"{SANDBOXES}/import", params={"name": "damaged"}, content=exported.content[:-50])
    assert (damaged.status_code, damaged.json()["code"]) == (422, "archive_refused")
    assert (await client.get(f"{SANDBOXES}/damaged")).status_code == 404


async def test_an_export_whose_client_is_gone_stops_and_an_import_leaves_nothing(
    served: Served, client: httpx2.AsyncClient, box: str
) -> None:
    engine = await served.server.engines.get("default")
    await (await engine.get(box)).exec("head -c 30000000 /dev/urandom > noise")
    async with client.stream("GET", f"{SANDBOXES}/{box}/export") as answer:
        async for _ in answer.aiter_raw():
            break

    async def body() -> AsyncIterator[bytes]:
        yield b"\x28\xb5\x2f\xfd" + bytes(1000)
        await anyio.sleep_forever()

    with anyio.move_on_after(0.3):
        await client.post(f"{SANDBOXES}/import", params={"name": "half"}, content=body())
    await (await engine.get(box)).exec("rm noise")
    exported = await client.get(f"{SANDBOXES}/{box}/export")
    assert exported.status_code == 200
    assert (await client.get(f"{SANDBOXES}/half")).status_code == 404


async def test_a_volume_is_filled_from_a_tar_and_read_back(client: httpx2.AsyncClient) -> None:
    made = await client.post("/api/v1/volumes", json={"name": "data"})
    assert made.status_code == 201, made.text
    taken = await client.post("/api/v1/volumes", json={"name": "data"})
    assert (taken.status_code, taken.json()["code"]) == (409, "volume_exists")
    mounted = await client.post(
        SANDBOXES, json={"name": "mounting", "mounts": [{"source": "volume:data", "target": "/data"}]}
    )
    assert mounted.status_code == 201, mounted.text
    in_use = await client.delete("/api/v1/volumes/data")
    assert (in_use.status_code, in_use.json()["code"]) == (409, "conflict")
    await client.delete(f"{SANDBOXES}/mounting")
    tar = await client.get("/api/v1/volumes/data/export")
    assert tar.status_code == 200
    copied = await client.post("/api/v1/volumes/copy/import", content=tar.content)
    assert copied.status_code == 201, copied.text
    for name in ("data", "copy"):
        assert (await client.delete(f"/api/v1/volumes/{name}")).status_code == 204
    assert (await client.get("/api/v1/volumes/data")).json()["code"] == "volume_not_found"


@pytest.mark.parametrize("body", [{"count": 2, "names": ["one"]}, {"names": []}, {"count": 0}])
async def test_forks_and_names_have_to_match(client: httpx2.AsyncClient, box: str, body: dict[str, object]) -> None:
    refused = await client.post(f"{SANDBOXES}/{box}/fork", json=body)
    assert (refused.status_code, refused.json()["code"]) == (400, "invalid_request")


@pytest.mark.parametrize("body", [{"names": ["again-a", "again-b"]}, {"count": 2}])
async def test_a_fork_whose_server_was_killed_before_it_answered_is_found_again(
    served: Served, client: httpx2.AsyncClient, body: dict[str, object]
) -> None:
    (await client.post(SANDBOXES, json={"name": "forked"})).raise_for_status()

    async def fork() -> list[dict[str, str]]:
        answer = await client.post(
            f"{SANDBOXES}/forked/fork", json=body, headers={"Idempotency-Key": "-".join(["fork", *body])}
        )
        assert answer.status_code == 201, answer.text
        return [{name: each[name] for name in ("name", "id")} for each in answer.json()["items"]]

    async def interrupt() -> None:
        """As a process leaves it that dies before it has stored its answer."""
        dead = {"status": None, "body": None, "instance": "dead"}
        async with served.server.database.write() as connection:
            await connection.execute(sa.update(tables.idempotency).values(dead))

    made = await fork()
    await interrupt()
    assert await fork() == made
    await client.delete(f"{SANDBOXES}/forked")
    if "names" in body:
        await interrupt()
    assert await fork() == made, "also if what they were made from is gone"
    assert len((await client.get(SANDBOXES)).json()["items"]) == len(made) + 1, "and `shared`, for other tests"
    for each in made:
        assert (await client.delete(f"{SANDBOXES}/{each['name']}")).status_code == 204


async def test_a_sandbox_from_a_checkpoint_is_within_policy_and_quotas_with_all_that_it_inherits(
    served: Served,
) -> None:
    """Made while the operator allowed it; what a policy or a quota forbids since then, no checkpoint brings back."""
    mib = 2**20
    key = await served.tenant(
        "inherits", policy=TenantPolicy(networks=("example.com",)), quotas=Quotas(memory_bytes=160 * mib)
    )
    async with served.client(key) as client:
        made = {"name": "first", "limits": {"memory_bytes": 80 * mib}, "network": {"allow": ["example.com"]}}
        (await client.post("/api/v1/sandboxes", json=made)).raise_for_status()
        checkpoint = (await client.post("/api/v1/sandboxes/first/checkpoints", json={"label": "cp"})).json()["id"]
        from_it = {"name": "second", "from_checkpoint": checkpoint}
        wide = await client.post("/api/v1/sandboxes", json={**from_it, "limits": {"memory_bytes": 81 * mib}})
        assert (wide.status_code, wide.json()["code"]) == (403, "quota_exceeded")
        second = await client.post("/api/v1/sandboxes", json=from_it)
        assert second.json()["limits"]["memory_bytes"] == 80 * mib
        for path, body in (("sandboxes", {**from_it, "name": "third"}), ("sandboxes/first/fork", {"checkpoint": "cp"})):
            refused = await client.post(f"/api/v1/{path}", json=body)
            assert (refused.status_code, refused.json()["details"]["used"]) == (403, 160 * mib)
        await client.post("/api/v1/sandboxes/second/sleep")  # it counts as before: any use wakes it
        assert (await client.post("/api/v1/sandboxes", json={**from_it, "name": "third"})).status_code == 403
        await client.delete("/api/v1/sandboxes/second")
        await served.server.tenants.update("inherits", policy=TenantPolicy())
        for path, body in (
            ("sandboxes", from_it),
            ("sandboxes/first/fork", {}),
            ("sandboxes/first/fork", {"checkpoint": "cp"}),
        ):
            refused = await client.post(f"/api/v1/{path}", json=body)
            assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
            assert "network rule" in refused.json()["message"]
        mounted = await client.post("/api/v1/sandboxes", json={**from_it, "mounts": [{"volume": "v", "target": "/v"}]})
        assert mounted.status_code in (400, 403)
