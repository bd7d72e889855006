"""Getting at headers that are set in requests on their way out, from inside: by sending them elsewhere, by keeping them
when they were taken back, or by sending others in their place.

The sandbox reaches hosts through the proxy of its policy, which goes to servers on loopback. All of them remember what
they were sent.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest

from atoll import InvalidRequest, NetworkPolicy, Sandbox
from atoll.runtime.engine import LocalEngine
from tests import searching
from tests.egress.world import World
from tests.origin import Origin, TestAuthority, origin

VALUE = "Bearer hk-live-7d20f1c9be"
API, OTHER = "93.184.216.34", "93.184.216.35"
"""Public addresses. Nothing is ever sent there."""
CURL = "curl -sS --max-time 20"
HEADERS = {"api.test": {"Authorization": VALUE}, "*.wide.test": {"X-Zone": "wide"}, "near.wide.test": {"X-Near": "1"}}


@dataclass
class Scene:
    inside: Sandbox
    api: Origin
    other: Origin
    plain: Origin
    """What answers for `api.test` without TLS."""


@pytest.fixture
async def scene(engine: LocalEngine, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    authority = TestAuthority(tmp_path_factory.mktemp("world"))
    world = World()
    names = ("api.test", "a.wide.test", "near.wide.test", "wide.test")
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(origin(authority.server_context(*names)))
        other = await stack.enter_async_context(origin(authority.server_context("other.test", "api.test")))
        plain = await stack.enter_async_context(origin(None))
        for name in names:
            world.name(name, [API])
        world.name("other.test", [OTHER])
        world.servers = {(API, 443): api.port, (OTHER, 443): other.port, (API, 80): plain.port}
        engine.egress_servers.connector = world.connector
        engine.egress_servers.trust = authority.client_context()
        sandbox = await engine.create(network=NetworkPolicy(allow=["*.test", API]))
        stack.push_async_callback(sandbox.destroy)
        await engine.set_request_headers(sandbox.name, HEADERS)
        yield Scene(sandbox, api, other, plain)
        engine.egress_servers.connector = None
        del engine.egress_servers.trust


async def run(scene: Scene, command: str) -> str:
    done = await scene.inside.exec(command, timeout_s=40)
    return done.stdout + done.stderr


async def test_programs_send_them_without_knowing_and_cannot_send_others(scene: Scene) -> None:
    assert "hello" in await run(scene, f"{CURL} https://api.test/ -H 'Authorization: mine' -H 'AUTHORIZATION: mine'")
    program = "import urllib.request as u; print(u.urlopen('https://api.test/python').read())"
    assert "hello" in await run(scene, f'python3 -c "{program}"')
    assert [asked.all("authorization") for asked in scene.api.asked] == [[VALUE.encode()]] * 2


async def test_they_go_to_their_own_hosts_over_tls_and_nowhere_else(scene: Scene) -> None:
    await run(scene, f"{CURL} -k https://other.test/ -H 'Host: api.test'")
    await run(scene, f"{CURL} -k --connect-to api.test:443:other.test:443 https://api.test/")
    await run(scene, f"{CURL} -k --connect-to api.test:443:{API}:443 https://api.test/")
    await run(scene, f"{CURL} http://api.test/")
    await run(scene, f"{CURL} -k https://wide.test/")
    assert scene.other.asked
    assert scene.plain.asked
    for server in (scene.api, scene.other, scene.plain):
        assert VALUE.encode() not in server.raw
        assert b"X-Zone" not in server.raw
    said = await run(scene, f"{CURL} https://api.test/ -H 'Host: other.test'")
    assert "but the request is for another host" in said


async def test_those_of_the_nearest_host_count_and_are_not_merged(scene: Scene) -> None:
    for name in ("a.wide.test", "near.wide.test"):
        assert "hello" in await run(scene, f"{CURL} https://{name}/")
    assert [(asked.all("x-zone"), asked.all("x-near")) for asked in scene.api.asked] == [
        ([b"wide"], []),
        ([], [b"1"]),
    ]


async def test_who_kept_a_connection_open_does_not_keep_them_when_they_are_taken_back(
    scene: Scene, engine: LocalEngine
) -> None:
    program = """
import http.client, os, ssl, sys
proxy = os.environ['HTTPS_PROXY'].rpartition('/')[2].split(':')
kept = http.client.HTTPSConnection(proxy[0], int(proxy[1]), timeout=20)
kept.set_tunnel('api.test', 443)
kept.request('GET', '/first'); print(kept.getresponse().read(), flush=True)
sys.stdin.readline()
try:
    kept.auto_open = 0
    kept.request('GET', '/second'); print(kept.getresponse().read())
except (OSError, http.client.HTTPException) as error:
    print('cut', type(error).__name__)
"""
    await scene.inside.files.write_text("/tmp/kept.py", program)
    process = await scene.inside.spawn(["python3", "/tmp/kept.py"], stdin=True)
    lines = process.lines()
    assert "hello" in await anext(lines)
    await engine.set_request_headers(scene.inside.name, {"api.test": {"X-Other": "2"}})
    await process.stdin.send(b"\n")
    assert (await anext(lines)).startswith("cut")
    await process.wait()
    assert [asked.line.split()[1] for asked in scene.api.asked] == [b"/first"]
    assert "hello" in await run(scene, f"{CURL} https://api.test/third")
    assert (scene.api.asked[-1].all("authorization"), scene.api.asked[-1].all("x-other")) == ([], [b"2"])
    await engine.set_request_headers(scene.inside.name, {})
    assert "the world's authority" in await run(scene, f"{CURL} -kv https://api.test/")  # nothing is in between


async def test_the_values_are_neither_inside_nor_in_any_record(scene: Scene, engine: LocalEngine) -> None:
    assert "hello" in await run(scene, f"{CURL} https://api.test/")
    processes = searching.processes_of(scene.inside.id)
    assert not [pid for pid in processes if searching.in_memory(pid, VALUE.encode())]
    assert searching.in_tree(engine.state_dir, VALUE.encode()) == []
    assert VALUE not in scene.inside.info.model_dump_json()


async def test_who_is_forked_or_woken_sends_them_too(scene: Scene) -> None:
    (fork,) = await scene.inside.fork()
    async with fork:
        await fork.sleep()
        done = await fork.exec(f"{CURL} https://api.test/", timeout_s=40)
        assert done.stdout == "hello\n", done.stderr
    assert [asked.all("authorization") for asked in scene.api.asked] == [[VALUE.encode()]]


@pytest.mark.parametrize(
    "wrong",
    [
        {"api.test": {"Host": "other.test"}},
        {"api.test": {"Transfer-Encoding": "chunked"}},
        {"api.test": {"X-A": "one\r\nX-B: two"}},
        {"api.test": {"X-A\r\nX-B": "two"}},
        {"api.test": {"X-A": ""}},
        {"*": {"X-A": "1"}},
        {"api.test:443": {"X-A": "1"}},
        {"93.184.216.34": {"X-A": "1"}},
        {"*.*.test": {"X-A": "1"}},
    ],
)
async def test_what_would_change_how_a_request_is_read_or_where_it_goes_cannot_be_set(
    scene: Scene, engine: LocalEngine, wrong: dict[str, dict[str, str]]
) -> None:
    with pytest.raises(InvalidRequest):
        await engine.set_request_headers(scene.inside.name, wrong)
