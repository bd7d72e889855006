"""What a hostile client tries on the proxy. Nothing here needs a sandbox: `tests/attacks/test_egress.py` does."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

import anyio
import pytest
from anyio.abc import ByteStream

from atoll.contract.network import Address
from atoll.runtime import http1
from atoll.runtime.egress import proxy as egress_proxy
from tests.egress.world import SITE, Proxied, World, everything, proxied, serving

OPEN = ("*", "0.0.0.0/0", "::/0")
"""All that can be allowed without naming an address that is not public."""


class Whole(ByteStream):
    """A client that has said all before anybody reads, and what it is answered."""

    def __init__(self, said: bytes) -> None:
        self._said = said
        self.answer = b""

    async def receive(self, max_bytes: int = 65536) -> bytes:
        if not self._said:
            raise anyio.EndOfStream
        said, self._said = self._said[:max_bytes], self._said[max_bytes:]
        return said

    async def send(self, item: bytes) -> None:
        self.answer += item

    async def send_eof(self) -> None:
        pass

    async def aclose(self) -> None:
        pass


async def statuses(proxy: Proxied, host: str, port: int = 443) -> tuple[bytes, bytes, int]:
    """What each protocol says to a wish for `host`: the status of CONNECT and of GET, and the code of SOCKS."""
    bracketed = f"[{host}]" if ":" in host else host
    tunnel = await proxy.tunnel(f"{bracketed}:{port}")
    plain = await proxy.get(f"http://{bracketed}:{port}/")
    return tunnel[9:12], plain[9:12], await proxy.socks(host, port)


async def test_a_name_that_turns_to_another_address_is_looked_up_once_and_dialled_as_judged(
    world: World, tmp_path: Path
) -> None:
    world.name("rebind.test", [SITE], ["127.0.0.1"])
    async with proxied(world, tmp_path, *OPEN) as proxy:
        assert await proxy.socks("rebind.test", 443) == 0
        assert (world.looked_up, world.dialled) == (["rebind.test"], [f"{SITE} 443"])
        said = await proxy.tunnel("rebind.test:443")  # a second wish is looked up anew, and judged anew
        assert said.startswith(
            b"HTTP/1.1 403 Forbidden: rebind.test resolves to 127.0.0.1: 127.0.0.1 is a loopback address"
        )
        assert world.dialled == [f"{SITE} 443"]


async def test_of_several_addresses_only_those_that_are_allowed_are_dialled(world: World, tmp_path: Path) -> None:
    world.name("mixed.test", ["10.0.0.1", "::ffff:127.0.0.1", SITE, "fd00::1"])
    async with proxied(world, tmp_path, *OPEN) as proxy:
        assert await proxy.socks("mixed.test", 444) == 5
    assert world.dialled == [f"{SITE} 444"]


@pytest.mark.parametrize("address", ["93.184.216.34", "::ffff:93.184.216.34", "64:ff9b::5db8:d822"])
async def test_an_address_that_is_denied_is_refused_in_every_spelling_and_behind_every_name(
    world: World, tmp_path: Path, address: str
) -> None:
    world.name("pretty.test", [address])
    world.name("twofold.test", [address, "93.184.216.35"])
    async with proxied(world, tmp_path, *OPEN, deny=["93.184.216.34"]) as proxy:
        for host in (address, "pretty.test"):
            assert await statuses(proxy, host) == (b"403", b"403", 2)
        assert await proxy.socks("twofold.test", 444) == 5
    assert world.dialled == ["93.184.216.35 444"]


@pytest.mark.parametrize(
    "address",
    """127.0.0.1 127.255.0.1 0.0.0.0 10.1.2.3 172.16.0.1 192.168.1.1 100.64.0.1 169.254.169.254 169.254.1.1
    255.255.255.255 224.0.0.1 240.0.0.1 192.0.2.1 198.18.0.1 168.63.129.16 ::1 :: ::ffff:127.0.0.1 ::ffff:a9fe:a9fe
    ::127.0.0.1 fe80::1 fc00::1 fd00:ec2::254 fec0::1 ff02::1 64:ff9b::7f00:1 64:ff9b::10.0.0.1 64:ff9b:1::1
    2002:7f00:1::1 2001:0:7f00:1::1 2001:db8::1 100::1 ::ffff:0:7f00:1 200::1 4000::1 8000::1""".split(),
)
async def test_addresses_that_are_not_public_are_refused_by_themselves_and_behind_a_name(
    world: World, tmp_path: Path, address: str
) -> None:
    world.name("pretty.test", [address])
    async with proxied(world, tmp_path, *OPEN) as proxy:
        for host in (address, "pretty.test"):
            assert await statuses(proxy, host) == (b"403", b"403", 2)
        assert {record.verdict for record in proxy.records()} == {"denied"}
        assert all(record.address for record in proxy.records())
    assert world.dialled == []


@pytest.mark.parametrize(
    "host",
    """2130706433 0x7f000001 0177.0.0.1 0x7f.0.0.1 127.1 127.0.1 127.0.0.01 127.0.0.1.. 1.2.3.4.5 0 00 0x
    example.com.. .example.com exa_mple..com 999.1.1.1 localhost.127""".split(),
)
async def test_other_spellings_of_addresses_are_no_hosts(world: World, tmp_path: Path, host: str) -> None:
    async with proxied(world, tmp_path, *OPEN) as proxy:
        assert await statuses(proxy, host) == (b"400", b"400", 8)
    assert world.looked_up == world.dialled == []


@pytest.mark.parametrize("host", ["EXAMPLE.com", "example.com.", "ExAmPlE.CoM."])
async def test_a_name_in_another_spelling_is_the_same_name(world: World, tmp_path: Path, host: str) -> None:
    async with proxied(world, tmp_path, "example.com:443") as proxy:
        assert await proxy.socks(host, 443) == 0
        proxy.allow("*.example.com")
        assert await proxy.socks(host, 443) == 2
    assert world.looked_up == ["example.com"]


@pytest.mark.parametrize(
    "target",
    [
        "http://example.com@10.0.0.1/",
        "http://user:word@example.com/",
        "http://example.com:80@evil.test/",
        "http://example.com\\@evil.test/",
        "http://example.com#@evil.test/",
        "http://example.com:/",
        "http://example.com:99999999/",
        "http://example.com:+80/",
        "http://example.com:0/",
        "http://[example.com]/",
        "http://[::1/",
        "http:///path",
        "https://example.com/",
        "ftp://example.com/",
        "/path",
        "*",
        "example.com:80",
        "http://example.com%00.evil.test/",
        "http://exa%6dple.com/",
    ],
)
async def test_targets_that_two_parsers_could_read_differently_are_refused(
    world: World, tmp_path: Path, target: str
) -> None:
    async with proxied(world, tmp_path, *OPEN) as proxy:
        assert (await proxy.get(target)).startswith(b"HTTP/1.1 400 Bad Request: ")
    assert world.looked_up == world.dialled == []


@pytest.mark.parametrize(
    "said",
    [
        b"CONNECT example.com HTTP/1.1\r\nHost: x\r\n\r\n",
        b"CONNECT user@example.com:443 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"CONNECT http://example.com:443 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"CONNECT example.com:443 HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nbody",
        b"CONNECT example.com:443 HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET http://example.com/ HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET http://example.com/ HTTP/1.1\r\nHost : a\r\n\r\n",
        b"GET http://example.com/ HTTP/1.1\r\nHost: a\r\n folded: b\r\nContent-Length: 1, 2\r\n\r\n",
        b"POST http://example.com/ HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"POST http://example.com/ HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: xchunked\r\n\r\nab",
        b"GET http://ex\xc3\xa4mple.com/ HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET http://example.com/ HTTP/9.9\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64) + b"\r\n\r\n",
        b"\r\n\r\n\x00\xff nonsense\r\n\r\n",
    ],
)
async def test_requests_that_are_malformed_or_ambiguous_are_refused(world: World, tmp_path: Path, said: bytes) -> None:
    async with proxied(world, tmp_path, *OPEN) as proxy:
        answer = await proxy.say(said)
        assert answer[:9] == b"HTTP/1.1 "
        assert answer[9:12] in {b"400", b"501"}
        assert [record.verdict for record in proxy.records()] == ["denied"]
    assert world.dialled == []


SMUGGLED = b"GET http://evil.test/ HTTP/1.1\r\nHost: x\r\n\r\n"
BOTH = b"has both Transfer-Encoding and Content-Length"
AMBIGUOUS = [
    pytest.param(b"1.1", b"Content-Length: 4\r\nTransfer-Encoding: chunked", BOTH, id="both lengths"),
    pytest.param(b"1.1", b"Transfer-Encoding: chunked\r\nContent-Length: 4", BOTH, id="both, the other way round"),
    pytest.param(b"1.1", b"Content-Length: 4\r\nContent-Length: 5", b"", id="two lengths"),
    pytest.param(b"1.1", b"Content-Length: 4, 5", b"", id="two lengths in one"),
    pytest.param(b"1.1", b"Transfer-Encoding: chunked, identity", b"", id="two codings"),
    pytest.param(b"1.0", b"Transfer-Encoding: chunked", b"HTTP/1.0 does not have", id="chunks in HTTP/1.0"),
]


@pytest.mark.parametrize(("version", "lines", "reason"), AMBIGUOUS)
async def test_a_body_cannot_be_smuggled_as_a_second_request(
    world: World, tmp_path: Path, version: bytes, lines: bytes, reason: bytes
) -> None:
    head = b"POST http://example.com/ HTTP/%s\r\nHost: x\r\n%s\r\n\r\n" % (version, lines)
    async with proxied(world, tmp_path, *OPEN) as proxy:
        answer = await proxy.say(head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(SMUGGLED), SMUGGLED))
        assert answer.startswith((b"HTTP/1.1 400 Bad Request: malformed HTTP request: ", b"HTTP/1.1 501 "))
        assert reason in answer
        assert answer.count(b"HTTP/1.1 ") == 1
        assert [(record.host, record.verdict) for record in proxy.records()] == [("", "denied")]
    assert world.looked_up == world.dialled == []


@pytest.mark.parametrize(("version", "lines", "reason"), AMBIGUOUS)
async def test_a_response_that_is_ambiguous_does_not_reach_the_client(
    world: World, tmp_path: Path, version: bytes, lines: bytes, reason: bytes
) -> None:
    async def ambiguous(stream: ByteStream) -> None:
        await stream.receive()
        await stream.send(b"HTTP/%s 200 OK\r\n%s\r\n\r\n4\r\nbody\r\n0\r\n\r\n" % (version, lines))

    async with serving(ambiguous) as port, proxied(world, tmp_path, *OPEN) as proxy:
        world.servers[("*", 8080)] = port
        answer = await proxy.get("http://example.com:8080/")
        assert answer.startswith(b"HTTP/1.1 502 Bad Gateway: example.com:8080 sent ")
        assert reason in answer
        assert b"body" not in answer
        assert [record.verdict for record in proxy.records()] == ["failed"]


@pytest.mark.parametrize("body", [b"4\r\nbodyX\r\n0\r\n\r\n", b"-1\r\n" + SMUGGLED, b"f" * 40 + b"\r\n", b"4\r\nbo"])
async def test_a_malformed_body_is_the_clients_fault_and_ends_the_exchange(
    world: World, tmp_path: Path, body: bytes
) -> None:
    async def silent(stream: ByteStream) -> None:
        with suppress(anyio.BrokenResourceError):
            await everything(stream)

    head = b"POST http://example.com:8080/ HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with serving(silent) as port, proxied(world, tmp_path, *OPEN) as proxy:
        world.servers[("*", 8080)] = port
        client = Whole(head + body)
        assert await proxy.proxy.serve(client)
        assert client.answer.startswith(b"HTTP/1.1 400 Bad Request: malformed HTTP request: ")
        assert [record.host for record in proxy.records()] == ["example.com"]


async def test_endless_headers_are_cut_off(world: World, tmp_path: Path) -> None:
    async with proxied(world, tmp_path, *OPEN) as proxy, await proxy.connect() as stream:
        await stream.send(b"GET http://example.com/ HTTP/1.1\r\nHost: x\r\n")
        await stream.send(b"X-Header: y\r\n" * (http1.MAX_HEAD_BYTES // 8))
        assert (await stream.receive()).startswith(b"HTTP/1.1 431 ")
        assert [record.verdict for record in proxy.records()] == ["denied"]
    assert world.looked_up == []


async def test_a_head_that_comes_at_once_is_bounded_as_one_that_comes_bit_by_bit(world: World, tmp_path: Path) -> None:
    beginning = b"GET http://example.com/ HTTP/1.1\r\nHost: x\r\nX: "
    async with proxied(world, tmp_path, *OPEN) as proxy:
        whole = Whole(beginning + b"y" * http1.MAX_HEAD_BYTES + b"\r\n\r\n")
        assert await proxy.proxy.serve(whole)
        assert whole.answer.startswith(b"HTTP/1.1 431 ")
        assert [record.verdict for record in proxy.records()] == ["denied"]
    assert world.looked_up == []


@pytest.mark.parametrize("url", ["http://example.com/", "http://10.0.0.1/"])
async def test_a_head_of_too_many_lines_is_refused_before_it_is_parsed(world: World, tmp_path: Path, url: str) -> None:
    async with proxied(world, tmp_path, *OPEN) as proxy:
        for lines in (http1.MAX_HEADER_LINES, http1.MAX_HEADER_LINES + 1, 4000):
            for first in ("Host: x", "Host: x\r\nnot a header"):
                head = "\r\n".join([f"GET {url} HTTP/1.1", first, *["X: y"] * (lines - 1 - first.count("\r"))])
                client = Whole(head.encode() + b"\r\n\r\n")
                assert await proxy.proxy.serve(client)
                if lines > http1.MAX_HEADER_LINES:
                    reason = b"malformed HTTP request: the head has more than 200 header lines"
                    assert client.answer.startswith(b"HTTP/1.1 431 Request Header Fields Too Large: " + reason)
                else:
                    assert client.answer[9:12] == (b"400" if "not" in first else b"403" if "10." in url else b"200")
        assert len(proxy.records()) == 6


async def test_a_response_of_too_many_header_lines_does_not_reach_the_client(world: World, tmp_path: Path) -> None:
    async def wordy(stream: ByteStream) -> None:
        await stream.receive()
        await stream.send(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 201 + b"\r\n")

    async with serving(wordy) as port, proxied(world, tmp_path, *OPEN) as proxy:
        world.servers[("*", 8080)] = port
        answer = await proxy.get("http://example.com:8080/")
        assert answer.startswith(
            b"HTTP/1.1 502 Bad Gateway: example.com:8080 sent a malformed HTTP response: the head has"
        )


async def test_nonsense_takes_no_more_of_the_records_than_anything_else(world: World, tmp_path: Path) -> None:
    async with proxied(world, tmp_path, *OPEN) as proxy:
        await proxy.say(b"GET http://example.com/ HTTP/1.1\r\nHost: x\r\n\x1b" + b"y" * 50_000 + b"\r\n\r\n")
        (record,) = proxy.records()
    assert record.reason is not None
    assert record.reason.startswith("malformed HTTP request: ")
    assert record.reason.isprintable()
    assert len(record.reason) <= 400


@pytest.mark.parametrize(
    "said",
    [
        b"\x05\x01\x02",
        b"\x05\x00",
        b"\x05\x01\x00\x05\x02\x00\x01\x01\x01\x01\x01\x00\x50",
        b"\x05\x01\x00\x05\x03\x00\x01\x01\x01\x01\x01\x00\x50",
        b"\x05\x01\x00\x05\x01\x00\x09\x01\x01\x01\x01\x00\x50",
        b"\x05\x01\x00\x04\x01\x00\x50\x01\x01\x01\x01\x00",
        b"\x05\x01\x00\x05\x01\x00\x03\x00\x00\x50",
        b"\x05\x01\x00\x05\x01\x00\x03\x05\xff\xfe\x00ab\x00\x50",
        b"\x05\x01\x00\x05\x01\x00\x03\x0bexample.com\x00\x00",
    ],
)
async def test_socks_that_is_malformed_or_asks_for_more_is_refused(world: World, tmp_path: Path, said: bytes) -> None:
    async with proxied(world, tmp_path, *OPEN) as proxy:
        answer = await proxy.say(said)
        assert answer.removeprefix(b"\x05\x00")[:2] in {b"\x05\xff", b"\x05\x07", b"\x05\x08"}
        assert [record.verdict for record in proxy.records()] == ["denied"]
    assert world.looked_up == world.dialled == []


async def test_random_bytes_never_do_more_than_end_a_connection(world: World, tmp_path: Path) -> None:
    async with proxied(world, tmp_path, *OPEN) as proxy:
        for size in range(1, 200):
            async with await proxy.connect() as stream:
                await stream.send(os.urandom(size))
                await stream.send_eof()
                with anyio.fail_after(20):
                    await everything(stream)
        assert await proxy.socks("example.com", 443) == 0


async def test_a_redirect_to_a_private_address_is_another_request_and_refused(world: World, tmp_path: Path) -> None:
    async def redirect(stream: ByteStream) -> None:
        await stream.receive()
        await stream.send(
            b"HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/latest/\r\nContent-Length: 0\r\n\r\n"
        )

    async with serving(redirect) as port, proxied(world, tmp_path, *OPEN) as proxy:
        world.servers[("*", 8080)] = port
        said = await proxy.get("http://example.com:8080/")
        assert b"location: http://169.254.169.254/latest/" in said.lower()
        assert (await proxy.get("http://169.254.169.254/latest/")).startswith(b"HTTP/1.1 403 ")
        assert world.dialled == [f"{SITE} 8080"]


async def test_who_is_slow_to_say_what_it_wants_is_let_go(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(egress_proxy, "HEAD_TIMEOUT_S", 0.05)
    async with proxied(world, tmp_path, *OPEN) as proxy:
        for beginning in (b"", b"GET http://exa", b"\x05\x01\x00\x05\x01"):
            async with await proxy.connect() as stream:
                if beginning:
                    await stream.send(beginning)
                with anyio.fail_after(20), suppress(anyio.BrokenResourceError):
                    await everything(stream)
        assert await proxy.socks("example.com", 443) == 0


async def test_names_that_nobody_answers_take_so_many_threads_and_no_more_until_they_are_answered(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    answered = threading.Event()

    def late(name: str) -> list[Address]:
        asked.append(name)
        answered.wait(60)
        return [ip_address(SITE)]

    monkeypatch.setattr(egress_proxy, "DNS_TIMEOUT_S", 0.1)
    world.connector = egress_proxy.Connector(resolve=late, dial=world.connector.dial)
    async with proxied(world, tmp_path, "*") as proxy:
        async with anyio.create_task_group() as group:
            for number in range(20):
                group.start_soon(proxy.tunnel, f"n{number}.test:443")
        assert len(asked) == 8
        assert {record.verdict for record in proxy.records()} == {"failed"}
        monkeypatch.setattr(egress_proxy, "DNS_TIMEOUT_S", 20.0)
        answered.set()
        assert await proxy.socks("example.com", 443) == 0


def test_a_name_that_nobody_answers_keeps_no_process_from_its_exit() -> None:
    program = """
import anyio, threading
from atoll.runtime.egress.proxy import _in_thread
async def main():
    with anyio.move_on_after(0.05):
        await _in_thread(threading.Event().wait, lambda: None)
anyio.run(main)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


async def test_what_is_asked_for_cannot_forge_a_record_or_a_header(world: World, tmp_path: Path) -> None:
    async with proxied(world, tmp_path, "example.com") as proxy:
        name = 'x","verdict":"allowed"}\n{"a":"'
        assert await proxy.socks(name, 443) == 8
        said = await proxy.tunnel("a\tb:443")
        assert said.startswith(b"HTTP/1.1 400 ")
        first, second = proxy.records()
        assert (first.host, first.verdict) == (name, "denied")
        assert second.verdict == "denied"
