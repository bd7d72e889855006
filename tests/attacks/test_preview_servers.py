"""A server inside that answers what is no answer: garbage, endless heads, floods of hints, too much, too little."""

from __future__ import annotations

import os

import anyio
import h11
import pytest
from anyio.abc import ByteStream

from atoll.runtime.sandbox import Sandbox
from atoll.testing.inside import Peak
from tests.attacks.wire import OK, ending, saying, serving
from tests.http_client import Client, ask, say

pytestmark = pytest.mark.usefixtures("listening", "no_bugs")

MIB = 1024 * 1024
HEAD = b"HTTP/1.1 200 OK\r\n"

NO_ANSWER = {
    "garbage": os.urandom(1000).replace(b"\n", b"-") + b"\r\n\r\n",
    "nothing": b"",
    "half a head": HEAD + b"Content-Le",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "HTTP/0.9": b"<html>hello</html>\r\n\r\n",
    "another version": b"HTTP/2.0x 200 OK\r\n\r\n",
    "a status that is none": b"HTTP/1.1 20 OK\r\n\r\n",
    "a status too long": b"HTTP/1.1 2000 OK\r\n\r\n",
    "both lengths": HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks in HTTP/1.0": b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": HEAD + b"Content-Length: 2\r\nContent-Length: 5\r\n\r\nokokok",
    "a negative length": HEAD + b"Content-Length: -5\r\n\r\n",
    "a coding that is none": HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a large head": HEAD + b"Content-Length: 0\r\n" + b"X: x\r\n" * 12_000 + b"\r\n",
    "a control character": HEAD + b"X: a\x00b\r\nContent-Length: 0\r\n\r\n",
    "a header without a name": HEAD + b": x\r\nContent-Length: 0\r\n\r\n",
    "an upgrade that nobody asked for": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\nhello",
    "more hints than anybody needs": b"HTTP/1.1 103 Early Hints\r\n\r\n" * 1000 + OK,
}


async def test_what_is_no_answer_is_said_to_be_none(prey: Sandbox) -> None:
    for attack, answer in NO_ANSWER.items():
        async with serving(prey, ending(answer)) as inside:
            said = await ask(inside.preview)
            assert said.status == 502, (attack, said.status, said.body)
            assert b"sent a malformed HTTP response" in said.body, attack


@pytest.mark.parametrize("line", [b"X", b"X: x\r\n", b"HTTP/1.1 102 Processing\r\n\r\n"])
async def test_an_endless_head_is_bounded(prey: Sandbox, line: bytes) -> None:
    block = line * (MIB // len(line))

    async def endless(stream: ByteStream, seen: bytearray) -> None:
        await stream.receive()
        if not line.startswith(b"HTTP"):
            await stream.send(HEAD)
        while True:
            await stream.send(block)

    peak = Peak(os.getpid())
    async with serving(prey, endless) as inside:
        assert (await ask(inside.preview)).status == 502
    assert peak.growth_bytes < 32 * MIB


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(HEAD + b"Content-Length: 100\r\n\r\ntoo little", id="too little"),
        pytest.param(HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", id="no last chunk"),
        pytest.param(HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhelloX\r\n0\r\n\r\n", id="a chunk that is none"),
        pytest.param(HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX: " + b"x" * MIB, id="a trailer"),
    ],
)
async def test_an_answer_that_breaks_off_never_looks_complete(prey: Sandbox, answer: bytes) -> None:
    async with serving(prey, ending(answer)) as inside:
        with pytest.raises(h11.RemoteProtocolError):
            await ask(inside.preview)
        with pytest.raises(anyio.BrokenResourceError):
            await say(inside.preview, inside.request("GET / HTTP/1.0"))


async def test_what_a_server_says_unasked_is_not_the_answer_to_the_next_request(prey: Sandbox) -> None:
    twice = OK + b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged"
    async with serving(prey, saying(twice)) as inside, Client(inside.preview) as client:
        for _ in range(5):
            assert (await client.ask("/")).body == b"ok"
        assert len(inside.seen) == 5, "each on a connection of its own"


async def test_hints_are_passed_on_and_none_to_who_cannot_know_them(prey: Sandbox) -> None:
    answer = b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\nConnection: close\r\n\r\n" + OK
    async with serving(prey, saying(answer)) as inside:
        said = await say(inside.preview, inside.request("GET / HTTP/1.1", "Connection: close"))
        assert said.startswith(b"HTTP/1.1 103 \r\nLink: </x>\r\n\r\nHTTP/1.1 200 OK\r\n")
        said = await say(inside.preview, inside.request("GET / HTTP/1.0"))
        assert said.startswith(b"HTTP/1.1 200 OK\r\n")


async def test_a_flood_of_small_chunks_holds_nobody_up(prey: Sandbox, bystander: Sandbox) -> None:
    block = b"1\r\nx\r\n" * 20_000

    async def crumbs(stream: ByteStream, seen: bytearray) -> None:
        await stream.receive()
        await stream.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        await stream.send(block)
        await stream.receive()

    peak = Peak(os.getpid())
    async with serving(prey, crumbs) as inside, Client(inside.preview) as client:
        await client.begin("/")
        await client.end()
        await client.head()
        pieces = client.pieces()
        assert await anext(pieces)
        with anyio.fail_after(20):
            assert (await bystander.exec("echo fine")).stdout == "fine\n"
    assert peak.growth_bytes < 32 * MIB


async def test_what_a_server_says_of_itself_is_no_markup_in_our_page(prey: Sandbox) -> None:
    async with serving(prey, ending(b"<script>alert(1)</script>\r\n\r\n")) as inside:
        page = await ask(inside.preview, Accept="text/html")
    assert page.status == 502
    assert b"<script" not in page.body
    assert page.header("content-security-policy").startswith("default-src 'none'")
