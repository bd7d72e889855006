"""Requests that two readers could read differently: each is refused, and nothing that follows it is answered."""

from __future__ import annotations

import pytest

from atoll.testing.server import RunningServer
from tests.serve.conftest import say

SECOND = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
"""What would be smuggled."""
CHUNKED = b"POST /healthz HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


def head(*lines: bytes, first: bytes = b"POST /healthz HTTP/1.1", host: bytes = b"Host: localhost\r\n") -> bytes:
    return first + b"\r\n" + host + b"".join(line + b"\r\n" for line in lines) + b"\r\n"


AMBIGUOUS = {
    "two lengths": head(b"Content-Length: 0", b"Content-Length: 62"),
    "the same length twice": head(b"Content-Length: 0", b"Content-Length: 0"),
    "a list of lengths": head(b"Content-Length: 0, 0"),
    "a length with a sign": head(b"Content-Length: +5"),
    "a negative length": head(b"Content-Length: -1"),
    "a length in hexadecimal": head(b"Content-Length: 0x10"),
    "a length beyond all numbers": head(b"Content-Length: 99999999999999999999"),
    "a length and chunks": head(b"Content-Length: 5", b"Transfer-Encoding: chunked"),
    "chunks and a length": head(b"Transfer-Encoding: chunked", b"Content-Length: 5"),
    "two codings": head(b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity"),
    "a coding that is not known": head(b"Transfer-Encoding: xchunked"),
    "a coding after another": head(b"Transfer-Encoding: gzip, chunked"),
    "a coding with a tab": head(b"Transfer-Encoding:\x0bchunked"),
    "chunks in HTTP/1.0": head(b"Transfer-Encoding: chunked", first=b"POST /healthz HTTP/1.0"),
    "a space before the colon": head(b"Content-Length : 5"),
    "a tab before the colon": head(b"Transfer-Encoding\t: chunked"),
    "a folded line": head(b"X-One: a", b" Transfer-Encoding: chunked"),
    "a folded line with a tab": head(b"X-One: a", b"\tb"),
    "a line without a colon": head(b"Content-Length"),
    "an empty name": head(b": 5"),
    "a name with a null byte": head(b"Content\x00-Length: 5"),
    "a value with a null byte": head(b"X-One: a\x00b"),
    "a bare LF in a header": head(b"X-One: a\nContent-Length: 62"),
    "a bare CR in a header": head(b"X-One: a\rContent-Length: 62"),
    "lines that end with LF": b"GET /healthz HTTP/1.1\nHost: localhost\n\n",
    "a request line that ends with LF": b"GET /healthz HTTP/1.1\nHost: localhost\r\n\r\n",
    "two spaces in the request line": head(first=b"GET  /healthz HTTP/1.1"),
    "a tab in the request line": head(first=b"GET\t/healthz HTTP/1.1"),
    "a space in the path": head(first=b"GET /healthz /x HTTP/1.1"),
    "another version": head(first=b"GET /healthz HTTP/1.2"),
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no version": b"GET /healthz\r\n\r\n",
    "no host": head(host=b""),
    "two hosts": head(b"Host: evil.example"),
    "a host with a path": head(host=b"Host: localhost/x\r\n"),
    "a host with a user": head(host=b"Host: evil@localhost\r\n"),
    "a host with a space": head(host=b"Host: localhost evil\r\n"),
    "a port that is none": head(host=b"Host: localhost:99999\r\n"),
    "an absolute form of another host": head(first=b"GET http://evil.example/healthz HTTP/1.1"),
    "an absolute form with a user": head(first=b"GET http://u@localhost/healthz HTTP/1.1"),
    "an absolute form of another scheme": head(first=b"GET ftp://localhost/healthz HTTP/1.1"),
    "a target without a slash": head(first=b"GET healthz HTTP/1.1"),
    "an asterisk": head(first=b"OPTIONS * HTTP/1.1"),
    "a fragment": head(first=b"GET /healthz#x HTTP/1.1"),
    "two keys": head(b"X-API-Key: a", b"X-API-Key: b"),
    "two authorizations": head(b"Authorization: Bearer a", b"Authorization: Bearer b"),
    "a WebSocket with a body": head(b"Upgrade: websocket", b"Connection: Upgrade", b"Content-Length: 5"),
    "a chunk size that is not hexadecimal": CHUNKED + b"0x5\r\nhello\r\n0\r\n\r\n",
    "a negative chunk size": CHUNKED + b"-5\r\nhello\r\n0\r\n\r\n",
    "a chunk size that overflows": CHUNKED + b"fffffffffffffffff\r\nhello\r\n0\r\n\r\n",
    "a chunk size with a space": CHUNKED + b"5 \r\nhello\r\n0\r\n\r\n",
    "a chunk size that ends with LF": CHUNKED + b"5\nhello\r\n0\r\n\r\n",
    "a chunk that is longer than its size": CHUNKED + b"3\r\nhello\r\n0\r\n\r\n",
    "an extension that ends with LF": CHUNKED + b"5;a\nhello\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("what", AMBIGUOUS)
def test_an_ambiguous_request_is_refused_and_ends_the_connection(strict_server: RunningServer, what: str) -> None:
    found = say(strict_server, AMBIGUOUS[what] + SECOND)
    assert [each.status for each in found] in ([400], [431])
    assert b"connection: close" in found[0].head.lower()
    told = found[0].json
    assert set(told) == {"code", "message", "details", "request_id"}
    assert told["request_id"].encode() in found[0].head


@pytest.mark.parametrize("method", [b"CONNECT", b"TRACE"])
def test_methods_of_proxies_are_refused(strict_server: RunningServer, method: bytes) -> None:
    (found,) = say(strict_server, head(first=method + b" /healthz HTTP/1.1") + SECOND)
    assert found.status == 405


def test_what_is_unambiguous_is_answered_request_by_request(strict_server: RunningServer) -> None:
    sent = (
        b"\r\n"  # an empty line before a request is to be ignored
        b"GET http://localhost/healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
        b"GET /readyz HTTP/1.1\r\nhost:localhost\r\n\r\n"
        + head(b"Content-Length: 5")
        + b"hello"
        + head(b"Upgrade: h2c", b"Connection: Upgrade, HTTP2-Settings", first=b"GET /healthz HTTP/1.1")
        + SECOND
    )
    assert [each.status for each in say(strict_server, sent)] == [200, 200, 405, 200, 200]


def test_what_follows_a_chunked_body_in_one_piece_is_not_answered(strict_server: RunningServer) -> None:
    (found,) = say(strict_server, CHUNKED + b"5\r\nhello\r\n0\r\n\r\n" + SECOND)
    assert found.status == 405


def test_a_trailer_does_not_become_a_header(strict_server: RunningServer) -> None:
    key = f"X-API-Key: {strict_server.key}\r\n".encode()
    sent = (
        b"POST /api/v1/sandboxes HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"2\r\n{}\r\n0\r\n" + key + b"\r\n"
    )
    (found,) = say(strict_server, sent)
    assert found.status == 401
