"""Requests that two readers take for different things: a second one hidden in the first, past the token."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import pytest

from atoll.runtime.previews import proxy, router
from atoll.runtime.sandbox import Sandbox
from tests.attacks.wire import OK, Inside, ending, saying, serving
from tests.http_client import host_of, say

pytestmark = pytest.mark.usefixtures("listening", "no_bugs")

HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: x\r\n\r\n"

REFUSED = {
    "both lengths": ("POST / HTTP/1.1", ["Content-Length: 4", "Transfer-Encoding: chunked"], b"0\r\n\r\n"),
    "both, the other way round": (
        "POST / HTTP/1.1",
        ["Transfer-Encoding: chunked", "Content-Length: 33"],
        b"0\r\n\r\n",
    ),
    "two lengths": ("POST / HTTP/1.1", ["Content-Length: 0", "Content-Length: 33"], b""),
    "two lengths in one": ("POST / HTTP/1.1", ["Content-Length: 0, 33"], b""),
    "a signed length": ("POST / HTTP/1.1", ["Content-Length: +0"], b""),
    "a negative length": ("POST / HTTP/1.1", ["Content-Length: -1"], b""),
    "a length that is none": ("POST / HTTP/1.1", ["Content-Length: 0x0"], b""),
    "a huge length": ("POST / HTTP/1.1", [f"Content-Length: {'9' * 30}"], b""),
    "a coding that is none": ("POST / HTTP/1.1", ["Transfer-Encoding: xchunked"], b""),
    "two codings": ("POST / HTTP/1.1", ["Transfer-Encoding: chunked", "Transfer-Encoding: identity"], b"0\r\n\r\n"),
    "two codings in one": ("POST / HTTP/1.1", ["Transfer-Encoding: chunked, identity"], b"0\r\n\r\n"),
    "a coding in quotes": ("POST / HTTP/1.1", ['Transfer-Encoding: "chunked"'], b"0\r\n\r\n"),
    "a space before the colon": ("POST / HTTP/1.1", ["Transfer-Encoding : chunked"], b"0\r\n\r\n"),
    "a control character": ("POST / HTTP/1.1", ["Transfer-Encoding: \x0bchunked"], b"0\r\n\r\n"),
    "a NUL": ("POST / HTTP/1.1", ["X: a\x00b"], b""),
    "a bare CR": ("POST / HTTP/1.1", ["X: a\rTransfer-Encoding: chunked"], b"0\r\n\r\n"),
    "a header without a colon": ("POST / HTTP/1.1", ["Nothing"], b""),
    "chunks in HTTP/1.0": ("POST / HTTP/1.0", ["Transfer-Encoding: chunked"], b"0\r\n\r\n"),
    "two hosts": ("GET / HTTP/1.1", ["Host: other"], b""),
    "a whole address": ("GET http://other/ HTTP/1.1", [], b""),
    "a tunnel": ("CONNECT other:80 HTTP/1.1", [], b""),
    "an asterisk": ("OPTIONS * HTTP/1.1", [], b""),
    "a space too many": ("GET / / HTTP/1.1", [], b""),
    "another version": ("GET / HTTP/1.2x", [], b""),
}


@pytest.fixture
async def inside(prey: Sandbox) -> AsyncIterator[Inside]:
    async with serving(prey, saying(OK)) as inside:
        yield inside


async def test_what_can_be_read_in_two_ways_is_refused_and_nothing_of_it_arrives(inside: Inside) -> None:
    for attack, (first, lines, body) in REFUSED.items():
        said = await say(inside.preview, inside.request(first, *lines, body=body + HIDDEN))
        assert said[9:12] in (b"400", b"501"), (attack, said)
        assert b"Malformed HTTP request: " in said, (attack, said)
        assert said.count(b"HTTP/1.1 ") == 1, (attack, said)
    assert inside.all == b""


async def test_a_message_with_both_lengths_is_refused_with_the_reason(inside: Inside) -> None:
    lines = ("Content-Length: 4", "Transfer-Encoding: chunked")
    said = await say(inside.preview, inside.request("POST / HTTP/1.1", *lines, body=b"0\r\n\r\n" + HIDDEN))
    assert b"ambiguous framing: it has both Transfer-Encoding and Content-Length" in said
    said = await say(inside.preview, inside.request("HEAD / HTTP/1.1", *lines, body=b"0\r\n\r\n" + HIDDEN))
    assert said[9:12] == b"400"
    assert said.endswith(b"\r\n\r\n"), "a response to HEAD has no body"


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"3\r\nabcX" + HIDDEN, id="no end of line after a chunk"),
        pytest.param(b"3\nabc\n0\n\n" + HIDDEN, id="bare line feeds"),
        pytest.param(b"0x3\r\nabc\r\n0\r\n\r\n" + HIDDEN, id="a size that is none"),
        pytest.param(b"-1\r\n" + HIDDEN, id="a negative size"),
        pytest.param(b"f" * 40 + b"\r\n" + HIDDEN, id="a huge size"),
        pytest.param(b"3;" + b"x" * 200_000, id="an endless extension"),
        pytest.param(b"0\r\nX: " + b"x" * 200_000, id="an endless trailer"),
    ],
)
async def test_chunks_that_are_none_end_the_exchange_and_do_not_arrive_whole(inside: Inside, body: bytes) -> None:
    said = await say(inside.preview, inside.request("POST / HTTP/1.1", "Transfer-Encoding: chunked", body=body))
    assert said.count(b"HTTP/1.1 ") <= 1
    assert b"hidden" not in inside.all
    assert b"0\r\n\r\n" not in inside.all, "the server is not told that this was all"


async def test_each_request_of_a_connection_needs_the_token(inside: Inside) -> None:
    second = inside.request("GET /hidden HTTP/1.1", "Connection: close", token=False)
    said = await say(inside.preview, inside.request("POST / HTTP/1.1", "Content-Length: 3", body=b"abc" + second))
    assert re.findall(rb"HTTP/1.1 (\d+)", said) == [b"200", b"404"]
    assert b"hidden" not in inside.all


async def test_a_kept_connection_does_not_lead_to_another_preview(inside: Inside, bystander: Sandbox) -> None:
    async with serving(bystander, saying(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nother")) as other:
        said = await say(inside.preview, inside.request() + other.request("GET / HTTP/1.1", "Connection: close"))
        assert (said.count(b"\r\n\r\nok"), said.count(b"\r\n\r\nother")) == (1, 1)
        mixed = other.request("GET /hidden HTTP/1.1", "Connection: close").replace(
            other.preview.token.encode(), inside.preview.token.encode()
        )
        assert b" 404 " in await say(inside.preview, inside.request() + mixed)
    assert b"hidden" not in inside.all + other.all


async def test_what_arrives_is_written_anew(inside: Inside) -> None:
    head = f"GET /a HTTP/1.1\nHost: {host_of(inside.preview)}\nAtoll-Token: {inside.preview.token}\nX: a\n  b\n"
    said = await say(inside.preview, head.encode() + b"Connection: close\n\n")
    assert said.startswith(b"HTTP/1.1 200 ")
    assert b"\r\nX: a b\r\n" in inside.all
    assert inside.all.count(b"\n") == inside.all.count(b"\r\n")


async def test_headers_for_one_hop_cannot_take_away_those_of_the_proxy(inside: Inside) -> None:
    lines = [
        "Connection: close, x-forwarded-for, host, content-length, via, secret",
        *("X-Forwarded-For: 10.0.0.1", "X_Forwarded_For: 10.0.0.2", "Forwarded: for=10.0.0.3", "Secret: 1"),
        *("Proxy-Authorization: Basic eA==", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk", "Content-Length: 3"),
    ]
    said = await say(inside.preview, inside.request("POST / HTTP/1.1", *lines, body=b"abc"))
    assert said.startswith(b"HTTP/1.1 200 ")
    head, _, body = inside.all.partition(b"\r\n\r\n")
    assert body == b"abc"
    seen = {name.lower(): value for name, _, value in (line.partition(b": ") for line in head.split(b"\r\n")[1:])}
    assert (seen[b"x-forwarded-for"], seen[b"content-length"]) == (b"127.0.0.1", b"3")
    assert seen[b"host"] == host_of(inside.preview).encode()
    assert b"10.0.0" not in head
    assert not {b"secret", b"proxy-authorization", b"upgrade", b"connection", b"forwarded"} & set(seen)


async def test_an_upgrade_that_the_server_does_not_grant_opens_no_tunnel(inside: Inside) -> None:
    lines = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: eA==")
    hidden = inside.request("GET /hidden HTTP/1.1", "Connection: close", token=False)
    said = await say(inside.preview, inside.request("GET / HTTP/1.1", *lines, body=hidden))
    assert re.findall(rb"HTTP/1.1 (\d+)", said) == [b"200", b"404"]
    assert b"hidden" not in inside.all


async def test_heads_that_are_too_large_or_too_slow_are_refused(
    inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = await say(inside.preview, inside.request("GET / HTTP/1.1", f"X: {'x' * 300_000}"))
    many = await say(inside.preview, inside.request("GET / HTTP/1.1", *["X: x"] * 12_000))
    assert (large[9:12], many[9:12]) == (b"431", b"431")
    monkeypatch.setattr(proxy, "HEAD_TIMEOUT_S", 0.1)
    monkeypatch.setattr(proxy, "FIRST_BYTE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(proxy, "IDLE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(proxy, "STALL_TIMEOUT_S", 0.1)
    assert (await say(inside.preview, inside.request()[:-2]))[9:12] == b"408"
    assert await say(inside.preview, b"") == b""
    slow = inside.request("POST / HTTP/1.1", "Content-Length: 100", body=b"begun")
    said = await say(inside.preview, slow)
    assert said.count(b"HTTP/1.1 ") == 1, "the server had answered already; then it ended"


async def test_a_head_of_too_many_lines_is_refused_before_it_is_parsed(inside: Inside) -> None:
    for first in ("X: y", "not a header"):
        said = await say(inside.preview, inside.request("GET / HTTP/1.1", first, *["X: y"] * 4000))
        assert said[9:12] == b"431"
        assert b"the head has more than 200 header lines" in said
    assert inside.all == b""
    assert (await say(inside.preview, inside.request("GET / HTTP/1.1", "Connection: close", *["X: y"] * 197)))[
        9:12
    ] == b"200"


async def test_a_preview_takes_no_more_at_once_than_it_may(
    inside: Inside, prey: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "MAX_EXCHANGES", 0)
    assert (await say(inside.preview, inside.request("GET / HTTP/1.1", "Connection: close")))[9:12] == b"503"
    assert inside.all == b""


async def test_a_server_that_closes_without_an_answer_is_not_asked_twice_to_change_something(prey: Sandbox) -> None:
    async with serving(prey, ending(b"")) as inside:
        for first in ("GET / HTTP/1.1", "POST / HTTP/1.1", "DELETE / HTTP/1.1"):
            inside.seen.clear()
            said = await say(inside.preview, inside.request(first, "Connection: close"))
            assert said[9:12] == b"502"
            assert len(inside.seen) == 1
