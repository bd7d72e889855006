"""Host names and origins: pages of other sites, and names that only point here."""

from __future__ import annotations

import httpx2
import pytest

from atoll.testing.server import RunningServer

HOSTS = {
    "localhost": 200,
    "127.0.0.1": 200,
    "atoll.localhost": 200,
    "api.atoll.localhost": 200,
    "LOCALHOST": 200,
    "[::1]": 200,
    "evil.example": 421,
    "atoll.localhost.evil.example": 421,
    "evilatoll.localhost": 421,
    "127.0.0.1.evil.example": 421,
    "localhost.": 421,
}


@pytest.mark.parametrize("host", HOSTS)
def test_only_names_of_the_server_are_answered(strict_server: RunningServer, host: str) -> None:
    answer = httpx2.get(strict_server.url + "/healthz", headers={"Host": f"{host}:{strict_server.port}"})
    assert answer.status_code == HOSTS[host]


def test_only_pages_of_the_same_origin_are_let_in(strict_server: RunningServer) -> None:
    port = strict_server.port
    for origin, status in (
        (f"http://127.0.0.1:{port}", 200),
        (f"https://127.0.0.1:{port}", 200),  # a reverse proxy speaks TLS
        (f"http://127.0.0.1:{port + 1}", 403),
        ("http://127.0.0.1", 403),
        (f"http://localhost:{port}", 403),
        (f"http://8000-web.atoll.localhost:{port}", 403),
        ("null", 403),
        ("", 403),
        ("http://evil.example", 403),
    ):
        answer = httpx2.get(strict_server.url + "/healthz", headers={"Origin": origin})
        assert answer.status_code == status, origin


def test_only_proxies_that_the_operator_trusts_say_who_the_client_is(strict_server: RunningServer) -> None:
    """Not even those on this machine, unless they are named (`trusted_proxies`)."""
    sent = {**strict_server.headers, "X-Forwarded-For": "198.51.100.7", "X-Forwarded-Proto": "https"}
    asked = httpx2.post(strict_server.url + "/api/v1/webhooks", json={}, headers=sent)
    audit = httpx2.get(strict_server.url + "/api/v1/audit?limit=20", headers=strict_server.headers).json()["items"]
    (entry,) = [each for each in audit if each["request_id"] == asked.headers["atoll-request-id"]]
    assert entry["client"] == "127.0.0.1"
