"""Nothing of a tenant can be seen or changed by another: every route of E2B's control plane, with another's ids."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import NamedTuple

import httpx2
import pytest
from e2b import ApiParams, BuildInfo, Sandbox, Template

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
    template: BuildInfo
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
    owner = ApiParams(api_key=server.key, api_url=server.url)
    template = Template.build(Template().from_image("host").run_cmd("true"), f"t{uuid.uuid4().hex[:8]}", **owner)
    with httpx2.Client(base_url=server.url, headers={"X-API-Key": key}, timeout=BOUND_S) as client:
        yield Others(sandbox, snapshot, template, client)
    with httpx2.Client(base_url=server.url, headers=server.headers, timeout=BOUND_S) as operator:
        assert operator.get(f"/templates/{template.template_id}").status_code == 200
        operator.delete(f"/templates/{template.template_id}").raise_for_status()
        for each in operator.get("/api/v1/checkpoints").json()["items"]:
            if (each["label"] or "").startswith("build-"):
                operator.delete(f"/api/v1/checkpoints/{each['id']}").raise_for_status()
    sandbox.kill()
    Sandbox.delete_snapshot(snapshot, api_key=server.key, api_url=server.url)


def test_there_are_routes_to_walk() -> None:
    assert len(WITH_IDS) >= 14


@pytest.mark.parametrize(("method", "path"), WITH_IDS)
def test_anothers_ids_are_not_found(others: Others, method: str, path: str) -> None:
    template = others.template
    ids = {
        "{sandbox}": others.sandbox.sandbox_id,
        "{template:path}": others.snapshot,
        "{template}": template.name,
        "{alias}": template.name,
        "{build}": template.build_id,
        "{hash}": "ab" * 32,
    }
    unknown = {
        "{sandbox}": "atoll" + "0" * 16,
        "{template:path}": "cp-000000000000:default",
        "{template}": "unknown",
        "{alias}": "unknown",
        "{build}": str(uuid.uuid4()),
        "{hash}": "ab" * 32,
    }

    def ask(named: dict[str, str]) -> tuple[int, str]:
        where = path
        for placeholder, id in named.items():
            where = where.replace(placeholder, id)
        body = None if method in ("GET", "DELETE") else BODIES.get(path.rpartition("/")[2], {})
        answer = others.client.request(method, where, json=body)
        said = answer.text
        for placeholder, id in named.items():
            said = said.replace(id, placeholder.replace("alias", "template"))
        return answer.status_code, said

    answers = ask(ids), ask(unknown)
    assert answers[0][0] in (404, 501)
    assert answers[0] == answers[1]


def test_lists_have_nothing_of_another(others: Others) -> None:
    for path in ("/sandboxes", "/v2/sandboxes", "/v2/sandboxes?metadata=whose%3Downer", "/snapshots", "/templates"):
        assert others.client.get(path).json() == [], path
    metrics = others.client.get(f"/sandboxes/metrics?sandbox_ids={others.sandbox.sandbox_id}")
    assert metrics.json() == {"sandboxes": {}}
    used = others.client.post("/v2/sandboxes", json={"templateID": others.snapshot})
    assert used.status_code in (403, 404)
    used = others.client.post("/v2/sandboxes", json={"templateID": others.template.name})
    assert used.status_code in (403, 404)
    mine = others.client.post("/v3/templates", json={"name": others.template.name}).json()
    build = f"/v2/templates/{others.template.name}/builds/{mine['buildID']}"
    assert others.client.post(build, json={"fromTemplate": others.template.name}).status_code == 404
    assert others.sandbox.is_running()
