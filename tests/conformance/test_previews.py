"""`expose`: servers inside are reached by clients of the host, through a name and a token."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

import anyio
import anyio.to_thread
import pytest
from anyio.abc import SocketAttribute
from websockets.asyncio.client import connect

from atoll import Engine, Preview, Sandbox
from atoll.contract.errors import InvalidRequest, PortRefused
from atoll.drivers import registry
from atoll.testing.inside import Peak, read_until
from atoll.testing.plugin import STRICT
from atoll.testing.waiting import eventually
from tests.http_client import Client, ask, host_of, port_of

if TYPE_CHECKING:
    from atoll import Process
    from atoll.contract.model import RuntimeName

MIB = 1024 * 1024
SERVER = (Path(__file__).parent / "webserver.py").read_text()
PORT = 8000


async def start_server(sandbox: Sandbox, port: int = PORT) -> Process:
    server = await sandbox.spawn(["python3", "-I", "-c", SERVER, str(port)])
    await read_until(server, b"listening\n")
    return server


def send_nothing_much(client: Client, size: int) -> None:
    """Send zeros, by a thread and from the kernel's own memory, so that the test itself costs little."""
    connection: socket.socket = client.stream.extra(SocketAttribute.raw_socket)
    with TemporaryFile() as sparse:
        sparse.truncate(size)
        at = 0
        while at < size:
            select.select([], [connection], [])
            at += os.sendfile(connection.fileno(), sparse.fileno(), at, size - at)


@pytest.fixture(scope="module")
async def server(shared: Sandbox) -> AsyncIterator[Process]:
    """The server inside the shared sandbox."""
    process = await start_server(shared)
    yield process
    await process.kill()


