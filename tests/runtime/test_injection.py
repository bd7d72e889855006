"""Secrets on their way: what is replaced, where, for whom, and what does not come back.

Both ends are real: a TLS client that trusts the sandbox's authority alone, and TLS servers on loopback.
"""

from __future__ import annotations

import base64
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import pytest
from anyio.abc import ByteStream, SocketStream
from anyio.streams.tls import TLSStream

from atoll import InvalidRequest
from atoll.contract.secret import Secret
from atoll.runtime.secrets.authority import Authority, Issuer
from atoll.runtime.secrets.injection import InjectionRule, Scrubber, SecretInjector, rules, substitute
from atoll.runtime.secrets.vault import SandboxSecrets
from tests.origin import Origin, TestAuthority, origin

VALUE = "sk-live-4f9a0c77d1"
HOST = "api.test"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> TestAuthority:
    return TestAuthority(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def secrets() -> SandboxSecrets:
    secrets = SandboxSecrets.of({"API_KEY": Secret(VALUE, hosts=[HOST, "http://plain.test"])})
    assert secrets is not None
    return secrets


@pytest.fixture(scope="module")
def placeholder(secrets: SandboxSecrets) -> str:
    return secrets.secrets["API_KEY"].placeholder


class Client:
    """Who is inside, over one connection."""

    def __init__(self, stream: ByteStream) -> None:
        self.stream = stream
        self._rest = b""

    async def say(self, *lines: str, body: bytes = b"") -> None:
        await self.stream.send("\r\n".join([*lines, "", ""]).encode("latin-1") + body)

    async def answer(self) -> bytes:
        """One whole answer that says where it ends, or all until the end."""
        while True:
            head, found, body = self._rest.partition(b"\r\n\r\n")
            fields = dict(line.partition(b": ")[::2] for line in head.lower().split(b"\r\n"))
            size = None
            if found and b"content-length" in fields:
                size = int(fields[b"content-length"])
            elif found and fields.get(b"transfer-encoding") == b"chunked" and b"\r\n0\r\n" in body:
                end = body.find(b"\r\n\r\n", body.index(b"\r\n0\r\n") + 2)
                size = end + 4 if end >= 0 else None
            if size is not None and len(body) >= size:
                data, self._rest = head + found + body[:size], body[size:]
                return data
            try:
                self._rest += await self.stream.receive()
            except anyio.EndOfStream:
                data, self._rest = self._rest, b""
                return data

    async def ask(self, *lines: str, body: bytes = b"") -> bytes:
        await self.say(*lines, body=body)
        return await self.answer()


class Inside:
    """Connections as they come from inside: to a secret injector, which dials a server on loopback."""

    def __init__(self, secrets: SandboxSecrets, world: TestAuthority) -> None:
        self.secrets = secrets
        self.served: Origin | None = None
        self.injector = SecretInjector(secrets, world.client_context)

    @asynccontextmanager
    async def raw(self, port: int, host: str = HOST) -> AsyncIterator[SocketStream]:
        async def dial() -> ByteStream:
            return await anyio.connect_tcp("127.0.0.1", port)

        ended = anyio.Event()

        async def handle(stream: SocketStream) -> None:
            async with stream:
                await self.injector.intercept(stream, host, 443, dial)
            ended.set()

        async with (
            await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(listener.serve, handle)
            async with await anyio.connect_tcp(*listener.extra(anyio.abc.SocketAttribute.local_address)) as stream:
                yield stream
            with anyio.fail_after(10):  # nothing is left of a connection whose client has gone
                await ended.wait()
            tasks.cancel_scope.cancel()

    @asynccontextmanager
    async def client(self, port: int) -> AsyncIterator[Client]:
        async with self.raw(port) as stream:
            inner = await TLSStream.wrap(stream, hostname=HOST, ssl_context=self.trust(), standard_compatible=False)
            yield Client(inner)

    def trust(self) -> ssl.SSLContext:
        assert self.secrets.authority is not None
        trust = ssl.create_default_context(cadata=self.secrets.authority.certificate)
        trust.set_alpn_protocols(["h2", "http/1.1"])
        return trust


@pytest.fixture
def inside(secrets: SandboxSecrets, world: TestAuthority) -> Inside:
    return Inside(secrets, world)


@pytest.fixture
async def served(world: TestAuthority) -> AsyncIterator[Origin]:
    async with origin(world.server_context(HOST)) as served:
        yield served


# ---- the pure part ----


def test_a_placeholder_is_replaced_in_its_header_and_nowhere_else() -> None:
    rule = InjectionRule(b"authorization", b"PH", b"value")
    headers = [(b"Authorization", b"Bearer PH"), (b"X-Other", b"PH"), (b"authorization", b"PH PH"), (b"Cookie", b"PH")]
    assert substitute([rule], headers) == [
        (b"Authorization", b"Bearer value"),
        (b"X-Other", b"PH"),
        (b"authorization", b"value PH"),
        (b"Cookie", b"PH"),
    ]


def test_basic_authentication_is_looked_at_decoded() -> None:
    rule = InjectionRule(b"authorization", b"PH", b"value")
    (filled,) = substitute([rule], [(b"Authorization", b"Basic " + base64.b64encode(b"user:PH"))])
    assert filled == (b"Authorization", b"Basic " + base64.b64encode(b"user:value"))
    broken = [(b"Authorization", b"Basic !!!"), (b"Authorization", b"Basic")]
    assert substitute([rule], broken) == broken


def test_a_host_is_for_itself_alone(secrets: SandboxSecrets) -> None:
    stored = secrets.secrets.values()
    assert len(rules(stored, HOST)) == 1
    assert len(rules(stored, HOST.upper())) == 1
    for other in ("test", f"x.{HOST}", f"{HOST}.evil.test", f"{HOST}.", "plain.test", "127.0.0.1", ""):
        assert rules(stored, other) == []


def test_without_tls_a_secret_goes_only_where_that_was_said(inside: Inside, placeholder: str) -> None:
    headers = [(b"Authorization", f"Bearer {placeholder}".encode())]
    filled, scrubber = inside.injector.rewrite(b"GET", "plain.test", headers)
    assert filled == [(b"Authorization", f"Bearer {VALUE}".encode()), (b"Accept-Encoding", b"identity")]
    assert scrubber is not None
    assert inside.injector.rewrite(b"GET", "other.test", headers) == (headers, None)
    assert inside.injector.tunnel_handler("plain.test", 80) is None
    with pytest.raises(InvalidRequest, match="not sent without TLS") as refused:
        inside.injector.rewrite(b"GET", HOST, headers)
    assert VALUE not in str(refused.value)


def test_what_must_not_come_back_is_found_wherever_it_is_cut() -> None:
    text = b"aaab" * 3 + b"aab-secret-" + b"-secret-x"
    for value in (b"aab-secret-", b"aaab", b"secret-x"):
        for size in range(1, len(text)):
            scrubber = Scrubber([value])
            passed = b"".join(scrubber.feed(text[at : at + size]) for at in range(0, len(text), size)) + scrubber.end()
            assert passed == text.replace(value, b"*" * len(value))


def test_values_that_are_in_each_other_are_all_found_wherever_they_are_cut() -> None:
    values = [b"secret-1", b"secret-1-longer", b"1-secret"]
    text = b"[secret-1]  [secret-1-longer]  [secret-1-lon]  [a-secret-1-]  [secret-1-secret-1]"
    shown = b"[********]  [***************]  [********-lon]  [a-********-]  [*****************]"
    for size in range(1, len(text)):
        scrubber = Scrubber(values)
        passed = b"".join(scrubber.feed(text[at : at + size]) for at in range(0, len(text), size)) + scrubber.end()
        assert passed == shown
    assert Scrubber(values).all(text) == shown


def test_what_is_held_back_can_be_sent_early_and_the_rest_of_a_value_is_still_overwritten() -> None:
    scrubber = Scrubber([b"secret-1", b"-1-other"])
    assert scrubber.feed(b"ends in s") == b"ends in "
    assert (scrubber.flush(), scrubber.flush()) == (b"s", b"")
    assert scrubber.feed(b"ecre") == b""
    assert scrubber.flush() == b"ecre"
    assert scrubber.feed(b"t-1-othe") == b"*"
    assert scrubber.feed(b"r!") == b"********!"
    assert scrubber.feed(b"secret-1") + scrubber.end() == b"********"


# ---- connections ----


async def test_the_real_value_arrives_and_the_placeholder_does_not(
    inside: Inside, served: Origin, placeholder: str
) -> None:
    async with inside.client(served.port) as client:
        said = await client.ask("GET /x?a=b HTTP/1.1", f"Host: {HOST}", f"Authorization: Bearer {placeholder}")
    assert said.endswith(b"hello\n")
    (asked,) = served.asked
    assert asked.line == b"GET /x?a=b HTTP/1.1"
    assert asked.all("authorization") == [f"Bearer {VALUE}".encode()]
    assert placeholder.encode() not in served.raw


async def test_elsewhere_in_a_request_a_placeholder_stays_one(inside: Inside, served: Origin, placeholder: str) -> None:
    body = f"key={placeholder}".encode()
    async with inside.client(served.port) as client:
        await client.ask(
            f"POST /{placeholder} HTTP/1.1",
            f"Host: {HOST}",
            f"X-Other: {placeholder}",
            f"Authorization: {placeholder[:20]} {placeholder[20:]}",
            f"Content-Length: {len(body)}",
            body=body,
        )
        folded = ("GET / HTTP/1.1", f"Host: {HOST}", f"Authorization: {placeholder[:20]}", f" {placeholder[20:]}")
        await client.ask(*folded)
    assert len(served.asked) == 2
    assert VALUE.encode() not in served.raw
    assert served.raw.count(placeholder.encode()) == 3


async def test_every_request_of_a_connection_has_to_be_for_its_host(
    inside: Inside, served: Origin, placeholder: str
) -> None:
    auth = f"Authorization: {placeholder}"
    for wrong in (
        ("GET / HTTP/1.1", "Host: other.test", auth),
        ("GET / HTTP/1.1", f"Host: {HOST}", "Host: other.test", auth),
        ("GET / HTTP/1.1", f"Host: {HOST}:8443", auth),
        ("GET / HTTP/1.1", f"Host: {HOST}.other.test", auth),
        ("GET / HTTP/1.1", auth),
        ("GET / HTTP/1.0", auth),
        ("GET https://other.test/ HTTP/1.1", f"Host: {HOST}", auth),
        ("CONNECT other.test:443 HTTP/1.1", f"Host: {HOST}", auth),
        ("TRACE / HTTP/1.1", f"Host: {HOST}", auth),
        ("POST / HTTP/1.1", f"Host: {HOST}", auth, "Content-Length: 5", "Transfer-Encoding: chunked"),
        ("POST / HTTP/1.1", f"Host: {HOST}", auth, "Transfer-Encoding: chunked", "Transfer-Encoding: identity"),
        ("PRI * HTTP/2.0",),
    ):
        async with inside.client(served.port) as client:
            # The first one is fine. What comes with it, unasked for, is looked at all the same.
            await client.say("GET /first HTTP/1.1", f"Host: {HOST}", "", *wrong)
            assert b" 200 OK" in await client.answer()
            refused = await client.answer()
            assert refused.split()[1] in (b"400", b"421", b"501"), (wrong, refused)
            with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await client.stream.receive()
        assert [asked.line.split()[1] for asked in served.asked] == [b"/first"]
        served.asked.clear()
    assert VALUE.encode() not in served.raw


AMBIGUOUS = [
    pytest.param("1.1", ["Content-Length: 5", "Transfer-Encoding: chunked"], b"both", id="both lengths"),
    pytest.param("1.1", ["Transfer-Encoding: chunked", "Content-Length: 5"], b"both", id="both, the other way round"),
    pytest.param("1.1", ["Content-Length: 4", "Content-Length: 5"], b"", id="two lengths"),
    pytest.param("1.1", ["Transfer-Encoding: chunked, identity"], b"", id="two codings"),
    pytest.param("1.0", ["Transfer-Encoding: chunked"], b"HTTP/1.0 does not have", id="chunks in HTTP/1.0"),
]


@pytest.mark.parametrize(("version", "lines", "reason"), AMBIGUOUS)
async def test_a_request_that_is_ambiguous_is_refused_and_nothing_of_it_arrives(
    inside: Inside, served: Origin, placeholder: str, version: str, lines: list[str], reason: bytes
) -> None:
    async with inside.client(served.port) as client:
        head = (f"POST / HTTP/{version}", f"Host: {HOST}", f"Authorization: {placeholder}")
        said = await client.ask(*head, *lines, body=b"0\r\n\r\n")
        assert said.startswith((b"HTTP/1.1 400 Bad Request: malformed HTTP request: ", b"HTTP/1.1 501 "))
        assert reason in said
    assert served.connections == 0


async def test_a_request_of_too_many_header_lines_is_refused(inside: Inside, served: Origin) -> None:
    async with inside.client(served.port) as client:
        said = await client.ask("GET / HTTP/1.1", f"Host: {HOST}", *["X: y"] * 200)
        assert said.startswith(b"HTTP/1.1 431 ")
    assert served.connections == 0


@pytest.mark.parametrize(("version", "lines", "reason"), AMBIGUOUS)
async def test_a_response_that_is_ambiguous_does_not_reach_the_client(
    inside: Inside, world: TestAuthority, placeholder: str, version: str, lines: list[str], reason: bytes
) -> None:
    async def handle(stream: SocketStream) -> None:
        context = world.server_context(HOST)
        async with await TLSStream.wrap(
            stream, server_side=True, ssl_context=context, standard_compatible=False
        ) as tls:
            await tls.receive()
            head = "\r\n".join([f"HTTP/{version} 200 OK", *lines, f"X-Secret: {VALUE}", "", ""])
            await tls.send(head.encode() + b"4\r\nbody\r\n0\r\n\r\n")
            with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                await tls.receive()

    async with (
        await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(listener.serve, handle)
        async with inside.client(listener.extra(anyio.abc.SocketAttribute.local_port)) as client:
            said = await client.ask("GET / HTTP/1.1", f"Host: {HOST}", f"Authorization: {placeholder}")
        tasks.cancel_scope.cancel()
    assert said.startswith(b"HTTP/1.1 502 Bad Gateway: api.test sent ")
    assert reason in said
    assert b"body" not in said
    assert VALUE.encode() not in said


async def test_a_malformed_body_is_the_clients_fault(inside: Inside, served: Origin) -> None:
    async with inside.client(served.port) as client:
        chunked = ("POST / HTTP/1.1", f"Host: {HOST}", "Transfer-Encoding: chunked")
        said = await client.ask(*chunked, body=b"4\r\nbodyX\r\n0\r\n\r\n")
        assert said.startswith(b"HTTP/1.1 400 Bad Request: malformed HTTP request: ")


async def test_pipelined_requests_are_answered_one_by_one_each_with_its_value(
    inside: Inside, served: Origin, placeholder: str
) -> None:
    async with inside.client(served.port) as client:
        lines = (f"Host: {HOST}", f"Authorization: {placeholder}", "", "")
        await client.stream.send("".join("\r\n".join((f"GET /{n} HTTP/1.1", *lines)) for n in range(5)).encode())
        for _ in range(5):
            assert b"200 OK" in await client.answer()
    assert [asked.line.split()[1] for asked in served.asked] == [b"/0", b"/1", b"/2", b"/3", b"/4"]
    assert [asked.all("authorization") for asked in served.asked] == [[VALUE.encode()]] * 5
    assert served.connections == 1


async def test_a_client_that_asks_tls_for_another_host_gets_nothing(inside: Inside, served: Origin) -> None:
    trust = inside.trust()
    async with inside.raw(served.port) as stream:
        with pytest.raises((ssl.SSLError, anyio.BrokenResourceError, anyio.EndOfStream)):
            await TLSStream.wrap(stream, hostname="other.test", ssl_context=trust)
    assert served.connections == 0


async def test_a_server_that_is_not_the_host_is_sent_nothing(
    inside: Inside, world: TestAuthority, placeholder: str, tmp_path: Path
) -> None:
    for context in (world.server_context("other.test"), TestAuthority(tmp_path).server_context(HOST)):
        async with origin(context) as impostor, inside.client(impostor.port) as client:
            said = await client.ask("GET / HTTP/1.1", f"Host: {HOST}", f"Authorization: {placeholder}")
            assert said.startswith(b"HTTP/1.1 502")
            assert b"the certificate of api.test is not valid: " in said
            assert impostor.raw == b""


async def test_what_a_server_sends_back_is_overwritten(inside: Inside, served: Origin, placeholder: str) -> None:
    basic = base64.b64encode(f"user:{placeholder}".encode()).decode()
    real = base64.b64encode(f"user:{VALUE}".encode())
    async with inside.client(served.port) as client:
        for path in ("/echo", "/pieces", "/reason"):
            said = await client.ask(f"GET {path} HTTP/1.1", f"Host: {HOST}", f"Authorization: Bearer {placeholder}")
            assert said.startswith(b"HTTP/1.1 200")
            assert VALUE.encode() not in said.replace(b"\r\n1\r\n", b"")
            assert b"*" * len(VALUE) in said
            said = await client.ask(f"GET {path} HTTP/1.1", f"Host: {HOST}", f"Authorization: Basic {basic}")
            assert real not in said.replace(b"\r\n1\r\n", b"")
    assert [asked.all("authorization")[0].split()[-1] for asked in served.asked] == [VALUE.encode(), real] * 3
    assert {asked.all("accept-encoding")[0] for asked in served.asked} == {b"identity"}


async def test_what_was_encoded_for_one_request_is_not_looked_for_in_the_answers_to_others(
    inside: Inside, served: Origin, placeholder: str
) -> None:
    basic, real = (base64.b64encode(f"junk:{each}".encode()).decode() for each in (placeholder, VALUE))
    async with inside.client(served.port) as client:
        said = await client.ask("GET /echo HTTP/1.1", f"Host: {HOST}", f"Authorization: Basic {basic}")
        assert real.encode() not in said
        said = await client.ask("GET /echo HTTP/1.1", f"Host: {HOST}", f"X-Known: {real}")
        assert real.encode() in said


async def test_a_redirect_is_the_clients_to_follow_and_the_value_does_not(
    inside: Inside, served: Origin, placeholder: str
) -> None:
    async with inside.client(served.port) as client:
        said = await client.ask("GET /moved HTTP/1.1", f"Host: {HOST}", f"Authorization: {placeholder}")
    assert b"302 Found" in said
    assert b"https://other.test/caught" in said
    assert VALUE.encode() not in said
    assert len(served.asked) == 1
    assert inside.injector.tunnel_handler("other.test", 443) is None


async def test_after_an_upgrade_bytes_pass_and_placeholders_stay(
    inside: Inside, served: Origin, placeholder: str
) -> None:
    async with inside.client(served.port) as client:
        await client.say(
            "GET /upgrade HTTP/1.1",
            f"Host: {HOST}",
            "Connection: upgrade",
            "Upgrade: websocket",
            "Sec-WebSocket-Extensions: permessage-deflate",
            f"Authorization: {placeholder}",
            body=b"early",
        )
        said = b""
        while b"early" not in said:
            said += await client.stream.receive()
        await client.stream.send(f"\x00\xff{placeholder}".encode("latin-1"))
        while placeholder.encode() not in said:
            said += await client.stream.receive()
    assert said.startswith(b"HTTP/1.1 101")
    assert served.asked[0].all("authorization") == [VALUE.encode()]
    assert served.asked[0].all("sec-websocket-extensions") == []
    assert VALUE.encode() not in said
    assert served.upgraded == b"early" + f"\x00\xff{placeholder}".encode("latin-1")


async def test_with_a_secret_nothing_but_a_websocket_can_be_changed_to(
    inside: Inside, served: Origin, placeholder: str
) -> None:
    lines = ("GET /upgrade HTTP/1.1", f"Host: {HOST}", "Connection: upgrade", f"Authorization: {placeholder}")
    for upgrade in (["h2c"], ["websocket, h2c"], ["websocket", "TLS/1.0"]):
        async with inside.client(served.port) as client:
            said = await client.ask(*lines, *(f"Upgrade: {protocol}" for protocol in upgrade))
            assert said.startswith(b"HTTP/1.1 400")
            assert b"websocket only" in said
    assert served.raw == b""


async def test_bodies_of_any_size_pass_both_ways(inside: Inside, served: Origin) -> None:
    sent = b"0123456789abcdef" * 65536
    async with inside.client(served.port) as client:
        said = await client.ask("POST /length HTTP/1.1", f"Host: {HOST}", f"Content-Length: {len(sent)}", body=sent)
        assert said.endswith(str(len(sent)).encode())
        chunks = b"".join(b"%x\r\n%s\r\n" % (65536, sent[:65536]) for _ in range(16)) + b"0\r\n\r\n"
        said = await client.ask("POST / HTTP/1.1", f"Host: {HOST}", "Transfer-Encoding: chunked", body=chunks)
        assert said.endswith(b"hello\n")
        said = await client.ask("HEAD /large HTTP/1.1", f"Host: {HOST}", "Connection: close")
        assert b"200 OK" in said
    assert served.asked[0].body == sent
    async with inside.client(served.port) as client:
        said = await client.ask("GET /large HTTP/1.1", f"Host: {HOST}")
        assert said.partition(b"\r\n\r\n")[2] == bytes(range(256)) * 4096
        await client.say("PUT / HTTP/1.1", f"Host: {HOST}", "Expect: 100-continue", "Content-Length: 2")
        assert (await client.stream.receive()).startswith(b"HTTP/1.1 100")
        await client.stream.send(b"ab")
        assert (await client.answer()).endswith(b"hello\n")
        said = await client.ask("GET /close HTTP/1.1", f"Host: {HOST}")
        assert b"hello\n" in said


async def test_what_is_not_tls_is_passed_on_as_it_is(inside: Inside, world: TestAuthority, placeholder: str) -> None:
    async with origin(None) as plain, inside.raw(plain.port) as stream:
        client = Client(stream)
        said = await client.ask("GET / HTTP/1.1", f"Host: {HOST}", f"Authorization: {placeholder}")
        assert said.endswith(b"hello\n")
        assert plain.asked[0].all("authorization") == [placeholder.encode()]


async def test_a_host_that_cannot_be_reached_is_said_so(inside: Inside) -> None:
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as free:
        port = free.extra(anyio.abc.SocketAttribute.local_port)
    async with inside.client(port) as client:
        said = await client.ask("GET / HTTP/1.1", f"Host: {HOST}")
        assert b"502" in said
        assert b"cannot connect to api.test" in said


async def test_a_host_that_goes_away_takes_the_connection_with_it(inside: Inside, served: Origin) -> None:
    async with inside.client(served.port) as client:
        said = await client.ask("GET /leave HTTP/1.1", f"Host: {HOST}")
        assert said.endswith(b"hello\n")
        with pytest.raises(anyio.EndOfStream):  # at once, and not when the next request is lost
            await client.stream.receive()
    async with inside.client(served.port) as client:
        assert (await client.ask("GET /nonsense HTTP/1.1", f"Host: {HOST}")).startswith(b"HTTP/1.1 502")


# ---- the authority ----


def handshake(trust: ssl.SSLContext, server: ssl.SSLContext, host: str) -> None:
    """A whole TLS handshake in memory."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides: list[Callable[[], object]] = [
        trust.wrap_bio(to_client, to_server, server_hostname=host).do_handshake,
        server.wrap_bio(to_server, to_client, server_side=True).do_handshake,
    ]
    for _ in range(6):
        for side in sides:
            try:
                side()
            except ssl.SSLWantReadError:
                continue
    sides[0]()


def test_who_has_the_authoritys_key_can_still_be_nobody_else() -> None:
    authority = Authority.make([HOST, "other.test"])
    issuer = Issuer(authority)
    trust = ssl.create_default_context(cadata=authority.certificate)
    trust.verify_flags |= ssl.VERIFY_X509_STRICT
    handshake(trust, issuer.context(HOST), HOST)
    assert issuer.context(HOST) is issuer.context(HOST)
    for host in ("evil.test", "127.0.0.1", "test"):
        with pytest.raises(ssl.SSLCertVerificationError, match=r"permitted subtree|excluded subtree|mismatch"):
            handshake(trust, issuer.context(host), host)


def test_secrets_and_keys_do_not_show(secrets: SandboxSecrets) -> None:
    shown = f"{secrets!r} {secrets} {secrets.authority!r} {Secret(VALUE, hosts=[HOST])!r}"
    assert VALUE not in shown
    assert "PRIVATE KEY" not in shown
