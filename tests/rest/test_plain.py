"""Requests that are read without FastAPI's dependencies, and those that are left to it."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from fastapi.routing import APIRoute

from atoll.surfaces import rest
from atoll.surfaces.rest.plain import PlainReader

JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        (JSON, b'{"command": ["echo", "hi"], "timeout_s": 20}'),
        (JSON, b'{"command": ["echo", "hi"], "output_limit_bytes": 1000.0}'),
        (JSON, '{"command": ["echo", "hi"]}'.encode("utf-16")),
        ({"content-type": "application/json; charset=utf-8"}, b'{"command": ["echo", "hi"]}'),
        ({"content-type": "application/vnd.api+json"}, b'{"command": ["echo", "hi"]}'),
        ({**JSON, "accept": "application/json", "idempotency-key": "plain-1"}, b'{"command": ["echo", "hi"]}'),
    ],
)
async def test_a_command_is_the_same_however_its_request_is_written(
    client: httpx2.AsyncClient, box: str, headers: dict[str, str], body: bytes
) -> None:
    answer = await client.post(f"/api/v1/sandboxes/{box}/exec", headers=headers, content=body)
    assert (answer.status_code, answer.json()["stdout"]) == (200, "hi\n")


@pytest.mark.parametrize(
    ("headers", "body", "query", "says"),
    [
        (JSON, b'{"command": []}', "", "command"),
        (JSON, b'{"command": ["true"], "timeout_s": "5"}', "", "timeout_s"),
        (JSON, b'{"command": ["true"], "surprise": 1}', "", "surprise"),
        (JSON, b'{"command": ["true"]', "", "JSON"),
        (JSON, b"", "", "body"),
        ({"content-type": "text/plain"}, b'{"command": ["true"]}', "", "Content-Type"),
        ({**JSON, "idempotency-key": "ä"}, b'{"command": ["true"]}', "", "Idempotency-Key"),
        (JSON, b'{"command": ["true"]}', "?surprise=1", "surprise"),
    ],
)
async def test_what_is_wrong_is_refused_with_its_name(
    client: httpx2.AsyncClient, box: str, headers: dict[str, str], body: bytes, query: str, says: str
) -> None:
    raw: Any = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    answer = await client.post(f"/api/v1/sandboxes/{box}/exec{query}", headers=raw, content=body)
    assert answer.status_code == 400
    assert says.lower() in json.dumps(answer.json()).lower()


@pytest.mark.parametrize("depth", [300, 900, 100_000])
@pytest.mark.parametrize("content_type", ["application/json", "application/json; charset=utf-8"])
async def test_a_body_that_is_nested_too_deeply_is_refused(
    client: httpx2.AsyncClient, content_type: str, depth: int
) -> None:
    nested = b"[" * depth + b"]" * depth
    body = b'{"name": "deep", "tools_config": [{"name": "x", "input_schema": {"type": "object", "x": %s}}]}' % nested
    answer = await client.post("/api/v1/configs", headers={"content-type": content_type}, content=body)
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request")


async def test_what_is_refused_names_no_address_of_memory(client: httpx2.AsyncClient) -> None:
    body = {"name": "a", "agent_type": "sandboxed", "workspace_secrets": {"TOKEN": ["swordfish"]}}
    answer = await client.post("/api/v1/configs", json=body)
    assert answer.status_code == 400
    assert answer.json()["message"].startswith("body.workspace_secrets.TOKEN: ")
    assert " at 0x" not in answer.text
    assert "swordfish" not in answer.text


def test_every_route_that_takes_json_is_read_plainly() -> None:
    routes = [each for router in rest.routers() for each in router.routes if isinstance(each, APIRoute)]
    left = [each.operation_id for each in routes if each.body_field is not None and PlainReader.of(each) is None]
    assert left == []
