"""The proxy: what is allowed comes through whole, what is not is told why, and everything is written down."""

from __future__ import annotations

import base64
import os
import ssl
from contextlib import suppress
from pathlib import Path

import anyio
import pytest
from anyio.abc import ByteStream

from atoll.contract.network import Address, PackageIndexes
from atoll.contract.secret import Secret
from atoll.runtime.egress.proxy import Connector
from atoll.runtime.http1 import Dial, Headers, TunnelHandler
from atoll.runtime.secrets.injection import Scrubber, SecretInjector
from atoll.runtime.secrets.vault import SandboxSecrets
from atoll.testing.waiting import eventually
from tests.egress.world import SITE, World, everything, proxied, serving
from tests.origin import origin


async def test_a_plain_request_goes_to_its_host_without_what_is_between_neighbours(
    world: World, tmp_path: Path
) -> None:
    async with proxied(world, tmp_path, "example.com:80") as proxy:
        said = await proxy.get(
            "http://Example.COM./a?b=c",
            "Host: elsewhere.test",
            "Proxy-Connection: keep-alive",
            "Proxy-Authorization: Basic eA==",
            "X-Mine: kept",
            "Connection: x-secret",
            "X-Secret: 1",
            "TE: trailers",
            "Upgrade: h2c",
        )
    head, _, body = said.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    seen = body.lower()
    assert b"get /a?b=c http/1.1\r\nhost: example.com\r\n" in seen
    assert b"x-mine: kept" in seen
    for gone in (b"elsewhere", b"proxy-", b"x-secret", b"upgrade", b"\nte:"):
        assert gone not in seen
    assert world.dialled == [f"{SITE} 80"]


async def test_each_request_on_one_connection_is_decided_by_itself(world: World, tmp_path: Path) -> None:
    request = "GET http://{}/ HTTP/1.1\r\nHost: example.com\r\n\r\n"
    async with proxied(world, tmp_path, "example.com:80") as proxy, await proxy.connect() as stream:
        seen = b""
        for _ in range(2):
            await stream.send(request.format("example.com").encode())
            seen = b""
            while not seen.endswith(b"0\r\n\r\n"):
                seen += await stream.receive()
            assert seen.startswith(b"HTTP/1.1 200 ")
        await stream.send(request.format("other.test").encode())
        assert (await everything(stream)).startswith(b"HTTP/1.1 403 Forbidden: no rule allows other.test:80; ")
        assert [record.verdict for record in proxy.records()] == ["allowed", "allowed", "denied"]
    assert world.looked_up == ["example.com"] * 2


@pytest.mark.parametrize("chunked", [False, True])
async def test_the_body_of_a_request_arrives(world: World, tmp_path: Path, chunked: bool) -> None:
    body = os.urandom(50_000).hex().encode()
    head = b"POST http://example.com/ HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    if chunked:
        sent = head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    else:
        sent = head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    async with proxied(world, tmp_path, "example.com") as proxy:
        said = await proxy.say(sent)
    assert (b"transfer-encoding: chunked" in said) == chunked
    assert body[:1000] in said
    assert body[-1000:] in said


async def test_a_tunnel_carries_bytes_both_ways_and_their_ends(world: World, tmp_path: Path) -> None:
    data = os.urandom(3_000_000)
    async with proxied(world, tmp_path, "*.com:443") as proxy, await proxy.connect() as stream:
        # What comes together with the request is the tunnel's already.
        await stream.send(b"CONNECT example.com:443 HTTP/1.1\r\nHost: x\r\n\r\nearly")
        assert (await stream.receive()).startswith(b"HTTP/1.1 200 ")
        got = bytearray()

        async def read() -> None:
            async for chunk in stream:
                got.extend(chunk)

        async with anyio.create_task_group() as group:
            group.start_soon(read)
            await stream.send(data)
            await stream.send_eof()
        assert bytes(got) == b"early" + data
        (record,) = await eventually(lambda: [r for r in proxy.records() if r.ended], "it is written down")
    assert (record.sent_bytes, record.received_bytes) == (len(data) + 5, len(data) + 5)
    assert (record.protocol, record.host, record.port, record.address) == ("connect", "example.com", 443, SITE)


