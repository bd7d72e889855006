"""Nothing of a tenant can be seen or changed by another: every route of E2B's control plane, with another's ids."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import NamedTuple

import httpx2
import pytest
from e2b import Sandbox

from atoll.surfaces.e2b.routing import control_routes
from atoll.surfaces.e2b.tokens import SandboxTokens
from atoll.testing.server import RunningServer
from atoll.testing.waiting import BOUND_S

BODIES = {"timeout": {"timeout": 60}, "fork": {"count": 1}, "network": {"denyOut": ["0.0.0.0/0"]}}
WITH_IDS = sorted(
    (method, route.path)
    for route in control_routes(SandboxTokens(b"0" * 32))
    for method in route.methods or ()
    if "{" in route.path and route.name != "unsupported" and method != "HEAD"
)


class Others(NamedTuple):
    """What one tenant has, and the client of another."""

    sandbox: Sandbox
    snapshot: str
    client: httpx2.Client


@pytest.fixture(scope="module")
def others(server: RunningServer) -> Iterator[Others]:
    name = f"t{uuid.uuid4().hex[:8]}"
    with httpx2.Client(base_url=server.url, headers=server.headers, timeout=BOUND_S) as operator:
        operator.post("/api/v1/tenants", json={"name": name}).raise_for_status()
        made = operator.post("/api/v1/keys", json={"name": "walk", "role": "admin"}, headers={"Atoll-Tenant": name})
    key = made.json()["text"]
    sandbox = Sandbox.create(
        timeout=600, metadata={"whose": "owner"}, api_key=server.key, api_url=server.url, sandbox_url=server.url
    )
    snapshot = sandbox.create_snapshot(name=f"s{uuid.uuid4().hex[:8]}").snapshot_id
    with httpx2.Client(base_url=server.url, headers={"X-API-Key": key}, timeout=BOUND_S) as client:
        yield Others(sandbox, snapshot, client)
    sandbox.kill()
    Sandbox.delete_snapshot(snapshot, api_key=server.key, api_url=server.url)


def test_there_are_routes_to_walk() -> None:
    assert len(WITH_IDS) >= 14


@pytest.mark.parametrize(("method", "path"), WITH_IDS)
def test_anothers_ids_are_not_found(others: Others, method: str, path: str) -> None:
    def ask(sandbox: str, snapshot: str) -> httpx2.Response:
        where = path.replace("{sandbox}", sandbox).replace("{template:path}", snapshot)
        body = None if method in ("GET", "DELETE") else BODIES.get(path.rpartition("/")[2], {})
        return others.client.request(method, where, json=body)

    unknown = "atoll" + "0" * 16
    answers = ask(others.sandbox.sandbox_id, others.snapshot), ask(unknown, "cp-000000000000:default")
    said = [
        answer.text.replace(others.sandbox.sandbox_id, unknown).replace(others.snapshot, "cp-000000000000:default")
        for answer in answers
    ]
    assert answers[0].status_code in (404, 501)
    assert (answers[0].status_code, said[0]) == (answers[1].status_code, said[1])


def test_lists_have_nothing_of_another(others: Others) -> None:
    for path in ("/sandboxes", "/v2/sandboxes", "/v2/sandboxes?metadata=whose%3Downer", "/snapshots"):
        assert others.client.get(path).json() == [], path
    metrics = others.client.get(f"/sandboxes/metrics?sandbox_ids={others.sandbox.sandbox_id}")
    assert metrics.json() == {"sandboxes": {}}
    used = others.client.post("/v2/sandboxes", json={"templateID": others.snapshot})
    assert used.status_code in (403, 404)
    assert others.sandbox.is_running()
