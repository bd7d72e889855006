"""A client of a server that turns against the way into its sandbox: the WebSocket with frames of the guest protocol."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx2
import pytest
from websockets.asyncio.client import ClientConnection, connect as open_websocket
from websockets.exceptions import ConnectionClosed, InvalidStatus

from atoll.client.engine import connect
from atoll.contract.protocol import FrameType, Op, Tag, encode_fields, encode_frame
from atoll.runtime.guest.link import encode_open
from atoll.runtime.interface import Engine
from atoll.runtime.sandbox import Sandbox
from atoll.testing.serving import ServerProcess

FREEZE = encode_frame(FrameType.FREEZE, 0, encode_fields(((Tag.ACTION, 2),)))
SHUTDOWN = encode_frame(FrameType.SHUTDOWN, 0)


@pytest.fixture(scope="module")
def server(servers: Callable[[Path], ServerProcess], state_dir: Path) -> ServerProcess:
    return servers(state_dir)


@pytest.fixture(scope="module")
async def remote(server: ServerProcess) -> AsyncIterator[Engine]:
    async with connect(server.url, server.key) as engine:
        yield engine


@pytest.fixture(scope="module")
async def victim(remote: Engine) -> AsyncIterator[Sandbox]:
    async with remote.create("victim", secret_env={"TOKEN": "never-on-the-wire"}) as sandbox:
        await sandbox.connect()
        yield sandbox


def tunnel(server: ServerProcess, name: str, key: str | None = None) -> open_websocket:
    url = f"ws{server.url.removeprefix('http')}/api/v1/sandboxes/{name}/guest"
    headers = {} if key == "" else {"X-API-Key": key or server.key}
    return open_websocket(url, additional_headers=headers, compression=None)


async def close_code(socket: ClientConnection) -> int | None:
    try:
        while True:
            await socket.recv()
    except ConnectionClosed:
        return socket.close_code


@pytest.mark.parametrize(
    "sent",
    [
        FREEZE,
        SHUTDOWN,
        encode_frame(FrameType.RECONFIGURE, 0, encode_fields(((Tag.KEEP, 0),))),
        encode_frame(FrameType.HELLO, 0),
        encode_frame(FrameType.OPEN, 1, encode_open(Op.PS, encode_fields(((Tag.IDLE, 1),)))),
        encode_frame(FrameType.OPEN, 1, encode_open(Op.READ, b"", 2**40)),
        encode_frame(
            FrameType.OPEN, 1, encode_open(Op.SPAWN, encode_fields(((Tag.SHELL, "true"), (Tag.SUDO, "user"))))
        ),
        b"\xff" * 300,
    ],
    ids=["freeze", "shutdown", "reconfigure", "hello", "idle", "window", "sudo", "garbage"],
)
async def test_frames_that_only_the_servers_machine_may_send_end_the_tunnel_alone(
    server: ServerProcess, victim: Sandbox, sent: bytes
) -> None:
    async with tunnel(server, "victim") as socket:
        await socket.recv()
        await socket.send(sent)
        assert await close_code(socket) == 1008
    assert (await victim.exec("echo alive")).stdout == "alive\n"


async def test_text_is_refused_and_a_torn_frame_harms_nothing(server: ServerProcess, victim: Sandbox) -> None:
    async with tunnel(server, "victim") as socket:
        await socket.send("{}")
        assert await close_code(socket) == 1003
    async with tunnel(server, "victim") as socket:
        await socket.send(encode_frame(FrameType.OPEN, 1, encode_open(Op.PROCS, b""))[:20])
    assert (await victim.exec("echo alive")).stdout == "alive\n"


async def test_the_environment_of_the_sandbox_never_comes_back(server: ServerProcess, victim: Sandbox) -> None:
    request = encode_open(Op.SPAWN, encode_fields(((Tag.SHELL, "true"), (Tag.QUIET, 1))))
    seen = b""
    async with tunnel(server, "victim") as socket:
        await socket.send(encode_frame(FrameType.OPEN, 1, request))
        while FrameType.END not in seen[4:5]:
            message = await socket.recv()
            seen = message if isinstance(message, bytes) else seen
            assert b"never-on-the-wire" not in seen


@pytest.mark.parametrize(
    ("name", "key", "status"), [("victim", "", 401), ("victim", "atoll_x_y", 401), ("other", None, 404)]
)
async def test_no_tunnel_without_a_key_and_none_to_what_is_not_there(
    server: ServerProcess, victim: Sandbox, name: str, key: str | None, status: int
) -> None:
    with pytest.raises(InvalidStatus) as refused:
        await tunnel(server, name, key)
    assert refused.value.response.status_code == status
    assert set(json.loads(refused.value.response.body)) == {"code", "message", "details", "request_id"}


async def test_a_key_that_is_revoked_ends_its_tunnels_and_another_tenant_has_none(
    server: ServerProcess, victim: Sandbox
) -> None:
    async with httpx2.AsyncClient(base_url=server.url, headers={"X-API-Key": server.key}) as admin:
        (await admin.post("/api/v1/tenants", json={"name": "neighbours"})).raise_for_status()
        try:
            headers = {"Atoll-Tenant": "neighbours"}
            theirs = (await admin.post("/api/v1/keys", json={"name": "theirs"}, headers=headers)).json()
            with pytest.raises(InvalidStatus) as refused:
                await tunnel(server, "victim", theirs["text"])
            assert refused.value.response.status_code == 404
        finally:
            (await admin.delete("/api/v1/tenants/neighbours")).raise_for_status()
        ours = (await admin.post("/api/v1/keys", json={"name": "ours"})).json()
        async with tunnel(server, "victim", ours["text"]) as socket:
            (await admin.delete(f"/api/v1/keys/{ours['key']['id']}")).raise_for_status()
            assert await close_code(socket) == 4401
    assert (await victim.exec("echo alive")).stdout == "alive\n"
