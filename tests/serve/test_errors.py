"""Every error has one shape, whoever makes it: the door, Starlette, FastAPI or a route, and for a WebSocket too."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from atoll.testing.server import RunningServer
from tests.serve.conftest import Said, say

SHAPE = {"code": str, "message": str, "details": dict, "request_id": str}


def assert_shape(body: Any, request_id: str) -> None:
    assert {name: type(value) for name, value in body.items()} == SHAPE
    assert body["request_id"] == request_id


def request(server: RunningServer, line: str, headers: dict[str, str]) -> Said:
    """The answer to a request without a body. A header that is empty is not sent."""
    lines = [f"{line} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items() if value)]
    return say(server, "\r\n".join([*lines, "", ""]).encode())[0]


def assert_said(found: Said, status: int, code: str) -> None:
    assert (found.status, found.json["code"]) == (status, code)
    told = {line.partition(b":")[0].lower(): line.partition(b":")[2].strip() for line in found.head.splitlines()[1:]}
    assert_shape(found.json, told[b"atoll-request-id"].decode())


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("GET", "/api", 404, "not_found"),
        ("GET", "/api/v1/nothing", 404, "not_found"),
        ("GET", "/api/v1/sandboxes/", 404, "not_found"),
        ("GET", "/api/v1/sandboxes/a/nothing", 404, "not_found"),
        ("GET", "/api/v1/sandboxes/nothing", 404, "sandbox_not_found"),
        ("GET", "/api/v1/sandboxes/nothing/terminal", 404, "not_found"),
        ("DELETE", "/api/v1/me", 405, "method_not_allowed"),
        ("OPTIONS", "/api/v1/me", 405, "method_not_allowed"),
        ("POST", "/api/v1/sandboxes/nothing", 405, "method_not_allowed"),
        ("GET", "/api/v1/sandboxes/a/exec", 405, "method_not_allowed"),
        ("POST", "/healthz", 405, "method_not_allowed"),
        ("POST", "/docs", 405, "method_not_allowed"),
        ("POST", "/openapi.json", 405, "method_not_allowed"),
        ("GET", "/api/v1/sandboxes?limit=x", 400, "invalid_request"),
        ("GET", "/api/v1/sandboxes?unknown=1", 400, "invalid_request"),
        ("POST", "/api/v1/sandboxes", 400, "invalid_request"),
        ("GET", "/api/v1/tenants/nothing", 404, "tenant_not_found"),
    ],
)
def test_an_error_of_a_path_a_method_or_a_value_has_the_one_shape(
    strict_server: RunningServer, method: str, path: str, status: int, code: str
) -> None:
    answer = httpx2.request(method, strict_server.url + path, headers=strict_server.headers)
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert_shape(answer.json(), answer.headers["Atoll-Request-Id"])
    assert status != 405 or answer.headers["Allow"], "what is allowed is said"


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff", b'"text"', b"null", b'{"name": 1}', b'{"nothing": 1}'])
def test_a_body_that_is_not_right_is_an_error_of_the_one_shape(strict_server: RunningServer, body: bytes) -> None:
    for content_type in ("application/json", "text/plain", "multipart/form-data", "nothing"):
        headers = {**strict_server.headers, "Content-Type": content_type}
        answer = httpx2.post(strict_server.url + "/api/v1/sandboxes", content=body, headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request"), content_type
        assert_shape(answer.json(), answer.headers["Atoll-Request-Id"])


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"X-API-Key": ""}, 401, "unauthenticated"),
        ({"X-API-Key": "atoll_none_none"}, 401, "unauthenticated"),
        ({"Authorization": "Basic YTpi", "X-API-Key": ""}, 401, "unauthenticated"),
        ({"Atoll-Tenant": "Not a name"}, 400, "invalid_request"),
        ({"Atoll-Tenant": "nobody"}, 404, "tenant_not_found"),
        ({"Host": "elsewhere.example"}, 421, "misdirected_request"),
        ({"Origin": "https://elsewhere.example"}, 403, "forbidden"),
        ({"Content-Encoding": "gzip"}, 415, "unsupported_encoding"),
        ({"Expect": "200-ok"}, 417, "invalid_request"),
        ({"Content-Length": "100000000"}, 413, "too_large"),
        ({"X-Long": "a" * 40_000}, 431, "headers_too_large"),
    ],
)
def test_an_error_of_a_header_has_the_one_shape(
    strict_server: RunningServer, headers: dict[str, str], status: int, code: str
) -> None:
    given = {
        "Host": "localhost",
        "Connection": "close",
        **strict_server.headers,
        "Content-Type": "application/json",
        **headers,
    }
    assert_said(request(strict_server, "POST /api/v1/sandboxes", given), status, code)


def test_what_has_no_body_by_its_method_has_only_the_id(strict_server: RunningServer) -> None:
    for path, status in (("/nothing", 404), ("/api/v1/me", 405), ("/api/v1/nothing", 404)):
        answer = httpx2.head(strict_server.url + path, headers=strict_server.headers)
        assert (answer.status_code, answer.content) == (status, b"")
        assert answer.headers["Atoll-Request-Id"].startswith("req_")


@pytest.mark.parametrize(
    ("path", "with_key", "status", "code"),
    [
        ("/api/v1/sandboxes/nothing/terminal", False, 401, "unauthenticated"),
        ("/api/v1/sandboxes/nothing/terminal", True, 404, "sandbox_not_found"),
        ("/api/v1/sandboxes/nothing/terminal?rows=0", True, 400, "invalid_request"),
        ("/api/v1/sandboxes/nothing/guest", True, 404, "sandbox_not_found"),
        ("/api/v1/sandboxes/nothing/archive", True, 404, "sandbox_not_found"),
        ("/api/v1/sessions/Not%20a%20name", True, 400, "invalid_request"),
        ("/api/v1/nothing", False, 401, "unauthenticated"),
        ("/api/v1/nothing", True, 404, "not_found"),
        ("/api/v1/me", True, 404, "not_found"),
        ("/nothing", True, 404, "not_found"),
    ],
)
def test_a_websocket_is_refused_with_the_one_shape(
    strict_server: RunningServer, path: str, with_key: bool, status: int, code: str
) -> None:
    upgrade = {"Upgrade": "websocket", "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="}
    given = {"Host": "localhost", "Connection": "Upgrade", **upgrade, **(strict_server.headers if with_key else {})}
    assert_said(request(strict_server, f"GET {path}", given), status, code)
