"""A terminal over a WebSocket: bytes both ways, resumed where it broke off, and bounded."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx2
import pytest
import websockets
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from atoll.surfaces.rest import terminal
from atoll.testing.waiting import eventually
from tests.rest.serving import Served


class Terminal:
    """The client's side: what it has seen, and where it is."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.seen = b""
        self.offset = 0
        self.process = 0
        self.told: list[dict[str, Any]] = []

    async def receive(self) -> None:
        message = await self.socket.recv()
        if isinstance(message, bytes):
            self.seen += message
            self.offset += len(message)
            return
        told = json.loads(message)
        self.told.append(told)
        if told["type"] in ("started", "gap"):
            self.offset = told["offset"]
        self.process = told.get("process", self.process)

    async def until(self, text: bytes) -> None:
        with anyio.fail_after(20):
            while text not in self.seen:
                await self.receive()

    async def until_closed(self) -> int:
        """The code with which it was closed."""
        with anyio.fail_after(20):
            try:
                while True:
                    await self.receive()
            except ConnectionClosed as closed:
                return 0 if closed.rcvd is None else closed.rcvd.code

    async def control(self, **message: Any) -> None:
        await self.socket.send(json.dumps(message))


@asynccontextmanager
async def opened(served: Served, box: str, query: str = "", **options: Any) -> AsyncIterator[Terminal]:
    url = f"{served.url.replace('http', 'ws', 1)}/api/v1/sandboxes/{box}/terminal{query}"
    options = {"additional_headers": {"X-API-Key": served.key}, "compression": None, **options}
    async with connect(url, **options) as socket:
        found = Terminal(socket)
        await found.receive()
        assert found.told[0]["type"] == "started"
        yield found


async def test_a_shell_is_typed_to_and_ends(served: Served, box: str) -> None:
    async with opened(served, box, "?rows=30&cols=100") as shell:
        await shell.socket.send(b"stty size; tty; id -un\n")
        await shell.until(b"30 100\r\n/dev/pts/")
        await shell.control(type="resize", rows=40, cols=132)
        await shell.socket.send(b"stty size\n")
        await shell.until(b"40 132\r\n")
        await shell.socket.send(b"exit 3\n")
        assert await shell.until_closed() == 1000
    assert shell.told[-1]["type"] == "exit"
    assert shell.told[-1]["exit_code"] == 3


async def test_a_signal_reaches_the_process(served: Served, box: str) -> None:
    async with opened(served, box, "?command=exec+sleep+60") as shell:
        await shell.control(type="signal", signal=15)
        assert await shell.until_closed() == 1000
    assert shell.told[-1]["exit_code"] == 143


async def test_a_broken_connection_is_resumed_at_the_next_byte(served: Served, box: str) -> None:
    command = "?command=for+i+in+1+2+3;+do+read+x;+echo+got+$x;+done"
    async with opened(served, box, command) as first:
        await first.socket.send(b"one\n")
        await first.until(b"got one\r\n")
        first.socket.transport.abort()
    again = f"?process={first.process}&offset={first.offset}&rows=11&cols=22"
    async with opened(served, box, again) as second:
        assert second.told[0] == {"type": "started", "process": first.process, "offset": first.offset}
        await second.socket.send(b"two\n")
        await second.until(b"got two\r\n")
        assert b"one" not in second.seen
        # The newest connection has the terminal.
        async with opened(served, box, f"?process={first.process}") as third:
            assert await second.until_closed() == terminal.TAKEN_OVER
            await third.until(b"got two\r\n")
            assert b"got one" in third.seen
            await third.socket.send(b"three\n")
            assert await third.until_closed() == 1000
    assert third.told[-1]["exit_code"] == 0


async def test_what_is_no_longer_kept_is_a_gap(served: Served, client: httpx2.AsyncClient, box: str) -> None:
    async with opened(served, box, "?command=stty+-echo;+read+x;+yes+|+head+-c+200000;+read+y;+echo+end") as first:
        await first.socket.send(b"go\n")
        await first.until(b"y\r\ny\r\n")

    async def has_written_all() -> bool:
        found = await client.get(f"/api/v1/sandboxes/{box}/processes/{first.process}")
        return found.json()["stdout_total"] >= 300_000

    await eventually(has_written_all, "all output was written, and no client reads it")
    async with opened(served, box, f"?process={first.process}&offset=0") as second:
        await second.socket.send(b"\n")
        await second.until(b"end\r\n")
    assert [each["type"] for each in second.told[:2]] == ["started", "gap"]
    assert second.told[1]["offset"] > 0


async def test_a_terminal_that_nobody_comes_back_to_is_ended(
    served: Served, client: httpx2.AsyncClient, box: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "KEPT_S", 0.2)
    async with opened(served, box, "?command=exec+sleep+60") as left:
        pass

    async def has_ended() -> bool:
        found = await client.get(f"/api/v1/sandboxes/{box}/processes/{left.process}")
        return found.json()["exit_code"] == 137

    await eventually(has_ended, "the terminal was ended")
    # A process that was not started as a terminal is left alone.
    made = await client.post(f"/api/v1/sandboxes/{box}/processes", json={"command": "exec sleep 60", "stdin": True})
    path = made.headers["location"]
    async with opened(served, box, f"?process={made.json()['id']}"):
        pass
    assert (await client.get(f"{path}/wait", params={"timeout_s": 0.5})).json()["exit_code"] is None
    await client.delete(path)