@pytest.mark.parametrize("host", ["example.com", b"\x01" + bytes(map(int, SITE.split(".")))])
async def test_socks_reaches_names_and_addresses(world: World, tmp_path: Path, host: str | bytes) -> None:
    async with proxied(world, tmp_path, "example.com:443", f"{SITE}:443") as proxy:
        assert await proxy.socks(host, 443) == 0
        assert await proxy.socks(host, 80) == 2
        assert await proxy.socks("unknown.example.com", 443) == 2
        proxy.allow("unknown.example.com", "example.com")
        assert await proxy.socks("unknown.example.com", 443) == 4
        assert await proxy.socks("example.com", 81) == 5


async def test_a_denied_connection_names_the_rule_that_is_missing_and_is_not_looked_up(
    world: World, tmp_path: Path
) -> None:
    async with proxied(world, tmp_path, "example.com:443") as proxy:
        said = await proxy.tunnel("secret-data.attacker.test:443")
        assert said.startswith(b"HTTP/1.1 403 Forbidden: ")
        assert b"to allow it, add the rule secret-data.attacker.test:443" in said.splitlines()[0]
        assert b"to allow it, add the rule example.com:80" in await proxy.get("http://example.com/")
        assert world.looked_up == world.dialled == []
        assert [(r.verdict, r.host, r.port, r.address, r.sent_bytes) for r in proxy.records()] == [
            ("denied", "secret-data.attacker.test", 443, None, 0),
            ("denied", "example.com", 80, None, 0),
        ]


async def test_a_connection_that_does_not_come_about_is_told_and_written_down(world: World, tmp_path: Path) -> None:
    async with proxied(world, tmp_path, "*") as proxy:
        assert b"HTTP/1.1 502 Bad Gateway: cannot resolve gone.test: " in await proxy.tunnel("gone.test:443")
        assert b"cannot connect to example.com:444 at 93.184.216.34: Connection refused" in await proxy.tunnel(
            "example.com:444"
        )
        assert [(r.verdict, r.address) for r in proxy.records()] == [("failed", None), ("failed", SITE)]


async def test_names_are_resolved_and_addresses_dialled_as_this_machine_does(world: World, tmp_path: Path) -> None:
    port = world.servers[("*", 443)]
    world.connector = Connector()
    async with proxied(world, tmp_path, "localhost", f"127.0.0.1:{port}", "127.0.0.1:9") as proxy:
        assert await proxy.socks("localhost", port) == 0
        assert await proxy.socks("127.0.0.1", port) == 0
        assert b"cannot connect to 127.0.0.1:9 at 127.0.0.1: Connection refused" in await proxy.tunnel("127.0.0.1:9")
        assert await proxy.socks("127.0.0.1", 9) == 5


async def test_the_next_address_is_tried_when_one_does_not_answer(world: World, tmp_path: Path) -> None:
    world.name("two.test", ["198.41.0.4", "2606:2800::1"])
    world.servers[("2606:2800::1", 5000)] = world.servers[("*", 443)]
    async with proxied(world, tmp_path, "two.test") as proxy:
        assert await proxy.socks("two.test", 5000) == 0
    assert world.dialled == ["198.41.0.4 5000", "2606:2800::1 5000"]


async def test_a_policy_that_changes_cuts_what_it_does_not_allow_any_more(world: World, tmp_path: Path) -> None:
    world.name("other.com", [SITE])
    async with proxied(world, tmp_path, "*.com", "example.com") as proxy:
        async with await proxy.connect() as kept, await proxy.connect() as cut:
            for stream, host in ((kept, b"example.com"), (cut, b"other.com")):
                await stream.send(b"CONNECT %s:443 HTTP/1.1\r\nHost: x\r\n\r\n" % host)
                assert (await stream.receive()).startswith(b"HTTP/1.1 200 ")
            proxy.allow("example.com")
            with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await cut.receive()
            await kept.send(b"still here")
            assert await kept.receive() == b"still here"
        reasons = await eventually(lambda: [r.reason for r in proxy.records() if r.reason], "the cut is written down")
    assert len(reasons) == 1
    assert "the policy has changed" in reasons[0]


