"""The way from `atoll.connect` into a sandbox: frames of the guest protocol through a WebSocket.

Owns the server's end of a tunnel: one connection to the sandbox's keeper for each WebSocket, so that a client which is
gone takes its streams with it as a local one does. The client is not trusted: each frame passes `FrameGate` before the
keeper sees it, and SPAWN gets the sandbox's environment here, which the client never sees. Facts that are not in frames
travel as text messages, before the frame that they explain: `{"oom_kills": 2}`, `{"ended": "was destroyed"}`.

Memory is bounded in both directions: the next message is read when the one before was sent on. While a tunnel is open
this process is connected to the sandbox too, and so serves its egress; with the last tunnel to an ephemeral sandbox it
disconnects, and the sandbox ends. Not here: the client's end (`client/tunnel.py`).
"""

from __future__ import annotations

import errno
import json
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio
from fastapi import APIRouter
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketDisconnected, WebSocketState

from atoll.contract.errors import InvalidRequest, SandboxDied, SandboxError, Unauthenticated
from atoll.contract.protocol import FrameType, Tag, encode_fields, encode_frame
from atoll.runtime.guest.frame_gate import FrameGate, FrameRefused, SpawnFrame
from atoll.surfaces.rest.caller import Caller, Executor
from atoll.surfaces.rest.event_stream import CHECK_KEY_S
from atoll.surfaces.rest.sandboxes import SandboxPath, find

if TYPE_CHECKING:
    from atoll.runtime.interface import Engine
    from atoll.runtime.sandbox import GuestRelay, Sandbox


_RECEIVE_BYTES = 512 * 1024
UNAUTHENTICATED = 4401
"""The code with which a WebSocket is closed whose key is no longer valid."""
_REFUSED, _TEXT = 1008, 1003
_LOOKS, _LOOK_S = 40, 0.05
"""How often one looks whether an ephemeral sandbox has ended, and after how long."""
router = APIRouter(prefix="/api/v1/sandboxes", tags=["sandboxes"])
_open_tunnels: Counter[str] = Counter()
"""How many tunnels each sandbox has, by id."""


@router.websocket("/{sandbox}/guest")
async def guest(websocket: WebSocket, caller: Executor, sandbox: SandboxPath) -> None:
    """Frames of the guest protocol, for `atoll.connect`."""
    found = await find(caller, sandbox)
    _open_tunnels[found.id] += 1
    try:
        try:
            relay = await found.relay()
        except OSError as error:
            if isinstance(error, SandboxError):
                raise
            raise SandboxDied(f"sandbox {found.name!r} cannot be reached: {error}") from error
        async with relay.stream:
            await caller.record(websocket, "sandboxes_guest", 101)
            await websocket.accept()
            await ServedTunnel(websocket, relay, caller).run()
    finally:
        with anyio.CancelScope(shield=True):
            await _closed(found, caller.engine)


async def _closed(sandbox: Sandbox, engine: Engine) -> None:
    _open_tunnels[sandbox.id] -= 1
    if _open_tunnels[sandbox.id]:
        return
    del _open_tunnels[sandbox.id]
    if sandbox.info.ephemeral:
        await sandbox.aclose()
        # Unless another process is connected to it, it ends within milliseconds, and nothing of it is to stay.
        with suppress(SandboxError):  # it is gone
            for _ in range(_LOOKS):
                await sandbox.status()
                await anyio.sleep(_LOOK_S)
                await engine.remove_abandoned()


class ServedTunnel:
    """One WebSocket, and its connection to a keeper."""

    def __init__(self, websocket: WebSocket, relay: GuestRelay, caller: Caller) -> None:
        self._websocket = websocket
        self._relay = relay
        self._caller = caller
        self._gate = FrameGate()
        self._oom_kills: int | None = None

    async def run(self) -> None:
        """Pass frames on until either side is gone, or the key is no longer valid."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._from_keeper, group.cancel_scope)
            group.start_soon(self._check_key, group.cancel_scope)
            await self._from_client()
            group.cancel_scope.cancel()

    async def _from_client(self) -> None:
        websocket, relay, gate = self._websocket, self._relay, self._gate
        while True:
            message = await websocket.receive()
            if message["type"] != "websocket.receive":
                return
            chunk = message.get("bytes")
            if chunk is None:
                await self._close(_TEXT, "only frames are taken, in binary messages")
                return
            try:
                passed = gate.admit(chunk)
            except FrameRefused as refused:
                await self._close(_REFUSED, str(refused))
                return
            parts: list[bytes | memoryview] = []
            for each in passed:
                if not isinstance(each, SpawnFrame):
                    parts.append(each)
                elif (frame := await self._with_environment(each)) is not None:
                    parts.append(frame)
            if parts:
                try:
                    await relay.stream.send(bytes(parts[0]) if len(parts) == 1 else b"".join(parts))
                except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
                    await anyio.sleep_forever()  # the other task passes on the keeper's last frames, and ends this one

    async def _with_environment(self, spawn: SpawnFrame) -> bytes | None:
        try:
            environment = await self._relay.environment()
            await self._tell_oom_kills()
            return spawn.encode(environment)
        except InvalidRequest as error:
            number, message = errno.E2BIG, error.message
        except SandboxError as error:
            number, message = errno.EIO, error.message
        self._gate.forget(spawn.stream)
        # The words after the last colon would be taken for those of the errno.
        fields = encode_fields(((Tag.ERRNO, number), (Tag.MESSAGE, f"{message}: ".encode())))
        await self._send(encode_frame(FrameType.END, spawn.stream, fields))
        return None

    async def _from_keeper(self, scope: anyio.CancelScope) -> None:
        receive, gate = self._relay.stream.receive, self._gate
        while True:
            try:
                chunk = await receive(_RECEIVE_BYTES)
            except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
                chunk = b""
            killed, gone = gate.returned(chunk)
            if killed:
                await self._tell_oom_kills()
            if gone or not chunk:
                await self._tell({"ended": self._relay.why_ended()})
            if not chunk:
                break
            await self._send(chunk)
        await self._close(1000, "the sandbox's keeper ended the connection")
        scope.cancel()

    async def _check_key(self, scope: anyio.CancelScope) -> None:
        while True:
            await anyio.sleep(CHECK_KEY_S)
            try:
                await self._caller.require_valid()
            except Unauthenticated as error:
                await self._close(UNAUTHENTICATED, error.message)
                scope.cancel()
                return

    async def _tell_oom_kills(self) -> None:
        """How often the kernel has killed a process for memory, if the client does not know."""
        kills = self._relay.oom_kills()
        if kills != self._oom_kills:
            self._oom_kills = kills
            await self._tell({"oom_kills": kills})

    async def _tell(self, fact: dict[str, object]) -> None:
        await self._send(json.dumps(fact))

    async def _send(self, data: bytes | str) -> None:
        kind = "text" if isinstance(data, str) else "bytes"
        try:
            await self._websocket.send({"type": "websocket.send", kind: data})
        except (WebSocketDisconnect, WebSocketDisconnected):
            await anyio.sleep_forever()  # the task that reads ends this one

    async def _close(self, code: int, reason: str) -> None:
        if self._websocket.application_state is WebSocketState.CONNECTED:
            await self._websocket.close(code, reason.encode()[:120].decode(errors="ignore"))
