from __future__ import annotations

import httpx2

from tests.rest.serving import Served


async def test_a_sandbox_is_created_listed_found_and_deleted(client: httpx2.AsyncClient) -> None:
    made = await client.post("/api/v1/sandboxes", json={"name": "demo", "labels": {"team": "red"}})
    assert made.status_code == 201, made.text
    assert made.headers["location"] == "/api/v1/sandboxes/demo"
    assert made.json()["status"] == "running"
    assert made.json()["labels"] == {"team": "red"}
    for wanted in ("demo", made.json()["id"]):
        found = await client.get(f"/api/v1/sandboxes/{wanted}")
        assert found.json()["id"] == made.json()["id"]
    listed = await client.get("/api/v1/sandboxes", params={"label": "team=red"})
    assert [each["name"] for each in listed.json()["items"]] == ["demo"]
    assert (await client.delete("/api/v1/sandboxes/demo")).status_code == 204
    gone = await client.get("/api/v1/sandboxes/demo")
    assert gone.status_code == 404
    assert gone.json() == {
        "code": "sandbox_not_found",
        "message": "no sandbox has the name or id 'demo'",
        "details": {"name": "demo"},
        "request_id": gone.headers["atoll-request-id"],
    }


async def test_no_route_answers_without_a_key(served: Served) -> None:
    async with httpx2.AsyncClient(base_url=served.url) as nobody:
        for path in ("/api/v1/sandboxes", "/api/v1/sandboxes/x", "/api/nothing", "/api/v1/me"):
            answer = await nobody.get(path)
            assert answer.status_code == 401, path
            assert answer.json()["code"] == "unauthenticated"
        assert (await nobody.post("/api/v1/sandboxes", content=b"{")).status_code == 401