async def test_a_client_that_does_not_read_holds_up_the_process(
    served: Served, client: httpx2.AsyncClient, box: str
) -> None:
    async with opened(served, box, "?command=yes", max_queue=1) as slow:

        async def total() -> int:
            return (await client.get(f"/api/v1/sandboxes/{box}/processes/{slow.process}")).json()["stdout_total"]

        seen = [-1, await total()]

        async def stands_still() -> bool:
            seen.append(await total())
            await anyio.sleep(0.05)
            return seen[-1] == await total() > 0

        await eventually(stands_still, "the process waits for its reader")
        assert await total() < 32 * 1024 * 1024
        slow.socket.transport.abort()
    await client.delete(f"/api/v1/sandboxes/{box}/processes/{slow.process}")


async def test_a_revoked_key_closes_a_terminal_and_streams(
    served: Served, client: httpx2.AsyncClient, box: str
) -> None:
    key, text = await served.server.keys.create("short", tenant="default", role="member")
    sent = {"X-API-Key": text.get_secret_value()}
    async with (
        opened(served, box, additional_headers=sent) as shell,
        served.client(sent["X-API-Key"]) as other,
        other.stream("GET", f"/api/v1/sandboxes/{box}/files/watch") as events,
    ):
        await served.server.keys.revoke(key.id)
        with anyio.fail_after(5):
            assert await shell.until_closed() == terminal.REVOKED
            text_of_events = (await events.aread()).decode()
    assert shell.told[-1]["code"] == "unauthenticated"
    assert "event: error" in text_of_events
    assert "unauthenticated" in text_of_events
    await client.delete(f"/api/v1/sandboxes/{box}/processes/{shell.process}")


async def test_the_key_may_be_a_subprotocol(served: Served, box: str) -> None:
    offered = [terminal.PROTOCOL, f"atoll.key.{served.key}"]
    async with opened(
        served, box, "?command=echo+hello", additional_headers={}, subprotocols=[*map(websockets.Subprotocol, offered)]
    ) as shell:
        assert shell.socket.subprotocol == terminal.PROTOCOL
        await shell.until(b"hello")


async def test_what_is_refused_is_an_answer_before_the_handshake(served: Served, box: str) -> None:
    for sandbox, query, headers, status, code in (
        (box, "", {"X-API-Key": "atoll_wrong_key"}, 401, "unauthenticated"),
        (box, "", {}, 401, "unauthenticated"),
        ("no-such", "", None, 404, "sandbox_not_found"),
        (box, "?rows=0", None, 400, "invalid_request"),
        (box, "?colour=red", None, 400, "invalid_request"),
        (box, "?process=999999", None, 404, "process_not_found"),
        (box, "?user=nobody-here", None, 404, "user_not_found"),
    ):
        options = {} if headers is None else {"additional_headers": headers}
        with pytest.raises(InvalidStatus) as refused:
            async with opened(served, sandbox, query, **options):
                pass
        answer = refused.value.response
        assert (answer.status_code, json.loads(answer.body)["code"]) == (status, code), (query, answer)


@pytest.mark.parametrize(
    "message",
    ["{}", "no json", '{"type":"resize","rows":0,"cols":5}', '{"type":"exec"}', '{"type":"signal","signal":99}'],
)
async def test_a_message_that_is_wrong_ends_the_connection_with_a_reason(
    served: Served, client: httpx2.AsyncClient, box: str, message: str
) -> None:
    async with opened(served, box, "?command=exec+sleep+60") as shell:
        await shell.socket.send(message)
        assert await shell.until_closed() == terminal.FAILED
    assert shell.told[-1]["code"] == "invalid_request"
    await client.delete(f"/api/v1/sandboxes/{box}/processes/{shell.process}")


async def test_inside_gvisor_it_is_the_same(served: Served, client: httpx2.AsyncClient) -> None:
    """Where kernels differ: terminals, resizing, killing a tree, files of unknown size, sessions of code."""
    api = "/api/v1/sandboxes/gvisor"
    (await client.post("/api/v1/sandboxes", json={"name": "gvisor", "runtime": "runsc"})).raise_for_status()
    async with opened(served, "gvisor", "?rows=30&cols=100") as first:
        await first.socket.send(b"stty size\n")
        await first.until(b"30 100\r\n")
        first.socket.transport.abort()
    async with opened(served, "gvisor", f"?process={first.process}&offset={first.offset}") as second:
        await second.control(type="resize", rows=40, cols=132)
        await second.socket.send(b"stty size\n")
        await second.until(b"40 132\r\n")
        await second.socket.send(b"exit\n")
        assert await second.until_closed() == 1000
    late = {"command": "echo begun; sleep 60 & wait", "timeout_s": 1}
    result = (await client.post(f"{api}/exec", json=late)).json()
    assert (result["timed_out"], result["stdout"]) == (True, "begun\n")
    assert "Linux" in (await client.get(f"{api}/files", params={"path": "/proc/version"})).text
    session = (await client.post(f"{api}/code/sessions", json={})).headers["location"]
    ran = await client.post(f"{session}/execute", json={"code": "print(6 * 7)"})
    assert ran.json()["result"]["output"] == "42\n"
    assert (await client.delete(api)).status_code == 204
