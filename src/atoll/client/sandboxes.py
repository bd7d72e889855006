"""The sandboxes of a server that this program has open: the `SandboxOwner` of each.

Owns the handles and the tunnels through which they reach their guests, and what the server has said of them besides
frames. Not here: operations by name (`engine.py`), the tunnel itself (`tunnel.py`). Used by `engine.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

import anyio
from anyio.abc import ByteStream

from atoll.client.http import HttpClient, path_of
from atoll.client.tunnel import Fact, open_tunnel
from atoll.contract.errors import AtollError, SandboxDied, SandboxNotFound
from atoll.contract.model import Preview, SandboxInfo, Usage
from atoll.runtime.sandbox import Sandbox

if TYPE_CHECKING:
    from atoll.client.engine import RemoteEngine
    from atoll.runtime.lifetimes import BackgroundTasks
    from atoll.runtime.previews.forward import DialPort


class RemoteSandboxes:
    """The open sandboxes of one remote engine, by id. Implements `SandboxOwner`."""

    def __init__(self, engine: RemoteEngine, http: HttpClient, tasks: BackgroundTasks) -> None:
        self.engine = engine
        self.tasks = tasks
        self._http = http
        self._sandboxes: dict[str, Sandbox] = {}
        self._oom_kills: dict[str, int] = {}
        self._ended: dict[str, str] = {}

    # ---- handles ----

    def open(self, info: SandboxInfo) -> Sandbox:
        """The handle of a sandbox. There is one for each, whose `info` is brought up to date."""
        sandbox = self._sandboxes.get(info.id)
        if sandbox is None:
            sandbox = self._sandboxes[info.id] = Sandbox(info, self, env=None)
        sandbox.info = info
        return sandbox

    def renew(self, info: SandboxInfo) -> None:
        """Bring the `info` of an open handle up to date."""
        if info.id in self._sandboxes:
            self._sandboxes[info.id].info = info

    async def disconnect(self, id: str) -> None:
        """Its run has ended: close the tunnel, without waiting for the server to report the end."""
        if id in self._sandboxes:
            await self._sandboxes[id].aclose()

    def restarted(self, id: str) -> None:
        """It was started anew: its handle can be used again, whatever it had failed with."""
        self._ended.pop(id, None)
        if id in self._sandboxes:
            self._sandboxes[id]._forget_failure()  # noqa: SLF001 - this is its owner

    async def forget(self, id: str) -> None:
        """It was destroyed."""
        sandbox = self._sandboxes.pop(id, None)
        self._oom_kills.pop(id, None)
        if sandbox is not None:
            self._ended[id] = "was destroyed"
            await sandbox.aclose()

    # ---- SandboxOwner ----

    async def connect(self, id: str) -> ByteStream:
        self.tasks.require_open()
        self._ended.pop(id, None)
        url = self._http.websocket_url(path_of("sandboxes", id, "guest"))
        try:
            return await open_tunnel(url, self._http.headers, self._http.trust, partial(self._learn, id))
        except SandboxNotFound:
            raise SandboxDied(self._gone(id)) from None

    def _gone(self, id: str) -> str:
        sandbox = self._sandboxes.get(id)
        expires_at = sandbox.info.expires_at if sandbox is not None else None
        is_over = expires_at is not None and expires_at <= datetime.now(UTC)
        return "the sandbox was destroyed" + (": its lifetime (ttl) is over" if is_over else "")

    def _learn(self, id: str, fact: Fact) -> None:
        kills, ended = fact.get("oom_kills"), fact.get("ended")
        if isinstance(kills, int):
            self._oom_kills[id] = kills
        if isinstance(ended, str):
            self._ended[id] = ended

    def take_start(self, id: str) -> Sequence[str]:  # noqa: ARG002 - of a protocol
        return ()  # the server runs it

    def oom_kills(self, id: str) -> int | None:
        return self._oom_kills.get(id)

    async def usage(self, id: str, *, disk: bool = True) -> Usage:
        try:
            return Usage.model_validate(await self._http.get(path_of("sandboxes", id, "stats"), disk=disk))
        except SandboxNotFound:
            raise SandboxDied("the sandbox was destroyed") from None

    async def current_info(self, info: SandboxInfo) -> SandboxInfo:
        try:
            return SandboxInfo.model_validate(await self._http.get(path_of("sandboxes", info.id)))
        except SandboxNotFound:
            raise SandboxDied(f"the sandbox {info.name!r} was destroyed") from None

    def why_ended(self, info: SandboxInfo) -> str | None:
        return self._ended.get(info.id)

    async def destroy(self, info: SandboxInfo) -> None:
        with contextlib.suppress(SandboxNotFound):
            await self.engine.destroy_id(info.id)

    async def stop(self, id: str) -> None:
        # The server only passes frames on, and has not seen what was wrong with them.
        with anyio.CancelScope(shield=True), contextlib.suppress(AtollError):
            await self._http.post(path_of("sandboxes", id, "shutdown"))

    async def expose(self, info: SandboxInfo, port: int, dial: DialPort, *, wait_s: float) -> Preview:  # noqa: ARG002 - the server dials
        from atoll.runtime.previews.router import check_port

        check_port(port, wait_s)
        body = {"port": port, "wait_s": wait_s}
        return Preview.model_validate(await self._http.post(path_of("sandboxes", info.id, "ports"), body))

    async def unexpose(self, info: SandboxInfo, port: int) -> None:
        with contextlib.suppress(AtollError):  # it is not exposed
            await self._http.send("DELETE", path_of("sandboxes", info.id, "ports", str(port)))

    async def list_previews(self, info: SandboxInfo) -> list[Preview]:
        found = await self._http.items(path_of("sandboxes", info.id, "ports"))
        return [Preview.model_validate(each) for each in found]
