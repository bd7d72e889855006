"""Clients that take their time: heads, bodies and handshakes that do not come, and too many connections."""

from __future__ import annotations

import time
from contextlib import ExitStack

import httpx2

from atoll.testing.server import RunningServer
from atoll.testing.waiting import wait_until
from tests.serve.conftest import answers, connect, read_all


def test_a_head_that_does_not_arrive_ends_the_connection(strict_server: RunningServer) -> None:
    with connect(strict_server) as connected:
        connected.sendall(b"GET /healthz HTTP/1.1\r\nHost: local")
        began = time.monotonic()
        (found,) = answers(read_all(connected))
        assert (found.status, found.json["code"]) == (408, "request_timeout")
        assert time.monotonic() - began < 10


def test_a_head_that_drips_ends_the_connection(strict_server: RunningServer) -> None:
    with connect(strict_server) as connected:
        connected.sendall(b"GET /healthz HTTP/1.1\r\n")
        connected.settimeout(0.1)
        said = b""
        for _ in range(200):
            try:
                connected.sendall(b"X")
                if data := connected.recv(65536):
                    said += data
                else:
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        assert answers(said)[0].status == 408


def test_a_connection_that_says_nothing_is_closed(strict_server: RunningServer) -> None:
    with connect(strict_server) as connected:
        assert read_all(connected) == b""


def test_a_body_that_makes_no_progress_ends_the_request(strict_server: RunningServer) -> None:
    for framing in (b"Content-Length: 4000", b"Transfer-Encoding: chunked"):
        with connect(strict_server) as connected:
            key = f"X-API-Key: {strict_server.key}".encode()
            connected.sendall(
                b"POST /api/v1/sandboxes HTTP/1.1\r\nHost: localhost\r\n%s\r\n%s\r\n\r\n" % (key, framing)
            )
            connected.sendall(b"5\r\n{    " if b"chunked" in framing else b"{")
            (found,) = answers(read_all(connected))
            assert (found.status, found.json["code"]) == (408, "request_timeout")


def test_one_client_has_so_many_connections_and_others_are_still_served(strict_server: RunningServer) -> None:
    with ExitStack() as held:
        for _ in range(16):
            held.enter_context(connect(strict_server))
        with connect(strict_server) as refused:
            (found,) = answers(read_all(refused))
            assert (found.status, found.json["code"]) == (503, "too_many_connections")
        with connect(strict_server, source="127.0.0.2") as other:
            other.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert answers(read_all(other))[0].status == 200
        for number in range(8):  # with these the server has all that it may have
            held.enter_context(connect(strict_server, source=f"127.0.0.{number + 3}"))
        with connect(strict_server, source="127.0.0.99") as refused:
            assert answers(read_all(refused))[0].status == 503
    wait_until(lambda: httpx2.get(strict_server.url + "/healthz").status_code == 200, "the connections are free again")