@asynccontextmanager
async def browsing(address: str, profile: Path) -> AsyncIterator[None]:
    """A browser that opens a page."""
    program = shutil.which("chromium")
    if program is None:
        (pytest.fail if STRICT else pytest.skip)("chromium is not installed: scripts/bootstrap test")
    options = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
        --disable-component-update --disable-sync --disable-dev-shm-usage --remote-debugging-port=0""".split()
    command = [program, *options, f"--user-data-dir={profile}", address]
    process = await anyio.open_process(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield
    finally:
        with anyio.CancelScope(shield=True):
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


@pytest.fixture(scope="module", autouse=True)
async def preview(shared: Sandbox, server: Process) -> Preview:
    """What it serves, from before any test: from then on somebody listens for clients, to the end of the runtime."""
    return await shared.expose(PORT)


# ---------------------------------------------------------------------------------------------------- what passes


@pytest.mark.core
async def test_a_page_comes_through_and_the_server_is_told_who_asks(preview: Preview) -> None:
    response = await ask(preview, "/seen?a=1&b=%20", User_Agent="test", TE="trailers", Connection="keep-alive, x-hop")
    assert response.status == 200
    assert response.header("content-type") == "application/json"
    assert response.json["target"] == "/seen?a=1&b=%20"
    seen = {name.lower(): value for name, value in response.json["headers"]}
    assert seen == {
        "host": host_of(preview),
        "user-agent": "test",
        "x-forwarded-for": "127.0.0.1",
        "x-forwarded-host": host_of(preview),
        "x-forwarded-proto": "http",
        "via": "1.1 atoll",
    }


async def test_a_connection_is_kept_for_the_next_request_and_so_is_the_one_inside(preview: Preview) -> None:
    async with Client(preview) as client:
        used = {(await client.ask("/seen")).json["connection"] for _ in range(5)}
        assert (await client.ask("/seen", method="HEAD")).body == b""
        assert (await client.ask("/seen")).json["connection"] in used
    assert len(used) == 1
    assert (await ask(preview, "/seen")).json["connection"] not in used


async def test_a_server_that_has_closed_a_kept_connection_is_dialled_anew(preview: Preview) -> None:
    async with Client(preview) as client:
        for _ in range(5):
            assert (await client.ask("/hangup")).body == b"bye"
        assert (await client.ask("/seen")).status == 200


async def test_events_come_one_by_one_and_their_server_sees_the_reader_leave(preview: Preview, server: Process) -> None:
    async with Client(preview) as reader:
        await reader.begin("/events", Accept="text/event-stream")
        await reader.end()
        assert (await reader.head()).header("content-type") == "text/event-stream"
        pieces = reader.pieces()
        assert await anext(pieces) == b"data: first\n\n"
        assert (await ask(preview, "/go")).body == b"gone"
        assert await anext(pieces) == b"data: second\n\n"
    await read_until(server, b"the reader of events left\n")


async def test_both_sides_may_speak_at_the_same_time(preview: Preview) -> None:
    async with Client(preview) as client:
        await client.begin("/both", method="POST", Transfer_Encoding="chunked")
        await client.send(b"one")
        assert (await client.head()).status == 200
        pieces = client.pieces()
        assert await anext(pieces) == b"ONE"
        await client.send(b"two")
        assert await anext(pieces) == b"TWO"
        await client.end()
        assert [piece async for piece in pieces] == []


async def test_a_websocket_says_everything_back(preview: Preview, server: Process) -> None:
    address = preview.url.replace("http", "ws").replace("/?", "/ws?")
    async with connect(address, host="127.0.0.1", port=port_of(preview), proxy=None, compression=None) as socket:
        for message in ("hello", "ü" * 1000, b"\x00\xff" * 20000, ""):
            await socket.send(message)
            assert await socket.recv() == message
    assert socket.close_code == 1000
    await read_until(server, b"the websocket is closed\n")


async def test_an_upload_of_any_size_takes_no_memory(preview: Preview, runtime_name: RuntimeName) -> None:
    """1 GiB in full on the fastest runtime; that memory does not grow with it shows with less on the others."""
    block = os.urandom(MIB)
    count = 1024 if runtime_name == "crun" else 64
    async with Client(preview) as client:
        small = await client.ask("/upload?check", method="POST", body=block)
        assert small.json == {"size": MIB, "check": zlib.crc32(block)}
        peak = Peak(os.getpid())
        await client.begin("/upload", method="POST", Content_Length=str(count * MIB))
        await anyio.to_thread.run_sync(send_nothing_much, client, count * MIB)
        said = b""
        while b"}" not in said:
            said += await client.stream.receive()
        assert json.loads(said.partition(b"\r\n\r\n")[2])["size"] == count * MIB
    assert peak.growth_bytes < 32 * MIB


async def test_a_large_response_waits_for_a_client_that_does_not_read(preview: Preview, shared: Sandbox) -> None:
    peak = Peak(os.getpid())
    size = 64 * MIB
    async with Client(preview) as client:
        await client.begin(f"/large?{size}")
        await client.end()
        await client.head()
        assert (await ask(preview, "/go")).body == b"gone", "others are not held up"
        assert sum([len(piece) async for piece in client.pieces()]) == size
    assert peak.growth_bytes < 32 * MIB


async def test_a_hundred_connections_at_once_do_not_mix(preview: Preview) -> None:
    async def one(number: int) -> None:
        async with Client(preview) as client:
            for turn in range(2):
                body = f"{number}-{turn} ".encode() * 3000
                answer = await client.ask("/upload?check", method="POST", body=body)
                assert answer.json == {"size": len(body), "check": zlib.crc32(body)}

    async with anyio.create_task_group() as group:
        for number in range(100):
            group.start_soon(one, number)


async def test_a_browser_opens_a_page_with_scripts_and_a_websocket(
    preview: Preview, server: Process, tmp_path: Path
) -> None:
    for base in (preview.url, preview.path_url):
        async with browsing(base.replace("?", "page?"), tmp_path):
            line = (await read_until(server, b"from+the+page")).decode().split("done ")[1]
        told = {name: value for name, (value,) in parse_qs(line.strip(), keep_blank_values=True).items()}
        assert told["said"] == "from the page"
        parts = urlsplit(base)
        address = f"{parts.scheme}://{parts.netloc}{parts.path}page"
        assert told["address"] == address, "the token is not in the address any more"
        assert told["cookies"] == "", "scripts cannot read the token"


# ------------------------------------------------------------------------------------------------ who may come in


async def test_the_token_may_be_in_the_query_a_header_or_a_cookie_and_the_server_sees_none(preview: Preview) -> None:
    token = preview.token
    by_query = await ask(preview, f"/seen?a=1&atoll_token={token}&b=2", token=False)
    cookie = by_query.header("set-cookie")
    assert cookie.split("; ")[1:] == ["Path=/", "HttpOnly", "SameSite=Lax"]
    assert by_query.json["target"] == "/seen?a=1&b=2"
    by_cookie = await ask(preview, "/seen", token=False, Cookie=f"mine=1; {cookie.split(';')[0]}; other=2")
    assert dict(by_cookie.json["headers"])["Cookie"] == "mine=1; other=2"
    assert by_cookie.all("set-cookie") == []
    by_header = await ask(preview, "/seen", Referer=f"http://x/?atoll_token={token}&c=3")
    assert dict(by_header.json["headers"])["Referer"] == "http://x/?c=3"
    for response in (by_query, by_cookie, by_header):
        assert token.encode() not in response.body


async def test_a_browser_is_led_to_an_address_without_the_token(preview: Preview) -> None:
    target = f"/a/b?x=1&atoll_token={preview.token}"
    response = await ask(preview, target, token=False, Sec_Fetch_Mode="navigate")
    assert response.status == 303
    assert response.header("location") == f"http://{host_of(preview)}/a/b?x=1"
    assert response.header("referrer-policy") == "no-referrer"
    # A script's own request is not led anywhere, and neither is a program that keeps no cookies.
    assert (await ask(preview, target, token=False, Sec_Fetch_Mode="cors", Accept="text/html")).status == 404
    assert (await ask(preview, target, token=False, Accept="*/*")).body == b"not this one"


async def test_the_path_form_serves_the_same_and_keeps_to_its_path(preview: Preview) -> None:
    parts = urlsplit(preview.path_url)
    prefix = parts.path.rstrip("/")
    async with Client(preview) as client:
        seen = await client.ask(f"{prefix}/seen?a=1", Host=parts.netloc, Cookie=f"theirs=1; {prefix[9:]}~own=2")
        headers = dict(seen.json["headers"])
        assert (seen.json["target"], headers["X-Forwarded-Prefix"]) == ("/seen?a=1", prefix)
        assert headers["Cookie"] == "own=2", "what other programs on the same address have set is none of its business"
        moved = await client.ask(f"{prefix}/moved", Host=parts.netloc)
        assert moved.header("location") == f"{prefix}/seen"
        name = prefix.rpartition("/")[2]
        assert moved.all("set-cookie") == [
            f"{name}~session=1; Path={prefix}/",
            f"{name}~plain=2; Path={prefix}/",
        ]
        led = await client.ask(f"{prefix}/?atoll_token={preview.token}", Host=parts.netloc, Accept="text/html")
        assert led.header("location") == f"{prefix}/"
        assert f"Path={prefix}/;" in led.header("set-cookie")


# ------------------------------------------------------------------------------------------ its beginning and end


@pytest.mark.core
async def test_a_port_on_which_nothing_listens_says_so(shared: Sandbox) -> None:
    preview = await shared.expose(59)
    page = await ask(preview, Accept="text/html,*/*")
    assert page.status == 502
    assert "<h1>Nothing listens on port 59</h1>" in page.body.decode()
    assert (await ask(preview)).body.startswith(b"Nothing listens on port 59. ")
    await shared.unexpose(59)


async def test_expose_waits_until_something_listens_on_either_address(shared: Sandbox) -> None:
    with pytest.raises(PortRefused, match="nothing listened on port 8006"):
        await shared.expose(8006, wait_s=0.05)
    assert 8006 not in [preview.port for preview in await shared.previews()]
    exposed: list[Preview] = []

    async def expose() -> None:
        exposed.append(await shared.expose(8006, wait_s=20))

    async with anyio.create_task_group() as group:
        group.start_soon(expose)
        server = await shared.spawn("exec python3 -m http.server 8006 --bind ::1")
    assert (await ask(exposed[0], "/.bashrc", method="HEAD")).status in (200, 404)
    await shared.unexpose(8006)
    await server.kill()


async def test_a_preview_is_the_same_until_it_is_ended_and_then_worth_nothing(
    preview: Preview, shared: Sandbox
) -> None:
    other = await shared.expose(8001)
    assert await shared.previews() == [preview, other]
    assert await shared.expose(8001) == other
    await shared.unexpose(8001)
    await shared.unexpose(8001)
    assert await shared.previews() == [preview]
    assert (await ask(other)).status == 404
    again = await shared.expose(8001)
    assert again.token != other.token
    assert (await ask(other)).status == 404
    assert (await ask(again)).status == 502
    await shared.unexpose(8001)


async def test_unexpose_breaks_off_what_is_under_way(shared: Sandbox, preview: Preview, server: Process) -> None:
    second = await start_server(shared, 8002)
    preview = await shared.expose(8002)
    async with Client(preview) as reader:
        await reader.begin("/events")
        await reader.end()
        await reader.head()
        pieces = reader.pieces()
        await anext(pieces)
        await shared.unexpose(8002)
        with pytest.raises(Exception, match="incomplete chunked read"):
            await anext(pieces)
    await second.kill()


async def test_a_request_wakes_a_sandbox_that_sleeps_but_not_one_that_was_shut_down(
    engine: Engine, sandbox: Sandbox
) -> None:
    await (await start_server(sandbox)).detach()
    preview = await sandbox.expose(PORT)
    await engine.shutdown(sandbox.name)
    response = await ask(preview, "/seen")
    assert (response.status, b"was shut down" in response.body) == (503, True)
    await sandbox.wake()
    await sandbox.sleep()
    response = await ask(preview, "/seen")
    with_memory = engine.runtimes()[sandbox.info.runtime].memory_checkpoint
    assert response.status == (200 if with_memory else 502), "it is awake, with its processes where they can be kept"
    assert [info.status for info in await engine.list() if info.name == sandbox.name] == ["running"]


async def test_a_sandbox_is_in_use_while_a_client_is_connected(engine: Engine, sandbox: Sandbox) -> None:
    await (await start_server(sandbox)).detach()
    preview = await sandbox.expose(PORT)

    async def unused() -> bool:
        used, at_work = registry.available(engine.state_dir)[sandbox.info.runtime].keeper.last_used(
            engine.state_dir / "sandboxes" / sandbox.id
        )
        return used is not None and not at_work

    await eventually(unused, "nobody uses it")
    async with Client(preview) as reader:
        await reader.begin("/events")
        await reader.end()
        await reader.head()
        await anext(reader.pieces())
        assert not await engine.sleep_unused(sandbox.name, timedelta(0))
    await eventually(unused, "nobody uses it any more")


async def test_a_sandbox_of_the_same_name_has_nothing_of_the_one_before(engine: Engine, sandbox: Sandbox) -> None:
    old = await sandbox.expose(PORT)
    await engine.destroy(sandbox.name)
    async with await engine.create(sandbox.name) as again:
        assert await again.previews() == []
        assert (await ask(old)).status == 404
        new = await again.expose(PORT)
        assert ((await ask(old)).status, (await ask(new)).status) == (404, 502)


@pytest.mark.parametrize("port", [0, -1, 65536])
async def test_a_port_that_is_none_is_an_invalid_request(shared: Sandbox, port: int) -> None:
    with pytest.raises(InvalidRequest, match="1 to 65535"):
        await shared.expose(port)