async def test_an_address_is_not_dialled_any_more_when_the_policy_changes_before_its_turn(
    world: World, tmp_path: Path
) -> None:
    world.name("two.test", [SITE, "10.0.0.5"])
    world.servers = {("10.0.0.5", 443): world.servers[("*", 443)]}

    async def dial(address: Address, port: int) -> ByteStream:
        proxy.allow("two.test")
        return await there.dial(address, port)

    there, world.connector = world.connector, Connector(world.connector.resolve, dial)
    async with proxied(world, tmp_path, "two.test", "10.0.0.5") as proxy:
        said = await proxy.tunnel("two.test:443")
        (record,) = proxy.records()
    assert said.startswith(b"HTTP/1.1 403 Forbidden: two.test resolves to 10.0.0.5")
    assert world.dialled == [f"{SITE} 443"]
    assert (record.verdict, record.address) == ("denied", "10.0.0.5")


async def test_an_open_connection_is_written_down_before_it_ends(world: World, tmp_path: Path) -> None:
    async with proxied(world, tmp_path, "*") as proxy, await proxy.connect() as stream:
        await stream.send(b"CONNECT example.com:443 HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await stream.receive()).startswith(b"HTTP/1.1 200 ")
        (record,) = proxy.records()
        assert (record.verdict, record.ended) == ("allowed", None)


async def test_a_server_that_breaks_off_is_not_taken_for_one_that_ended(world: World, tmp_path: Path) -> None:
    async def half(stream: ByteStream) -> None:
        await stream.receive()
        await stream.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nhalf")

    async def nonsense(stream: ByteStream) -> None:
        await stream.receive()
        await stream.send(b"SSH-2.0-nonsense\r\n\r\n")

    async with serving(half) as halved, serving(nonsense) as odd, proxied(world, tmp_path, "*") as proxy:
        world.servers |= {("*", 81): halved, ("*", 82): odd}
        async with await proxy.connect() as stream:
            await stream.send(b"GET http://example.com:81/ HTTP/1.1\r\nHost: x\r\n\r\n")
            seen = b""
            with suppress(anyio.BrokenResourceError):
                async for chunk in stream:
                    seen += chunk
            assert seen.endswith(b"half")
            assert b"content-length: 1000" in seen.lower()
        assert (await proxy.get("http://example.com:82/")).startswith(
            b"HTTP/1.1 502 Bad Gateway: example.com:82 sent no complete HTTP response"
        )


async def test_indexes_may_be_at_private_addresses_and_nobody_else_there(world: World, tmp_path: Path) -> None:
    world.name("index.test", ["10.1.2.3"])
    world.name("evil.test", ["169.254.169.254"])
    indexes = PackageIndexes(allow=("index.test:443", "evil.test:443"), env={}, certificates={})
    async with proxied(world, tmp_path, "registries", "other.test", indexes=indexes) as proxy:
        assert await proxy.socks("index.test", 443) == 0
        assert await proxy.socks("index.test", 80) == 2
        assert await proxy.socks("evil.test", 443) == 2
        world.name("other.test", ["10.1.2.3"])
        assert await proxy.socks("other.test", 443) == 2
        proxy.allow("other.test", indexes=indexes)  # the preset is not in the policy any more
        assert await proxy.socks("index.test", 443) == 2


class Taking:
    """Answers itself for one host, and signs requests to another."""

    def tunnel_handler(self, host: str, port: int) -> TunnelHandler | None:
        return self._take if host == "example.com" else None

    async def _take(self, client: ByteStream, host: str, port: int, dial: Dial) -> None:
        async with await dial() as outside:
            await outside.send(b"[" + await client.receive() + b"]")
            await client.send(await outside.receive())
            await client.send_eof()

    def tunnel_filter(self, host: str) -> Scrubber | None:
        return None

    def rewrite(self, method: bytes, host: str, headers: Headers) -> tuple[Headers, Scrubber | None]:
        return [*headers, (b"x-signed-for", host.encode() + b" " + method)], None


async def test_an_allowed_connection_can_be_taken_over_and_a_denied_one_not(world: World, tmp_path: Path) -> None:
    async with proxied(world, tmp_path, "example.com", interceptor=Taking()) as proxy:
        async with await proxy.connect() as stream:
            await stream.send(b"CONNECT example.com:443 HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await stream.receive()).startswith(b"HTTP/1.1 200 ")
            await stream.send(b"mine")
            assert await everything(stream) == b"[mine]"
        assert b"x-signed-for: example.com" in await proxy.get("http://example.com/")
        world.servers.clear()
        async with await proxy.connect() as stream:
            await stream.send(b"CONNECT example.com:443 HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await everything(stream)) == b"HTTP/1.1 200 Connection established\r\n\r\n"
        assert [record.verdict for record in proxy.records()] == ["allowed", "allowed", "failed"]
        proxy.allow()
        assert (await proxy.tunnel("example.com:443")).startswith(b"HTTP/1.1 403 ")


async def test_a_secret_that_goes_without_tls_does_not_come_back(world: World, tmp_path: Path) -> None:
    value = "sk-live-4f9a0c77d1"
    secrets = SandboxSecrets.of({"KEY": Secret(value, hosts=["http://example.com"])})
    assert secrets is not None
    placeholder = secrets.secrets["KEY"].placeholder
    basic, real = (base64.b64encode(f"user:{each}".encode()).decode() for each in (placeholder, value))
    interceptor = SecretInjector(secrets, ssl.create_default_context)
    async with origin(None) as site, proxied(world, tmp_path, "example.com", interceptor=interceptor) as proxy:
        world.servers[(SITE, 80)] = site.port
        for path in ("echo", "pieces", "reason"):
            for sent, shown in ((f"Bearer {placeholder}", value), (f"Basic {basic}", real)):
                headers = ("Host: x", "Accept-Encoding: gzip", f"Authorization: {sent}")
                said = await proxy.get(f"http://example.com/{path}", *headers)
                assert said.startswith(b"HTTP/1.1 200 ")
                assert b"*" * len(shown) in said.replace(b"\r\n1\r\n", b"")
                assert shown.encode() not in said.replace(b"\r\n1\r\n", b"")
                assert site.asked[-1].all("authorization")[0].endswith(shown.encode())
                assert site.asked[-1].all("accept-encoding") == [b"identity"]
        site.asked.clear()
        lines = ("TRACE http://example.com/ HTTP/1.1", "Host: x", f"Authorization: {placeholder}", "Connection: close")
        said = await proxy.say("\r\n".join((*lines, "", "")).encode())
        assert said.startswith(b"HTTP/1.1 403 ")
        assert b"not sent with TRACE" in said
        assert site.asked == []


async def test_a_tunnel_that_is_searched_does_not_wait_for_more_than_comes(world: World, tmp_path: Path) -> None:
    value = "sk-live-4f9a0c77d1"
    secrets = SandboxSecrets.of({"KEY": Secret(value, hosts=["http://example.com"])})
    assert secrets is not None
    interceptor = SecretInjector(secrets, ssl.create_default_context)
    async with (
        proxied(world, tmp_path, "example.com", interceptor=interceptor) as proxy,
        await proxy.connect() as stream,
    ):
        await stream.send(b"CONNECT example.com:443 HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await stream.receive()).startswith(b"HTTP/1.1 200 ")
        with anyio.fail_after(20):
            for sent in (b"yes", b"sk-li", b"s"):  # each ends as the value begins, and waits for an answer
                await stream.send(sent)
                came = b""
                while came != sent:
                    came += await stream.receive()
            await stream.send(f"({value})".encode())
            await stream.send_eof()
            assert await everything(stream) == b"(" + b"*" * len(value) + b")"


async def test_an_answer_that_cannot_be_read_without_a_secret_is_none(world: World, tmp_path: Path) -> None:
    async def handle(stream: ByteStream) -> None:
        await stream.receive()
        await stream.send(b"HTTP/1.1 200 OK\r\nContent-Length: 12345678\r\n\r\n")

    secrets = SandboxSecrets.of({"PIN": Secret("12345678", hosts=["http://example.com"])})
    assert secrets is not None
    interceptor = SecretInjector(secrets, ssl.create_default_context)
    async with serving(handle) as site, proxied(world, tmp_path, "example.com", interceptor=interceptor) as proxy:
        world.servers[(SITE, 80)] = site
        assert (await proxy.get("http://example.com/")).startswith(b"HTTP/1.1 502 ")
