"""Heads and bodies that are too large, and bodies that would become so."""

from __future__ import annotations

import gzip

import httpx2
import pytest

from atoll.testing.server import RunningServer
from atoll.testing.waiting import BOUND_S
from tests.serve.conftest import say

LARGE_HEADS = {
    "one long header": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 40_000 + b"\r\n\r\n",
    "many headers": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + b"X: a\r\n" * 150 + b"\r\n",
    "a head without an end": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + b"X: a\r\n" * 100_000,
    "a long name": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + b"X" * 40_000 + b": a\r\n\r\n",
    "a long request line": b"GET /" + b"a" * 100_000,
    "a long target": b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


@pytest.mark.parametrize("what", LARGE_HEADS)
def test_a_large_head_is_refused(strict_server: RunningServer, what: str) -> None:
    (found,) = say(strict_server, LARGE_HEADS[what])
    assert found.status in (414, 431)
    assert found.json["code"] == "headers_too_large"


def test_a_large_body_is_refused_before_it_is_sent(strict_server: RunningServer) -> None:
    key = f"X-API-Key: {strict_server.key}\r\n".encode()
    start = b"POST /api/v1/sandboxes HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" + key
    found = say(strict_server, start + b"Content-Length: 100000000000\r\n\r\n{")
    assert (found[0].status, found[0].json["code"]) == (413, "too_large")


def test_a_large_body_without_a_length_is_refused(strict_server: RunningServer) -> None:
    def pieces():
        for _ in range(100):
            yield b" " * 10_000

    headers = {**strict_server.headers, "Content-Type": "application/json"}
    answer = httpx2.post(strict_server.url + "/api/v1/sandboxes", content=pieces(), headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (413, "too_large")


def test_contents_of_files_and_inputs_of_processes_may_have_any_size(strict_server: RunningServer) -> None:
    large = b"a" * 300_000
    with httpx2.Client(
        base_url=f"{strict_server.url}/api/v1", headers=strict_server.headers, timeout=BOUND_S
    ) as client:
        assert client.post("/sandboxes", json={"name": "filled"}).status_code == 201
        written = client.put("/sandboxes/filled/files", params={"path": "large"}, content=large)
        assert written.json()["size"] == len(large)
        spawned = client.post("/sandboxes/filled/processes", json={"command": "wc -c > counted", "stdin": True}).json()[
            "id"
        ]
        sent = client.post(f"/sandboxes/filled/processes/{spawned}/stdin", params={"eof": True}, content=large)
        assert sent.status_code == 204, sent.text
        client.get(f"/sandboxes/filled/processes/{spawned}/wait", params={"timeout_s": 10})
        assert client.get("/sandboxes/filled/files", params={"path": "counted"}).text == "300000\n"
        assert client.delete("/sandboxes/filled").status_code == 204


def test_chunks_that_are_mostly_extensions_are_refused(strict_server: RunningServer) -> None:
    start = b"POST /api/v1/sandboxes HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
    key = f"X-API-Key: {strict_server.key}\r\n\r\n".encode()
    found = say(strict_server, start + key + (b"1;" + b"a" * 10_000 + b"\r\n \r\n") * 30)
    assert found[0].status == 400


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd", "identity, gzip"])
def test_a_compressed_body_is_refused(strict_server: RunningServer, coding: str) -> None:
    body = gzip.compress(b'{"name": "' + b"a" * 10_000_000 + b'"}')
    headers = {**strict_server.headers, "Content-Encoding": coding, "Content-Type": "application/json"}
    answer = httpx2.post(strict_server.url + "/api/v1/sandboxes", content=body, headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (415, "unsupported_encoding")


def test_an_expectation_other_than_continue_is_refused(strict_server: RunningServer) -> None:
    (found,) = say(strict_server, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nExpect: 200-ok\r\n\r\n")
    assert found.status == 417
