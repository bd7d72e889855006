"""Nothing of a tenant can be seen by another: every route of the OpenAPI document, with another tenant's ids."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from atoll.surfaces import rest
from tests.bundles.making import manifest, packed
from tests.rest.serving import Served

METHODS = ("get", "post", "put", "patch", "delete", "head")
MAKES = {"volumes_import", "builds_upload"}
"""Operations whose path names what they make: it is made in the tenant's own namespace, whoever else has the name."""


def document() -> dict[str, Any]:
    app = FastAPI()
    rest.install(app, None)  # type: ignore[arg-type] # the document needs no server
    return app.openapi()


DOCUMENT = document()
OPERATIONS = [
    (method, path, operation)
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
    if method in METHODS
]
WITH_IDS = [each for each in OPERATIONS if "{" in each[1]]
IDS = [f"{method} {path}" for method, path, _ in WITH_IDS]


def resolve(schema: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        found: Any = DOCUMENT
        for part in schema["$ref"].removeprefix("#/").split("/"):
            found = found[part]
        schema = found
    return schema


def smallest(schema: dict[str, Any]) -> Any:
    """The smallest value that a schema allows."""
    schema = resolve(schema)
    for word in ("anyOf", "oneOf", "allOf"):
        if word in schema:
            return smallest(schema[word][0])
    if "enum" in schema:
        return schema["enum"][0]
    if "const" in schema:
        return schema["const"]
    kind = schema.get("type")
    if kind == "object":
        fields = schema.get("properties", {})
        return {name: smallest(fields[name]) for name in schema.get("required", [])}
    if kind == "array":
        return [smallest(schema["items"])] * schema.get("minItems", 0)
    if kind in ("integer", "number"):
        least = max(schema.get("minimum", 1), 1)
        return int(least) if kind == "integer" else least
    return {"boolean": False, "null": None}.get(str(kind), "x" * max(schema.get("minLength", 1), 1))


class Owner:
    """A tenant that has one of everything."""

    def __init__(self, ids: dict[str, list[str]], turn: str) -> None:
        self.ids = ids
        """By the name of the path's parameter."""
        self.turn = turn
        """Of its conversation."""

    def everything(self) -> list[str]:
        return [id for ids in self.ids.values() for id in ids]


@pytest.fixture(scope="module")
async def owner(served: Served) -> Owner:
    key = await served.tenant("owner")
    async with served.client(key) as client:
        made = (await client.post("/api/v1/sandboxes", json={"name": "theirs"})).json()
        checkpoint = (await client.post("/api/v1/sandboxes/theirs/checkpoints", json={"label": "label"})).json()
        (await client.post("/api/v1/volumes", json={"name": "their-volume"})).raise_for_status()
        webhook = (await client.post("/api/v1/webhooks", json={"url": "https://example.com/theirs"})).json()["webhook"]
        content = packed("def run(args): ...", manifest("run"))
        gzip = {"Content-Type": "application/gzip"}
        bundle = (await client.post("/api/v1/bundles", content=content, headers=gzip)).json()
        api_key = (await client.post("/api/v1/keys", json={"name": "their-key"})).json()["key"]
        agent = (await client.post("/api/v1/configs", json={"name": "their-agent"})).json()
        files = "ab" * 32
        (await client.put(f"/api/v1/builds/files/{files}", content=b"theirs")).raise_for_status()
        request = {"name": "their-template", "dockerfile": "FROM host\nRUN true"}
        build = (await client.post("/api/v1/builds", json=request)).json()
        async with client.stream("GET", f"/api/v1/builds/{build['id']}/events") as answer:
            assert '"status":"ready"' in (await answer.aread()).decode()
    config = await served.server.configs.get("owner", agent["id"])
    turn = await served.server.conversations.begin("owner", config, "theirs", conversation=None, request="theirs")
    await served.server.conversations.end(turn.id, "cancelled")
    sandboxes = ["theirs", made["id"]]
    return Owner(
        {
            "sandbox": sandboxes,
            "name": sandboxes,
            "checkpoint": [checkpoint["id"]],
            "volume": ["their-volume"],
            "bundle": [bundle["bundle_id"]],
            "webhook": [webhook["id"]],
            "key": [api_key["id"]],
            "tenant": ["owner"],
            "config": [agent["id"]],
            "conversation": [turn.conversation],
            "template": ["their-template"],
            "build": [build["id"]],
            "files": [files],
        },
        turn.id,
    )


@pytest.fixture(scope="module")
async def stranger(served: Served) -> AsyncIterator[httpx2.AsyncClient]:
    async with served.client(await served.tenant("stranger")) as client:
        yield client


@pytest.fixture(scope="module")
async def bystander(served: Served) -> AsyncIterator[httpx2.AsyncClient]:
    """Who has asked for nothing of the owner's: the audit log shows what one asked for."""
    async with served.client(await served.tenant("bystander")) as client:
        yield client


def requests_for(path: str, owner: Owner) -> Iterator[tuple[str, str, str, str]]:
    """For each id of the owner's that the path can have: the path with it, that with one that never was, and both."""
    names = re.findall(r"{(\w+)}", path)
    others = {
        "process": "1",
        "session": "s",
        "approval": "a",
        "port": "8000",
        "reference": "host:1",
        "turn": owner.turn,
        "external_id": "wsi_1",
        "tag": "default",
    }
    first = next((name for name in names if name in owner.ids), None)
    for id in owner.ids[first] if first else ():
        # Of the same form and length: an id differs in its last characters.
        never = re.sub(r"[a-z0-9]{3}$", lambda found: "000" if found[0] != "000" else "111", id)
        rest_of = {name: others.get(name, "x") for name in names if name != first}
        paths = [path.format(**{**rest_of, str(first): each}) for each in (id, never)]
        yield paths[0], paths[1], id, never


@pytest.mark.parametrize(("method", "path", "operation"), WITH_IDS, ids=IDS)
async def test_the_id_of_another_tenant_is_one_that_never_was(
    stranger: httpx2.AsyncClient, owner: Owner, method: str, path: str, operation: dict[str, Any]
) -> None:
    options: dict[str, Any] = {}
    content = resolve(operation.get("requestBody", {})).get("content", {})
    if "application/json" in content:
        options["json"] = smallest(content["application/json"]["schema"])
    query = [each for each in map(resolve, operation.get("parameters", [])) if each["in"] == "query"]
    options["params"] = {each["name"]: smallest(each["schema"]) for each in query if each.get("required")}
    for theirs, never, id, other in requests_for(path, owner):
        answers = [await stranger.request(method, each, **options) for each in (theirs, never)]
        shapes = []
        for answer, used in zip(answers, (id, other), strict=True):
            text = answer.text.replace(answer.headers["atoll-request-id"], "REQUEST").replace(used, "ID")
            headers = {name for name in answer.headers if name not in ("date", "content-length")}
            shapes.append((answer.status_code, re.sub(r'"created_at":"[^"]*"', "", text), headers))
        assert shapes[0] == shapes[1]
        if operation["operationId"] not in MAKES:
            assert answers[0].status_code in (403, 404), answers[0].text


@pytest.mark.parametrize(
    ("method", "path"), [each[:2] for each in OPERATIONS if each[0] == "get" and "{" not in each[1]]
)
async def test_no_list_shows_what_another_tenant_has(
    bystander: httpx2.AsyncClient, owner: Owner, method: str, path: str
) -> None:
    params = {"after": 0, "follow": False} if path.endswith("/events") else {}
    answer = await bystander.request(method, path, params=params)
    assert not [id for id in owner.everything() if id in answer.text]


@pytest.mark.parametrize(("method", "path"), [each[:2] for each in OPERATIONS])
async def test_no_operation_of_another_tenant_can_be_asked_for(
    stranger: httpx2.AsyncClient, owner: Owner, method: str, path: str
) -> None:
    """The header Atoll-Tenant is looked at before all else. Only a key of the server may name another."""
    path = re.sub(r"{\w+}", owner.ids["sandbox"][0], path)
    for named, status, code in (("owner", 403, "forbidden"), ("Not a name", 400, "invalid_request")):
        answer = await stranger.request(method, path, headers={"Atoll-Tenant": named})
        assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("sandboxes", {"from_checkpoint": "CHECKPOINT"}),
        ("sandboxes", {"from_checkpoint": "label"}),
        ("sandboxes", {"image": "template:their-template"}),
        ("builds", {"name": "mine", "dockerfile": "FROM template:their-template\nRUN true"}),
        ("builds", {"name": "mine", "plan": {"image": "template:their-template"}}),
        ("sandboxes", {"mounts": [{"source": "volume:their-volume", "target": "/v"}]}),
        ("sandboxes/mine/restore", {"checkpoint": "CHECKPOINT", "foreign": True}),
        ("sandboxes/mine/restore", {"checkpoint": "CHECKPOINT"}),
        ("sandboxes/mine/fork", {"checkpoint": "CHECKPOINT"}),
    ],
)
async def test_ids_in_a_body_are_not_found_either(
    stranger: httpx2.AsyncClient, owner: Owner, path: str, body: dict[str, Any]
) -> None:
    if "mine" in path and (await stranger.get("/api/v1/sandboxes/mine")).status_code == 404:
        (await stranger.post("/api/v1/sandboxes", json={"name": "mine"})).raise_for_status()
    body = {name: owner.ids["checkpoint"][0] if value == "CHECKPOINT" else value for name, value in body.items()}
    answer = await stranger.post(f"/api/v1/{path}", json=body)
    assert answer.status_code == 404, answer.text
    assert answer.json()["code"] in ("checkpoint_not_found", "volume_not_found", "template_not_found")


async def test_the_files_that_another_tenant_has_uploaded_are_not_there(
    stranger: httpx2.AsyncClient, owner: Owner
) -> None:
    body = {"name": "mine", "dockerfile": "FROM host\nCOPY . /srv", "files": owner.ids["files"][0]}
    answer = await stranger.post("/api/v1/builds", json=body)
    assert (answer.status_code, answer.json()["code"]) == (422, "build_failed"), answer.text
    assert "are not there" in answer.json()["message"]
